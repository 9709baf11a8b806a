"""The layout of the package is its architecture: imports point one way, folders hold the same files."""

import ast
import re
from pathlib import Path

import pytest

import jax_attn_bwd

ROOT = Path(jax_attn_bwd.__file__).parent
MODULES = sorted(p.relative_to(ROOT) for p in ROOT.rglob("*.py"))
OPERATORS = sorted(p.parent.name for p in ROOT.glob("ops/*/__init__.py"))
REQUIRED = ("__init__", "api", "spec", "reference", "forward", "backward", "cases")
FRAMEWORKS = {"flax", "haiku", "equinox", "torch", "optax", "matplotlib", "rich", "tokamax"}


def is_module(name: str) -> bool:
    """Whether `name` is a module of this package."""
    path = ROOT.parent / Path(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def imports(path: Path) -> set[str]:
    """Modules that a file imports, absolute."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if is_module(submodule) else node.module)
    return found


def layer(module: str) -> int:
    """Height of a module of the package; it may import what is not higher."""
    parts = module.split(".")[1:]
    if not parts or parts[0] == "__init__":
        return 8
    if parts[0] in ("check", "bench"):
        return 9
    if parts[0] in ("layers", "compat", "parallel"):
        return 7
    if parts[0] == "_core":
        return 0
    name = parts[2] if len(parts) > 2 else "__init__"
    return {"spec": 1, "grouping": 1, "structure": 1, "reference": 1, "arguments": 2, "tiling": 2,
            "layout": 2, "tiles": 2, "parts": 2, "sampling": 2, "scatter": 2, "forward": 3,
            "backward": 4, "gat": 5, "gatv2": 5, "transformer": 5, "edge_softmax": 5, "rule": 5,
            "api": 5, "cases": 6, "__init__": 6}.get(name, 3)  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_one_way(path):
    module = ".".join(("jax_attn_bwd", *path.with_suffix("").parts))
    for target in imports(path):
        if not target.startswith("jax_attn_bwd"):
            continue
        assert layer(target) <= layer(module), f"{module} imports {target}"
        source, goal = path.parts, target.split(".")[1:]
        if source[0] == "ops" and goal[:1] == ["ops"] and len(source) > 2 and len(goal) > 1:
            allowed = {source[1]} | ({"dot_product"} if source[1] == "multi_head" else set())
            assert goal[1] in allowed, f"{module} imports the operator {goal[1]}"
        if source[-1].startswith(("mosaic_", "triton_")):
            assert goal[-1] not in ("api", "forward", "backward"), f"{module} imports {target}"


@pytest.mark.parametrize("operator", OPERATORS)
def test_operator_folders_hold_the_same_files(operator):
    found = {p.stem for p in (ROOT / "ops" / operator).glob("*.py")}
    assert set(REQUIRED) <= found


@pytest.mark.parametrize("operator", OPERATORS)
def test_reference_imports_only_numpy_like_modules(operator):
    assert imports(Path("ops", operator, "reference.py")) <= {"jax", "jax.numpy", "jax.nn"}


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[0] != "layers"], ids=str)
def test_frameworks_stay_out_of_the_core(path):
    if path.parts[0] == "bench" or path.name == "console.py":
        return  # optional there, imported where used
    assert not {name.split(".")[0] for name in imports(path)} & FRAMEWORKS


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[0] == "layers"], ids=str)
def test_a_layer_imports_its_own_framework_alone(path):
    folder = path.parts[1] if len(path.parts) > 2 else None
    folders = {p.parts[1] for p in MODULES if p.parts[0] == "layers" and len(p.parts) > 2}
    targets = [name.split(".") for name in imports(path)]
    assert {target[0] for target in targets} & FRAMEWORKS <= {str(folder).split("_")[0]}
    layers = {target[2] for target in targets if target[:2] == ["jax_attn_bwd", "layers"]}
    assert layers & folders <= {folder}


def test_a_backward_is_written_not_differentiated():
    forbidden = re.compile(r"jax\.(vjp|grad|value_and_grad|jvp|linearize|jacrev|jacfwd)\(")
    kernels = [*ROOT.glob("ops/*/mosaic_*.py"), *ROOT.glob("ops/*/triton_*.py")]
    for path in [*ROOT.glob("ops/*/backward.py"), *kernels]:
        assert not forbidden.search(path.read_text()), path


def test_public_names_are_the_operators_exports():
    exported = set(dir(jax_attn_bwd))
    for operator in OPERATORS:
        tree = ast.parse((ROOT / "ops" / operator / "__init__.py").read_text())
        names = {a.asname for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        assert names
        assert names <= exported, operator
    assert {"explain", "__version__"} <= exported


def test_top_level_holds_what_it_should():
    top = {p.name for p in ROOT.parent.iterdir() if not p.name.startswith(".")}
    if "pyproject.toml" not in top:
        pytest.skip("the package is installed elsewhere than in its checkout")
    import subprocess

    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT.parent, capture_output=True, text=True, check=True
    ).stdout.split()
    names = {name.split("/")[0] for name in tracked if not name.startswith(".")}
    assert names <= {
        "pyproject.toml", "jax_attn_bwd", "tests", "examples", "notebooks", "README.md",
    }  # fmt: skip


def test_the_public_names_are_listed():
    """`__all__` is what `__init__` imports under its own name, no more and no less."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    imported = [a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert sorted(imported) == sorted(jax_attn_bwd.__all__)
    assert all(hasattr(jax_attn_bwd, name) for name in jax_attn_bwd.__all__)
    assert {"compat", "layers"} <= set(jax_attn_bwd.__all__)
