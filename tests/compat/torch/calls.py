"""Calls of torch's function by the names of its arguments, for the tests beside this file."""

import numpy as np

N, L, S, E, H = 2, 4, 5, 6, 3
D = E // H
CAUSAL = np.triu(np.full((L, S), -np.inf), 1)


def hides(*shape):
    """A boolean mask, True = not allowed, that leaves column 1 to every row."""
    mask = np.random.default_rng(5).random(shape) < 0.4
    mask[..., 1] = False
    return mask


def added(*shape):
    """A floating mask with some -inf."""
    return np.where(hides(*shape), -np.inf, np.random.default_rng(6).standard_normal(shape))


def arrays(case, dtype=np.float64):
    """Every array of a call, by the argument it is given as."""
    rng = np.random.default_rng(7)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    n = 1 if "unbatched" in case else N
    kdim, vdim = (3, 7) if "separate" in case else (E, E)
    given = {"query": draw(L, n, E), "key": draw(S, n, kdim), "value": draw(S, n, vdim)}
    if "separate" in case:
        given |= {"q_proj_weight": draw(E, E), "k_proj_weight": draw(E, kdim)}
        given |= {"v_proj_weight": draw(E, vdim)}
    else:
        given["in_proj_weight"] = draw(3 * E, E)
    given["out_proj_weight"] = draw(E, E)
    if "no_bias" not in case:
        given |= {"in_proj_bias": draw(3 * E), "out_proj_bias": draw(E)}
    if "rows" in case:
        given |= {"bias_k": draw(1, 1, E), "bias_v": draw(1, 1, E)}
    for name in ("static_k", "static_v"):
        if name in case:
            given[name] = draw(n * H, S, D)
    shapes = {"key_padding_mask": (n, S), "attn_mask": (L, S)}
    if "heads" in case:
        shapes["attn_mask"] = (n * H, L, S)
    for name, of in (("key_padding_mask", "padding"), ("attn_mask", "attn")):
        for kind, make in (("bool", hides), ("float", added)):
            if f"{of}_{kind}" in case:
                given[name] = make(*shapes[name])
    if "causal" in case:
        given["attn_mask"] = CAUSAL
    if "wrong_hint" in case:
        given["attn_mask"] = hides(L, S)
    if "unbatched" in case:
        for name in ("query", "key", "value"):
            given[name] = given[name][:, 0]
        if "key_padding_mask" in given:
            given["key_padding_mask"] = given["key_padding_mask"][0]
    return given


def options(case):
    return dict(
        add_zero_attn="zero" in case,
        need_weights="no_weights" not in case,
        average_attn_weights="per_head" not in case,
        is_causal="causal" in case or "wrong_hint" in case,
        use_separate_proj_weight="separate" in case,
    )


POSITIONAL = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k",
    "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
)  # fmt: skip


def call(function, given, **more):
    """`function` with the 13 arguments that have no default in place, the others by name."""
    given = {"embed_dim_to_check": E, "num_heads": H, "dropout_p": 0.0, "add_zero_attn": False} | given
    given |= more
    positional = [given.pop(name, None) for name in POSITIONAL]
    return function(*positional, **given)
