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
from jax_attn_bwd.bench.compile_only import compiling, devices, table
from jax_attn_bwd.bench.compile_only.cases import registered

TABLE = Path(bench.__file__).parent / "results" / "nvidia_static.md"
TABLE_TARGETS = {
    "mosaic_gpu": ("H200",),
    "xla": ("H100", "H200", "B200"),
}  # an H100 runs the H200's code


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all compiled within budgets, 1 if not, 2 if nothing could be compiled."""
    known = sorted(operator.name for operator in ops.discover())
    parser = argparse.ArgumentParser(
        prog="python -m jax_attn_bwd.bench.compile_only", description=description
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", choices=devices.TARGETS)
    what.add_argument(
        "--table", action="store_true", help=f"compile for all and write {TABLE.name}"
    )
    parser.add_argument("--implementation", choices=backend.NAMES, default="xla")
    parser.add_argument("--operator", nargs="+", choices=known, default=(), metavar="NAME")
    parser.add_argument("--case", help="only the case of this name")
    parser.add_argument("--out", type=Path, help="JSON; with --table the Markdown file")
    args = parser.parse_args(argv)
    if args.table:
        return _table(args.out or TABLE, tuple(args.operator))

    operators = registered(args.implementation, tuple(args.operator))
    reason = devices.missing(args.target, sass=args.implementation == "mosaic_gpu")
    if reason is None and not operators:
        reason = f"no operator asked for has an implementation {args.implementation!r}"
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
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
    columns = [
        "operator",
        "case",
        "direction",
        "temp MiB",
        "kernels",
        "registers",
        "spills",
        "shared KiB",
    ]
    cells = []
    for row in rows:
        memory = row.temporary_bytes
        kernels = row.kernels
        cells.append([
            row.operator, row.case, row.direction, None if memory is None else f"{memory / 2**20:.1f}",
            len(kernels), " ".join(str(k.registers) for k in kernels),
            " ".join(str(k.spill_stores + k.spill_loads) for k in kernels),
            " ".join(f"{k.shared_memory / 1024:.0f}" for k in kernels),
        ])  # fmt: skip
    console.table(f"Static figures for {target}", columns, cells)


def _table(path: Path, names: tuple[str, ...]) -> int:
    """Compiles for every chip of the table, each in a process of its own, and writes the page."""
    rows, versions = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for implementation, target in _combinations(names):
            out = Path(folder, f"{implementation}_{target}.json")
            command = [sys.executable, "-m", bench.__name__ + ".compile_only", "--target", target]
            command += ["--implementation", implementation, "--out", str(out)]
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
    path.write_text(table.markdown(rows, versions))
    wrong = [sentence for row in rows for sentence in compiling.violations(row)]
    print(f"wrote {path}: {len(rows)} programs, {len(wrong)} violations")
    for sentence in wrong:
        print(sentence)
    return int(bool(wrong))


def _combinations(names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(implementation, target) of what is registered."""
    for implementation, targets in TABLE_TARGETS.items():
        if registered(implementation, names):
            yield from ((implementation, target) for target in targets)


if __name__ == "__main__":
    sys.exit(main())
