"""A class has a name of its own: one that two files define means two things to who reads either."""

import ast
from collections import defaultdict
from pathlib import Path

import jax_attn_bwd
from jax_attn_bwd import layers

ROOT = Path(jax_attn_bwd.__file__).parent
# what every operator has, under the name that all have it by
OF_EVERY_OPERATOR = {"Plan", "Options", "Operands", "Residuals", "Result", "Wanted"} | {
    "Tiling",
    "Inputs",
    "Call",
}


def classes() -> dict[str, list[str]]:
    """The files that define a class of each name, a leading underscore aside; as often as they define one.

    Layers of a framework, `layers/FRAMEWORK.py`, have the names that it gives them.
    """
    found = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if parts[0] == "layers" and path.stem in layers._FRAMEWORKS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.removeprefix("_")].append("/".join(parts))
    return found


def test_few_classes_share_a_name():
    shared = {
        name: files
        for name, files in classes().items()
        if len(set(files)) > 1 and name not in OF_EVERY_OPERATOR
    }
    assert sum(map(len, shared.values())) <= 20, shared
