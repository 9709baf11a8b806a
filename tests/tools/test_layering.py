"""The layout of the package is its architecture: imports point one way, folders hold the same files."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

import jax_attn_bwd
from jax_attn_bwd import layers

ROOT = Path(jax_attn_bwd.__file__).parent
MODULES = sorted(p.relative_to(ROOT) for p in ROOT.rglob("*.py"))
OPERATORS = sorted(p.parent.name for p in ROOT.glob("ops/*/__init__.py"))
REQUIRED = ("__init__", "api", "spec", "reference", "plan", "forward", "backward", "cases")
FRAMEWORKS = {"flax", "haiku", "equinox", "keras", "torch", "optax", "matplotlib", "rich", "tokamax"}


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


# The architecture, lowest first: a module imports what stands in its own row or above it. A new file is one
# more pattern in the row where it belongs; a file that no row knows, and a pattern without a file, fail.
LAYERS = (
    ("_core/*",),
    (
        "ops/dot_product/mask",
        "ops/*/spec",
        "ops/*/reference",
        "ops/graph/groups",
        "ops/graph/segments",
        "ops/graph/levels",
        "ops/graph/loops",
        "ops/graph/placement",
    ),
    ("ops/*/kinds/*",),
    ("ops/graph/plan",),
    ("ops/graph/softmax", "ops/graph/reductions", "ops/*/structure", "ops/graph/batching"),
    ("ops/*/arguments", "ops/*/layout", "ops/*/sampling", "ops/*/mod_functions", "ops/dot_product/plan"),
    (
        "ops/dot_product/block",
        "ops/dot_product/visibility",
        "ops/deformable/point_gradients",
        "ops/deformable/value_gradient",
        "ops/*/plan",
    ),
    ("ops/*/clean_operands", "ops/*/online_softmax", "ops/*/row_terms", "ops/*/kernels/*"),
    ("ops/linear_attention/matrix",),
    ("ops/linear_attention/decays",),
    ("ops/linear_attention/layout",),
    (
        "ops/linear_attention/kernels/inputs",
        "ops/linear_attention/kernels/hopper_tiles",
        "ops/linear_attention/kernels/hopper_pieces",
        "ops/linear_attention/kernels/hopper_channels",
        "ops/linear_attention/kernels/hopper_channel_gradients",
        "ops/linear_attention/kernels/hopper_forward",
        "ops/linear_attention/kernels/hopper_backward",
        "ops/linear_attention/kernels/tpu_chunks",
    ),
    ("ops/linear_attention/kernels/tpu_decays",),
    ("ops/linear_attention/kernels/tpu_erasing",),
    ("ops/linear_attention/kernels/tpu_forward", "ops/linear_attention/kernels/tpu_backward"),
    ("ops/dot_product/devices",),
    ("ops/*/portable/*",),
    ("ops/*/forward",),
    ("ops/*/backward", "ops/*/tangent"),
    ("ops/*/blockwise",),
    # the one operator that builds on another, through its block
    ("ops/multi_head/projections", "ops/multi_head/appended", "ops/multi_head/plan"),
    ("ops/multi_head/forward", "ops/multi_head/backward"),
    ("ops/multi_head/tangent",),
    ("ops/*/api", "ops/*/edge_ops"),
    ("mods/*",),
    ("ops/*/cases",),
    ("ops/*/__init__", "ops/__init__"),
    ("layers/*", "compat/*"),
    ("parallel/*",),
    ("__init__",),
    ("check/*", "__main__"),
)
DOORS = ("blockwise", "spec", "mask", "visibility", "arguments")  # what one operator imports of another
RANKS = [(pattern, rank) for rank, row in enumerate(LAYERS) for pattern in row]
SIZES = {"kernels": 1000, "": 700}  # lines of a file, by folder
TESTS = ROOT.parent / "tests"


def file_of(module: str) -> Path:
    """The file of a module, below the package."""
    path = Path(*module.split(".")[1:])
    as_module = path.parent / f"{path.name}.py"
    return as_module if (ROOT / as_module).exists() else path / "__init__.py"


def rows_of(path: Path) -> list[int]:
    """The rows of `LAYERS` that know a file: those that name it, else those whose patterns match.

    `*` in the middle of a pattern is one folder, at the end everything.
    """
    name = path.with_suffix("").as_posix()
    if named := [rank for pattern, rank in RANKS if pattern == name]:
        return named
    found = []
    for pattern, rank in RANKS:
        expression = re.escape(pattern).replace(r"\*", "[^/]*")
        expression = expression.removesuffix("[^/]*") + ".*" if pattern.endswith("/*") else expression
        if re.fullmatch(expression, name):
            found.append(rank)
    return found


def ours(path: Path) -> set[Path]:
    """The files of the package that a file imports."""
    return {file_of(name) for name in imports(path) if name.split(".")[0] == "jax_attn_bwd"} - {path}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_file_has_its_layer(path):
    assert len(rows_of(path)) == 1, f"{path}: add it to one row of LAYERS"


def test_every_pattern_has_a_file():
    names = [path.with_suffix("").as_posix() for path in MODULES]
    for pattern, _ in RANKS:
        assert fnmatch.filter(names, pattern), f"{pattern}: no such file"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_one_way(path):
    (rank,) = rows_of(path)
    for target in ours(path):
        (goal,) = rows_of(target)
        assert goal <= rank, f"{path} imports {target}"
        if path.parts[0] == target.parts[0] == "ops" and len(path.parts) > 2 and len(target.parts) > 2:
            allowed = {path.parts[1]} | ({"dot_product"} if path.parts[1] == "multi_head" else set())
            assert target.parts[1] in allowed, f"{path} imports the operator {target.parts[1]}"
            if target.parts[1] != path.parts[1]:
                doors = (*DOORS, "cases") if path.stem == "cases" else DOORS
                assert target.stem in doors, f"{path} imports {target}, and not by the doors {doors}"
        if "kernels" in path.parts:
            assert target.stem not in ("api", "forward", "backward"), f"{path} imports {target}"


def test_no_imports_in_a_circle():
    """Those inside functions count, too."""
    above = {path: ours(path) for path in MODULES}
    while free := [path for path, targets in above.items() if not targets & above.keys()]:
        for path in free:
            del above[path]
    assert not above, f"in a circle, or above one: {sorted(map(str, above))}"


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_file_of_the_package_is_too_long(path):
    lines = len((ROOT / path).read_text().splitlines())
    assert lines <= SIZES["kernels" if "kernels" in path.parts else ""]


def test_no_file_of_tests_is_too_long():
    long = {p.name: n for p in TESTS.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


@pytest.mark.parametrize("operator", OPERATORS)
def test_operator_folders_hold_the_same_files(operator):
    found = {p.stem for p in (ROOT / "ops" / operator).glob("*.py")}
    assert set(REQUIRED) <= found


@pytest.mark.parametrize("operator", OPERATORS)
def test_reference_imports_only_numpy_like_modules(operator):
    assert imports(Path("ops", operator, "reference.py")) <= {"jax", "jax.numpy", "jax.nn"}


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[0] != "layers"], ids=str)
def test_frameworks_stay_out_of_the_core(path):
    if path.name == "console.py":
        return  # optional there, imported where used
    assert not {name.split(".")[0] for name in imports(path)} & FRAMEWORKS


@pytest.mark.parametrize("path", [p for p in MODULES if p.parts[0] == "layers"], ids=str)
def test_a_layer_imports_its_own_framework_alone(path):
    targets = [name.split(".") for name in imports(path)]
    framework = path.stem.split("_")[0]  # of a file FRAMEWORK_ASPECT.py, too
    own = {framework} if {path.stem, framework} & layers._FRAMEWORKS.keys() else set()
    assert {target[0] for target in targets} & FRAMEWORKS <= own
    others = {target[2] for target in targets if target[:2] == ["jax_attn_bwd", "layers"]}
    assert not others & layers._FRAMEWORKS.keys()


# What asks JAX for a derivative, and the only files of `ops/` that may, each with its reason. Kernels of
# hardware are tied to the portable rules by `_core.with_portable_jvp`.
DERIVATIVES = {"vjp", "grad", "value_and_grad", "jvp", "linearize", "jacrev", "jacfwd", "custom_jvp"}
DIFFERENTIATED = {
    "ops/dot_product/mod_functions.py": "the score functions of users",
    "ops/graph/kinds/gat.py": "bookkeeping: rows without an edge, which may hold NaN, move no weight",
    "ops/graph/loops.py": "bookkeeping: the row past the end moves nothing",
    "ops/graph/reductions.py": "what self-loops are filled with; `edge_max` has its own rules",
}


def derivatives(source: str) -> set[str]:
    """Returns the functions that a source takes from JAX, by whatever name, to differentiate with."""
    tree, found = ast.parse(source), set()
    modules = {"jax"}  # names of JAX and of modules in it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or "jax" for a in node.names if a.name.split(".")[0] == "jax"}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jax":
            found |= {alias.name for alias in node.names} & DERIVATIVES
            modules |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        is_one = isinstance(node, ast.Attribute) and node.attr in DERIVATIVES
        if is_one and ast.unparse(node.value).split(".")[0] in modules:
            found.add(node.attr)
    return found


def test_a_backward_is_written_not_differentiated():
    found = {p.as_posix(): derivatives((ROOT / p).read_text()) for p in MODULES if p.parts[0] == "ops"}
    assert {path for path, names in found.items() if names} == DIFFERENTIATED.keys()


@pytest.mark.parametrize(
    "source",
    [
        "import jax\ndx = jax.grad(f)(x)",
        "import jax\n@jax.custom_jvp\ndef f(x): ...",
        "import jax as j\ntake = j.vjp",
        "import jax\n@partial(jax.custom_jvp, nondiff_argnums=(0,))\ndef f(n, x): ...",
        "from jax import jvp as push\npush(f, (x,), (dx,))",
        "from jax.custom_derivatives import custom_jvp",
        "from jax import custom_derivatives as rules\nrules.custom_jvp(f)",
        "def f(x):\n    from jax import linearize\n    return linearize(g, x)",
    ],
)
def test_a_derivative_that_is_taken_is_seen(source):
    assert len(derivatives(source)) == 1


@pytest.mark.parametrize("source", ['"""See jax.vjp(f)."""', "import jax\njax.custom_vjp(f)", "rule.jvp(x)"])
def test_what_is_not_differentiated_is_let_through(source):
    assert derivatives(source) == set()


def test_arguments_are_handed_on_by_name():
    """What finds references to an argument finds its way to the plan; the locals of layers are counted."""
    found = {str(path): (ROOT / path).read_text().count("locals()") for path in MODULES}
    assert sum(found.values()) <= 25
    assert not [p for p, n in found.items() if n and p.split("/")[0] not in ("layers", "compat")]
    assert not found["layers/attention_fn.py"]


# Who may ask what a call runs on, and so choose by it.
DECIDE = re.compile(
    r"_core/(targets|fusion|products|backend|records|mosaic_\w+)|ops/\w+/(plan|kernels/\w+)|check/\w+"
)
ASKED = {
    "platform",
    "is_one_cpu",
    "multiplies",
    "device_kind",
    "device_count",
    "__version_info__",
    "generation",
}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_choices_are_asked_where_they_are_made(path):
    """Platform, version, devices and what a CPU has: all else is told by its plan."""
    tree = ast.parse((ROOT / path).read_text())
    asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & ASKED
    if not DECIDE.fullmatch(path.with_suffix("").as_posix()):
        assert not asked, f"{path} asks {asked}: the plan asks, and hands the answer on"


def test_identity_of_objects_decides_nothing():
    for path in [p for p in MODULES if p.parts[0] == "ops"]:
        calls = (n.func for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.Call))
        assert "id" not in {getattr(f, "id", None) for f in calls}, path


def test_public_names_are_the_operators_exports():
    exported = set(dir(jax_attn_bwd))
    for operator in OPERATORS:
        tree = ast.parse((ROOT / "ops" / operator / "__init__.py").read_text())
        names = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
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
    folders = {"jax_attn_bwd", "tests", "examples", "notebooks", "findings"}
    assert names <= folders | {"pyproject.toml", "README.md"}


def test_the_public_names_are_listed():
    """`__all__` is what `__init__` imports under its own name, no more and no less."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    own = [n for n in found if n.module and n.module.split(".")[0] == "jax_attn_bwd"]
    imported = [a.asname or a.name for n in own for a in n.names]
    assert sorted(imported) == sorted(jax_attn_bwd.__all__)
    assert all(hasattr(jax_attn_bwd, name) for name in jax_attn_bwd.__all__)
    assert {"compat", "layers", "parallel"} <= set(jax_attn_bwd.__all__)
