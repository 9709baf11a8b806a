"""The page Speed says what the files in `tests/bench/results` hold, and README what the page says."""

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"
PAGE = (ROOT / ".docs" / "pages" / "speed.md").read_text()
README = (ROOT / "README.md").read_text()
VERSIONS = ("0.10.2", "0.12.0.1")
MACHINES = ("AMD EPYC", "Intel Xeon")  # others are not noted in the file
LARGE = r"T=S=(2048|4096) (full|causal), .*"
# step, what it is beside, and where its cases are: the file of results, cases, contenders
STEPS = [
    ("softmax `[4, 8, 1024, 1024]`, float32 and bfloat16", "`jax.nn`", "softmax", ".*", "jax.nn"),
    ("softmax `[8, 128, 128]` to `[4, 8, 512, 512]`, one masked, the smallest between products",
     "`jax.nn`", "programs", "softmax.*", "plain"),
    ("dense attention, batch 1, 2,048 and 4,096 tokens, 8 heads of 64, full and causal",
     "`jax.nn`", "dot_product", LARGE, "jax.nn"),
    ("dense attention, batch 2, 2,048 tokens, 8 heads of 64, causal", "`jax.nn`",
     "programs", "dense B2 T2048.* causal", "plain"),
    ("the same with a window of 256 tokens", "`jax.nn`",
     "programs", "dense B2 T2048.* window 256", "plain"),
    ("dense attention, batch 1, 2,048 and 4,096 tokens, 8 heads of 64, full and causal", "torch",
     "dot_product", LARGE, "torch.*"),
    ("dense attention, batch 4, 512 tokens, 8 heads of 64, causal", "`jax.nn`",
     "programs", "dense B4 T512 .*", "plain"),
    ("dense attention, batch 2 to 32, 1 to 256 tokens, 4 to 8 heads of 32 or 64",
     "`jax.nn`",
     "programs", "dense (B32 T16|B16 T64|B8 T|vmap|12 layers).*", "plain"),
    ("multi-head layer, batch 4, 512 tokens, 8 heads of 64", "Flax, Equinox",
     "multi_head", "B=4 T=512.*", "(flax|equinox).*"),
    ("multi-head layer, batch 1, 2,048 tokens, 8 heads of 64", "Flax, Equinox",
     "multi_head", "B=1 T=2048.*", "(flax|equinox).*"),
    ("the two layers above", "torch", "multi_head", ".*", "torch.*"),
    ("multi-head layer, batch 1, 512 to 4,096 tokens, 4 heads of 64", "torch",
     "multi_head_scaling", ".*", "torch.*"),
    ("deformable attention, batch 1, 5,440 queries, 8 heads of 32", "gathers that JAX differentiates",
     "deformable", ".*Q=5440, .*", "gather.*"),
    ("deformable attention, batch 1, 300 queries, 8 heads of 32", "gathers that JAX differentiates",
     "deformable", ".*Q=300, .*", "gather.*"),
    ("the two above", "torch's `grid_sample`", "deformable", ".*", "torch.*"),
    ("GAT, GATv2, graph transformer, 500,000 edges, 8 heads of 16", "segment sums of sorted edges",
     "graph", ".*", "JAX.*"),
    ("GAT, 25,000 to 500,000 edges, 1 head of 64 or 8 of 8", "segment sums of sorted edges",
     "programs", "gat (10k/(25k|100k)|100k/500k).* step", "plain"),
    ("GAT, 1,600 to 13,000 edges, 8 heads of 8", "segment sums of sorted edges",
     "programs", "gat (384|2.7k)/.* step", "plain"),
    ("gated delta rule, batch 1 and 8, 512 to 4,096 tokens, 4 heads of 64 and 8 of 128",
     "a chunk form that JAX differentiates", "linear_attention", "gated_delta_rule.*", "chunk form.*"),
    ("gated linear attention, the same shapes",
     "a chunk form that JAX differentiates", "linear_attention", "gated_linear_attention.*", "chunk form.*"),
    ("12 masks and scores as functions, from ALiBi to a window, batch 1, 4,096 tokens, 4 heads of 64",
     "the same as arrays", "mods", ".*T4096.*, forward . backward", "our call with an array"),
    ("80 random programs, a step of each, as `race --seed 3 --count 80` draws them",
     "the formula that JAX differentiates", "race_seed3", ".*", "plain"),
    ("compiling one call of dense attention, batch 2, 2,048 tokens, 8 heads of 64, causal and a window",
     "`jax.nn`", "compiling", "call, B2 T2048.*", "jax.nn"),
    ("compiling one call of dense attention, batch 4, 128 tokens, 8 heads of 64, causal",
     "`jax.nn`", "compiling", "call, B4 T128.*", "jax.nn"),
    ("compiling a transformer of 12 layers, batch 2, 1,024 tokens",
     "`jax.nn`", "compiling", "model.*T1024", "jax.nn"),
    ("compiling a transformer of 12 layers, batch 2, 128 tokens",
     "`jax.nn`", "compiling", "model.*T128", "jax.nn"),
]  # fmt: skip


