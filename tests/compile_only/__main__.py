"""Command line: `PYTHONPATH=tests python -m compile_only --target H200 [--out FILE]`, or `--table`."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import report
from cases import discover

from compile_only import __doc__ as description
from compile_only import compiling, devices, gpu, pages, scale, tpu, traffic_table
from compile_only.programs import Program, registered
from jax_attn_bwd._core import backend, console

TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    # an H100 runs the H200's code
    "nvidia": {"mosaic_gpu": ("A100", "H200", "B200"), "xla": ("H100", "H200", "B200")},
    "tpu": {"mosaic_tpu": tuple(devices.TPU)},
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all compiled within budgets, 1 if not, 2 if nothing could be compiled."""
    devices.none_of_this_machine()
    known = sorted(operator.name for operator in discover())
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m compile_only", description=description)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", choices=devices.TARGETS)
    what.add_argument(
        "--table",
        nargs="?",
        const="nvidia",
        choices=(*TABLES, "scale", "programs"),
        help="compile for all chips of that maker and write out/<maker>_static.md; scale: a training step "
        "for whole pods, out/scale.md; programs: the portable path on GPUs beside the plain formula, a "
        "section of out/nvidia_static.md",
    )
    parser.add_argument("--peers", action="store_true", help="JAX's own TPU kernels instead of ours")
    parser.add_argument("--implementation", choices=backend.NAMES, default="xla")
    parser.add_argument("--operator", nargs="+", choices=known, default=(), metavar="NAME")
    parser.add_argument("--case", nargs="+", default=(), metavar="NAME", help="only the cases of these names")
    parser.add_argument("--out", type=Path, help="JSON; with --table the Markdown file")
    args = parser.parse_args(argv)
    if args.table:
        names = {"scale": "scale.md", "programs": "nvidia_static.md"}
        name = names.get(args.table, f"{args.table}_static.md")
        path = args.out or report.OUT / name
        report.prepare(parser, path.parent)
        if args.table == "scale":
            return _scale(path)
        if args.table == "programs":
            return _programs(path, args.operator, args.case)
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
        programs = compiling.compile_peers(args.target)
    else:
        programs = compiling.compile_all(args.target, args.implementation, operators, tuple(args.case))
    if args.out:
        args.out.write_text(json.dumps(compiling.document(programs), indent=1) + "\n")
    _show(programs, args.target)
    wrong = _tell(f"{len(programs)} programs compiled for {args.target}", programs)
    return int(bool(wrong) or not programs)


def _show(programs: Sequence[Program], target: str) -> None:
    """The programs on the terminal."""
    figures = tuple(dict.fromkeys(name for p in programs for k in p.kernels for name in k.shown()))
    columns = ["operator", "case", "direction", "temp MiB", "kernels", *figures]
    cells = []
    for p in programs:
        memory, shown = p.temporary_bytes, [k.shown() for k in p.kernels]
        temporary = None if memory is None else f"{memory / 2**20:.1f}"
        joined = (" ".join(str(f[name]) for f in shown) for name in figures)
        cells.append([p.operator, p.case, p.direction, temporary, len(p.kernels), *joined])
    console.table(f"Static figures for {target}", columns, cells)


def _tell(what: str, programs: Sequence[Program]) -> int:
    """Prints what was done and what is wrong, and returns how much is."""
    wrong = [sentence for program in programs for sentence in compiling.violations(program)]
    print(f"{what}: {len(wrong)} violations", *wrong, sep="\n")
    return len(wrong)


def _scale(path: Path) -> int:
    """Compiles for the pods whose compilers are here, and writes the page."""
    reasons = {pod: devices.missing(about.target) for pod, about in scale.PODS.items()}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        print(reason, file=sys.stderr)
    here = [pod for pod, reason in reasons.items() if reason is None]
    return scale.table(path, here) if here else 2


def _programs(path: Path, names: Sequence[str], cases: Sequence[str]) -> int:
    """Compiles the portable path and the plain formulas, and writes their section of the page."""
    for chip in traffic_table.CHIPS:
        if reason := devices.missing(chip):
            print(reason, file=sys.stderr)
            return 2
    return traffic_table.table(path, names, cases=cases)


def _table(path: Path, maker: str, names: tuple[str, ...]) -> int:
    """Compiles for every chip of the table, each in a process of its own, and writes the page."""
    programs: list[Program] = []
    versions: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        for implementation, target, more in _combinations(maker, names):
            out = Path(folder, f"{implementation}_{target}{'_'.join(more)}.json")
            command = [sys.executable, "-m", __package__, "--target", target]
            command += ["--implementation", implementation, "--out", str(out), *more]
            done = subprocess.run(
                [*command, *(["--operator", *names] if names else [])],
                capture_output=True,
                text=True,
                check=False,
            )
            if not out.exists():
                print(done.stderr[-2000:] or f"{target} ended with {done.returncode}", file=sys.stderr)
                return done.returncode or 1
            versions = json.loads(out.read_text())
            programs += compiling.read(versions)
    page = {"nvidia": gpu.markdown, "tpu": tpu.markdown}[maker](programs, versions)
    old = path.read_text() if path.exists() else ""
    if names and old:  # other rows stay as they are
        page = pages.merged(old, page, names)
    elif maker == "nvidia" and old:  # the section has a command of its own
        page = traffic_table.with_section(page, traffic_table.section_of(old))
    path.write_text(page)
    return int(bool(_tell(f"wrote {path}: {len(programs)} programs", programs)))


def _combinations(maker: str, names: tuple[str, ...]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(implementation, target, more arguments): what is registered, and peers."""
    for implementation, targets in TABLES[maker].items():
        if registered(implementation, names):
            yield from ((implementation, target, ()) for target in targets)
    if maker == "tpu" and (not names or "dot_product_attention" in names):
        yield from (("mosaic_tpu", target, ("--peers",)) for target in ("v5e", "v6e"))


if __name__ == "__main__":
    sys.exit(main())
