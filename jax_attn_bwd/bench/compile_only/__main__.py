"""Command line: `python -m jax_attn_bwd.bench.compile_only --target H200 [--out FILE]`, or `--table`."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax_attn_bwd import bench, ops
from jax_attn_bwd._core import backend, console
from jax_attn_bwd.bench.compile_only import __doc__ as description
from jax_attn_bwd.bench.compile_only import compiling, devices, table, tpu_table
from jax_attn_bwd.bench.compile_only.cases import registered

RESULTS = Path(bench.__file__).parent / "results"
TABLES = {
    "nvidia": {
        "mosaic_gpu": ("H200",),
        "xla": ("H100", "H200", "B200"),
    },  # an H100 runs the H200's code
    "tpu": {"mosaic_tpu": tuple(devices.TPU)},
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all compiled within budgets, 1 if not, 2 if nothing could be compiled."""
    devices.none_of_this_machine()
    known = sorted(operator.name for operator in ops.discover())
    parser = argparse.ArgumentParser(
        prog="python -m jax_attn_bwd.bench.compile_only", description=description
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", choices=devices.TARGETS)
    what.add_argument(
        "--table", nargs="?", const="nvidia", choices=tuple(TABLES),
        help="compile for all chips of that maker and write results/<maker>_static.md",
    )  # fmt: skip
    parser.add_argument(
        "--peers", action="store_true", help="JAX's own TPU kernels instead of ours"
    )
    parser.add_argument("--implementation", choices=backend.NAMES, default="xla")
    parser.add_argument("--operator", nargs="+", choices=known, default=(), metavar="NAME")
    parser.add_argument("--case", help="only the case of this name")
    parser.add_argument("--out", type=Path, help="JSON; with --table the Markdown file")
    args = parser.parse_args(argv)
    if args.table:
        path = args.out or RESULTS / f"{args.table}_static.md"
        return _table(path, args.table, tuple(args.operator))

    operators = registered(args.implementation, tuple(args.operator))
    reason = devices.missing(args.target, sass=args.implementation == "mosaic_gpu")
    if args.peers and args.target not in devices.TPU:
        parser.error("the peers are TPU kernels")
    if reason is None and not operators:
        reason = f"no operator asked for has an implementation {args.implementation!r}"
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    if args.peers:
        rows = compiling.compile_peers(args.target)
    else:
        rows = compiling.compile_all(args.target, args.implementation, operators, args.case)
    if args.out:
        args.out.write_text(json.dumps(compiling.document(rows), indent=1) + "\n")
    wrong = [sentence for row in rows for sentence in compiling.violations(row)]
    _show(rows, args.target)
    print(f"{len(rows)} programs compiled for {args.target}: {len(wrong)} violations")
    for sentence in wrong:
        print(sentence)
    return int(bool(wrong) or not rows)


def _show(rows: Sequence[compiling.Row], target: str) -> None:
    """The rows on the terminal."""
    columns = ["operator", "case", "direction", "temp MiB", "kernels", *table.figures(target)]
    cells = []
    for row in rows:
        memory, shown = row.temporary_bytes, [table.figures(target, k) for k in row.kernels]
        cells.append([
            row.operator, row.case, row.direction, None if memory is None else f"{memory / 2**20:.1f}",
            len(row.kernels), *(" ".join(str(f[name]) for f in shown) for name in table.figures(target)),
        ])  # fmt: skip
    console.table(f"Static figures for {target}", columns, cells)


def _table(path: Path, maker: str, names: tuple[str, ...]) -> int:
    """Compiles for every chip of the table, each in a process of its own, and writes the page."""
    rows: list[compiling.Row] = []
    versions: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        for implementation, target, more in _combinations(maker, names):
            out = Path(folder, f"{implementation}_{target}{'_'.join(more)}.json")
            command = [sys.executable, "-m", bench.__name__ + ".compile_only", "--target", target]
            command += ["--implementation", implementation, "--out", str(out), *more]
            done = subprocess.run(
                [*command, *(["--operator", *names] if names else [])],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if not out.exists():
                print(
                    done.stderr[-2000:] or f"{target} ended with {done.returncode}", file=sys.stderr
                )
                return done.returncode or 1
            versions = json.loads(out.read_text())
            rows += compiling.read(versions)
    markdown = {"nvidia": table.markdown, "tpu": tpu_table.markdown}[maker]
    path.write_text(markdown(rows, versions))
    wrong = [sentence for row in rows for sentence in compiling.violations(row)]
    print(f"wrote {path}: {len(rows)} programs, {len(wrong)} violations")
    for sentence in wrong:
        print(sentence)
    return int(bool(wrong))


def _combinations(maker: str, names: tuple[str, ...]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(implementation, target, more arguments) of what is registered, and of the peers on a TPU."""
    for implementation, targets in TABLES[maker].items():
        if registered(implementation, names):
            yield from ((implementation, target, ()) for target in targets)
    if maker == "tpu" and "scaled_masked_softmax" not in names:
        yield from (("mosaic_tpu", target, ("--peers",)) for target in ("v5e", "v6e"))


if __name__ == "__main__":
    sys.exit(main())
