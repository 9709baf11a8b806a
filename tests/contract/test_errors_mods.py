"""Every error of masks and scores that are functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.errors import HV, B, N, S, T, attention, check, ones, rows
from contract.test_errors_dot_product import attention_bwd

from jax_attn_bwd import BipartiteCSC, dot_product_attention, mods

NAME = "dot_product_attention"
PACKED = mods.packed(np.ones((7, 5), bool))
FEW = np.asarray([1, 3], np.int32)


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
     "mask_mod must be elementwise jnp operations that broadcast over batch, head, row and column, got "
     "branching, which asks in Python whether an array is true; write jnp.where for if, and & | ~ for and",
     {"mask_mod": branching}),
    ("ands", TypeError, "got <lambda>, which asks in Python whether an array is true; write jnp.where",
     {"mask_mod": lambda b, h, r, c: r < c and c > 2}),
    ("uncalled", TypeError, "mask_mod must be a function of places, got mods.sliding_window itself; call it",
     {"mask_mod": mods.sliding_window}),
    ("arguments", TypeError,
     r"mask_mod must take \(batch, head, row, column\) and the 1 arrays of mod_args, got "
     r"<lambda>\(b, h, r, c\), too many positional arguments; both .* are handed all of mod_args",
     {"mask_mod": lambda b, h, r, c: r < c, "mod_args": (ones(3),)}),
    ("not broadcast", TypeError, "mask_mod must be elementwise .* that broadcast",
     {"mask_mod": lambda b, h, r, c: r.reshape(-1) == c.reshape(-1)}),
    ("score dtype", TypeError,
     "score_mod must return float32, the dtype of the logits, got dtype float64; cast what it adds",
     {"score_mod": lambda x, b, h, r, c: x.astype(np.float64)}),
    ("score shape", ValueError, "score_mod must return logits of the shape that it is handed, here .*, got",
     {"score_mod": lambda x, b, h, r, c: x[..., None]}),
    ("of a constant", ValueError,
     "mask_mod must be elementwise .*, got what it returns has an array's own axis where the tile has its",
     {"mask_mod": lambda b, h, r, c: jnp.asarray([True, False, True])}),
    ("of a constant's columns", ValueError, "mask_mod must be elementwise .*, got .* has an array's own axis",
     {"mask_mod": lambda b, h, r, c: jnp.arange(3) > 1}),
    ("a callback", ValueError, "score_mod must be elementwise .*, got 'pure_callback', which is not number",
     {"score_mod": lambda x, b, h, r, c: jax.pure_callback(lambda x: x, x, x)}),
    ("an axis by its place", ValueError,
     "score_mod must be elementwise .*, got one that takes or drops an axis of its tile by its place",
     {"score_mod": lambda x, b, h, r, c, s: x * s[h[..., 0, 0]][..., None, None], "mod_args": (ones(N),)}),
    ("a row by its place", ValueError, "score_mod must be elementwise .*, got .* drops an axis of its tile",
     {"score_mod": lambda x, b, h, r, c: x + r[..., 0][..., None].astype(x.dtype)}),
    ("args of half a byte", TypeError, "mod_args must hold arrays of .*, of whole bytes, got dtype int4",
     {"mask_mod": lambda b, h, r, c, x: x[r] > 0, "mod_args": (jnp.ones(T, jnp.int4),)}),
    ("few args", ValueError, "mod_args must hold the 2 that mask_mod reads, got 1",
     {"mask_mod": mods.tree, "mod_args": (FEW,)}),
    ("many args", ValueError, "mod_args must hold the 1 that are read, got 2",
     {"mask_mod": mods.causal, "score_mod": mods.alibi, "mod_args": (FEW, ones(N))}),
    ("documents of few", ValueError,
     r"ids of document in mod_args must have shape \[T\] or \[..., T\] with T at least 7, ... = \(2,\), got",
     {"mask_mod": mods.causal & mods.document, "mod_args": (FEW,)}),
    ("documents of another batch", ValueError, r"the ids of document in mod_args must have .*, got \(1, 5\)",
     {"mask_mod": mods.document, "mod_args": (ones(1, 5, dtype=np.int32),)}),
    ("documents of floats", TypeError, "ids of document in mod_args must be an array of integers, got dtype",
     {"mask_mod": ~mods.document, "mod_args": (ones(T),)}),
    ("slopes of few heads", ValueError, r"slopes of alibi in mod_args must have shape \[N\] with N = 6, got",
     {"score_mod": mods.alibi, "mod_args": (ones(N - 1),)}),
    ("a table of ints", TypeError, "table of relative_bias in mod_args must be a floating-point array, got",
     {"score_mod": mods.relative_bias(2), "mod_args": (ones(N, 5, dtype=np.int32),)}),
    ("blocks of integers", TypeError,
     "the blocks of mods.blocks in mod_args must be boolean, got dtype int32; write blocks != 0, or",
     {"mask_mod": mods.blocks(2), "mod_args": (ones(1, 3, 4, dtype=np.int32),)}),
    ("blocks that do not cover", ValueError,
     r"the blocks of mods.blocks in mod_args must cover the plane with shape \[..., N or 1, 3, 4\], got "
     r"\(1, 2, 4\); N = 6, ... = \(2,\), blocks of 2 x 2",
     {"mask_mod": mods.blocks(2) & mods.causal, "mod_args": (ones(1, 2, 4, dtype=bool),)}),
    ("blocks of other heads", ValueError, r"of mods.blocks in mod_args must cover .*, got \(2, 3, 3, 4\)",
     {"mask_mod": mods.blocks(2), "mod_args": (ones(2, 3, 3, 4, dtype=bool),)}),
    ("a packed mask of another plane", ValueError,
     r"the mask of mods.packed must have the T = 5 rows and S = 7 columns of the call, got \(7, 5\)",
     {"mask_mod": PACKED[0], "mod_args": PACKED[1]}),
    ("a packed mask of a longer plane", ValueError, r"the T = 5 rows and S = 7 columns .*, got \(8, 9\)",
     dict(zip(("mask_mod", "mod_args"), mods.packed(np.ones((8, 9), bool)), strict=True))),
    ("arrays of another packed mask", ValueError, r"array 1 of mods.packed in mod_args must have .*\[32, 1\]",
     {"mask_mod": mods.packed(ones(T, S, dtype=bool))[0], "mod_args": (PACKED[1][0], FEW)}),
    ("a small table", ValueError, r"relative_bias in mod_args must have shape \[N, 5\] with N = 6, got",
     {"score_mod": mods.relative_bias(2), "mod_args": (ones(N, 4),)}),
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


ON_TILES = rows(
    ("a maximum", "'reduce_max' along the columns", lambda x: x - x.max(-1, keepdims=True)),
    ("a mean over rows", "'reduce_sum' along the rows", lambda x: x - x.mean(-2, keepdims=True)),
    ("the greatest", "'argmax' along the columns", lambda x: x + x.argmax(-1, keepdims=True).astype(x.dtype)),
    ("turned round", "'rev' along the rows", lambda x: x[..., ::-1, :]),
    ("running sums", "'cumsum' along the columns", lambda x: jnp.cumsum(x, -1)),
    ("sorted", "'sort' along the columns", lambda x: jnp.sort(x, -1)),
    ("a neighbour", "'slice' along the columns",
     lambda x: jnp.concatenate([x[..., 1:], x[..., :1]], -1)),
    ("the two greatest", "'top_k', which is not number by number, of the .*",
     lambda x: x - jax.lax.top_k(x, 2)[0][..., -1:]),
    ("frequencies", "'fft', which is not number by number, of the .*",
     lambda x: jnp.fft.fft(x).real.astype(x.dtype)),
    ("a maximum made again", "'reduce_max' along the columns",
     jax.checkpoint(lambda x: x - x.max(-1, keepdims=True))),
    ("a maximum in a loop", "'reduce_max' along the columns",
     lambda x: jax.lax.fori_loop(0, 2, lambda i, x: x - x.max(-1, keepdims=True), x)),
    ("a maximum in a branch", "'reduce_max' along the rows",
     lambda x: jax.lax.cond(True, lambda x: x - x.max(-2, keepdims=True), lambda x: x, x)),
    ("a maximum of all", "'reduce_max' along .*the rows and the columns", lambda x: x - x.reshape(-1).max()),
    ("a maximum of a loop of no turn", "'reduce_max' along the columns",
     lambda x: x - jax.lax.while_loop(lambda y: False, jnp.zeros_like, x).max(-1, keepdims=True)),
    ("row after row", "'scan' along the rows",
     lambda x: jnp.moveaxis(jax.lax.map(lambda y: y - y.sum(), jnp.moveaxis(x, -2, 0)), 0, -2)),
    ("products of rows", "'dot_general' along the columns",
     lambda x: x - jnp.einsum("...ts,...ts->...t", x, x)[..., None]),
    ("over heads", "'reduce_sum' along the heads", lambda x: x - x.sum(-4, keepdims=True)),
    ("own columns", "'add' of an array's own axis with the columns",
     lambda x: x + jnp.arange(x.shape[-1], dtype=x.dtype).reshape(1, 1, 1, 1, -1)),
    ("random bits", "of an array's own axis with the batch",
     lambda x: x + jax.random.normal(jax.random.key(0), x.shape, x.dtype)),
)  # fmt: skip


@pytest.mark.parametrize(("what", "score"), ON_TILES)
def test_functions_of_a_whole_tile(what, score):
    """Each would compute something else where the tiles are others."""
    words = f"score_mod must be elementwise .*, got .*{what}; it is evaluated on tiles of any size"
    check_call(attention, NAME, ValueError, words, {"score_mod": lambda x, *place: score(x)})


def greatest(x):
    """Along the last axis, by an operation that JAX has no name for."""
    return jax.lax.reduce(x, np.int32(0), lambda x, y: jnp.where(x > y, x, y), (x.ndim - 1,))


ELEMENTWISE = {
    "constant": lambda b, h, r, c: True,
    "of no axis": lambda b, h, r, c: jnp.asarray(True),
    "of a row": lambda b, h, r, c: r > 1,
    "of pairs": lambda b, h, r, c: (jnp.stack([r, r + 2], -1) == c[..., None]).any(-1),
    "of a table's rows": lambda b, h, r, c: jnp.asarray(TABLE)[r % 3].sum(-1) > c.astype(float) - 3,
    "of a table's product": lambda b, h, r, c: jnp.asarray(TABLE)[c % 3] @ jnp.ones(2) < r.astype(float),
    "by a branch": lambda b, h, r, c: jax.lax.cond(True, lambda: r < c, lambda: r > c),
    "of rows of its own": lambda b, h, r, c: (
        jax.vmap(lambda x, i: x[i])(
            jnp.stack([r.reshape(-1), 2 * r.reshape(-1)], -1), r.reshape(-1) % 2
        ).reshape(r.shape)
        >= c
    ),
    "of a reduction of pairs": lambda b, h, r, c: greatest(jnp.stack([r, r + 1], -1)) > c,
    "by a selection": lambda b, h, r, c: jnp.select([c <= r - 3, c <= r], [c % 3 < 2, c % 2 < 1], c < 5),
    "by a number": lambda b, h, r, c: jax.lax.select_n((r // 2 + 0 * c) % 2, c <= r + 0 * c, c > r + 0 * c),
    "of a table that is made": lambda b, h, r, c: (
        jnp.arange(8)[r % 8] + jnp.sort(jnp.array([3, 1, 2]))[c % 3] < 5
    ),
    "of a triangle": lambda b, h, r, c: jnp.tril(jnp.ones((3, 3), bool))[r % 3, c % 3],
    "of few": lambda b, h, r, c: jnp.isin(r - c, jnp.array([0, 1, 4], np.int32)),
    "by search": lambda b, h, r, c: jnp.searchsorted(jnp.array([0, 2, 4], np.int32), r) <= c,
    "one hot": lambda b, h, r, c: jax.nn.one_hot(r % 3, 3) @ jnp.arange(3.0) >= c.astype(float) - 2,
    "element by element": jnp.vectorize(
        lambda b, h, r, c: (
            jax.lax.while_loop(lambda x: x > 2, lambda x: x - 2, r)
            + jax.lax.cond(h > c, lambda: 0, lambda: 1)
            <= c
        )
    ),
    "in a loop": lambda b, h, r, c: jax.lax.fori_loop(0, 3, lambda i, x: x + i, r - c) > 2,
    "made again": lambda b, h, r, c: jax.checkpoint(lambda x, y: x >= y)(r, c),
    "of a table that is made of rows": lambda b, h, r, c: (
        (jnp.stack([jnp.stack([r, r + 1], -1)] * 2, -1) - 1).reshape(*r.shape, 4).max(-1) >= c
    ),
    "squeezed": lambda b, h, r, c: jnp.expand_dims(jnp.squeeze(r, -1), -1) >= c,
}
TABLE = np.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize("mask_mod", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_functions_that_are_elementwise(mask_mod):
    """They hide what the mask hides that they are on the plane."""
    q, k, v = (np.random.default_rng(0).standard_normal((2, n, 4, 3)) for n in (5, 7, 7))
    index = lambda *axes: jnp.ix_(*(jnp.arange(n, dtype=jnp.int32) for n in axes))
    plane = jnp.broadcast_to(mask_mod(*index(2, 4, 5, 7)), (2, 4, 5, 7))
    got, expected = (
        dot_product_attention(q, k, v, **options) for options in ({"mask_mod": mask_mod}, {"mask": plane})
    )
    np.testing.assert_allclose(got, expected, 1e-12, 1e-12)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "mask_mod must return bool, got dtype int32", (lambda b, h, r, c: r - c, 8, 8)),
        (ValueError, "mod_args must hold the 1 that are read, got 0", (mods.document, 8, 8)),
        (TypeError, "mod_args must be a tuple of arrays, got ndarray", (mods.document, 8, 8, ones(8))),
        (ValueError, "block must be a positive int, got 0", (mods.causal, 8, 8)),
    ],
)
def test_tiles(error, words, arguments):
    with pytest.raises(error, match=f"^mods.tiles: {words}"):
        mods.tiles(*arguments, block=0 if "block" in words else 4)


@pytest.mark.parametrize(("kind", "name"), [("mask", "causal"), ("mask", "document"), ("score", "alibi")])
def test_a_named_one_that_is_called(kind, name):
    words = (
        rf"mods.{name}: a {kind} must be told .*, got a call of .* itself; write {kind}_mod=mods.{name}, with"
    )
    with pytest.raises(TypeError, match=words):
        getattr(mods, name)()


def test_unhashable():
    class Unhashable:
        __hash__ = None

        def __call__(self, batch, head, row, column):
            return row < column

    words = "mask_mod must be hashable, got an unhashable Unhashable; it is a static argument"
    check_call(attention, NAME, TypeError, words, {"mask_mod": Unhashable()})


def test_a_function_without_a_module():
    """As `exec` defines it."""
    space = {}
    exec("visible = lambda batch, head, row, column: row >= column", space)
    np.testing.assert_array_equal(attention(mask_mod=space["visible"]), attention(mask_mod=mods.causal))


def test_what_is_known_of_joined_masks_is_asked_of_their_own_arrays():
    """The first is a function of the user's, of whose array nothing is."""
    near = mods.Mask(lambda batch, head, row, column, reach: row - column <= reach, 1)
    ids = np.arange(S, dtype=np.int32) // 2
    call = lambda *args: attention(mask_mod=near & mods.document, mod_args=args)
    assert jax.eval_shape(call, np.int32(T), ids).shape[1] == T
    with pytest.raises(ValueError, match="the ids of document in mod_args must have shape"):
        jax.eval_shape(call, ids, np.int32(T))


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
    ("arity", TypeError,
     r"mods.Mask: function must take \(batch, head, row, column\) and the 0 arrays that num_args says, got "
     r"<lambda>\(b, h, r\), too many positional arguments",
     lambda: mods.Mask(lambda b, h, r: r > 1)),
    ("arity of a score", TypeError,
     r"mods.Score: function must take \(logits, batch, head, row, column\) and the 1 arrays that num_args",
     lambda: mods.Score(lambda x, b, h, r, c: x, 1)),
    ("blocks of size 0", ValueError, "key_size must be a positive int, got 0", lambda: mods.blocks(4, 0)),
    ("blocks beyond", ValueError, r"mods.blocks_from_indices: indices must lie in \[-1, 3\], got 0 to 4",
     lambda: mods.blocks_from_indices([[0, 4]], 4)),
    ("packed numbers", TypeError,
     "mods.packed: mask must be a NumPy array of bools, .*, got dtype float32; write mask != 0",
     lambda: mods.packed(ones(3, 3))),
    ("packed vector", ValueError, r"mods.packed: mask must have shape \[T, S\], both positive, got \(3,\)",
     lambda: mods.packed(ones(3, dtype=bool))),
    ("packed graph that is traced", TypeError,
     "mods.packed: mask must be known, got a traced one; pack it outside of jax.jit, and hand over mod_args",
     lambda: jax.jit(mods.packed)(BipartiteCSC.from_coo([0], [1], 2, 2))),
    ("joined", TypeError, "a mask must be combined with a Mask, got function; write mods.Mask",
     lambda: mods.causal & (lambda b, h, r, c: r < c)),
)  # fmt: skip


