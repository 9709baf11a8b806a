"""The layer with its heads over one mesh axis, alone and around a ring over another."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import QUICK, assert_close, quick_jit, thorough
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from parallel.sequences import draw
from parallel.test_exchange import COLLECTIVE

from jax_attn_bwd import MultiHeadAttentionParams, Rotary, mods, multi_head_attention
from jax_attn_bwd.parallel import tensor_parallel_multi_head_attention

T, E, N, K, H = 16, 6, 4, 2, 3
ROTARY = Rotary(base=10.0, size=2, interleaved=True)
HEADS = P(None, "heads")
SPECS = MultiHeadAttentionParams(
    HEADS,
    P("heads"),
    HEADS,
    P("heads"),
    HEADS,
    P("heads"),
    P("heads"),
    P(),
    P("heads"),
    P("heads"),
    P("heads"),
)


def parameters(rng, appended: bool) -> MultiHeadAttentionParams:
    shapes = MultiHeadAttentionParams(
        (E, N, H), (N, H), (E, K, H), (K, H), (E, K, H), (K, H), (N, H, E), (E,), (K, H), (K, H), (N,)
    )
    params = MultiHeadAttentionParams(*(draw(rng, *shape) for shape in shapes))
    return params if appended else params._replace(bias_k=None, bias_v=None)


def only_given(specs, params):
    return MultiHeadAttentionParams(
        *(s if x is not None else None for s, x in zip(specs, params, strict=True))
    )


def mesh(sequence: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[: 2 * sequence]).reshape(sequence, 2), ("sequence", "heads"))


def layer(reduce: str, sequence: bool, params, **options):
    tokens = ("sequence", "heads") if sequence else "heads"
    x = P(None, tokens) if reduce == "psum_scatter" else P(None, "sequence" if sequence else None)
    call = functools.partial(
        tensor_parallel_multi_head_attention,
        axis_name="heads",
        reduce=reduce,
        sequence_axis_name="sequence" if sequence else None,
        **options,
    )
    specs = only_given(SPECS, params), x
    return jax.shard_map(call, mesh=mesh(2 if sequence else 1), in_specs=specs, out_specs=x)


def compare(rng, params, reduce, sequence, options):
    x, ct = draw(rng, 2, T, E), draw(rng, 2, T, E)

    def gradients(function):
        def loss(params, x):
            out = function(params, x)
            return (out * ct).sum(), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True), compiler_options=QUICK)(params, x)

    got = gradients(layer(reduce, sequence, params, **options))
    expected = gradients(functools.partial(multi_head_attention, **options))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), got, expected)


def test_outputs_with_dropout(rng):
    """In every run: the gradients of other options take long."""
    options = {"dropout_rate": 0.3, "out_dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    options["add_residual"] = True
    params, x = parameters(rng, False), draw(rng, 2, T, E)
    calls = (
        layer("psum_scatter", False, params, **options),
        functools.partial(multi_head_attention, **options),
    )
    got, expected = quick_jit(lambda *given: [call(*given) for call in calls])(params, x)
    assert_close(got, expected, 1e-12)


@pytest.mark.parametrize(
    ("reduce", "sequence", "options"),
    [
        (
            "psum_scatter",
            True,
            {"dropout_rate": 0.3, "out_dropout_rate": 0.4, "add_residual": True, "rotary": ROTARY},
        ),
        *(
            pytest.param(*of, marks=thorough)
            for of in (
                (
                    "psum_scatter",
                    False,
                    {"add_zero_attn": True, "dropout_rate": 0.3, "rotary": ROTARY, "local_window_size": 5},
                ),
                (
                    "psum",
                    False,
                    {
                        "logits_soft_cap": 2.0,
                        "save": "qkv",
                        "out_dropout_rate": 0.4,
                        "dropout_offset": (3, 2, 5, 1),
                    },
                ),
                ("psum", True, {"appended": True, "add_zero_attn": True, "rotary": ROTARY}),
                (
                    "psum",
                    True,
                    {
                        "local_window_size": 5,
                        "dropout_rate": 0.3,
                        "out_dropout_rate": 0.4,
                        "add_zero_attn": True,
                    },
                ),
                ("psum_scatter", True, {"appended": True, "add_zero_attn": True, "logits_soft_cap": 2.0}),
            )
        ),
    ],
    ids=str,
)
def test_as_on_one_device(reduce, sequence, options, rng):
    options = {"is_causal": True, "dropout_key": jax.random.key(3), **options}
    appended = options.pop("appended", not sequence)
    compare(rng, parameters(rng, appended), reduce, sequence, options)


@pytest.mark.parametrize(
    ("reduce", "sequence"), [pytest.param("psum", False, marks=thorough), ("psum_scatter", True)], ids=str
)
def test_functions_count_heads_and_tokens_of_the_whole(reduce, sequence, rng):
    params, x, ct = parameters(rng, False), draw(rng, 2, T, E), draw(rng, 2, T, E)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, T)), axis=1), jnp.int32)
    slopes = jnp.asarray(rng.random(N))
    functions = {"mask_mod": mods.causal & mods.document, "score_mod": mods.alibi}

    def gradients(function):
        def loss(params, x, slopes):
            out = function(params, x, ids, slopes)
            return (out * ct).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), compiler_options=QUICK)(params, x, slopes)

    def sharded(params, x, *args):
        tokens = ("sequence", "heads") if sequence else None
        call = lambda params, x, *args: tensor_parallel_multi_head_attention(
            params, x, axis_name="heads", reduce=reduce, mod_args=args, **functions,
            sequence_axis_name="sequence" if sequence else None,
        )  # fmt: skip
        specs = only_given(SPECS, params), P(None, tokens), P(), P()
        run = jax.shard_map(call, mesh=mesh(1 + sequence), in_specs=specs, out_specs=P(None, tokens))
        return run(params, x, *args)

    one = lambda params, x, *args: multi_head_attention(params, x, mod_args=args, **functions)
    got, expected = gradients(sharded), gradients(one)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), got, expected)


@thorough
def test_rotary_by_positions_around_a_ring(rng):
    """Tokens dealt to the devices in stripes, which their positions tell."""
    params, x, ct = parameters(rng, appended=False), draw(rng, 2, T, E), draw(rng, 2, T, E)
    order = np.arange(T).reshape(-1, 2).T.ravel()
    positions = jnp.asarray(order.reshape(2, -1))

    def striped(params, x):
        at = positions[jax.lax.axis_index("sequence")]
        return tensor_parallel_multi_head_attention(
            params, x, axis_name="heads", reduce="psum", sequence_axis_name="sequence", rotary=ROTARY,
            is_causal=True, query_positions=at, key_value_positions=at,
        )  # fmt: skip

    tokens = P(None, "sequence")
    specs = only_given(SPECS, params), tokens
    run = jax.shard_map(striped, mesh=mesh(2), in_specs=specs, out_specs=tokens)
    one = functools.partial(multi_head_attention, is_causal=True, rotary=ROTARY)
    gradient = lambda f, x, ct: jax.jit(jax.grad(lambda p, x: (f(p, x) * ct).sum(), (0, 1)))(params, x)
    dparams, dx = gradient(run, x[:, order], ct[:, order])
    expected, expected_dx = gradient(one, x, ct)
    assert_close(dx, expected_dx[:, order], 1e-12)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), dparams, expected)


@thorough
@pytest.mark.parametrize(
    ("reduce", "sequence"), [("psum", False), ("psum_scatter", False), ("psum_scatter", True)], ids=str
)
def test_tangents_are_those_of_one_device(reduce, sequence, rng):
    """Along all parameters and tokens; around a ring, too."""
    primals = parameters(rng, not sequence), draw(rng, 2, T, E)
    along = jax.tree.map(lambda x: draw(rng, *x.shape), primals)
    options = {"is_causal": True, "add_zero_attn": True, "add_residual": True, "rotary": ROTARY}
    options |= {"dropout_rate": 0.3, "out_dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    options["forward_mode"] = True

    def tangents(call):
        return jax.jit(lambda *x: jax.jvp(call, *x), compiler_options=QUICK)(primals, along)

    got = tangents(layer(reduce, sequence, primals[0], **options))
    expected = tangents(functools.partial(multi_head_attention, **options))
    for x, y in zip(got, expected, strict=True):
        assert_close(x, y, 1e-12)


@thorough
@pytest.mark.parametrize("average", [False, True])
def test_weights(average, rng):
    """They are those of each device's heads, or their mean, and have a gradient."""
    params, x, ct = parameters(rng, appended=True), draw(rng, 2, T, E), draw(rng, 2, T, E)
    options = {"return_weights": True, "average_weights": average, "is_causal": True}
    call = functools.partial(tensor_parallel_multi_head_attention, axis_name="heads", **options)
    tokens, weights = P(None, "heads"), P() if average else P(None, "heads")
    specs = (only_given(SPECS, params), tokens)
    run = jax.shard_map(call, mesh=mesh(), in_specs=specs, out_specs=(tokens, weights))

    def gradients(function):
        def loss(params, x):
            out, weights = function(params, x)
            return (out * ct).sum() + jnp.sin(weights).sum(), (out, weights)

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True), compiler_options=QUICK)(params, x)

    expected = gradients(functools.partial(multi_head_attention, **options))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), gradients(run), expected)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        ("psum_scatter", {"all-gather": 2, "reduce-scatter": 2}),
        pytest.param("psum", {"all-reduce": 2}, marks=thorough),
    ],
)
def test_collectives_of_a_training_step(reduce, expected, rng):
    """Self-attention, forward and backward; parameters that devices share would take one more sum."""
    params = parameters(rng, appended=False)._replace(out_bias=None)
    run = layer(reduce, False, params, is_causal=True)
    step = jax.jit(jax.grad(lambda p, x: (run(p, x) ** 2).sum(), (0, 1)), compiler_options=QUICK)
    text = step.lower(params, draw(rng, 2, T, E)).compile().as_text()
    assert collections.Counter(COLLECTIVE.findall(text)) == expected


