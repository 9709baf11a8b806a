"""A layer of the source, and its formulas in NumPy float64, for the tests beside this file."""

import numpy as np

from jax_attn_bwd.compat import bnns

B, L, S, H, DK, DV, DM = 2, 3, 5, 2, 4, 3, 6
Triple = bnns.BNNSMHAProjectionParameters
ALL = Triple(True, True, True)


def layer(case=(), dtype=np.float64):
    """A layer with every bias; `case` may name "no_bias", "rows" and "zero"."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)

    def projection(weights, bias):
        return Triple(None, draw(*weights), None if "no_bias" in case else draw(*bias))

    rows = (draw(DK, H), draw(DV, H)) if "rows" in case else (None, None)
    return bnns.BNNSLayerParametersMultiheadAttention(
        projection((DM, DK, H), (DK, H)),
        projection((DM, DK, H), (DK, H)),
        projection((DM, DV, H), (DV, H)),
        "zero" in case,
        *rows,
        projection((H * DV, DM), (DM,)),
    )


def inputs(case=(), dtype=np.float64):
    rng = np.random.default_rng(2)
    batch = () if "unbatched" in case else (B,)
    query, key, value, dout = (rng.standard_normal((*batch, n, DM)).astype(dtype) for n in (L, S, S, L))
    return query, key, value, dout


def key_mask(*shape):
    """True = ignored; key 2 stays."""
    mask = np.random.default_rng(3).random(shape) < 0.5
    mask[..., 2] = False
    return mask


def added(case, *shape):
    """`add_to_attention`, boolean (True = -inf, never on key 2) or floating."""
    rng = np.random.default_rng(4)
    return key_mask(*shape) if "bool" in case else rng.standard_normal(shape)


def source(F, query, key, key_mask, value, x, dout):
    """The header's formulas, head by head, and their derivatives; unbatched input has no batch axis."""
    if query.ndim == 2:
        found = source(F, query[None], key[None], key_mask, value[None], x, dout[None])
        drop = ("output", "query.target_desc", "key.target_desc", "value.target_desc")
        return {name: g[0] if name in drop else g for name, g in found.items()}
    zero = lambda x: 0.0 if x is None else x
    grads = {
        f"{n}.target_desc": np.zeros_like(a)
        for n, a in zip(("query", "key", "value"), (query, key, value), strict=True)
    }
    for n in ("query", "key", "value", "output"):
        t = getattr(F, n)
        grads[f"{n}.weights"] = np.zeros_like(t.weights)
        if t.bias is not None:
            grads[f"{n}.bias"] = np.zeros_like(t.bias)
    if F.key_attn_bias is not None:
        grads |= {"key_attn_bias": np.zeros((DK, H)), "value_attn_bias": np.zeros((DV, H))}
    out = np.zeros_like(dout)
    for b in range(len(query)):
        heads = []
        for h in range(H):
            at = lambda t: zero(None if t is None else t[:, h])  # noqa: B023
            q = query[b] @ F.query.weights[:, :, h] + at(F.query.bias)
            k = key[b] @ F.key.weights[:, :, h] + at(F.key.bias)
            v = value[b] @ F.value.weights[:, :, h] + at(F.value.bias)
            if F.key_attn_bias is not None:
                k, v = (np.vstack([k, F.key_attn_bias[:, h]]), np.vstack([v, F.value_attn_bias[:, h]]))
            if F.add_zero_attn:
                k, v = np.vstack([k, np.zeros(DK)]), np.vstack([v, np.zeros(DV)])
            r = q @ k.T / np.sqrt(DK)
            if x is not None:
                plane = {2: lambda: x, 3: lambda: x[h], 4: lambda: x[b, h]}[x.ndim]()  # noqa: B023
                r[:, :S] += np.where(plane, -np.inf, 0.0) if x.dtype == bool else plane
            if key_mask is not None:
                r[:, :S][:, key_mask if key_mask.ndim == 1 else key_mask[b]] = -np.inf
            p = np.exp(r - r.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            heads.append((q, k, v, p))
        z = np.hstack([p @ v for *_, v, p in heads])
        out[b] = z @ F.output.weights + zero(F.output.bias)
        grads["output.weights"] += z.T @ dout[b]
        if F.output.bias is not None:
            grads["output.bias"] += dout[b].sum(0)
        dz = np.split(dout[b] @ F.output.weights.T, H, 1)
        for h, (q, k, v, p) in enumerate(heads):
            dp = dz[h] @ v.T
            dr = p * (dp - (p * dp).sum(1, keepdims=True)) / np.sqrt(DK)
            parts = {"query": dr @ k, "key": dr.T @ q, "value": p.T @ dz[h]}
            if F.key_attn_bias is not None:
                grads["key_attn_bias"][:, h] += parts["key"][S]
                grads["value_attn_bias"][:, h] += parts["value"][S]
            for n, a in (("query", query), ("key", key), ("value", value)):
                g, t = parts[n][: a.shape[1]], getattr(F, n)
                grads[f"{n}.target_desc"][b] += g @ t.weights[:, :, h].T
                grads[f"{n}.weights"][:, :, h] += a[b].T @ g
                if t.bias is not None:
                    grads[f"{n}.bias"][:, h] += g.sum(0)
    return {"output": out} | grads


def by_name(deltas):
    """Every delta that is not None, by the source's names."""
    found = {"key_attn_bias": deltas.key_attn_bias_delta, "value_attn_bias": deltas.value_attn_bias_delta}
    for name in ("query", "key", "value", "output"):
        triple = getattr(deltas, f"{name}_param_delta")
        found |= {f"{name}.{field}": x for field, x in triple._asdict().items()}
    return {name: x for name, x in found.items() if x is not None}


def backward(F, query, key, mask, value, x, dout, **more):
    asked = dict(
        batch_size=None,
        query_param_delta=ALL,
        key_param_delta=ALL,
        value_param_delta=ALL,
        key_attn_bias_delta=True,
        value_attn_bias_delta=True,
        output=None,
        output_param_delta=Triple(dout, True, True),
    )
    return bnns.apply_multihead_attention_backward(
        F=F, query=query, key=key, key_mask=mask, value=value, add_to_attention=x, **{**asked, **more}
    )
