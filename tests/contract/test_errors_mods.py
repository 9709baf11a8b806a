"""Every error of masks and scores that are functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.errors import HV, B, N, T, attention, check, ones, rows
from contract.test_errors_dot_product import attention_bwd

from jax_attn_bwd import mods

NAME = "dot_product_attention"


def check_call(call, operator, exception, words, arguments):
    """`check` with functions as they are: it would call them."""
    check(call, operator, exception, words, {name: lambda x=x: x for name, x in arguments.items()})


def printing(batch, head, row, column):
    jax.debug.print("{}", row)
    return column <= row


def branching(batch, head, row, column):
    return row if row[0, 0] > 1 else column


MASKS = rows(
    ("no function", TypeError, "mask_mod must be a function or None, got ndarray", {"mask_mod": ones(T)}),
    ("dtype", TypeError, "mask_mod must return bool, got dtype int32",
     {"mask_mod": lambda b, h, r, c: r - c}),
    ("shape", ValueError, r"mask_mod must return what broadcasts to the tile .*, got \(4,\)",
     {"mask_mod": lambda b, h, r, c: jnp.ones(4, bool)}),
    ("several", TypeError, "mask_mod must return one array, got 2 of them",
     {"mask_mod": lambda b, h, r, c: (r < c, c < r)}),
    ("effects", TypeError, "mask_mod must have no side effects, got .*[Dd]ebug", {"mask_mod": printing}),
    ("branches", TypeError,
     "mask_mod must be elementwise jnp operations that broadcast over batch, head, row and column, got ",
     {"mask_mod": branching}),
    ("arguments", TypeError, "mask_mod must be elementwise .*, got TypeError: .*positional argument",
     {"mask_mod": lambda b, h, r, c: r < c, "mod_args": (ones(3),)}),
    ("not broadcast", TypeError, "mask_mod must be elementwise .* that broadcast",
     {"mask_mod": lambda b, h, r, c: r.reshape(-1) == c.reshape(-1)}),
    ("score dtype", TypeError,
     "score_mod must return float32, the dtype of the logits, got dtype float64; cast what it adds",
     {"score_mod": lambda x, b, h, r, c: x.astype(np.float64)}),
    ("score shape", ValueError, "score_mod must return logits of the shape that it is handed, here .*, got",
     {"score_mod": lambda x, b, h, r, c: x[..., 0]}),
    ("score of nothing", TypeError, "score_mod must be a function or None, got str", {"score_mod": "alibi"}),
    ("args an array", TypeError, r"mod_args must be a tuple of arrays, got ndarray; write \(x,\)",
     {"score_mod": mods.alibi, "mod_args": ones(N)}),
    ("args of text", TypeError, "mod_args must hold arrays of floats, integers or bools, got dtype <U1",
     {"score_mod": mods.alibi, "mod_args": ("a",)}),
    ("args alone", ValueError, "mod_args must be given together with mask_mod or score_mod, got neither",
     {"mod_args": (ones(N),)}),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "arguments"), MASKS)
def test_dot_product_attention(exception, words, arguments):
    check_call(attention, NAME, exception, words, arguments)


def test_unhashable():
    class Unhashable:
        __hash__ = None

        def __call__(self, batch, head, row, column):
            return row < column

    words = "mask_mod must be hashable, got an unhashable Unhashable; it is a static argument"
    check_call(attention, NAME, TypeError, words, {"mask_mod": Unhashable()})


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_closing_over_traced_arrays(transform):
    def call(slope):
        closing = lambda x, batch, head, row, column: x * slope.sum().astype(x.dtype)
        words = "score_mod must not close over traced arrays, .*; hand them over in mod_args"
        check_call(attention, NAME, TypeError, words, {"score_mod": closing})
        return slope.sum()

    transform(call)(ones(3))


@pytest.mark.parametrize("args", [(ones(T, dtype=np.int32),), ()])
def test_gradients_of_what_has_none(args):
    mask = mods.document if args else mods.causal
    words = "mod_args must hold floating-point arrays where wrt names it, got (int32|nothing); integers"
    arguments = {"mask_mod": mask, "mod_args": args, "wrt": "mod_args", "key": ones(B, T, 3, 4)}
    arguments |= {"value": ones(B, T, 3, HV)}
    check_call(attention_bwd, f"{NAME}_bwd", TypeError, words, arguments)


NAMED = rows(
    ("window", ValueError, "left must be an int, 0 or more, got -1", lambda: mods.sliding_window(-1)),
    ("window kind", TypeError, "right must be an int, 0 or more, got float",
     lambda: mods.sliding_window(1, 2.0)),
    ("dilated", ValueError, "dilation must be a positive int, got 0", lambda: mods.dilated(0)),
    ("cap", ValueError, "cap must be positive, got -1.0", lambda: mods.soft_cap(-1.0)),
    ("tree", ValueError, "a parent must come before its child 1, got 1",
     lambda: mods.tree_intervals([-1, 1])),
    ("joined", TypeError, "a mask must be combined with a Mask, got function; write mods.Mask",
     lambda: mods.causal & (lambda b, h, r, c: r < c)),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "call"), NAMED)
def test_named(exception, words, call):
    with pytest.raises(exception, match=words):
        call()


FEW = np.asarray([1, 3], np.int32)


def closing_over_an_array(batch, head, row, column):
    return jnp.asarray([True, False, True])[(row + column) % 3]


REFUSED = (
    ("mosaic_gpu", "mask_mod reads an array at places that depend on row and column together, .* one value",
     {"mask_mod": closing_over_an_array}),
    ("mosaic_tpu", "score_mod reads an array at places that depend on row and column together, .* bias array",
     {"score_mod": mods.relative_bias(2), "mod_args": (ones(N, 5),)}),
    ("mosaic_tpu", "score_mod reads arrays and cannot be traced on one element: IndexError",
     {"score_mod": lambda x, b, h, r, c, at: x * at[h[..., :1]], "mod_args": (ones(N),)}),
    ("mosaic_tpu", "mask_mod reads arrays and is not elementwise: '.*' makes several numbers of one",
     {"mask_mod": lambda b, h, r, c, few: jnp.stack([r - c, c - r]).max(0) > few[0], "mod_args": (FEW,)}),
    ("mosaic_tpu", "its tiles hold 32 bits a number, and mask_mod computes in int64",
     {"mask_mod": mods.document, "mod_args": (np.arange(T),)}),
    ("mosaic_tpu", "cannot lower 'erf_inv', which score_mod is made of",
     {"score_mod": lambda x, b, h, r, c: jax.lax.erf_inv(x)}),
    ("mosaic_tpu", "cannot lower 'population_count', which mask_mod is made of",
     {"mask_mod": lambda b, h, r, c: jax.lax.population_count(r) > 1}),
    ("mosaic_tpu", "tiles hold 32 bits a number, and mask_mod computes in int64",
     {"mask_mod": lambda b, h, r, c: r.astype(np.int64) > c.astype(np.int64)}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "words", "options"), REFUSED)
def test_kernels_refuse_by_name(name, words, options):
    from jax_attn_bwd._core import pallas

    with pallas.interpreting(name), pytest.raises(NotImplementedError, match=words):
        attention(**options, implementation=name)
