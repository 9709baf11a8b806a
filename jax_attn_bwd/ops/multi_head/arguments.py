"""From the arguments of a call to checked `Options` and `Operands`."""

from typing import Any

import jax

from jax_attn_bwd._core import checks, dropout, head_scale, sharding
from jax_attn_bwd._core import rotary as rotary_embedding
from jax_attn_bwd.ops.dot_product import arguments as dot_product
from jax_attn_bwd.ops.dot_product.arguments import Like, bias_plane, mask_of, plane
from jax_attn_bwd.ops.dot_product.spec import Sizes
from jax_attn_bwd.ops.multi_head.spec import INPUTS, PARAMS, SAVE, MultiHeadAttentionParams, Operands, Options

SHAPES = {
    "query_kernel": ("Eq", "N", "H"),
    "query_bias": ("N", "H"),
    "key_kernel": ("Ek", "K", "H"),
    "key_bias": ("K", "H"),
    "value_kernel": ("Ev", "K", "Hv"),
    "value_bias": ("K", "Hv"),
    "out_kernel": ("N", "Hv", "Eo"),
    "out_bias": ("Eo",),
    "bias_k": ("K", "H"),
    "bias_v": ("K", "Hv"),
    "sink": ("N",),
}
_WIDTHS = {"query_kernel": "query", "key_kernel": "key", "value_kernel": "value"}


def prepare(
    operator: str, params, query, key, value, *, num_heads, bias, mask, scale, is_causal, local_window_size,
    query_seq_lengths, key_value_seq_lengths, query_segment_ids, key_value_segment_ids, query_positions,
    key_value_positions, mask_mod, score_mod, mod_args, add_zero_attn, dropout_rate, out_dropout_rate,
    dropout_key, dropout_offset, add_residual, return_weights, average_weights, return_residual, save,
    rotary, logits_soft_cap, broadcast_dropout, precision, deterministic_sums, deterministic=None,
) -> tuple[Options, Operands]:  # fmt: skip
    """Checks every argument of `multi_head_attention`; raises as it says."""
    # inputs and parameters: of one dtype, with a size for every letter
    remedy = "write MultiHeadAttentionParams(**params)" if isinstance(params, dict) else "params come first"
    params = checks.instance(operator, "params", params, MultiHeadAttentionParams, remedy)
    given = {"query": query, "key": key, "value": value}
    inputs = {n: checks.floating(operator, n, x) for n, x in given.items() if x is not None}
    if "query" not in inputs:
        raise TypeError(checks.message(operator, "query", "be a floating-point array", None))
    params = _params(operator, params)
    narrow = {n: x for n, x in params._asdict().items() if x is not None and n != "sink"}
    checks.same_dtype(operator, **inputs, **narrow)
    operands = Operands(inputs["query"], inputs.get("key"), inputs.get("value"))
    operands = operands._replace(**params._asdict())
    operands = jax.tree.map(sharding.without_ones, operands)
    query = operands.query
    sizes = _sizes(operator, params, operands, num_heads)
    *batch, T, _ = query.shape
    S, N = operands.inputs[1].shape[-2], sizes["N"]

    # planes, flags, and whether they fit together
    of_plane = Sizes(tuple(batch), T, S, 1, N)  # mask functions are checked as for one key head
    if bias is not None:
        bias = bias_plane(operator, bias, of_plane, None)
    if mask is not None:  # the heads that it is sharded with are made under the rule
        mask = plane(operator, "mask", checks.boolean_mask(operator, mask), of_plane, None)
    given = {"add_zero_attn": add_zero_attn, "add_residual": add_residual, "return_weights": return_weights}
    given |= {"average_weights": average_weights, "return_residual": return_residual}
    flags = {name: checks.flag(operator, name, x) for name, x in given.items()}
    H, Eo = sizes["H"], sizes["Eo"]
    if flags["add_residual"] and Eo != query.shape[-1]:
        expected = f"have the width {query.shape[-1]} of query, to which it is added"
        raise ValueError(checks.message(operator, "the output, with add_residual,", expected, Eo))
    _check_explicit_sharding(operator, operands)

    # the attention inside: its scale, its mask and its options
    known_scale = head_scale.static(operator, scale, H, query.dtype)
    if operands.query_kernel is None and head_scale.is_traced(scale):
        expected = "be known where params.query_kernel is None"
        remedy = "multiply query by it, hand the keys over by themselves, and pass scale=1.0"
        raise TypeError(checks.message(operator, "scale", expected, "a traced array", remedy))
    seen, score_mod = mask_of(
        operator, Like(query, -2, None), of_plane, is_causal=is_causal, local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids, key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions, key_value_positions=key_value_positions, mask_mod=mask_mod,
        score_mod=score_mod, mod_args=mod_args,
    )  # fmt: skip
    dense = dot_product.options_of(
        operator, known_scale, query.dtype, logits_soft_cap, dropout_rate, broadcast_dropout, precision,
        deterministic_sums, deterministic, score_mod,
    )  # fmt: skip

    # the layer's own options, and what dropout draws from
    options = Options(
        dense,
        N,
        out_dropout_rate=checks.rate(operator, "out_dropout_rate", out_dropout_rate),
        save=checks.choice(operator, "save", save, SAVE),
        rotary=rotary_embedding.checked(operator, rotary, H),
        **flags,
    )
    rates = {"dropout_rate": options.attention.dropout_rate, "out_dropout_rate": options.out_dropout_rate}
    columns = S + options.appended_rows(operands)
    words, offset = dropout.words_and_offset(operator, rates, dropout_key, dropout_offset, T, columns)
    seen = seen.replace(elements=mask)
    operands = operands._replace(**times_scale(operands._asdict(), scale))
    return options, operands._replace(bias=bias, mask=seen, dropout_words=words, dropout_offset=offset)


