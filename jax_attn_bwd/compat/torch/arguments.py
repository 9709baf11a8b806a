"""From the arguments of the call to the layer's: sizes, parameters, keys that are given, masks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_attn_bwd._core import checks
from jax_attn_bwd.compat.multi_head import both, heads, mask
from jax_attn_bwd.ops.multi_head import MultiHeadAttentionParams

NAME = "torch.multi_head_attention_forward"


class Sizes(NamedTuple):
    """Whether there is a batch N; L queries of width E, S keys, H heads."""

    batched: bool
    N: int
    L: int
    S: int
    E: int
    H: int


def all_sizes(given: dict[str, Any], embed_dim: Any, num_heads: Any) -> Sizes:
    """Every size, and that the inputs agree on them."""
    H, E = heads(NAME, num_heads, embed_dim_to_check=embed_dim), int(embed_dim)
    query, key, static_k = given["query"], given["key"], given["static_k"]
    rank, batch = query.ndim, query.shape[1:-1]
    if rank not in (2, 3):
        expected = "have shape (L, N, E) or, without a batch, (L, E)"
        raise ValueError(checks.message(NAME, "query", expected, query.shape))
    rows, columns = ("(L, N, E)", "(S, N, {})") if rank == 3 else ("(L, E)", "(S, {})")
    checks.shape(NAME, "query", query, rows, (query.shape[0], *batch, E))
    for name, width in (("key", "kdim"), ("value", "vdim")):
        x = given[name]
        letter = "E" if "in_proj_weight" in given else width
        if x.ndim != rank:
            raise ValueError(checks.message(NAME, name, f"have shape {columns.format(letter)}", x.shape))
        last = E if letter == "E" else x.shape[-1]
        checks.shape(NAME, name, x, columns.format(letter), (key.shape[0], *batch, last))
    if static_k is not None and static_k.ndim != 3:
        expected = "have shape (N * num_heads, S, E / num_heads)"
        raise ValueError(checks.message(NAME, "static_k", expected, static_k.shape))
    S = key.shape[0] if static_k is None else static_k.shape[1]
    return Sizes(rank == 3, batch[0] if batch else 1, query.shape[0], S, E, H)


def all_params(sizes: Sizes, given: dict[str, Any]) -> MultiHeadAttentionParams:
    """The layer's parameters from the source's, whose weights are (out, in)."""
    E, H = sizes.E, sizes.H
    D = E // H

    def checked(name: str, letters: str, *shape: int) -> Any:
        if given[name] is not None:
            checks.shape(NAME, name, given[name], letters, shape)
        return given[name]

    if "in_proj_weight" in given:
        kernels = jnp.split(checked("in_proj_weight", "(3E, E)", 3 * E, E), 3)
    else:
        kernels = [
            checked(f"{source[0]}_proj_weight", f"(E, {width})", E, given[source].shape[-1])
            for source, width in (("query", "E"), ("key", "kdim"), ("value", "vdim"))
        ]
    b = checked("in_proj_bias", "(3E,)", 3 * E)
    offsets = [None] * 3 if b is None else [x.reshape(H, D) for x in jnp.split(b, 3)]
    rows = [checked(name, "(1, 1, E)", 1, 1, E) for name in ("bias_k", "bias_v")]
    both(NAME, bias_k=rows[0], bias_v=rows[1])
    rows = [None if x is None else x.reshape(H, D) for x in rows]
    w_o = given["out_proj_weight"]
    Eo = w_o.shape[0] if w_o.ndim else E
    w_o, b_o = checked("out_proj_weight", "(Eo, E)", Eo, E), checked("out_proj_bias", "(Eo,)", Eo)
    found: dict[str, Any] = {"out_kernel": w_o.T.reshape(H, D, Eo), "out_bias": b_o}
    found |= {"bias_k": rows[0], "bias_v": rows[1]}
    for name, w, offset in zip(("query", "key", "value"), kernels, offsets, strict=True):
        found |= {f"{name}_kernel": w.T.reshape(w.shape[1], H, D), f"{name}_bias": offset}
    return MultiHeadAttentionParams(**found)


def all_static(sizes: Sizes, given: dict[str, Any]) -> tuple[jax.Array | None, ...]:
    """The keys and values `(N, H, S, D)` that stand in for projected ones; None = projected."""
    N, S, H, D = sizes.N, sizes.S, sizes.H, sizes.E // sizes.H
    found = []
    for name in ("static_k", "static_v"):
        x = given[name]
        if x is not None:
            if given["bias_k"] is not None:
                expected = "be None together with bias_k and bias_v"
                raise ValueError(checks.message(NAME, name, expected, f"shape {x.shape}"))
            letters = "(N * num_heads, S, E / num_heads)"
            checks.shape(NAME, name, x, letters, (N * H, S, D))
            x = x.reshape(N, H, S, D)
        found.append(x)
    if found[1] is None and given["value"].shape[0] != S:
        expected = f"have the length S = {S} of static_k"
        raise ValueError(checks.message(NAME, "value", expected, given["value"].shape[0]))
    return tuple(found)


def all_masks(sizes: Sizes, key_padding_mask, attn_mask) -> tuple[Any, Any]:
    """`key_padding_mask` as `(N, 1, 1, S)` and `attn_mask` as `(N or 1, H or 1, L, S)`."""
    batched, N, L, S, _, H = sizes
    padding = allowed = None
    if key_padding_mask is not None:
        padding = mask(NAME, "key_padding_mask", key_padding_mask)
        expected = (N, S) if batched else (S,)
        checks.shape(NAME, "key_padding_mask", padding, "(N, S)" if batched else "(S,)", expected)
        padding = padding.reshape(N, 1, 1, S)
    if attn_mask is not None:
        allowed = mask(NAME, "attn_mask", attn_mask)
        if allowed.ndim == 3:
            checks.shape(NAME, "attn_mask", allowed, "(N * num_heads, L, S)", (N * H, L, S))
        else:
            checks.shape(NAME, "attn_mask", allowed, "(L, S)", (L, S))
        heads = (1, 1) if allowed.ndim == 2 else (N, H)
        allowed = allowed.reshape(*heads, L, S)
    return padding, allowed
