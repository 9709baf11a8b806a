"""What a program for GPUs reads and writes, read from its text; the section of the page that tells it."""

import jax
from compile_only import pages, traffic, traffic_table

PROGRAM = """HloModule step, is_scheduled=true

%slices (a: f32[64,8], i: s32[]) -> f32[4,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %taken = f32[4,8]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={4,8}
}

%puts (a.1: f32[64,8], u: f32[4,8], i.1: s32[]) -> f32[64,8] {
  %a.1 = f32[64,8]{1,0} parameter(0)
  %u = f32[4,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[64,8]{1,0} dynamic-update-slice(%a.1, %u, %i.1, %zero.1)
}

%turns (a.2: f32[64,8]) -> bf16[8,4] {
  %a.2 = f32[64,8]{1,0} parameter(0)
  %rounded = bf16[64,8]{1,0} convert(%a.2)
  %half = bf16[32,8]{1,0} slice(%rounded), slice={[0:32], [0:8]}
  %turned = bf16[8,32]{1,0} transpose(%half), dimensions={1,0}
  ROOT %few = bf16[8,4]{1,0} slice(%turned), slice={[0:8], [4:8]}
}

%skip (s: f32[4,8]) -> f32[4,8] {
  ROOT %s = f32[4,8]{1,0} parameter(0)
}

%work (s.1: f32[4,8]) -> f32[4,8] {
  %s.1 = f32[4,8]{1,0} parameter(0)
  ROOT %twice = f32[4,8]{1,0} add(%s.1, %s.1)
}

%body (x: (s32[], f32[64,8], pred[])) -> (s32[], f32[64,8], pred[]) {
  %x = (s32[], f32[64,8]{1,0}, pred[]) parameter(0)
  %n = s32[] get-tuple-element(%x), index=0
  %all = f32[64,8]{1,0} get-tuple-element(%x), index=1
  %live = pred[] get-tuple-element(%x), index=2
  %one = f32[4,8]{1,0} fusion(%all, %n), kind=kLoop, calls=%slices
  %two = f32[4,8]{1,0} conditional(%live, %one, %one), true_computation=%work, false_computation=%skip
  %new = f32[64,8]{1,0} fusion(%all, %two, /*index=2*/%n), kind=kLoop, calls=%puts
  ROOT %next = (s32[], f32[64,8]{1,0}, pred[]) tuple(%n, %new, %live)
}

%condition (y: (s32[], f32[64,8], pred[])) -> pred[] {
  %y = (s32[], f32[64,8]{1,0}, pred[]) parameter(0)
  ROOT %flag = pred[] get-tuple-element(%y), index=2
}

ENTRY %main (q: bf16[16,16]) -> f32[64,8] {
  %q = bf16[16,16]{1,0} parameter(0)
  %b0 = f32[64,8]{1,0} copy-done(%q)
  %product = (bf16[16,16]{1,0}, s8[4096]{0}) custom-call(%q, %q), custom_call_target="__cublas$gemm"
  %part = bf16[8,4]{1,0} fusion(%b0), kind=kLoop, calls=%turns
  %t = (s32[], f32[64,8]{1,0}, pred[]) tuple(%a0, %b0, %c0)
  %w = (s32[], f32[64,8]{1,0}, pred[]) while(%t), condition=%condition, body=%body,
    backend_config={"known_trip_count":{"n":"10"}}
  ROOT %result = f32[64,8]{1,0} get-tuple-element(%w), index=1
}
"""


def test_slices_updates_loops_branches_and_workspaces():
    tile, number = 4 * 4 * 8, 4
    sliced, updated, added, product = 2 * tile + number, 2 * tile + number, 3 * tile, 3 * 2 * 16 * 16
    found = traffic.of(PROGRAM)
    assert found.by_kernel == {
        "product": product,
        "part": (4 + 2) * 8 * 4,
        "one": 10 * sliced,
        "twice": 10 * added,
        "new": 10 * updated,
    }
    assert (found.bytes, found.launches) == (sum(found.by_kernel.values()), 2 + 3 * 10)
    half = traffic.of(PROGRAM, branches=(0.5, 0.5))
    assert (found.bytes - half.bytes, half.launches) == (5 * added, 2 + 2 * 10 + 5)


