"""The portable path beside the plain formula, compiled for chips: a section of `results/nvidia_static.md`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench import plain
from cases import discover, shapes

from compile_only import compiling, devices, gpu, pages, traffic
from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core import console, targets
from jax_attn_bwd._core.cases import Case, Operator
from jax_attn_bwd.ops.dot_product.mask import Mask
from jax_attn_bwd.ops.dot_product.plan import GPU_TILE, Strips, plan
from jax_attn_bwd.ops.dot_product.portable import strips
from jax_attn_bwd.ops.dot_product.portable.strips import StripSource
from jax_attn_bwd.ops.dot_product.spec import Operands, Options

GPUS = ("H200", "A100")
TPUS = ("v5e", "v6e")  # for which linear attention alone is compiled
CHIPS = (*GPUS, *TPUS)
HEADING = "## Portable path beside the plain formula"
LINEAR = ("gated_delta_rule", "gated_linear_attention")
DOCUMENTS = 4  # of equal length, in a packed sequence
CAUSAL, TEMPORARIES, LAUNCHES = 0.7, 1 / 8, 2  # goals: of plain bytes, of plain memory, for each tile
PLANES, IN_TURN = 1.1, 1 / 4  # of plain bytes and launches where nothing is skipped; of memory over 2 GiB
_ABOUT = f"""Forward and gradients, the cotangent given. `GB`: what all kernels read and write of the
device's memory; an operand counts once for each kernel, whatever a cache saves. `launches`: kernels, library
calls and copies; loops count as often as they run. Dense attention is B = 4, T = S = 4096, N = 16, H = 128 in
bfloat16 beside `jax.nn.dot_product_attention(implementation="xla")`; window: 1024, causal; padding: a
mask array that may hide keys of each entry, and hides none; bias: one that entries share, with its gradient;
segments:
{DOCUMENTS} documents of equal length, causal; which of its widths a strip takes is told at run time, and each
width counts as often as these documents take it. Softmax stands beside
`jax.nn.softmax`, graphs (constants of their programs) beside `jax.ops.segment_sum`, deformable attention
beside gathers of its corners, linear attention beside its chunks as programs have them, in float32 if not
said otherwise; "kernels": ours for that chip, else the portable path; on a TPU arrays that lie in the memory
on the chip do not count.
Dense attention has goals. Causal, window, segments: at most {CAUSAL} of the plain formula's bytes for causal
attention, else as large a share of them as the live tiles have of the plane; at most an eighth of its
temporaries; at most {LAUNCHES} launches for each live tile. Full, padding, bias: at most {PLANES} of its
bytes and launches, and a quarter of its temporaries where these are over 2 GiB; "at once" is full attention
of B = 32, T = 512, N = 12, H = 64, which has less. "Goals missed" says what a program has more of, and how
much.
Rewritten by `PYTHONPATH=tests python -m compile_only --table programs`."""


class Goal(NamedTuple):
    """What our program should stay within."""

    bytes: float = PLANES  # beside those of the plain formula
    temporaries: float = PLANES  # likewise
    launches: int | None = None  # None = `PLANES` of the plain formula's

    def missed(self, ours: "Figures", plain: "Figures") -> str:
        """What our program has more of than it should, beside the most there should be; "" = nothing."""
        launches = PLANES * plain.traffic.launches if self.launches is None else self.launches
        found = (
            ("GB", ours.traffic.bytes / plain.traffic.bytes, self.bytes),
            ("temp", ours.temporary_bytes / max(plain.temporary_bytes, 1), self.temporaries),
            ("launches", ours.traffic.launches, launches),
        )
        return ", ".join(f"{name} {value:.3g} > {most:.3g}" for name, value, most in found if value > most)


class Pair(NamedTuple):
    """An operator's call and the plain formula of the same arrays; how often ours takes each branch.

    It is compiled for `chips`.
    """

    name: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    branches: tuple[float, ...] = ()
    goal: Goal | None = None
    chips: tuple[str, ...] = GPUS


class Figures(NamedTuple):
    """What is told of a compiled program."""

    traffic: traffic.Traffic
    temporary_bytes: int


def pairs(shape: tuple[int, int, int, int] = (4, 4096, 16, 128)) -> Iterator[Pair]:
    """What is compiled; `shape` is that of dense attention's operands."""
    yield from dense(shape)
    yield from at_once()
    yield from others()


