"""Draws dense attention and the multi-head layer, with options of what is seen, added and dropped."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import plain
from bench.race.call import (
    Budget,
    Call,
    Input,
    Lot,
    activation,
    given,
    lengths,
    normal,
    parameter,
    random_key,
    seen,
)
from jax_attn_bwd import MultiHeadAttentionParams, Rotary, dot_product_attention, mods, multi_head_attention

TOKENS = (1, 16, 32, 64, 100, 128, 196, 197, 256, 384, 512, 577, 777, 1024, 1500, 2048)
HEADS, HEAD_SIZES = (1, 2, 3, 4, 6, 8, 8, 12, 16), (8, 16, 32, 64, 64, 80, 96, 128)
BATCHES = (1, 1, 2, 4, 8, 16, 32, 64)
FARTHEST = 32  # distances of a relative bias


class Sizes(NamedTuple):
    """Holds the sizes of attention: K heads of keys and values."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int

    def __str__(self) -> str:
        """Leaves out what is as usual."""
        other = {"S": self.S == self.T, "K": self.K == self.N}
        return " ".join(f"{letter}{n}" for letter, n in self._asdict().items() if not other.get(letter))


Say = Callable[[Mapping[str, Any]], dict[str, Any]]  # the inputs -> keyword arguments


class Option(NamedTuple):
    """Holds an option of attention: the inputs it reads, and what it says of them to each side."""

    name: str
    inputs: Mapping[str, Input] = MappingProxyType({})
    ours: Say = dict
    plain: Say = dict
    checked: Say | None = None


def tokens(lot: Lot) -> int:
    """Draws a number of tokens, most often a usual one."""
    return lot.one_of(TOKENS) if lot.chance(0.7) else lot.size(1, 2048)


