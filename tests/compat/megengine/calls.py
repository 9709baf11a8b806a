"""Packed weights and the source's steps in plain jnp, for the tests beside this file."""

import jax
import jax.numpy as jnp
import numpy as np
from compat.programs import outputs_and_gradients
from helpers import assert_close

from jax_attn_bwd.compat import megengine

N, L, S, H, E = 2, 3, 5, 2, 8


def source(given, sizes, flags, added, add_zero_attn=False, reslink=False):
    """The source's steps in plain jnp: `added` `(N, H, L, S)` is what the masks add to the logits."""
    q, k, v = given["query"], given["key"], given["value"]
    qp, kp, vp, op = sizes
    shapes = [(E, qp), (k.shape[-1], kp), (v.shape[-1], vp), (vp or H * v.shape[-1], op)]
    flat, start, parts = given["io_weight_bias"].ravel(), 0, []
    biases = [(width,) if flag else (0,) for flag, (_, width) in zip(flags, shapes, strict=True)]
    for shape in (*shapes, *biases):
        parts.append(flat[start : start + int(np.prod(shape))].reshape(shape))
        start += int(np.prod(shape))
    assert start == flat.size

    def heads(x, w, b, row):
        if w.size:
            x = (x @ w + (b[None, None] if b.size else 0)).reshape(*x.shape[:2], H, -1)
        else:
            x = jnp.repeat(x[:, :, None], H, 2)
        if row is not None:
            row = row.reshape(1, 1, H if w.size else 1, -1)
            x = jnp.concatenate([x, jnp.broadcast_to(row, (len(x), 1, *x.shape[2:]))], 1)
        return jnp.moveaxis(x, 2, 1)

    q = heads(q, parts[0], parts[4], None)
    k = heads(k, parts[1], parts[5], given.get("bias_k"))
    v = heads(v, parts[2], parts[6], given.get("bias_v"))
    if add_zero_attn:
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0))) for x in (k, v))
    logits = q @ k.swapaxes(-1, -2) * (E // H if qp else E) ** -0.5
    extra = k.shape[2] - added.shape[-1]
    added = jnp.pad(added, ((0, 0), (0, 0), (0, 0), (0, extra)))
    weights = jax.nn.softmax(logits + jnp.broadcast_to(added, logits.shape), -1)
    out = jnp.moveaxis(weights @ v, 1, 2).reshape(len(q), q.shape[2], -1)
    if op:
        out = out @ parts[3] + (parts[7][None, None] if parts[7].size else 0)
    return out + given["query"] if reslink else out, weights.reshape(-1, *weights.shape[2:])


def draw(sizes=(E, E, E, E), flags=(True,) * 4, k_size=6, v_size=10, rows=False, batch=N):
    rng = np.random.default_rng(3)
    qp, kp, vp, op = sizes
    length = E * qp + k_size * kp + v_size * vp + (vp or H * v_size) * op
    length += sum(width for flag, width in zip(flags, sizes, strict=True) if flag)
    shapes = {
        "query": (batch, L, E),
        "key": (batch, S, k_size),
        "value": (batch, S, v_size),
        "io_weight_bias": (1, length),
    }
    if rows:
        shapes |= {"bias_k": (1, 1, kp or k_size), "bias_v": (1, 1, vp or v_size)}
    return {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}


def assert_as_source(sizes, flags, given, added, masks, *, of_source=None, **more):
    """Outputs and gradients against `source`, at random cotangents of output and weights."""
    of_source = of_source or {}
    names = dict(zip(("qproj_size", "kproj_size", "vproj_size", "oproj_size"), sizes, strict=True))
    names |= dict(zip(("qbias", "kbias", "vbias", "obias"), flags, strict=True))

    def run(given):
        rest = {**given, **masks, **names, **more}
        first = [rest.pop(x) for x in ("query", "key", "value")]
        return megengine.multi_head_attention(
            *first, E, H, 0.0, 0.0, rest.pop("io_weight_bias"), need_weights=True, **rest
        )

    def cotangents(outputs):
        rng = np.random.default_rng(4)
        return tuple(rng.standard_normal(x.shape) for x in outputs)

    got, gradients = outputs_and_gradients(run, given, cotangents)
    expected, expected_gradients = outputs_and_gradients(
        lambda given: source(given, sizes, flags, jnp.asarray(added), **of_source), given, cotangents
    )
    for name, x, y in zip(("out", "weights"), got, expected, strict=True):
        assert_close(x, y, 1e-12, name)
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient, 1e-11, name)


NONE = np.zeros((1, 1, L, S))
ALL = (True,) * 4
