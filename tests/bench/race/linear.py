"""Draws linear attention, with the delta rule and without, beside its form in chunks."""

import jax.numpy as jnp

from bench.plain import chunk_form, solves_end
from bench.race.call import Budget, Call, Input, Lot, activation, lengths, uniform
from bench.race.dense import tokens
from jax_attn_bwd import gated_delta_rule, gated_linear_attention

CHUNK = 64  # tokens


def linear(lot: Lot, budget: Budget) -> Call:
    """Draws a call of linear attention; the delta rule is of keys of length 1, as others diverge.

    Where the gradient of its plain formula would not end there is no delta rule.
    """
    delta, each_channel, with_lengths = lot.chance(0.5), lot.chance(0.3), lot.chance(0.2)
    delta = delta and solves_end()
    normalised = delta or lot.chance(0.3)
    N, H, Hv = lot.one_of((1, 2, 4, 8, 16)), lot.one_of((32, 64, 64, 128)), lot.one_of((32, 64, 64, 128))
    K = lot.one_of([K for K in range(1, N + 1) if N % K == 0]) if lot.chance(0.25) else N
    B, T = lot.one_of((1, 1, 2, 4, 8)), tokens(lot)
    # products of chunks are small, and those of a triangular solve slow
    while B * T > 1 and 60.0 * B * N * T * (H + Hv) * (CHUNK + H) > budget.operations:
        B, T = (B // 2, T) if B > 1 else (1, -(-T // 2))
    inputs = {
        "query": activation(B, T, K, H),
        "key": activation(B, T, K, H),
        "value": activation(B, T, N, Hv),
        "log_decay": Input(
            (B, T, N, H) if each_channel else (B, T, N),
            lambda rng, shape: -0.1 * uniform(rng, shape),
            dtype="float32",
        ),
    }
    if delta:
        inputs["beta"] = Input((B, T, N), uniform)
    if with_lengths:
        inputs["seq_lengths"] = lengths(B, T)
    epsilon = 1e-6 if normalised else None

    def ours(data, a):
        function = gated_delta_rule if delta else gated_linear_attention
        return function(**a, l2_norm_epsilon=epsilon)

    def formula(data, a):
        wide = {name: x.astype(jnp.float32) for name, x in a.items() if name != "seq_lengths"}
        heads = {name: jnp.repeat(wide[name], N // K, 2) for name in ("query", "key")}
        out = chunk_form(epsilon, **{**wide, **heads})
        if with_lengths:
            out = jnp.where((jnp.arange(T) < a["seq_lengths"][:, None])[..., None, None], out, 0)
        return out.astype(a["value"].dtype)

    kind = "delta rule" if delta else "decays"
    said = {f"K{K}": K < N, "normalised": normalised, "a decay a channel": each_channel}
    said["lengths"] = with_lengths
    name = ", ".join([f"{kind} B{B} T{T} N{N} H{H} Hv{Hv}", *[word for word, drawn in said.items() if drawn]])
    return Call(name, inputs, (B, T, N, Hv), ours, formula)