def times_scale(arrays: dict[str, Any], scale: Any) -> dict[str, Any]:
    """Multiplies what projects the queries, or its gradient, by a traced `scale`; other arrays stay."""
    given = {name: arrays.get(name) for name in ("query_kernel", "query_bias")}
    return arrays | {name: head_scale.times(x, scale) for name, x in given.items() if x is not None}


def _params(operator: str, params: MultiHeadAttentionParams) -> MultiHeadAttentionParams:
    """Checks the parameters, each by itself and which are given together."""
    # dtypes and ranks
    checked = {}
    for name, x in params._asdict().items():
        if x is not None:
            checked[name] = x = checks.floating(operator, f"params.{name}", x)
            letters = SHAPES[name]
            names, flat = ", ".join(letters), x.ndim == 2 and len(letters) == 3
            remedy = f"write kernel.reshape({names})" if flat else ""
            checks.rank(operator, f"params.{name}", x, f"[{names}]", len(letters), remedy=remedy)

    # which of them need one another
    for side in ("query", "key", "value", "out"):
        if f"{side}_bias" in checked and f"{side}_kernel" not in checked:
            expected = f"be None where params.{side}_kernel is None"
            got = f"shape {checked[f'{side}_bias'].shape}"
            raise ValueError(checks.message(operator, f"params.{side}_bias", expected, got))
    for one, other in (("bias_k", "bias_v"), ("bias_v", "bias_k")):
        if one in checked and other not in checked:
            expected = f"be given together with params.{one}: together they are one key and its value"
            raise ValueError(checks.message(operator, f"params.{other}", expected, None))
    return MultiHeadAttentionParams(**checked)


