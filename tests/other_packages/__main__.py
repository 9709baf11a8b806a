"""What other packages make of an operator: `python -m other_packages` of a clone's `tests`.

Each tool is a function of a function of one array, or of what makes a layer. It runs on the plain formula, on
our call, and where that is refused on our call with `forward_mode=True`. A row is what
`.docs/pages/other_packages.md` says: "right", "forward_mode=True", the words of a refusal, or "fails by
itself", if the tool cannot be imported or takes the plain formula no more than ours. One that differs from
its expectation is marked, and the exit code is 1. With arguments, only the tools whose names hold one of them
run.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import sys
import warnings
from functools import partial

import jax
import numpy as np

from other_packages.tools import OF, TOOLS, Tool


def outcome(tool: Tool) -> str:
    """Returns "right", "forward_mode=True", "wrong", or "refused" or "fails by itself" and the words."""
    theirs, call = OF[tool.of]
    said = lambda error: f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        expected, words = tool.run(theirs), ""
    except Exception as error:
        return f"fails by itself: {said(error)}"
    for name, options in (("right", {}), ("forward_mode=True", {"forward_mode": True})):
        try:
            found = tool.run(partial(call, **options))
        except Exception as error:
            words = words or said(error)
            continue
        pairs = zip(*map(jax.tree.leaves, (expected, found)), strict=True)
        return name if all(np.allclose(x, y, 1e-2, 4e-3) for x, y in pairs) else "wrong"
    return f"refused: {words}"


def main() -> int:
    wrong = 0
    logging.disable(logging.ERROR)
    for group in ("transform", "read"):  # the last tool of the last one sets jax_enable_x64
        importlib.import_module(f"other_packages.{group}")
    for name, tool in TOOLS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        if importlib.util.find_spec(tool.package) is None:
            print(f"{name:38} not here", flush=True)
            continue
        try:
            version = importlib.metadata.version(tool.package)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = outcome(tool)
        differs = not found.startswith(tool.expected)
        wrong += differs
        mark = f"   <- EXPECTED {tool.expected}" if differs else ""
        print(f"{name:38} {version:10} {found}{mark}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    print(f"JAX {jax.__version__}")
    sys.exit(main())
