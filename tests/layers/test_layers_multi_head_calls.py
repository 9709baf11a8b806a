"""Construction and call of `MultiHeadAttention`: what is traced once, and what is refused by name."""

import pytest
from helpers import assert_close
from test_layers_multi_head import arrays

E, T = 8, 5


@pytest.mark.parametrize(
    "options",
    [{"implementation": "xla"}, {"local_window_size": 2}, {"attention_fn": "ours"}, {}],
    ids=lambda options: "-".join(options),
)
def test_equal_layers_of_nnx_trace_once(options):
    nnx = pytest.importorskip("flax.nnx")
    from jax_attn_bwd import attention_fn
    from jax_attn_bwd.layers.flax_nnx import MultiHeadAttention

    if options.get("attention_fn"):
        options = {"attention_fn": attention_fn}
    (x,) = arrays((1, T, E))
    traces = []

    @nnx.jit
    def run(layer, x):
        traces.append(1)
        return layer(x)

    fixed = {"decode": False, "param_dtype": x.dtype}
    layers = [MultiHeadAttention(2, E, **fixed, **options, rngs=nnx.Rngs(i)) for i in range(3)]
    outs = [run(layer, x) for layer in layers]
    assert len(traces) == 1
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])
    for out, layer in zip(outs, layers, strict=True):
        assert_close(out, layer(x), 1e-12)
