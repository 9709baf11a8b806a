"""The Hopper kernels on shards: what each device computes of its part fits together.

The interpreter has one device, so the shards of a 2 x 2 mesh (batch, heads) are computed in turn.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPERATORS, QUICK, assert_close, cotangents, interpreted, thorough
from jax.sharding import PartitionSpec as P

from jax_attn_bwd import mods
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.dot_product import cases
from jax_attn_bwd.ops.dot_product import mask as mask_fields

(OPERATOR,) = (o for o in OPERATORS if o.name == "dot_product_attention")
# bits by batch entry and head; gradients of a bias and of slopes, sums over shards; one pair of heads on each
CASE = cases.case(
    "shards",
    T=6,
    S=10,
    dropout_rate=0.3,
    score_mod=mods.alibi,
    extra=lambda rng, n: {
        "mod_args_0": rng.random(n["N"]),
        "bias": rng.standard_normal((1, n["N"], 1, n["S"])),
        "dropout_key": np.array([7, 11], np.uint32),
    },
)
pytestmark = [pytest.mark.kernel, thorough]
AXES = {
    "query": "bTnH",
    "key": "bSnH",
    "value": "bSnH",
    "bias": "1n1S",
    "batch_number": "b",
    "head_number": "n",
}


def spec(axes):
    return P(*(a if a in "bn" else None for a in axes))


def cut(x, spec, place):
    """The part of `x` at `place`, {axis name: index}."""
    for axis, name in enumerate(spec):
        if name is not None:
            half = x.shape[axis] // 2
            x = jax.lax.slice_in_dim(x, place[name] * half, (place[name] + 1) * half, axis=axis)
    return x


def in_turn(f, out_specs, operands):
    """`pallas.on_local_shards` on a mesh that is not there."""

    def specs_of(operands):
        if hasattr(operands, "query"):  # Operands
            given = {n: x for n, x in operands._asdict().items() if n != "mask"}
            given |= {n: operands.array(n) for n in mask_fields.AXES}
            known = {n: jax.tree.map(lambda _, n=n: spec(AXES.get(n, "")), x) for n, x in given.items()}
            args = jax.tree.map(lambda _: spec(""), operands.mask.mod_args)
            made = operands.with_arrays(known)
            return made._replace(mask=made.mask.replace(mod_args=args))
        if hasattr(operands, "result"):  # Residuals
            result = operands.result
            axes = {"out": "bTnH", "lse": "bTn", "lse_rounding": "bTn", "wide_out": "bTnH"}
            made = result._replace(**{n: spec(axes[n]) for n, x in result._asdict().items() if x is not None})
            return operands._replace(operands=specs_of(operands.operands), result=made)
        return None if operands is None else spec({2: "bTnH", 1: "bTn"}[operands.ndim - 2])

    *arrays, keys = operands
    specs = [*map(specs_of, arrays), None if keys is None else spec("bn2")]
    is_spec = lambda x: isinstance(x, P)
    made, pieces = out_specs(*specs), {}
    for b, n in itertools.product(range(2), range(2)):
        place = {"b": b, "n": n}
        local = jax.tree.map(lambda s, x, p=place: cut(x, s, p), specs, list(operands), is_leaf=is_spec)
        pieces[b, n] = f(*local)

    def join(spec, *parts):
        (w, x), (y, z) = parts[:2], parts[2:]
        heads = spec.index("n") if "n" in spec else None
        rows = [sum(pair) if heads is None else jnp.concatenate(pair, heads) for pair in ((w, x), (y, z))]
        return jnp.concatenate(rows, spec.index("b")) if "b" in spec else rows[0] + rows[1]

    return jax.tree.map(join, made, *(pieces[p] for p in sorted(pieces)), is_leaf=is_spec)


@interpreted
def test_shards_fit_together(monkeypatch):
    arrays = CASE.arrays(jnp.bfloat16)
    names = OPERATOR.differentiated(arrays)
    rest = {name: x for name, x in arrays.items() if name not in names}

    def step():
        call = lambda inputs: OPERATOR.call(**inputs, **rest, **CASE.options, implementation="mosaic_gpu")
        outputs, pull = jax.vjp(call, {name: jnp.asarray(arrays[name]) for name in names})
        return outputs, pull(cotangents(OPERATOR, outputs))[0]

    with pallas.interpreting("mosaic_gpu"):
        outputs, gradients = jax.jit(step, compiler_options=QUICK)()
        monkeypatch.setattr(pallas, "on_local_shards", in_turn)
        cut_outputs, cut_gradients = jax.jit(lambda: step(), compiler_options=QUICK)()
    for got, expected in zip(cut_outputs, outputs, strict=True):
        assert_close(got, expected, 1e-6)
    for name in names:
        assert_close(np.asarray(cut_gradients[name]), gradients[name], 1e-2, name)
