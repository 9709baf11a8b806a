"""Dense attention with masks and scores as functions, beside the same ones as arrays of T x S, on one device.

Each is measured beside our own call with the array, our own option where there is one, and torch's
`flex_attention`, compiled, where it runs: on a CPU it has no backward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import peers
from bench.measure import TOLERANCES, Contender, Part, Workload, compiled_contender, step
from jax_attn_bwd import dot_product_attention, mods

HEADS, SIZE = 4, 64
SHORT, LONG, QUICK = 4096, 16384, 256  # tokens; the long ones have no array beside them
BLOCK = (256, 512)  # rows and columns of the tiles that the notes count


class Modified(NamedTuple):
    """A mask or a score of the named ones, for a number of tokens.

    Attributes:
      options: options of our call; `mod_args` are given apart.
      mod_args: what the functions read.
      option: `(mod_args) -> options` that say the same without a function, where such exist.
      learned: whether the last entry of `mod_args` has a gradient.
      array: whether an array of T x S says the same: a soft cap adds nothing that is known before.
      flex: functions `(batch, head, row, column)` and `(logits, batch, head, row, column)` of torch, or None,
        of the entries of `mod_args` as tensors.
    """

    options: dict[str, Any]
    mod_args: tuple[Any, ...] = ()
    option: Callable[..., dict[str, Any]] | None = None
    learned: bool = False
    array: bool = True
    flex: Callable[..., tuple[Callable | None, Callable | None]] | None = None


def parts(quick: bool, only: str = "") -> list[Part]:
    """Lists those whose names contain `only`; `quick` keeps them short."""
    short, found = QUICK if quick else SHORT, list[Part]()
    for name, make in NAMED.items():
        for what in ("forward", "forward + backward"):
            if only in (title := f"{name}, {_sizes(short)}, {what}"):
                found.append((title, partial(_short, title, make, short, "backward" in what)))
    for name in () if quick else ("prefix", "documents", "window and global tokens"):
        if only in (title := f"{name}, {_sizes(LONG)}, forward + backward"):
            found.append((title, partial(_long, title, name)))
    return found


def _short(title: str, make: Callable[[int], Modified], T: int, backward: bool) -> Iterator[Workload]:
    yield _workload(title, make(T), T, backward)


def _long(title: str, name: str) -> Iterator[Workload]:
    yield Workload(title, [_ours(NAMED[name](LONG), _draw(LONG), LONG, True)])


def _sizes(T: int) -> str:
    return f"B1 T{T} N{HEADS} H{SIZE}"


def _workload(name: str, modified: Modified, T: int, backward: bool) -> Workload:
    args = _draw(T)
    contenders = [_ours(modified, args, T, backward)]
    if modified.array:
        contenders.append(_array(modified, args, T, backward))
    if modified.option:
        more = modified.option(*modified.mod_args)
        flags = {k: x for k, x in more.items() if not hasattr(x, "shape")}
        arrays = {k: x for k, x in more.items() if k not in flags}
        call = partial(dot_product_attention, **flags)
        contenders.append(compiled_contender("our option", _measured(call, backward), *args, arrays))
    flex = {"flex_attention": partial(_flex, modified, args, backward)} if modified.flex else {}
    found, refused = peers.gather(name, flex if peers.torch_device() else {})
    return Workload(name, [*contenders, *found], tolerance=TOLERANCES["float32"], refused=refused)


def _draw(T: int) -> tuple[jax.Array, ...]:
    """Draws the cotangent, then query, key and value."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((1, T, HEADS, SIZE)), jnp.float32) for _ in range(4))


def _measured(call: Callable[..., jax.Array], backward: bool) -> Callable[..., Any]:
    """Makes `call(q, k, v, **named)` a function of (dout, q, k, v, named): its output, and gradients.

    Of what is named, "learned" has a gradient.
    """

    def run(dout, q, k, v, named):
        fixed = {name: x for name, x in named.items() if name != "learned"}
        learned = {name: x for name, x in named.items() if name == "learned"}
        function = lambda q, k, v, learned: call(q, k, v, **fixed, **learned)
        return step(function)(dout, q, k, v, learned) if backward else function(q, k, v, learned)

    return run


def _ours(modified: Modified, args: tuple, T: int, backward: bool) -> Contender:
    def call(q, k, v, mod_args, **learned):
        given = (*mod_args, *learned.values())
        return dot_product_attention(q, k, v, **modified.options, mod_args=given)

    named: dict[str, Any] = {"mod_args": modified.mod_args}
    if modified.learned:
        named = {"mod_args": modified.mod_args[:-1], "learned": modified.mod_args[-1]}
    made = compiled_contender("jax_attn_bwd", _measured(call, backward), *args, named)
    if mask_mod := modified.options.get("mask_mod"):
        kinds = mods.tiles(mask_mod, T, T, modified.mod_args, block=BLOCK)
        made.notes["tiles"] = f"{np.count_nonzero(kinds)} of {kinds.size} of {BLOCK[0]} x {BLOCK[1]}"
    return made


