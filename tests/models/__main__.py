"""Compares every row of the page "Models" with the published module that it names.

PYTHONPATH=tests python -m models [--write] [words of rows ...]

It needs the versions that the rows name (`.ci/extras` installs them), and the files of fla-core in the folder
that FLA_CORE names, unpacked: installed beside transformers, it takes that over and wants a GPU.
"""

import argparse
import importlib
import re

import jax

from models import compare

PARTS = ("language", "recurrent", "vision", "others")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="of the rows to compare; all")
    parser.add_argument("--write", action="store_true", help="write what was found into the page")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    models: dict[str, compare.Model] = {}
    for part in PARTS:
        models |= importlib.import_module(f"models.{part}").MODELS
    if missing := models.keys() - {row.model for row in compare.rows()}:
        raise SystemExit(f"no row of the page for {', '.join(sorted(missing))}")
    known, wrong = compare.known(), []
    for row in compare.rows():
        if not any(word in row.model for word in arguments.words or [""]):
            continue
        errors = compare.compare(models[row.model], row.call, known)
        print(f"{row.model}: output {errors.output:.1e}, gradients {errors.gradients:.1e}", flush=True)
        if arguments.write:
            write(row.model, errors)
        # another machine adds in another order
        elif not all(x <= 4 * y + 1e-14 for x, y in zip(errors, row.errors, strict=True)):
            wrong.append(row.model)
    if wrong:
        raise SystemExit(f"further from theirs than the page says: {', '.join(wrong)}")


def write(model: str, errors: compare.Errors) -> None:
    """Puts the errors of a row into the page."""
    cells = " | ".join(f"{x:.0e}".replace("e-0", "e-").replace("0e+00", "0") for x in errors)
    row = rf"^(\| {re.escape(model)} \|.*\|)[^|]*\|[^|]*\|$"
    text = compare.PAGE.read_text()
    compare.PAGE.write_text(re.sub(row, rf"\g<1> {cells} |", text, flags=re.MULTILINE))


if __name__ == "__main__":
    main()