@pytest.mark.parametrize(("exception", "words", "call"), NAMED)
def test_named(exception, words, call):
    with pytest.raises(exception, match=words):
        call()


def closing_over_an_array(batch, head, row, column):
    return jnp.asarray([True, False, True])[(row + column) % 3]


REFUSED = (
    ("mosaic_gpu", "mask_mod reads an array at places that depend on row and column together",
     {"mask_mod": mods.blocks(2), "mod_args": (ones(1, 3, 4, dtype=bool),)}),
    ("mosaic_gpu", "mask_mod reads an array at blocks of rows and columns, .* hand over a mask array",
     {**dict(zip(("mask_mod", "mod_args"), mods.packed(ones(T, S, dtype=bool)), strict=True)),
      "query_positions": np.arange(T)}),
    ("mosaic_gpu", "mask_mod reads an array at places that depend on row and column together, .* one value",
     {"mask_mod": closing_over_an_array}),
    ("mosaic_tpu", "score_mod reads an array at places that depend on row and column together, .* bias array",
     {"score_mod": lambda x, b, h, r, c, table: x + table[r, c], "mod_args": (ones(T, T),)}),
    ("mosaic_tpu", "score_mod reads an array at row - column, .* not of query_positions .* leave these out",
     {"score_mod": mods.relative_bias(2), "mod_args": (ones(N, 5),), "query_positions": np.arange(T)}),
    ("mosaic_tpu", "score_mod reads arrays and cannot be traced on one element: IndexError",
     {"score_mod": lambda x, b, h, r, c, at: x * at[h[..., :1]], "mod_args": (ones(N),)}),
    ("mosaic_tpu", "mask_mod reads arrays and is not elementwise: '.*' makes several numbers of one",
     {"mask_mod": lambda b, h, r, c, few: jnp.stack([r - c, c - r]).max(0) > few[0], "mod_args": (FEW,)}),
    ("mosaic_tpu", "its tiles hold 32 bits a number, and mask_mod computes in int64",
     {"mask_mod": mods.document, "mod_args": (np.arange(7),)}),
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

    sizes = {"query": (B, T, N, 4), "key": (B, S, 3, 4), "value": (B, S, 3, HV)}
    operands = {argument: jnp.ones(shape, jnp.bfloat16) for argument, shape in sizes.items()}
    with pallas.interpreting(name), pytest.raises(NotImplementedError, match=words):
        attention(**operands, **options, implementation=name)
