"""What other libraries call an argument: a wrong keyword is answered with the name that it has here.

`ELSEWHERE` is the one table of these words, for every public function and layer. `known` guards a function
with a plain signature, `ChecksNames` the constructor of a layer, and `checks.complete` what takes
`**options`; all three raise the error of `unexpected`.
"""

import difflib
import inspect
from collections.abc import Callable, Collection
from functools import cache, wraps
from typing import Any, Self, TypeVar, cast, get_args, is_typeddict

import jax
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

_PADDING = "mask=(attention_mask != 0)[:, None, None, :] of [B, S] zeros and ones"
_FLAX = "a layer of Flax takes attention_fn=jax_attn_bwd.attention_fn"
_PACKED = "sequences packed one after another are told by"
_CACHE = "a cache is decode=True in Flax, cache_length= in Haiku, init_cache and decode in Equinox"
_LEFT_OUT = "leave it out:"

# words: ((a name that the call has, what to write), ...), of which the first that fits answers. An empty
# answer is `name=word`; an empty name fits every call.
_WORDS: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {
    # who sees whom
    ("mask",): (("attention_mask", "write attention_mask=: True attends"),),
    ("attn_mask", "src_mask", "where"): (
        ("mask", "write mask=: True attends; what is added to the logits is bias"),
        ("attention_mask", "write attention_mask=: True attends"),
    ),
    ("attention_mask", "token_mask"): (
        ("reference_points", "write mask=: True keeps a pixel of the value"),
        ("key_", "write mask=, [T, S] or [N, T, S]: True attends"),
        ("mask", f"write {_PADDING}; True attends"),
        ("seq_lengths", "write seq_lengths=attention_mask.sum(-1), with the padding at the end"),
    ),
    ("key_padding_mask", "padding_mask", "input_padding_mask", "src_key_padding_mask"): (
        ("reference_points", "write mask=~{word}: True keeps"),
        ("key_", "write mask=jnp.broadcast_to(~{word}, (T, S)): True attends"),
        ("mask", "write mask=~{word}[:, None, None, :]: True attends, where True hides in torch"),
        ("seq_lengths", "write seq_lengths=(~{word}).sum(-1), with the padding at the end"),
    ),
    ("kv_mask", "key_mask", "value_mask"): (
        ("reference_points", "write mask={word}: True keeps"),
        ("mask", "write mask={word}[:, None, None, :]: True attends"),
    ),
    ("causal", "is_causal", "use_causal_mask", "causal_mask", "is_decoder", "unidirectional"): (
        ("is_causal", ""),
        ("use_causal_mask", ""),
        ("log_decay", f"{_LEFT_OUT} linear attention is causal always"),
        ("conv_kernel_dim", f"{_LEFT_OUT} linear attention is causal always"),
        ("attention_fn", "write attention_fn=configured_attention_fn(is_causal=True)"),
    ),
    ("window_size", "sliding_window", "sliding_window_size", "window", "local_window", "attention_window"): (
        ("sliding_window", ""),
        (
            "local_window_size",
            "write local_window_size=(left, right); a sliding window of n tokens is (n - 1, 0)",
        ),
    ),
    ("seq_lens", "lengths", "valid_length", "kv_lens", "seqlens_k", "kv_lengths", "seq_lengths"): (
        ("seq_lengths", ""),
        ("key_value_seq_lengths", "write key_value_seq_lengths=, for queries query_seq_lengths="),
    ),
    ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k"): (
        ("segment_ids", f"{_PACKED} segment_ids=jnp.repeat(jnp.arange(n), lengths)"),
        (
            "query_segment_ids",
            f"{_PACKED} query_segment_ids and key_value_segment_ids, jnp.repeat(jnp.arange(n), lengths)",
        ),
    ),
    ("segment_ids", "q_segment_ids", "kv_segment_ids", "document_ids", "seq_idx"): (
        ("segment_ids", ""),
        ("query_segment_ids", "write query_segment_ids= and key_value_segment_ids="),
    ),
    ("position_ids", "positions", "input_positions", "cache_position"): (
        ("query_positions", "write query_positions= and key_value_positions="),
    ),
    ("q_offset", "query_offset", "cache_length", "cache_index", "start_pos", "offset"): (
        ("query_positions", "write query_positions={word} + jnp.arange(T)"),
    ),
    # logits
    ("scale", "softmax_scale", "sm_scale", "scaling", "scale_factor", "qk_scale"): (
        ("scale", ""),
        ("conv_kernel_dim", f"{_LEFT_OUT} queries are scaled by 1 / sqrt(size of a head)"),
        ("num_heads", "layers scale by 1 / sqrt(size of a head); multi_head_attention takes scale="),
    ),
    (
        "softcap",
        "soft_cap",
        "logit_cap",
        "attn_logits_soft_cap",
        "logits_softcap",
        "attn_logit_softcapping",
    ): (("logits_soft_cap", ""),),
    ("attn_bias", "attention_bias", "position_bias", "pair_bias", "relative_position_bias", "ab"): (
        ("bias", ""),
        ("score_bias", ""),
        ("attention_fn", "write attention_fn=configured_attention_fn(bias={word})"),
    ),
    ("block_mask",): (
        ("mask_mod", "write mask_mod=, the function that it was made of: tiles are found from it"),
    ),
    ("temperature",): (("scale", "write scale=1 / temperature"),),
    ("alibi_slopes",): (("score_mod", "write score_mod=mods.alibi, mod_args=(alibi_slopes,)"),),
    ("sinks", "s_aux", "attn_sink", "learnable_sink"): (("sink", ""),),
    ("rope", "rotary_emb", "position_embeddings", "rotary_dim", "freqs_cis"): (
        ("rotary", "write rotary=jax_attn_bwd.Rotary(...)"),
    ),
    ("theta", "rope_theta", "rope_base", "max_wavelength"): (
        ("base", ""),
        ("rotary", "write rotary=jax_attn_bwd.Rotary(base={word})"),
    ),
    ("dim",): (
        ("interleaved", "write size=: how many features of a head are turned"),
        ("axis", ""),
        ("features", ""),
        ("in_features", ""),
        ("query_size", ""),
        ("model_size", ""),
    ),
    # dropout
    ("dropout_p", "dropout", "attn_dropout", "attention_dropout", "attn_pdrop", "dropout_prob", "p"): (
        ("dropout_rate", ""),
        ("dropout", ""),
        ("dropout_p", ""),
        ("w_init_scale", "Haiku's layer takes dropout_rate= in the call"),
    ),
    ("dropout_rate",): (("dropout_p", ""), ("dropout", "")),
    ("dropout_rng",): (
        ("dropout_key", f"write dropout_key=dropout_rng; {_FLAX}"),
        ("rngs", "write rngs=nnx.Rngs(dropout=dropout_rng)"),
        ("inference", "write key=dropout_rng"),
    ),
    ("rng", "rngs", "seed", "dropout_seed", "prng_key"): (
        ("dropout_key", ""),
        ("dropout_rng", ""),
        ("rngs", "write rngs=nnx.Rngs({word})"),
        ("inference", "write key={word}"),
    ),
    ("training", "train", "is_training"): (
        ("spatial_shapes", f"{_LEFT_OUT} nothing is dropped"),
        ("deterministic_sums", "dropout is told by dropout_rate, 0.0 where nothing is dropped"),
        ("inference", "write inference=not {word}"),
        ("deterministic", "write deterministic=not {word}"),
        ("dropout_rate", "write dropout_rate=0.0 where nothing is dropped"),
    ),
    ("dtype", "module", "force_fp32_for_softmax", "promote_dtype"): (
        ("dropout_mask", f"{_LEFT_OUT} results have the dtype of the nodes"),
        ("dropout_key", f"{_LEFT_OUT} results have the dtype of the query; {_FLAX}"),
    ),
    # what is returned
    ("need_weights", "output_attentions", "return_attention_scores", "return_attn_probs"): (
        ("return_weights", ""),
        ("return_attention_weights", ""),
        ("sow_weights", ""),
        ("key", "weights are not formed; multi_head_attention(..., return_weights=True) returns them"),
    ),
    ("average_attn_weights",): (("average_weights", ""),),
    ("return_lse", "return_softmax_lse", "save_residuals", "return_aux"): (("return_residual", ""),),
    ("output_final_state", "return_state"): (("return_final_state", ""),),
    # linear attention
    ("g", "gk", "gate", "decay", "log_g", "g_gamma", "log_f"): (("log_decay", ""),),
    ("head_first", "batch_first"): (("", f"{_LEFT_OUT} batch axes come first, then tokens, then heads"),),
    ("reverse",): (("log_decay", "turn the tokens of all inputs, and of the output: jnp.flip(x, 1)"),),
    ("use_qk_l2norm_in_kernel", "qk_l2norm"): (("l2_norm_epsilon", "write l2_norm_epsilon=1e-6"),),
    ("mode",): (("method", ""), ("log_decay", f"{_LEFT_OUT} what is fastest is chosen here")),
    ("chunk_size", "block_size", "block_sizes", "block_q", "block_k", "block_kv", "num_warps"): (
        ("", f"{_LEFT_OUT} tiles are chosen here"),
    ),
    ("eps", "epsilon", "norm_eps", "layer_norm_epsilon"): (("rms_norm_eps", ""), ("l2_norm_epsilon", "")),
    ("conv_size", "conv_kernel_size", "short_conv_kernel_size", "linear_conv_kernel_dim"): (
        ("conv_kernel_dim", ""),
    ),
    # heads and widths
    ("num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_query_heads", "h"): (
        ("num_query_heads", ""),
        ("num_heads", ""),
        ("heads", ""),
        ("num_value_heads", "write num_key_heads= and num_value_heads="),
        ("log_decay", f"{_LEFT_OUT} shapes tell how many heads there are, [..., T, N, H]"),
        ("query", f"{_LEFT_OUT} shapes tell how many heads there are, [..., T, N, H]"),
    ),
    ("num_heads", "head_num"): (
        ("num_query_heads", ""),
        ("heads", ""),
        ("num_value_heads", "write num_key_heads= and num_value_heads="),
        ("query", f"{_LEFT_OUT} shapes tell how many heads there are, [..., T, N, H]"),
    ),
    ("num_key_value_heads", "num_kv_heads", "kv_heads", "num_query_groups", "n_kv_heads"): (
        ("num_kv_heads", ""),
        ("num_key_value_heads", ""),
        ("key", f"{_LEFT_OUT} fewer heads of key and value are grouped by their shapes"),
    ),
    ("enable_gqa", "num_key_value_groups"): (
        ("key", f"{_LEFT_OUT} fewer heads of key and value are grouped by their shapes"),
        ("num_kv_heads", "write num_kv_heads="),
    ),
    ("embed_dim", "d_model", "hidden_size", "embed_dims", "hidden_dim", "model_dim", "emb_dim"): (
        ("features", ""),
        ("in_features", ""),
        ("query_size", ""),
        ("model_size", ""),
        ("qkv_features", ""),
        ("key_dim", "write key_dim={word} // num_heads"),
        ("kernel_init", f"{_LEFT_OUT} the width is read off the input"),
    ),
    ("head_dim", "head_size", "size_per_head", "key_dim"): (
        ("qk_size", "write qk_size={word}, vo_size={word}"),
        ("key_size", ""),
        ("key_dim", ""),
        ("head_dim", ""),
        ("qkv_features", "write qkv_features=num_heads * {word}"),
        ("key_head_dim", "write key_head_dim= and value_head_dim="),
    ),
    ("kdim", "vdim"): (
        ("in_kv_features", ""),
        ("qk_size", "write key_size= and value_size=, the widths of the inputs"),
        ("num_heads", f"{_LEFT_OUT} widths of keys and values are read off the input"),
    ),
    ("bias", "qkv_bias", "add_bias"): (
        ("use_bias", ""),
        ("with_bias", ""),
        ("use_query_bias", "write use_query_bias=, use_key_bias=, use_value_bias= and use_output_bias="),
        ("sow_weights", "attention_fn=configured_attention_fn(bias=bias), told at construction, adds one"),
    ),
    ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias"): (
        ("params", "compat.torch.multi_head_attention_forward takes torch's weights"),
    ),
    ("add_bias_kv",): (("params", "write params._replace(bias_k=bias_k, bias_v=bias_v)"),),
    ("device",): (("", f"{_LEFT_OUT} arrays lie where jax.device_put put them"),),
    # the inputs
    ("q", "queries", "x_q", "Q"): (("query", ""), ("inputs_q", "")),
    ("k", "keys", "x_k", "K"): (("key_", ""), ("key", ""), ("inputs_k", "")),
    ("v", "values", "x_v", "V"): (("value", ""), ("inputs_v", "")),
    ("query",): (("inputs_q", ""), ("src", "")),
    ("key",): (("key_", ""), ("inputs_k", "")),
    ("value",): (("inputs_v", ""),),
    ("inputs_kv", "context", "memory", "encoder_hidden_states", "key_value_states"): (
        ("inputs_k", ""),
        ("key_", "write key_={word}, value={word}"),
        ("key", "write key={word}, value={word}"),
    ),
    ("hidden_states", "inputs", "inputs_q"): (("query", ""), ("inputs_q", ""), ("x", "")),
    ("input", "logits", "scores"): (("x", ""), ("scores", "")),
    ("past_key_value", "past_key_values", "cache_params", "use_cache", "cache", "layer_past", "kv_cache"): (
        ("conv_kernel_dim", "a cache is decode=True in Flax and Haiku, init_cache and decode in Equinox"),
        ("num_heads", _CACHE),
        ("mask", f"layers have a cache: {_CACHE.removeprefix('a cache is ')}"),
        ("log_decay", "write initial_state= and return_final_state=True"),
    ),
    ("attn_implementation", "backend", "impl", "attention_kernel", "kernel"): (("implementation", ""),),
    # deformable attention
    ("value_spatial_shapes", "input_spatial_shapes", "spatial_shapes_list", "shapes"): (
        ("spatial_shapes", ""),
    ),
    ("value_level_start_index", "input_level_start_index", "level_start_index"): (
        ("level_start_index", ""),
        ("reference_points", f"{_LEFT_OUT} it follows from spatial_shapes"),
    ),
    ("im2col_step",): (("", f"{_LEFT_OUT} it changes no result"),),
    ("n_levels",): (("num_levels", ""),),
    ("n_points", "points", "num_reference_points"): (("num_points", ""),),
    ("input_flatten",): (("value", ""),),
    ("align_corners",): (("method", f"{_LEFT_OUT} pixels lie as with align_corners=False"),),
    ("interpolation",): (("method", ""),),
    # graphs
    ("edge_index", "adj", "adj_t", "g_graph", "edges"): (
        ("graph", "write graph=BipartiteCSC.from_edge_index(edge_index, num_nodes), built once, outside jit"),
    ),
    ("edge_attr", "edge_feat", "edge_features", "edge_weight"): (("edge", ""), ("edge_attr", "")),
    ("negative_slope", "slope"): (("alpha", ""), ("negative_slope", "")),
    ("concat",): (("concat_heads", ""),),
    ("concat_heads",): (("concat", ""),),
    ("att", "attn_weights", "att_src", "att_dst"): (("attention_weights", ""),),
    ("num_nodes", "size"): (("graph", f"{_LEFT_OUT} the graph knows how many nodes it has"),),
    ("feat", "node_feat", "x"): (("src", ""), ("x", "")),
    ("aggr",): (
        (
            "",
            f"{_LEFT_OUT} messages are added up; edge_sum, edge_mean and edge_max of jax_attn_bwd reduce"
            " them otherwise",
        ),
    ),
    ("flow",): (
        (
            "",
            f"{_LEFT_OUT} messages go from sources to destinations; for 'target_to_source' swap src and dst",
        ),
    ),
    ("node_dim",): (("", f"{_LEFT_OUT} nodes are the last axis but one, [..., nodes, channels]"),),
    ("in_channels", "in_feats", "in_features"): (
        ("in_channels", ""),
        ("out_channels", f"{_LEFT_OUT} the width is read off the input"),
    ),
    ("out_feats", "out_features"): (("out_channels", ""),),
}
# what is said of a call in another order, where it has more arguments by position than are taken
ORDERS = {
    "dot_product_attention": "what torch calls attn_mask, dropout_p, is_causal is told by mask=,"
    " dropout_rate=, is_causal=",
    "multi_head_attention": "params.query_kernel tells widths and heads, [Eq, N, H]; num_heads= is told where"
    " there is none",
    "gated_linear_attention": "a beta is the fifth of gated_delta_rule",
    "use_attention": "it is a context, in which models run as they are: with use_attention(): model(x)",
    "batch_graphs": "graphs are one list, batch_graphs([a, b])",
    "multi_scale_deformable_attention": "level_start_index is given by name, or left out: it follows from"
    " spatial_shapes",
    "MultiScaleDeformableAttention.__init__": "the number of heads comes first, then the width:"
    " MSDeformAttn(256, 4, 8, 4) of torch, in the order (d_model, n_levels, n_heads, n_points), is"
    " (8, 256, num_levels=4, num_points=4)",
}
# what other libraries call a function or a layer, and where it stands here
_CALLS = {
    "dot_product_attention": "flash_attention flash_attn_func flex_attention memory_efficient_attention"
    " scaled_dot_product_attention sdpa splash_attention",
    "gated_delta_rule": "chunk_gated_delta_rule fused_recurrent_gated_delta_rule",
    "gated_linear_attention": "chunk_gla chunk_retention chunk_simple_gla linear_attention",
    "layers.<framework>.{word}": "GATConv GATv2Conv GatedDeltaNet KimiDeltaAttention MultiHeadAttention"
    " MultiheadAttention MultiHeadDotProductAttention MultiScaleDeformableAttention TransformerConv"
    " replace_attention",
    "mods.{word}": "alibi alibi_slopes causal document prefix_lm relative_bias sliding_window",
    "multi_scale_deformable_attention": "MSDeformAttn MSDeformAttnFunction ms_deform_attn",
    "parallel.{word}": "all_gather_attention partition_graph ring_attention ulysses_attention",
    "scaled_masked_softmax": "masked_softmax softmax",
}
ELSEWHERE = {word: answers for words, answers in _WORDS.items() for word in words}


