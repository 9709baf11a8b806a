"""`results/tpu_static.md`: the static figures of every TPU kernel and case, beside those of the peers."""

from collections.abc import Sequence

from jax_attn_bwd.bench.compile_only.compiling import Row
from jax_attn_bwd.bench.compile_only.table import grid
from jax_attn_bwd.bench.compile_only.tpu_kernels import SLOTS, TpuKernel
from jax_attn_bwd.bench.compile_only.tpu_peers import NAMES

_FIGURES = (
    "bundles", "per score, 1e-3", "spill stores per score, 1e-3", "VMEM KiB", *(f"{s} %" for s in SLOTS),
)  # fmt: skip

_ABOUT = """Compiled in full with no such chip at hand. A bundle is what a core issues in a cycle in
which it waits for nothing: bundles compare programs, they are not a time. `bundles` are those of the
loop over the grid in the program text; `per score` divides them by the elements of the tile of one step,
where the loop holds one program for a tile (`full`: nothing is compared; `mixed`: causality, windows and
lengths are; `both`: one of each). MXU, XLU, ...: share of the slots of that unit. Rewritten by
`python -m jax_attn_bwd.bench.compile_only --table tpu`."""
_ABOUT_PEERS = """bfloat16, H = 128, T = S = 4096; `one causal tile`: 1024. `temp MiB`: what the program of
forward and gradients allocates beside arguments and results, for 2 x 16 heads (ours) and 8 heads (peers)."""


def markdown(rows: Sequence[Row], versions: dict[str, str]) -> str:
    """The page."""
    peers = [row for row in rows if row.implementation in NAMES]
    own = [row for row in rows if row.implementation not in NAMES]
    pieces = [
        "# Static figures of the compiled programs, TPU",
        f"JAX {versions['jax']}, libtpu {versions['libtpu']}. {_ABOUT}",
        "## Dense attention beside JAX's kernels",
        _ABOUT_PEERS,
        grid(
            ("kernels of", "case", "kernel", "chip", "tile", *_FIGURES, "temp MiB"),
            [
                (row.implementation, row.case, k.name, row.target, _tile(k), *_figures(k), _temporary(row))
                for row in (*peers, *own)
                for k in row.kernels
                if row in peers or row.case in ("H=128", "one causal tile")
            ],
        ),
        "## Every case",
        grid(
            ("operator", "case", "kernel", "chip", *_FIGURES),
            [(row.operator, row.case, k.name, row.target, *_figures(k)) for row in own for k in row.kernels],
        ),
    ]  # fmt: skip
    failed = [f"* {row.operator}[{row.implementation}] {row.case} {row.direction}, {row.target}: {row.error}"
              for row in rows if row.error]  # fmt: skip
    if failed:
        pieces += ["## Did not compile", "\n".join(failed)]
    return "\n\n".join(pieces) + "\n"


def _tile(kernel: TpuKernel) -> str:
    return "" if kernel.tile is None else "{} x {}".format(*kernel.tile)


def _temporary(row: Row) -> str:
    return "" if row.temporary_bytes is None else f"{row.temporary_bytes / 2**20:.1f}"


def _figures(kernel: TpuKernel) -> tuple:
    per_score = kernel.per_score
    spills = kernel.spill_stores / kernel.scores / kernel.programs if kernel.scores else None
    return (
        kernel.inner,
        None if per_score is None else f"{per_score * 1e3:.2f}",
        kernel.spill_stores if spills is None else f"{spills * 1e3:.2f}",
        kernel.vmem // 1024,
        *(kernel.slots[slot] for slot in SLOTS),
    )