def rows(name: str, version: str) -> list[dict]:
    """The rows of a results file; none if there is no run of that version."""
    path = RESULTS / f"{name}_cpu_jax{version}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def figures(name: str, cases: str, contenders: str, version: str) -> list[float]:
    """How many times as fast ours is, in every case measured of a step."""
    return [
        row["ratio"]
        for row in rows(name, version)
        if re.fullmatch(cases, row["case"]) and re.fullmatch(contenders, row["contender"]) and row["ratio"]
    ]


def told(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    shown = (statistics.median(ratios), min(ratios), max(ratios))
    words = [f"{x:.2f}" if x < 0.995 else f"{x:.1f}" if x < 9.95 else f"{x:.0f}" for x in shown]
    return words[0] if words[1] == words[2] else f"{words[0]} ({words[1]} to {words[2]})"


def heading(name: str, version: str) -> str:
    """The heading of the table of one machine and one JAX that a results file belongs to."""
    device = json.loads((RESULTS / f"{name}_cpu_jax{version}.json").read_text())["device"]
    found = [machine for machine in MACHINES if set(machine.split()) <= set(re.split(r"\W+", device))]
    return f"## {found[0] if found else 'x86-64, make not noted'}, JAX {version}"


def tables() -> dict[str, list[str]]:
    """The rows of the page's tables of CPUs, by heading."""
    parts = re.split(r"^(?=## )", PAGE, flags=re.MULTILINE)
    rows_of = lambda part: re.findall(r"^\| (?!---|step).*", part, re.MULTILINE)
    return {part.splitlines()[0]: rows_of(part) for part in parts if ", JAX " in part.splitlines()[0]}


@pytest.mark.parametrize(
    ("step", "beside", "name", "cases", "contenders"), STEPS, ids=[f"{s}-{b}" for s, b, *_ in STEPS]
)
def test_each_figure_is_the_median_of_what_was_measured(step, beside, name, cases, contenders):
    cells = {version: told(figures(name, cases, contenders, version)) for version in VERSIONS}
    assert set(cells.values()) != {"-"}
    for version, cell in cells.items():
        if cell != "-":
            assert f"| {step} | {beside} | `{name}` | {cell} |" in tables()[heading(name, version)]


def test_no_step_is_told_that_was_not_measured():
    measured = sum(told(figures(*where, version)) != "-" for _, _, *where in STEPS for version in VERSIONS)
    assert sum(map(len, tables().values())) == measured


def test_readme_says_what_the_page_says_of_the_newest_jax():
    """Each figure of the first table, found by its number in a row of the page."""
    newest = "\n".join(line for head, lines in tables().items() if VERSIONS[-1] in head for line in lines)
    told_of = {  # a row of README's table: the steps that its figures are of
        "| a CPU, sequences": [("dense .* 512 tokens.*", "1.7"), ("dense .* batch 2, 2,048.*", "3.6"),
                                   (r"dense .* \| torch", "0.59")],
        "| a CPU, shorter": [("dense .* 1 to 256 tokens.*", "1.1")],
        "| a CPU, deformable": [("deformable .* 300 q.*", "4.3"), ("deformable .* 5,440 q.*", "8.7")],
        "| a CPU, graphs": [("GAT, 25,000.*", "3.0"), ("GAT, 1,600.*", "0.94")],
        "| linear attention": [("gated delta rule.*", "2.5")],
        "| masks, biases": [("12 masks.*", "2.8")],
        "**What it costs**": [("compiling one call .* 2,048.*", "0.45"), ("compiling a .* 1,024.*", "0.77")],
    }  # fmt: skip
    for words, steps in told_of.items():
        line = README.split(words)[1].split("\n\n" if words.startswith("**") else "\n")[0]
        for step, figure in steps:
            assert figure in line
            assert re.search(rf"^\| {step} .*\| {re.escape(figure)} .*\|$", newest, re.MULTILINE), step
    h100 = PAGE.split("## An H100\n")[1].split("\n## ")[0]
    assert "| batch 4, 4,096 tokens, 16 heads of 128, causal | 2.6 | 17 | 18 | 2.2 |" in h100
    assert "2.6 ms where `jax.nn` takes 18 and cuDNN 2.2 (4,096 tokens, causal, H100)" in README
    measured = (RESULTS / "nvidia_h100.md").read_text()
    assert "| 17.4 (1621) | 2.61 (2) | 2.67 (128) | 2.25 (130) | 18.4 (10241) | 2.24 (130) |" in measured


def test_readme_is_short():
    assert len(README.splitlines()) <= 150