SORTS_AND_ADDS = """HloModule sums, is_scheduled=true

%order (k: s32[64,8]) -> (s32[64,8], s32[64,8]) {
  %k = s32[64,8]{1,0} parameter(0)
  %places = s32[64,8]{1,0} iota(), iota_dimension=0
  ROOT %sorted = (s32[64,8]{1,0}, s32[64,8]{1,0}) sort(%k, %places), dimensions={0}, to_apply=%less
}

%adds (v: f32[64,8], r: f32[999,8], j: s32[999,1]) -> f32[64,8] {
  %v = f32[64,8]{1,0} parameter(0)
  %r = f32[999,8]{1,0} parameter(1)
  %j = s32[999,1]{1,0} parameter(2)
  ROOT %added = f32[64,8]{1,0} scatter(%v, %j, %r), to_apply=%sum
}

ENTRY %main (keys: s32[64,8], rows: f32[999,8], at: s32[999,1]) -> f32[64,8] {
  %keys = s32[64,8]{1,0} parameter(0)
  %rows = f32[999,8]{1,0} parameter(1)
  %at = s32[999,1]{1,0} parameter(2)
  %first = (s32[64,8]{1,0}, s32[64,8]{1,0}) fusion(%keys), kind=kCustom, calls=%order
  %zeros = f32[64,8]{1,0} copy(%keys)
  %one = f32[64,8]{1,0} fusion(%zeros, %rows, %at), kind=kInput, calls=%adds
  ROOT %other = f32[64,8]{1,0} scatter(%one, %at, %rows), to_apply=%sum
}
"""


def test_a_sort_goes_over_its_arrays_some_times_and_a_scatter_over_its_own_once():
    keys, rows, at = 4 * 64 * 8, 4 * 999 * 8, 4 * 999
    added = rows + at + 2 * keys
    found = traffic.of(SORTS_AND_ADDS)
    assert found.by_kernel == {"first": 4 * 3 * keys, "zeros": 2 * keys, "one": added, "other": added}
    assert found.launches == 4 + 3


ON_A_TPU = """HloModule nests, is_scheduled=true

%inner (all: f32[64,8], i: s32[]) -> f32[4,8] {
  %all = f32[64,8]{1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %o = s32[] constant(0)
  ROOT %tile = f32[4,8]{1,0:T(8,128)} dynamic-slice(%all, %i, %o), dynamic_slice_sizes={4,8}
}

%outer (whole: f32[64,8], j: s32[], near: f32[4,8]) -> f32[4,8] {
  %whole = f32[64,8]{1,0:T(8,128)} parameter(0)
  %j = s32[] parameter(1)
  %near = f32[4,8]{1,0:T(8,128)S(1)} parameter(2)
  %nested = f32[4,8]{1,0:T(8,128)} fusion(%whole, %j), kind=kLoop, calls=%inner
  ROOT %both = f32[4,8]{1,0:T(8,128)} add(%nested, %near)
}

ENTRY %main (x: f32[64,8], n: s32[]) -> f32[4,8] {
  %x = f32[64,8]{1,0:T(8,128)} parameter(0)
  %n = s32[] parameter(1)
  %on_chip = f32[4,8]{1,0:T(8,128)S(1)} dynamic-slice(%x, %n, %n), dynamic_slice_sizes={4,8}
  ROOT %sum = f32[4,8]{1,0:T(8,128)} fusion(%x, %n, %on_chip), kind=kOutput, calls=%outer
}
"""


def test_fusions_within_fusions_and_the_memory_on_a_chip():
    tile, number = 4 * 4 * 8, 4
    assert traffic.of(ON_A_TPU).by_kernel == {"on_chip": 2 * number, "sum": tile + number + tile}