def ours_for(name: str) -> str:
    """Returns what to write for a function or a layer of other libraries; empty where nobody knows."""
    found = [ours for ours, words in _CALLS.items() if name in words.split()]
    return f"; write jax_attn_bwd.{found[0].format(word=name)}" if found else ""


def remedy(name: str, names: Collection[str]) -> str:
    """Returns what to write for the keyword `name` in a call that has `names`; empty where nobody knows."""
    for ours, answer in ELSEWHERE.get(name, ()):
        if not ours or (ours in names and ours != name):
            return (answer or "write {ours}={word}").format(ours=ours, word=name)
    return ""


def unexpected(call: str, name: str, names: Collection[str], others: Collection[str] = ()) -> TypeError:
    """Returns the error for a keyword that `call` does not take.

    `names` are those that it takes, `others` those of the other of a layer's two, constructor and call.
    """
    place = "at construction" if call.endswith(("__call__", ".call")) else "in the call"
    close = difflib.get_close_matches(name, [n for n in names if n not in ("self", "cls")], 1)
    if answer := remedy(name, names):
        answer = f"; {answer}"
    elif name in others:
        answer = f"; it is told {place}"
    elif answer := remedy(name, others):
        answer = f"; {answer}{f', {place}' if answer.startswith('write') else ''}"
    elif close:
        answer = f". Did you mean {close[0]!r}?"
    return TypeError(f"{call}() got an unexpected keyword argument {name!r}{answer}")