def _sizes(lot: Lot, budget: Budget, heads: Sequence[tuple[int, int]], like: float, E: int = 0) -> Sizes:
    """Draws sizes within the budget: one of `heads` (N, H), as many keys as queries with a chance of `like`.

    With a width E, the projections of a layer are in the budget, too.
    """
    N, H = lot.one_of(heads)
    K = lot.one_of([K for K in range(1, N + 1) if N % K == 0]) if lot.chance(0.25) else N
    B, T = lot.one_of(BATCHES), tokens(lot)
    S = T if lot.chance(like) else tokens(lot)
    while B * T * S > 1 and (
        budget.elements < B * N * T * S or budget.operations < 14.0 * B * N * H * (T * S + E * (T + S))
    ):
        B, T, S = (B // 2, T, S) if B > 1 else (1, -(-T // 2), -(-S // 2))
    return Sizes(B, T, S, N, K, H)


# ---- options


def _options(lot: Lot, n: Sizes) -> list[Option]:
    """Draws what is seen, what is added to the logits, and what becomes of the probabilities."""
    found = []
    if causal := lot.chance(0.35):
        found.append(_says("causal", is_causal=True))
    if lot.chance(0.4):
        found.append(lot.one_of(_seen(lot, n, causal)))
    if lot.chance(0.35):
        found.append(lot.one_of(_added(lot, n)))
    if lot.chance(0.15):
        sink = Option("sink", {"sink": parameter(n.N)})
        found.append(lot.one_of((sink, DROPOUT)))
    return found


def _says(name: str, **both: Any) -> Option:
    """Makes an option that reads nothing, and is the same on both sides."""
    return Option(name, {}, lambda a: both, lambda a: both)


def _seen(lot: Lot, n: Sizes, causal: bool) -> list[Option]:
    """Makes those that leave something to see for every query: elsewhere formulas differ."""
    # arrays
    shape = lot.one_of(((n.B, 1, 1, n.S), (n.B, 1, n.T, n.S), (1, 1, n.T, n.S), (n.B, n.N, n.T, n.S)))
    mask = given(shape, seen)._replace(mapped=shape[0] > 1)
    found = [
        Option(f"mask {list(shape)}", {"mask": mask}),
        Option("lengths", {"key_value_seq_lengths": lengths(n.B, n.S)}),
    ]
    # where keys lie beside each query
    if n.T <= n.S:
        left = lot.size(1, n.S)
        right = lot.one_of((0, left))
        found.append(_says(f"window {left}, {right}", local_window_size=(left, right)))
    if n.T == n.S:
        ids = given((n.B, n.T), lambda rng, shape: np.sort(rng.integers(0, 4, shape), -1).astype(np.int32))
        ours = lambda a: {f"{side}_segment_ids": a["ids"] for side in ("query", "key_value")}
        found.append(Option("segments", {"ids": ids}, ours, lambda a: {"mask": plain.segments(a["ids"])}))
    if not causal:
        length = n.S // 4
        ours = lambda a: {"mask_mod": mods.static_prefix_lm(length)}
        same = lambda a: {"mask": plain.prefix(n.T, n.S, length)}
        found.append(Option(f"prefix of {length}, a function", {}, ours, same))
    return found


def _added(lot: Lot, n: Sizes) -> list[Option]:
    shape = lot.one_of(((1, n.N, n.T, n.S), (n.B, n.N, n.T, n.S), (n.B, 1, 1, n.S)))
    bias = Input(shape, normal, mapped=shape[0] > 1)
    relative = mods.relative_bias(FARTHEST)
    return [
        Option(f"bias {list(shape)}", {"bias": bias._replace(wanted=False)}),
        Option(f"bias {list(shape)} with gradient", {"bias": bias}),
        Option(
            "relative bias, a function",
            {"table": parameter(n.N, 2 * FARTHEST + 1)},
            lambda a: {"score_mod": relative, "mod_args": (a["table"],)},
            lambda a: {"bias": plain.relative_bias(n.T, n.S, a["table"])},
        ),
        Option(
            "ALiBi, a function",
            {},
            lambda a: {"score_mod": mods.static_alibi(n.N)},
            lambda a: {"bias": plain.alibi(n.T, n.S, n.N)},
        ),
        Option("soft cap", {}, lambda a: {"logits_soft_cap": 20.0}, lambda a: {"soft_cap": 20.0}),
    ]


# each side has random numbers of its own; ours is compared with a formula that drops the same
DROPOUT = Option(
    "dropout",
    {"dropout_key": random_key()},
    lambda a: {"dropout_rate": plain.RATE, **a},
    lambda a: {"dropout": partial(plain.dropout, a["dropout_key"])},
    lambda a: {"dropout": partial(plain.our_dropout, a["dropout_key"])},
)


class _Options:
    """Holds the options of one call."""

    def __init__(self, options: Sequence[Option]) -> None:
        self._options = options
        self.names = [option.name for option in options]
        self.inputs = {name: x for option in options for name, x in option.inputs.items()}

    def said(self, side: str, a: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what they say to a side: "ours", "plain" or "checked"."""
        found: dict[str, Any] = {}
        for option in self._options:
            say = getattr(option, side) or option.plain
            found |= say({name: a[name] for name in option.inputs})
        return found

    def sides(self, formula: Callable[..., jax.Array]) -> dict[str, Any]:
        """Returns the sides beside ours; `formula` takes the side and the inputs."""
        names = ["plain"] + ["checked"] * any(option.checked for option in self._options)
        return {side: lambda data, a, side=side: formula(side, a) for side in names}


# ---- calls


def dense(lot: Lot, budget: Budget) -> Call:
    """Draws a call of dense attention."""
    n = _sizes(lot, budget, [(N, H) for N in HEADS for H in HEAD_SIZES], like=0.65)
    options = _Options(_options(lot, n))
    query, keys = activation(n.B, n.T, n.N, n.H), activation(n.B, n.S, n.K, n.H)

    def attend(function, side, a):
        return function(a["query"], a["key"], a["value"], **options.said(side, a))

    return Call(
        ", ".join([str(n), *options.names]),
        {"query": query, "key": keys, "value": keys, **options.inputs},
        query.shape,
        ours=lambda data, a: attend(dot_product_attention, "ours", a),
        **options.sides(partial(attend, plain.attention)),
    )


def layer(lot: Lot, budget: Budget) -> Call:
    """Draws self-attention, or attention to a memory, with biases and rotary positions or without."""
    E = lot.one_of((64, 128, 192, 256, 384, 512, 768))
    has = {"memory": lot.chance(0.25), "biases": lot.chance(0.6), "rotary": lot.chance(0.3)}
    heads = [(N, E // N) for N in HEADS if E % N == 0 and E // N <= 128]
    n = _sizes(lot, budget, heads, like=1.0 - has["memory"], E=E)
    options = _Options(_options(lot, n))
    # what it has learned
    projected = {"query": n.N, "key": n.K, "value": n.K}
    learned = {f"{name}_kernel": parameter(E, N, n.H, spread=E**-0.5) for name, N in projected.items()}
    learned["out_kernel"] = parameter(n.N, n.H, E, spread=(n.N * n.H) ** -0.5)
    if has["biases"]:
        learned |= {f"{name}_bias": parameter(N, n.H, spread=0.1) for name, N in projected.items()}
        learned["out_bias"] = parameter(E, spread=0.1)
    read = {"x": activation(n.B, n.T, E)}
    if has["memory"]:
        read["memory"] = activation(n.B, n.S, E)

    def ours(data, a):
        said = options.said("ours", a)
        kernels = {name: a[name] for name in learned}
        params = MultiHeadAttentionParams(**kernels, sink=said.pop("sink", None))
        rotary = Rotary() if has["rotary"] else None
        return multi_head_attention(params, a["x"], a.get("memory"), rotary=rotary, **said)

    def formula(side, a):
        bias = lambda name: a[f"{name}_bias"] if has["biases"] else 0
        of = lambda name, x: jnp.einsum("bte,enh->btnh", x, a[f"{name}_kernel"]) + bias(name)
        memory = a.get("memory", a["x"])
        query, key, value = of("query", a["x"]), of("key", memory), of("value", memory)
        if has["rotary"]:
            query, key = plain.rotary(query), plain.rotary(key)
        out = plain.attention(query, key, value, **options.said(side, a))
        return jnp.einsum("btnh,nhe->bte", out, a["out_kernel"]) + bias("out")

    said = [name for name, drawn in has.items() if drawn]
    return Call(
        ", ".join([f"E{E} {n}", *said, *options.names]),
        read | learned | options.inputs,
        read["x"].shape,
        ours,
        **options.sides(formula),
    )
