"""A framework is imported when its layers are first named, and not before."""

import subprocess
import sys

import pytest

import jax_attn_bwd
from jax_attn_bwd import layers

PRESENT = """
import sys
def present(): return {"equinox", "haiku", "flax", "keras", "torch", "jraph"} & set(sys.modules)
"""


def run(program):
    subprocess.run([sys.executable, "-c", PRESENT + program], check=True, capture_output=True, text=True)


def test_a_framework_is_imported_with_its_layers_only():
    """In the order in which none may have come with the one before (Haiku itself imports Flax)."""
    for package in ("equinox", "flax"):
        pytest.importorskip(package)
    run("""
import jax_attn_bwd, jax_attn_bwd.layers.graph, jax_attn_bwd.layers.deformable
assert {"flax_linen", "flax_nnx", "haiku", "equinox", "keras"} <= set(dir(jax_attn_bwd.layers))
assert {"layers", "compat"} <= set(dir(jax_attn_bwd))
assert not hasattr(jax_attn_bwd.layers, "torch")
assert not present(), present()
assert jax_attn_bwd.layers.equinox.GATConv.__name__ == "GATConv"
assert present() == {"equinox"}, present()
assert jax_attn_bwd.layers.flax_linen.MultiHeadAttention.__name__ == "MultiHeadAttention"
assert present() == {"equinox", "flax"}, present()
assert "jax_attn_bwd.layers.flax_nnx" not in sys.modules
""")


def test_what_a_plain_import_leaves_out():
    """It is there when it is named."""
    run("""
import jax_attn_bwd
late = {"jax_attn_bwd." + name for name in ("compat", "mods", "parallel")}
assert not late & set(sys.modules) and "jax.extend" not in sys.modules
assert {"compat", "mods", "parallel"} <= set(dir(jax_attn_bwd))
assert not hasattr(jax_attn_bwd, "nothing")
from jax_attn_bwd import *
assert late <= set(sys.modules) and mods is jax_attn_bwd.mods and compat.torch
""")


@pytest.mark.thorough
def test_a_second_import_in_one_process():
    """After `sys.modules` was purged: classes are new, and their names are taken."""
    run("""
import jax_attn_bwd
for name in [name for name in sys.modules if name.split(".")[0] == "jax_attn_bwd"]:
    del sys.modules[name]
first, jax_attn_bwd = jax_attn_bwd, None
import jax_attn_bwd
assert jax_attn_bwd.BipartiteCSC is not first.BipartiteCSC
assert jax_attn_bwd.BipartiteCSC.from_coo([0], [0], 1, 1).num_edges == 1
""")


def test_a_missing_framework_is_named():
    run("""
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("equinox", "haiku", "flax", "keras"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import jax_attn_bwd
for folder, package, distribution in (
    ("equinox", "equinox", "equinox"), ("haiku", "haiku", "dm-haiku"),
    ("flax_linen", "flax", "flax"), ("flax_nnx", "flax", "flax"), ("keras", "keras", "keras"),
):
    try:
        getattr(jax_attn_bwd.layers, folder)
    except ImportError as error:
        assert f"layers.{folder} needs the package {package}; install it" in str(error), error
        assert str(error).endswith(f"pip install {distribution}"), error
    else:
        raise AssertionError(folder)
""")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'pytorch'"):
        layers.pytorch  # noqa: B018
    assert jax_attn_bwd.layers is layers