@cache
def by_position(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Returns what a function takes by position; None where it takes any number."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def too_many(call: str, names: tuple[str, ...], given: int) -> TypeError:
    """Returns the error for more arguments by position than `names`."""
    bound = sum(name in ("self", "cls") for name in names)
    said = f"{call}() takes {', '.join(names[bound:]) or 'nothing'} by position, and the others by name"
    order = f"; {ORDERS[call]}" if call in ORDERS else ""
    return TypeError(f"{said}; {given - bound} were given by position{order}")


@cache
def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Returns what a function takes by name; none where it takes any."""
    names: set[str] = set()
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            listed = get_args(p.annotation)[:1]  # of **options: Unpack[Keywords]
            if not (listed and is_typeddict(listed[0])):
                return frozenset()
            names |= listed[0].__required_keys__ | listed[0].__optional_keys__
        elif p.kind is not p.VAR_POSITIONAL:
            names.add(p.name)
    return frozenset(names)


def known(function: F) -> F:
    """Guards a public function, or the call of a layer: a wrong keyword is answered with the right one.

    Of its signature help and tooltips show names and defaults: types, written out, would hide what follows.
    """
    signature = inspect.signature(function)
    names, call = names_of(function), function.__qualname__
    places = by_position(function)

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if names and not kwargs.keys() <= names:
            name = next(name for name in kwargs if name not in names)
            if not (call.endswith(("__call__", ".call")) and args):
                raise unexpected(call, name, names)
            layer = type(args[0])  # its call may stand in a class that several layers share
            raise unexpected(f"{layer.__name__}.{function.__name__}", name, names, names_of(layer.__init__))
        if places is not None and len(args) > len(places):
            raise too_many(call, places, len(args))
        return function(*args, **kwargs)

    vars(guarded)["__signature__"] = _shown(signature)
    return cast(F, guarded)


def _shown(signature: inspect.Signature) -> inspect.Signature:
    """Returns names and defaults of a signature, without types."""
    shown = [
        p if p.kind is p.VAR_KEYWORD else p.replace(annotation=p.empty) for p in signature.parameters.values()
    ]
    return signature.replace(parameters=shown, return_annotation=signature.empty)


class _Name:
    """What a signature prints of a default that has no short form: a function's name, or `...`."""

    def __init__(self, default: Any) -> None:
        self.name = getattr(default, "__qualname__", "<")

    def __repr__(self) -> str:
        return "..." if "<" in self.name else self.name


class _LayerSignature:
    """What help and tooltips show of a layer's class, its constructor's, and of a layer, its call's.

    The metaclass of Flax NNX would show `(*args, **kwargs)`, dataclasses the types of all their fields, and
    functions the address where they lie.
    """

    def __get__(self, layer: Any, kind: type) -> inspect.Signature:
        signature = inspect.signature(getattr(kind, "__init__" if layer is None else "__call__"))
        _, *others = signature.parameters.values()
        others = [p.replace(default=_Name(p.default)) if " at 0x" in repr(p.default) else p for p in others]
        return _shown(signature.replace(parameters=others))


class ChecksNames:
    """Answers a wrong keyword of a layer's constructor, which may be the framework's own."""

    __slots__ = ()  # so that a layer of the framework may become one of ours
    __signature__ = _LayerSignature()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leaves out types where Equinox reads its classes' signature, that of the constructor."""
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(init := vars(cls).get("__init__")):
            vars(init)["__signature__"] = _shown(inspect.signature(init))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Makes the layer, or raises."""
        call, places = f"{cls.__name__}.__init__", by_position(cls.__init__)
        names = names_of(cls.__init__)
        if names and not kwargs.keys() <= names:
            name = next(name for name in kwargs if name not in names)
            raise unexpected(call, name, names, names_of(cls.__call__))
        if places is not None and len(args) >= len(places):
            raise too_many(call, places, len(args) + 1)
        if args and isinstance(args[0], jax.Array | np.ndarray) and args[0].ndim > 1:
            made = f"layer = {cls.__name__}(...)"
            raise TypeError(f"{call}() makes a layer and takes no tokens; write {made}, then layer(x)")
        if isinstance(kwargs.get("rngs"), jax.Array | np.ndarray | int):
            got = type(kwargs["rngs"]).__name__
            raise TypeError(f"{cls.__name__}: rngs must be nnx.Rngs, got {got}; write rngs=nnx.Rngs(key)")
        if isinstance(seed := kwargs.get("key"), int):
            raise TypeError(
                f"{cls.__name__}: key must be a JAX key, got int; write key=jax.random.key({seed})"
            )
        return super().__new__(cls)