@thorough
def test_other_keys_than_queries(rng):
    params, x, y = parameters(rng, appended=False), draw(rng, 2, T, E), draw(rng, 2, 2 * T, E)
    tokens = P(None, "heads")
    call = functools.partial(tensor_parallel_multi_head_attention, axis_name="heads")
    run = jax.shard_map(
        call, mesh=mesh(), in_specs=(only_given(SPECS, params), tokens, tokens), out_specs=tokens
    )
    assert_close(jax.jit(run)(params, x, y), multi_head_attention(params, x, y), 1e-13)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axis_name": "model"}, r"axis_name must name an axis bound here, got 'model'; .*'heads'"),
        ({"sequence_axis_name": "tokens"}, r"axis_name must name an axis bound here, got 'tokens'"),
        (
            {"reduce": "psum"},
            r"query must be the same on all devices along 'heads'.*or choose reduce='psum_scatter'",
        ),
        ({"reduce": "sum"}, r"reduce must be one of"),
        (
            {"sequence_axis_name": "sequence", "return_weights": True},
            r"return_weights must be False with sequence_axis",
        ),
        (
            {"sequence_axis_name": "sequence", "rotary": Rotary()},
            r"rotary\.size must be even and at most the head size 3",
        ),
        (
            {"sequence_axis_name": "sequence", "rotary": ROTARY, "query_positions": jnp.zeros(3, int)},
            r"query_positions must broadcast to \[..., T\] = \(2, 16\), got \(3,\)",
        ),
        ({"sequence_axis_name": "sequence", "save": "qkv"}, r"save must be 'inputs' with sequence_axis_name"),
    ],
    ids=str,
)
def test_errors(changed, message, rng):
    params = parameters(rng, appended=False)
    tokens, arguments = P(None, "heads"), {"axis_name": "heads", **changed}
    call = functools.partial(tensor_parallel_multi_head_attention, **arguments)
    run = jax.shard_map(call, mesh=mesh(), in_specs=(only_given(SPECS, params), tokens), out_specs=tokens)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, params, draw(rng, 2, T, E))


@pytest.mark.parametrize("shared", ["query_kernel", "out_kernel"])
def test_kernels_of_all_heads(shared, rng):
    params = parameters(rng, appended=False)
    specs = only_given(SPECS, params)._replace(**{shared: P()})
    call = functools.partial(tensor_parallel_multi_head_attention, axis_name="heads")
    run = jax.shard_map(call, mesh=mesh(), in_specs=(specs, P(None, "heads")), out_specs=P(None, "heads"))
    with pytest.raises(
        ValueError, match=rf"params\.{shared} must hold this device's heads, sharded over 'heads'"
    ):
        jax.eval_shape(run, params, jnp.zeros((2, T, E)))