def others() -> Iterator[Pair]:
    """All operators but dense attention; each as it is timed."""
    for operator in discover():
        if operator.name in _PLAIN:
            timed = [case for case in operator.tagged("timed") if case.name not in _LEFT_OUT]
            yield _beside(operator, timed[0])
            if operator.name in LINEAR:
                yield from _kernels(operator, timed[0])


def _beside(operator: Operator, case: Case, implementation: str = "xla") -> Pair:
    with targets.aimed_at(GPUS[0]):  # a graph is built for the chip that it is used on
        types = shapes(case)
    first_output = partial(_first_output, tuple(types))
    ours = partial(first_output, operator.call, {**case.options, "implementation": implementation})
    formula = _PLAIN[operator.name](operator, case)
    if formula is None:
        formula = partial(first_output, operator.reference, case.options)
    chips = CHIPS if operator.name in LINEAR else GPUS
    return Pair(f"{operator.name}, {case.name}", ours, formula, tuple(types.values()), chips=chips)


def _first_output(names: Sequence[str], call: Any, options: Any, *arrays: jax.Array) -> jax.Array:
    return call(**dict(zip(names, arrays, strict=True)), **options)[0]


def _kernels(operator: Operator, case: Case) -> Iterator[Pair]:
    """The kernels of linear attention: TPUs' in float32, Hopper's beside the portable path in bfloat16."""
    of_tpus = _beside(operator, case, "mosaic_tpu")
    yield of_tpus._replace(name=f"{of_tpus.name}, kernels", chips=TPUS)
    for words, implementation in (("", "xla"), (", kernels", "mosaic_gpu")):
        pair = _beside(operator, case, implementation)
        narrow = tuple(jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in pair.arrays)
        formula = partial(_in_float32, pair.plain)
        yield Pair(f"{pair.name}, bfloat16{words}", pair.ours, formula, narrow, chips=GPUS[:1])


