"""One clear sentence for each call that cannot be meant."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from parallel.sequences import AXIS, KINDS, TOKENS, mesh

from jax_attn_bwd import mods

n, T, N = 4, 8, 4


def call(kind="ring", specs=None, check_vma=True, axis_name=AXIS, **arguments):
    specs = specs or dict.fromkeys(arguments, P())
    statics = {name: x for name, x in arguments.items() if not hasattr(x, "shape")}
    arrays = {name: x for name, x in arguments.items() if name not in statics}
    x = jax.ShapeDtypeStruct((1, n * T, N, 3), jnp.float32)
    attend = functools.partial(KINDS[kind], axis_name=axis_name, **statics)
    run = jax.shard_map(
        lambda q, more: attend(q, q, q, **more),
        mesh=mesh(n),
        in_specs=(TOKENS, {name: specs[name] for name in arrays}),
        out_specs=TOKENS,
        check_vma=check_vma,
    )
    return jax.eval_shape(run, x, arrays)


ALL, PART, TOKEN_IDS = jnp.arange(n * T), jnp.zeros((n * T, n * T), bool), jnp.zeros((n * T,), int)
AT = ("query_positions", "key_value_positions")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(layout="zig"), r"layout must be one of \('contiguous', 'zigzag', 'striped'\), got 'zig'"),
        (
            dict(layout="zigzag", query_positions=ALL, key_value_positions=ALL),
            "positions must be left out with layout='zigzag', which tells them",
        ),
        (dict(axis_name="y"), r"ring_attention: axis_name must name an axis bound here, got 'y'; .*\('x',\)"),
        (
            dict(check_vma=False),
            r"ring_attention: jax.shard_map around it must have check_vma=True, got False",
        ),
        (
            dict(query_positions=ALL, specs={AT[0]: P(AXIS)}),
            r"key_value_positions must be given together with query_pos",
        ),
        (
            dict(zip(AT, (ALL, ALL), strict=True)),
            r"query_positions must broadcast to \[..., T\] = \(1, 8\), got \(32,\)",
        ),
        (
            dict(mask=PART, specs={"mask": P(AXIS)}, kind="ulysses"),
            r"ulysses_attention: mask must have all 32 rows and 32 columns",
        ),
        (
            dict(mask=jnp.zeros((n, T, n * T), bool), specs={"mask": P(None, None, AXIS)}),
            r"mask must have T = 8 rows.*or 1 row and S = 8 columns.*gathered whole",
        ),
        (dict(bias=jnp.zeros((n * T, 3)), specs={"bias": P(AXIS)}), r"bias must have T = 8 rows"),
        (
            dict(key_value_seq_lengths=jnp.zeros((3,), int)),
            r"key_value_seq_lengths must broadcast to \[...\] = \(1,\)",
        ),
        (dict(mask=jnp.zeros((n * T, n * T))), r"mask must be boolean"),
        (
            dict(query_segment_ids=TOKEN_IDS, specs={"query_segment_ids": P(AXIS)}),
            r"key_value_segment_ids must be given together",
        ),
        (dict(dropout_rate=0.5), r"dropout_key must be given"),
        (dict(implementation="mine"), r"ring_attention: implementation must be None or one of"),
        (dict(is_causal=1), r"is_causal must be a Python bool"),
        (
            dict(mask_mod=mods.document, mod_args=(jnp.zeros((T,), jnp.int32),)),
            r"ring_attention: the ids of document in mod_args must have shape .* with T at least 32",
        ),
    ],
)
def test_errors(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(**arguments)


def test_outside_of_shard_map():
    x = jnp.zeros((1, T, N, 3))
    with pytest.raises(
        ValueError, match=r"axis_name must name an axis bound here.*jax.shard_map over that axis"
    ):
        KINDS["ring"](x, x, x, axis_name=AXIS)


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "mosaic_gpu"])
def test_kernels_are_chosen_by_name(implementation):
    with pytest.raises(
        NotImplementedError, match=rf"ring_attention: implementation='{implementation}' cannot"
    ):
        call(implementation=implementation)


def test_dropout_of_positions_that_differ_in_the_batch():
    at = jnp.zeros((2, n * T), int)
    x = jax.ShapeDtypeStruct((2, n * T, N, 3), jnp.float32)
    attend = functools.partial(KINDS["ring"], axis_name=AXIS, dropout_rate=0.1)
    run = jax.shard_map(
        lambda q, at, key: attend(q, q, q, query_positions=at, key_value_positions=at, dropout_key=key),
        mesh=mesh(n),
        in_specs=(TOKENS, TOKENS, P()),
        out_specs=TOKENS,
    )
    with pytest.raises(ValueError, match=r"positions must be the same for the whole batch with dropout"):
        jax.eval_shape(run, x, at, jax.random.key(0))
