"""Draws linear attention, with the delta rule and without, beside its form in chunks."""

import jax.numpy as jnp

from jax_attn_bwd import gated_delta_rule, gated_linear_attention
from jax_attn_bwd.bench.peers import chunk_form
from jax_attn_bwd.bench.race.call import Budget, Call, Input, Lot, activation, uniform

CHUNK = 64  # tokens; the plain form takes whole chunks


def linear(lot: Lot, budget: Budget) -> Call:
    """Draws a call of linear attention."""
    delta, normalised, each_channel = lot.chance(0.5), lot.chance(0.5), lot.chance(0.3)
    N, H, Hv = lot.one_of((1, 2, 4, 8, 16)), lot.one_of((32, 64, 64, 128)), lot.one_of((32, 64, 64, 128))
    B, chunks = lot.one_of((1, 1, 2, 4, 8)), lot.one_of((1, 2, 4, 8, 16, 32))
    while B * chunks > 1 and 14.0 * B * N * chunks * CHUNK * (H + Hv) * (CHUNK + H) > budget.operations:
        B, chunks = (B // 2, chunks) if B > 1 else (1, chunks // 2)
    T, epsilon = CHUNK * chunks, 1e-6 if normalised else None
    decay = (B, T, N, H) if each_channel and not delta else (B, T, N)
    inputs = {
        "query": activation(B, T, N, H),
        "key": activation(B, T, N, H),
        "value": activation(B, T, N, Hv),
        "log_decay": Input(decay, lambda rng, shape: -0.1 * uniform(rng, shape), dtype="float32"),
    }
    if delta:
        inputs["beta"] = Input((B, T, N), uniform)

    def ours(data, a):
        function = gated_delta_rule if delta else gated_linear_attention
        return function(**a, l2_norm_epsilon=epsilon)

    def formula(data, a):
        wide = {name: x.astype(jnp.float32) for name, x in a.items()}
        return chunk_form(epsilon, **wide).astype(a["value"].dtype)

    kind = "delta rule" if delta else "decays"
    name = f"{kind} B{B} T{T} N{N} H{H} Hv{Hv}" + ", normalised" * normalised
    return Call(name + ", a decay a channel" * (len(decay) == 4), inputs, (B, T, N, Hv), ours, formula)
