"""The layer runs what dense attention would run by itself."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_attn_bwd import MultiHeadAttentionParams, dot_product_attention, explain, multi_head_attention


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