def test_every_pair_is_one_call_of_two_forms():
    names = []
    for pair in traffic_table.pairs((1, 64, 2, 8)):
        names.append(pair.name)
        if pair.name.endswith("kernels"):  # which run on their chips alone
            continue
        with jax.numpy_dtype_promotion("standard"):  # which `jax.nn` needs
            ours, plain = (jax.eval_shape(call, *pair.arrays) for call in (pair.ours, pair.plain))
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype), pair.name
    more = 3 * len(traffic_table.LINEAR)
    assert len(set(names)) == len(names) == 8 + len(traffic_table._PLAIN) + more


def test_the_section_replaces_an_older_one_and_no_other():
    line = ("softmax", "H200", "1.00", 3, "5", "2.00", 4, "6", "0.50", "-", "fusion 1.00")
    page = traffic_table.with_section("# Page\n\nKernels.\n", traffic_table.section([line]))
    assert page.startswith("# Page\n\nKernels.\n\n## ")
    assert page.endswith("| softmax | H200 | 1.00 | 3 | 5 | 2.00 | 4 | 6 | 0.50 | - | fusion 1.00 |\n")
    assert traffic_table.with_section(page, traffic_table.section_of(page)) == page
    assert "softmax | H200" not in traffic_table.with_section(page, traffic_table.section([]))


def test_other_rows_stay():
    lines = [
        (f"{name}, a", "H200", *"123456", "0.5", "-", "fusion, 1") for name in ("softmax", "dense", "gat")
    ]
    page = traffic_table.with_section("# Page", traffic_table.section(lines))
    new = traffic_table.Pair("dense, a", len, len, ())
    assert traffic_table._others(page, [(new, "H200")]) == [lines[0], lines[2]]
    assert traffic_table._others(page, [(new, "A100")]) == lines
    assert traffic_table._others("# Page", [(new, "H200")]) == []


def test_goals_follow_the_plain_formula_or_the_live_tiles():
    found = {pair.name.split(", ")[1]: pair for pair in traffic_table.dense((1, 4096, 2, 8))}
    assert {name: (pair.goal.bytes, pair.goal.launches, pair.branches) for name, pair in found.items()} == {
        "full": (1.1, None, ()),
        "causal": (0.7, 20, ()),
        "window": (7 / 16, 14, ()),
        "padding": (1.1, None, ()),
        "bias": (1.1, None, ()),
        "segments": (4 / 16, 8, (1.0, 0.0, 0.0, 0.0)),
    }
    *_, packed = traffic_table.dense((1, 64, 2, 8))
    assert packed.branches == ()


def test_what_is_over_its_goal_is_told():
    def figures(size, launches, memory):
        return traffic_table.Figures(traffic.Traffic(size, launches, {}), memory)

    goal, plain = traffic_table.Goal(0.7, 1 / 8, 20), figures(100, 9, 800)
    assert goal.missed(figures(70, 20, 100), plain) == ""
    assert goal.missed(figures(98, 377, 101), plain) == "GB 0.98 > 0.7, temp 0.126 > 0.125, launches 377 > 20"
    assert traffic_table.Goal().missed(figures(110, 10, 880), plain) == "launches 10 > 9.9"


def test_a_table_of_some_operators_takes_the_place_of_their_rows():
    def page(*rows, more=()):
        return pages.page("# Page", "## Kernels", pages.table(("operator", "x"), rows), *more)

    old = page(("a", 1), ("b", 2), ("a", 3), more=("## Notes", "Words."))
    assert pages.merged(old, page(("a", 4)), ("a",)) == page(("b", 2), ("a", 4), more=("## Notes", "Words."))
    empty = pages.page("# Page", "## Kernels", "No kernel is registered.")
    assert pages.merged(old, empty, ("b",)) == page(("a", 1), ("a", 3), more=("## Notes", "Words."))