def _array(modified: Modified, args: tuple, T: int, backward: bool) -> Contender:
    """Makes a contender of our own call with the mask, or what the score adds, as an array, made outside."""
    at = jnp.ix_(*(jnp.arange(n, dtype=jnp.int32) for n in (1, HEADS, T, T)))  # batch, head, row, column
    added = lambda *read: modified.options["score_mod"](jnp.zeros((1, HEADS, T, T)), *at, *read)
    call: Callable[..., jax.Array] = dot_product_attention
    if mask_mod := modified.options.get("mask_mod"):
        named = {"mask": jax.jit(lambda *read: mask_mod(*at, *read))(*modified.mod_args)}
    elif modified.learned:  # its gradient goes through the array
        call = lambda q, k, v, learned: dot_product_attention(q, k, v, added(learned))
        named = {"learned": modified.mod_args[-1]}
    else:
        named = {"bias": jax.jit(added)(*modified.mod_args)}
    return compiled_contender("our call with an array", _measured(call, backward), *args, named)


def _flex(modified: Modified, args: tuple, backward: bool) -> Contender:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dout, *inputs = (peers.tensor(x).transpose(1, 2).contiguous() for x in args)
    tensors = [x.requires_grad_(backward) for x in inputs]
    assert modified.flex is not None
    mask_mod, score_mod = modified.flex(*map(peers.tensor, modified.mod_args))
    T = dout.shape[2]
    blocks = mask_mod and create_block_mask(mask_mod, None, None, T, T, device=peers.torch_device())
    torch.compiler.reset()  # what an earlier case compiled is not compiled again for any shape
    attend = torch.compile(flex_attention, dynamic=False)

    def run():
        with torch.set_grad_enabled(backward):
            out = attend(*tensors, block_mask=blocks, score_mod=score_mod)
        return (out, *torch.autograd.grad(out, tensors, dout)) if backward else (out,)

    run()  # compiles, or refuses
    return peers.torch_contender("flex_attention", run, lambda *found: [x.transpose(1, 2) for x in found])


def _documents(T: int) -> np.ndarray:
    """Draws eight packed documents."""
    ends = np.random.default_rng(1).choice(T - 1, 7, replace=False) + 1
    return np.searchsorted(np.sort(ends), np.arange(T), side="right").astype(np.int32)


def _segments(ids: np.ndarray) -> dict[str, Any]:
    return {"query_segment_ids": ids[None], "key_value_segment_ids": ids[None]}


def _tree(T: int) -> tuple[np.ndarray, ...]:
    """Draws sixteen prompts, each continued by drafts that branch: in depth-first order."""
    rng, parents = np.random.default_rng(2), [-1]
    length = T // 16
    for i in range(1, T):
        start = i // length * length
        parents.append(-1 if i == start else i - 1 if rng.random() < 0.95 else int(rng.integers(start, i)))
    return mods.tree_intervals(parents)


_WINDOW = 256

NAMED: dict[str, Callable[[int], Modified]] = {
    "causal": lambda T: Modified(
        {"mask_mod": mods.causal},
        option=lambda: {"is_causal": True},
        flex=lambda: (lambda b, h, row, column: column <= row, None),
    ),
    "window": lambda T: Modified(
        {"mask_mod": mods.sliding_window(_WINDOW)},
        option=lambda: {"local_window_size": (_WINDOW, 0)},
        flex=lambda: (lambda b, h, row, column: (column <= row) & (row - column <= _WINDOW), None),
    ),
    "prefix": lambda T: Modified(
        {"mask_mod": mods.prefix_lm},
        (np.int32(T // 4),),
        flex=lambda length: (lambda b, h, row, column: (column < length) | (column <= row), None),
    ),
    "documents": lambda T: Modified(
        {"mask_mod": mods.document},
        (_documents(T),),
        option=_segments,
        flex=lambda ids: (lambda b, h, row, column: ids[row] == ids[column], None),
    ),
    "causal documents": lambda T: Modified(
        {"mask_mod": mods.causal & mods.document},
        (_documents(T),),
        option=lambda ids: {"is_causal": True, **_segments(ids)},
    ),
    "dilated window": lambda T: Modified({"mask_mod": mods.dilated(4) & mods.sliding_window(4 * _WINDOW)}),
    "global tokens": lambda T: Modified({"mask_mod": mods.global_tokens(64)}),
    "window and global tokens": lambda T: Modified(
        {"mask_mod": mods.sliding_window(_WINDOW, _WINDOW) | mods.global_tokens(64)}
    ),
    "tree": lambda T: Modified({"mask_mod": mods.tree}, _tree(T)),
    "not causal": lambda T: Modified({"mask_mod": ~mods.causal}),
    "ALiBi": lambda T: Modified(
        {"score_mod": mods.alibi},
        (mods.alibi_slopes(HEADS),),
        flex=lambda slopes: (
            None, lambda logits, b, h, row, column: logits - slopes[h] * (row - column).abs()
        ),
    ),
    "learned relative bias": lambda T: Modified(
        {"score_mod": mods.relative_bias(128)},
        (jnp.asarray(np.random.default_rng(3).standard_normal((HEADS, 257)), jnp.float32),),
        learned=True,
    ),
    "soft cap": lambda T: Modified(
        {"score_mod": mods.soft_cap(5.0)}, option=lambda: {"logits_soft_cap": 5.0}, array=False
    ),
}  # fmt: skip