def _in_float32(formula: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """The formula of narrow arrays: JAX solves triangular systems in float32 and wider alone."""
    return formula(*(x.astype(jnp.float32) for x in arrays)).astype(arrays[0].dtype)


def _segments(operator: Operator, case: Case) -> Callable[..., Any]:
    types, options = tuple(shapes(case).values()), case.options
    edges = plain.edges_of(options["graph"], types[0].shape[1], options["head_size"])
    return plain.segment_ops(edges, operator.name)


def _chunks(operator: Operator, case: Case) -> Callable[..., Any]:
    return partial(plain.chunk_form, case.options.get("l2_norm_epsilon"))


_PLAIN: dict[str, Callable[[Operator, Case], Callable[..., Any] | None]] = {
    "scaled_masked_softmax": lambda operator, case: jax.nn.softmax,
    "multi_scale_deformable_attention": lambda operator, case: None,  # the definition is the formula
    **dict.fromkeys(gpu.GRAPH, _segments),
    **dict.fromkeys(LINEAR, _chunks),
}
_LEFT_OUT = ("[131072, 1024] bfloat16",)  # narrow rows, which any compiler keeps in registers


def dense(shape: tuple[int, int, int, int]) -> Iterator[Pair]:
    """Dense attention, beside `jax.nn`."""
    types, T = (jax.ShapeDtypeStruct(shape, jnp.bfloat16),) * 3, shape[1]
    causal: dict[str, Any] = {"is_causal": True}
    calls = {"full": {}, "causal": causal, "window": {**causal, "local_window_size": (T // 4, 0)}}
    for name, options in calls.items():
        ours, plain = (
            partial(call, **options, implementation="xla")
            for call in (dot_product_attention, jax.nn.dot_product_attention)
        )
        yield Pair(f"dot_product_attention, {name}", ours, plain, types, goal=_goal(T, **options))

    def padded(call, q, k, v, keys):
        return call(q, k, v, mask=keys, implementation="xla")

    ours, plain = (partial(padded, call) for call in (dot_product_attention, jax.nn.dot_product_attention))
    keys = jax.ShapeDtypeStruct((shape[0], 1, 1, T), jnp.bool_)
    yield Pair("dot_product_attention, padding", ours, plain, (*types, keys), goal=_goal(T))

    def biased(call, q, k, v, bias):
        return call(q, k, v, bias=bias, implementation="xla")

    ours, plain = (partial(biased, call) for call in (dot_product_attention, jax.nn.dot_product_attention))
    bias = jax.ShapeDtypeStruct((1, shape[2], T, T), jnp.bfloat16)
    yield Pair("dot_product_attention, bias", ours, plain, (*types, bias), goal=_goal(T))

    def packed(q, k, v, ids):
        ids = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return dot_product_attention(q, k, v, is_causal=True, implementation="xla", **ids)

    def masked(q, k, v, ids):
        mask = (ids[:, :, None] == ids[:, None])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")

    ids, goal = jax.ShapeDtypeStruct((1, T), jnp.int32), _goal(T, **causal, documents=DOCUMENTS)
    yield Pair(
        "dot_product_attention, segments", packed, masked, (*types, ids), _widths_taken(types[0]), goal
    )


def at_once() -> Iterator[Pair]:
    """Full attention of which `jax.nn` holds less than 2 GiB."""
    ours, plain = (
        partial(call, implementation="xla") for call in (dot_product_attention, jax.nn.dot_product_attention)
    )
    for dtype in ("bfloat16", "float32"):
        types = (jax.ShapeDtypeStruct((32, 512, 12, 64), dtype),) * 3
        yield Pair(f"dot_product_attention, at once, {dtype}", ours, plain, types, goal=Goal())


def _widths_taken(operand: Any) -> tuple[float, ...]:
    """How often strips of the packed documents take each width, forward or backward, whichever more."""
    T = operand.shape[1]
    ids = jnp.arange(T, dtype=jnp.int32)[None] * DOCUMENTS // T
    mask = Mask(is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids)
    operands = Operands(operand, operand, operand, mask=mask)
    with targets.aimed_at(GPUS[0]):
        schedule = plan("xla", Options(scale=1.0), operands).schedule
    if not (isinstance(schedule, Strips) and schedule.runtime_extent):
        return ()
    plane = StripSource.of(schedule, operands)
    found = [strips.extents(plane, axis) for axis in (0, 1)]
    taken = [np.bincount(np.ravel(x.width), minlength=len(x.widths)) / x.width.size for x in found]
    return tuple(map(float, np.maximum(*taken)))


def _goal(
    T: int, is_causal: bool = False, local_window_size: tuple[int, int] | None = None, documents: int = 1
) -> Goal:
    """That of a plane of T x T, a window looking back alone, documents of equal length."""
    block = min(T, GPU_TILE)
    i, j = np.indices((T // block,) * 2)
    row, column = i * block, (j + 1) * block - 1  # the first row and the last column of each tile
    live = column * documents // T >= row * documents // T
    if is_causal:
        live &= j <= i
    if local_window_size is not None:
        live &= column >= row - local_window_size[0]
    if not is_causal and local_window_size is None and documents == 1:
        return Goal(temporaries=IN_TURN)
    is_plain = local_window_size is None and documents == 1
    return Goal(CAUSAL if is_plain else float(live.mean()), TEMPORARIES, LAUNCHES * int(live.sum()))


def figures(call: Callable[..., Any], pair: Pair, device: Any) -> Figures:
    """Those of the gradients of `call` for the floating arrays of `pair`, compiled for `device`."""
    moving = [jnp.issubdtype(x.dtype, jnp.floating) for x in pair.arrays]
    out = jax.eval_shape(pair.plain, *pair.arrays)  # kernels run on their chips alone

    def gradients(dout, *arrays):
        floats = [x for x, moves in zip(arrays, moving, strict=True) if moves]
        others = [x for x, moves in zip(arrays, moving, strict=True) if not moves]

        def of_floats(*floats):
            left, rest = iter(floats), iter(others)
            return call(*(next(left if moves else rest) for moves in moving))

        result, pull = jax.vjp(of_floats, *floats)
        return result, pull(dout)

    options = {} if device.platform == "tpu" else compiling.WITHOUT_GPU
    compiled = devices.lower(gradients, (out, *pair.arrays), device).compile(options)
    found = traffic.of(compiled.as_text(), pair.branches)
    return Figures(found, compiled.memory_analysis().temp_size_in_bytes)


def table(
    path: Path, operators: Sequence[str] = (), chips: Sequence[str] = CHIPS, cases: Sequence[str] = ()
) -> int:
    """Compiles the pairs of these operators and cases, or all, and writes the section of the page at `path`.

    Other rows stay as they are.
    """
    found = {chip: devices.devices(chip)[0] for chip in chips}  # before JAX computes anything
    is_one_of = lambda x, names: not names or x in names
    wanted = []
    for pair in pairs():
        operator, _, case = pair.name.partition(", ")
        if is_one_of(operator, operators) and is_one_of(case, cases):
            wanted.append(pair)
    jobs = [(pair, chip) for pair in wanted for chip in chips if chip in pair.chips]
    lines = []
    for pair, chip in console.progress(jobs, len(jobs), "compile"):
        lines.append(
            _line(pair, chip, *(figures(call, pair, found[chip]) for call in (pair.ours, pair.plain)))
        )
    page = path.read_text() if path.exists() else ""
    kept = _others(page, jobs) if operators or cases else []
    path.write_text(with_section(page, section([*lines, *kept])))
    print(f"wrote {path}: {2 * len(lines)} programs")
    return 0


def _others(page: str, jobs: Sequence[tuple[Pair, str]]) -> list[tuple[str, ...]]:
    """The rows of the section that are of other pairs and chips."""
    new = {(pair.name, chip) for pair, chip in jobs}
    rows = map(pages.cells, pages.rows(section_of(page)))
    return [row for row in rows if row[:2] not in new]


def _line(pair: Pair, chip: str, ours: Figures, plain: Figures) -> tuple[Any, ...]:
    cells: list[Any] = []
    for one in (ours, plain):
        cells += [
            f"{one.traffic.bytes / 1e9:.2f}",
            one.traffic.launches,
            f"{one.temporary_bytes / 2**20:.0f}",
        ]
    ratio = f"{ours.traffic.bytes / plain.traffic.bytes:.2f}"
    heaviest = sorted(ours.traffic.by_kernel.items(), key=lambda item: -item[1])[:2]
    missed = "-" if pair.goal is None else pair.goal.missed(ours, plain) or "none"
    most = ", ".join(f"{name} {n / 1e9:.2f}" for name, n in heaviest)
    return (pair.name, chip, *cells, ratio, missed, most)


def section(lines: Sequence[tuple[Any, ...]]) -> str:
    """The section's text."""
    columns = (
        "program",
        "chip",
        "GB",
        "launches",
        "temp MiB",
        "plain GB",
        "launches",
        "temp MiB",
        "ratio of GB",
        "goals missed",
    )
    return "\n\n".join((HEADING, _ABOUT, pages.table((*columns, "most GB by"), lines)))


def with_section(page: str, text: str) -> str:
    """`page` with `text` at its end, in the place of an older one."""
    return pages.page(*filter(None, (page.partition(HEADING)[0].rstrip(), text)))


def section_of(page: str) -> str:
    """The section as it stands in `page`; "" if it has none."""
    _, heading, rest = page.partition(HEADING)
    return (heading + rest).rstrip()
