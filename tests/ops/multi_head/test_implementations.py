"""The layer runs what dense attention would run by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_attn_bwd import MultiHeadAttentionParams, dot_product_attention, explain, multi_head_attention
from jax_attn_bwd._core import choices
from jax_attn_bwd._core.products import accumulated


def test_a_kernel_that_is_not_proven_is_passed_over_in_the_layer_too(monkeypatch, unproven):
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    heads = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    inputs = jax.ShapeDtypeStruct((1, 256, 64), jnp.bfloat16)

    def layer(x):
        return multi_head_attention(MultiHeadAttentionParams(), x, num_heads=2)

    with jax.sharding.use_abstract_mesh(mesh):
        alone = explain(dot_product_attention, heads, heads, heads)
        assert explain(layer, inputs) == alone
        monkeypatch.setenv("JAX_ATTN_BWD_KERNELS", "mosaic_gpu")
        assert explain(layer, inputs)["mosaic_gpu"] == "ok"
    assert alone["mosaic_gpu"] != "ok"


@pytest.mark.usefixtures("one_device")
def test_explain_names_the_way_of_the_attention_inside_and_a_plane_of_weights():
    def portable(T, batch=1, **options):
        x = jax.ShapeDtypeStruct((batch, T, 64), jnp.float32)
        layer = lambda x: multi_head_attention(MultiHeadAttentionParams(), x, num_heads=2, **options)
        return explain(layer, x).choices[-1]

    small, large = portable(64), portable(4096, is_causal=True)
    assert small.way.startswith("whole plane")
    assert large.way.startswith("tiles")
    assert portable(64, return_weights=True).way == f"plane of weights, {small.way}"
    assert "batch_slices" in portable(512, batch=8).rules
    with choices.without("batch_slices"):
        assert "slices" not in portable(512, batch=8).way


@pytest.mark.usefixtures("narrow_products")
def test_narrow_factors_of_projections_are_widened_where_that_is_switched_off(rng):
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((8, 16), (16, 2, 64)))
    project = lambda: accumulated("te,enh->tnh", x, w)
    narrow = project()
    with choices.without("narrow_products"):
        wide = project()
        assert "bf16" not in str(jax.make_jaxpr(project)()).split("dot_general")[1]
    np.testing.assert_allclose(narrow, wide, rtol=1e-5, atol=1e-5)