def _sizes(operator: str, params, operands: Operands, num_heads: Any) -> dict[str, Any]:
    """Returns the size of every shape letter; raises where two sources disagree."""
    sizes: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def settle(letter: str, value: Any, source: str) -> None:
        known, first = sizes.setdefault(letter, value), sources.setdefault(letter, source)
        if known != value:
            expected = f"have {letter} = {known}, as {first}"
            raise ValueError(checks.message(operator, source, expected, value))

    checks.rank(operator, "query", operands.query, "[..., T, Eq]", least=2)
    *batch, _, _ = operands.query.shape
    inputs = dict(zip(_WIDTHS.values(), operands.inputs, strict=True))
    for name, letters in (("key", "[..., S, Ek]"), ("value", "[..., S, Ev]")):
        x = inputs[name]
        checks.rank(operator, name, x, letters, least=2)
        S = inputs["key"].shape[-2]
        checks.shape(operator, name, x, letters, (*batch, S, x.shape[-1]))
    for name, source in _WIDTHS.items():
        if getattr(params, name) is not None:
            settle(SHAPES[name][0], inputs[source].shape[-1], source)
    if num_heads is not None:
        settle("N", checks.integer(operator, "num_heads", num_heads, least=1), "num_heads")
    # A missing kernel hands the input to every head: its width is the head size.
    if params.query_kernel is None:
        settle("H", inputs["query"].shape[-1], "query, which has no kernel,")
    for name, x in params._asdict().items():
        if x is not None:
            for letter, n in zip(SHAPES[name], x.shape, strict=True):
                settle(letter, n, f"params.{name}")
    if params.key_kernel is None:
        settle("H", inputs["key"].shape[-1], "key, which has no kernel,")
    if params.value_kernel is None:
        settle("Hv", inputs["value"].shape[-1], "value, which has no kernel,")
    if "N" not in sizes:
        expected = "be given where neither query nor the output is projected"
        raise ValueError(checks.message(operator, "num_heads", expected, None))
    N, K = sizes["N"], sizes.setdefault("K", 1)  # one key head for all queries
    if K < 1 or N % K:
        expected = "be a positive multiple of the key heads K"
        remedy = f"{sources['K']} has K = {K}"
        raise ValueError(checks.message(operator, "query heads N", expected, N, remedy))
    return {"Eo": N * sizes["Hv"], **sizes}


def _check_explicit_sharding(operator: str, operands: Operands) -> None:
    """Refuses contracted widths that are sharded on an Explicit mesh: other axes may be, and Eo."""
    # inputs: their batch axes alike
    for name, x in zip(INPUTS, operands.inputs, strict=True):
        spec = sharding.explicit_spec(x)
        if spec[-1] is not None:
            expected = "not be sharded along its width"
            remedy = "reshard it, or take jax_attn_bwd.parallel.tensor_parallel_multi_head_attention"
            raise ValueError(checks.message(operator, name, expected, spec, remedy))
        if spec[:-2] != (first := sharding.explicit_spec(operands.query))[:-2]:
            expected = f"be sharded like query, {first}, in its batch axes"
            raise ValueError(checks.message(operator, name, expected, spec, "reshard it"))
    # parameters
    for name in PARAMS:
        x = getattr(operands, name)
        if x is not None:
            letters = SHAPES[name]
            for letter, axis in zip(letters, sharding.explicit_spec(x), strict=True):
                if axis is not None and letter not in ("N", "K", "Eo"):
                    expected = "not be sharded along its widths; heads may be"
                    got = sharding.explicit_spec(x)
                    raise ValueError(checks.message(operator, f"params.{name}", expected, got, "reshard it"))
    _check_mesh_axes(operator, operands)


def _check_mesh_axes(operator: str, operands: Operands) -> None:
    """Refuses a mesh axis that shards two of batch, sequences, heads and Eo; other arrays are resharded."""
    batch = sharding.explicit_spec(operands.query)[:-2]
    taken = {m: "the batch of query" for axis in batch for m in sharding.names_of(axis)}
    sequences = (sharding.explicit_spec(x)[-2] for x in operands.inputs)
    taken |= {m: "a sequence" for axis in sequences for m in sharding.names_of(axis)}
    projections = [n for n in PARAMS if n.endswith(("_kernel", "_bias"))]
    for name, x in ((n, getattr(operands, n)) for n in projections):
        spec = () if x is None else sharding.explicit_spec(x)
        for letter, axis in zip(SHAPES[name], spec, strict=x is not None):
            role = "heads" if letter in ("N", "K") else letter
            for m in sharding.names_of(axis):
                if (other := taken.setdefault(m, role)) != role:
                    expected = f"not be sharded along {letter} over {m!r}, which shards {other}"
                    remedy = "reshard it (jax.sharding.reshard), or use two axes of the mesh"
                    raise ValueError(checks.message(operator, f"params.{name}", expected, spec, remedy))
