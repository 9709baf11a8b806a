"""`compat.megengine`: what MegEngine itself computed, and its formulas written out for what it refuses."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat_helpers import QUICK, outputs_and_gradients
from helpers import assert_close

from jax_attn_bwd.compat import megengine

GOLDEN = Path(
    os.environ.get("JAX_ATTN_BWD_MEGENGINE_GOLDEN")
    or Path(__file__).parents[2] / "shared/golden/megengine_multi_head_attention.npz"
)
N, L, S, H, E = 2, 3, 5, 2, 8


@pytest.mark.skipif(
    not GOLDEN.exists(), reason="the outputs of MegEngine 1.13 are not on this machine"
)
def test_as_megengine_itself():
    """Every recorded call: output, weights, gradients of query, key, value and the packed weights."""
    arrays = np.load(GOLDEN)
    cases = json.loads(str(arrays["meta"]))
    assert cases
    for c in cases:
        name = c["name"]
        masks = ("attn_mask", "key_padding_mask")
        masks = {m: arrays[f"{name}/{m}"] for m in masks if f"{name}/{m}" in arrays.files}

        def run(x, c=c, masks=masks):
            return megengine.multi_head_attention(
                *x[:3], c["E"], c["H"], 0.0, 0.0, x[3], c["qp"], c["kp"], c["vp"], c["op"], c["qb"],
                c["kb"], c["vb"], c["ob"], need_weights=c["need"], average_attn_weights=c["avg"],
                is_causal=c["causal"], **masks,
            )  # fmt: skip

        def cotangents(outputs, dy=arrays[f"{name}/dy"]):
            return dy, None if outputs[1] is None else np.zeros(outputs[1].shape, np.float32)

        moving = [jnp.asarray(arrays[f"{name}/{x}"]) for x in "qkvw"]
        (out, weights), gradients = outputs_and_gradients(run, moving, cotangents)
        assert_close(out, arrays[f"{name}/out"], 1e-5, f"{name}: out")
        assert (weights is None) == (f"{name}/weights" not in arrays.files)
        if weights is not None:
            assert_close(weights, arrays[f"{name}/weights"], 1e-5, f"{name}: weights")
        for x, gradient in zip("qkvw", gradients, strict=True):
            assert_close(gradient, arrays[f"{name}/d{x}"], 1e-5, f"{name}: d{x}")


def source(given, sizes, flags, added, add_zero_attn=False, reslink=False):
    """The source's steps in plain jnp: `added` `(N, H, L, S)` is what the masks add to the logits."""
    q, k, v = given["query"], given["key"], given["value"]
    qp, kp, vp, op = sizes
    shapes = [(E, qp), (k.shape[-1], kp), (v.shape[-1], vp), (vp or H * v.shape[-1], op)]
    flat, start, parts = given["io_weight_bias"].ravel(), 0, []
    biases = [(width,) if flag else (0,) for flag, (_, width) in zip(flags, shapes, strict=True)]
    for shape in (*shapes, *biases):
        parts.append(flat[start : start + int(np.prod(shape))].reshape(shape))
        start += int(np.prod(shape))
    assert start == flat.size

    def heads(x, w, b, row):
        if w.size:
            x = (x @ w + (b[None, None] if b.size else 0)).reshape(*x.shape[:2], H, -1)
        else:
            x = jnp.repeat(x[:, :, None], H, 2)
        if row is not None:
            row = row.reshape(1, 1, H if w.size else 1, -1)
            x = jnp.concatenate([x, jnp.broadcast_to(row, (len(x), 1, *x.shape[2:]))], 1)
        return jnp.moveaxis(x, 2, 1)

    q = heads(q, parts[0], parts[4], None)
    k = heads(k, parts[1], parts[5], given.get("bias_k"))
    v = heads(v, parts[2], parts[6], given.get("bias_v"))
    if add_zero_attn:
        k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0))) for x in (k, v))
    logits = q @ k.swapaxes(-1, -2) * (E // H if qp else E) ** -0.5
    extra = k.shape[2] - added.shape[-1]
    added = jnp.pad(added, ((0, 0), (0, 0), (0, 0), (0, extra)))
    weights = jax.nn.softmax(logits + jnp.broadcast_to(added, logits.shape), -1)
    out = jnp.moveaxis(weights @ v, 1, 2).reshape(len(q), q.shape[2], -1)
    if op:
        out = out @ parts[3] + (parts[7][None, None] if parts[7].size else 0)
    return out + given["query"] if reslink else out, weights.reshape(-1, *weights.shape[2:])


def draw(sizes=(E, E, E, E), flags=(True,) * 4, k_size=6, v_size=10, rows=False, batch=N):
    rng = np.random.default_rng(3)
    qp, kp, vp, op = sizes
    length = E * qp + k_size * kp + v_size * vp + (vp or H * v_size) * op
    length += sum(width for flag, width in zip(flags, sizes, strict=True) if flag)
    shapes = {
        "query": (batch, L, E), "key": (batch, S, k_size), "value": (batch, S, v_size),
        "io_weight_bias": (1, length),
    }  # fmt: skip
    if rows:
        shapes |= {"bias_k": (1, 1, kp or k_size), "bias_v": (1, 1, vp or v_size)}
    return {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}


def assert_as_source(sizes, flags, given, added, masks, *, of_source=None, **more):
    """Outputs and gradients against `source`, at random cotangents of output and weights."""
    of_source = of_source or {}
    names = dict(zip(("qproj_size", "kproj_size", "vproj_size", "oproj_size"), sizes, strict=True))
    names |= dict(zip(("qbias", "kbias", "vbias", "obias"), flags, strict=True))

    def run(given):
        rest = {**given, **masks, **names, **more}
        first = [rest.pop(x) for x in ("query", "key", "value")]
        return megengine.multi_head_attention(
            *first, E, H, 0.0, 0.0, rest.pop("io_weight_bias"), need_weights=True, **rest
        )

    def cotangents(outputs):
        rng = np.random.default_rng(4)
        return tuple(rng.standard_normal(x.shape) for x in outputs)

    got, gradients = outputs_and_gradients(run, given, cotangents)
    expected, expected_gradients = outputs_and_gradients(
        lambda given: source(given, sizes, flags, jnp.asarray(added), **of_source),
        given,
        cotangents,
    )
    for name, x, y in zip(("out", "weights"), got, expected, strict=True):
        assert_close(x, y, 1e-12, name)
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient, 1e-11, name)


NONE = np.zeros((1, 1, L, S))
ALL = (True,) * 4


@pytest.mark.parametrize(
    ("sizes", "flags", "widths"),
    [((E, E, E, E), ALL, (6, 10)), ((0, 0, 6, 5), (False, False, True, False), (E, 3)),
     ((0, 0, 0, 0), (False,) * 4, (E, 3))],
    ids=["projected", "value_and_output", "none"],
)  # fmt: skip
def test_what_megengine_refuses(sizes, flags, widths):
    """Appended rows beside projections of every kind, and the residual link where the widths allow it."""
    given = draw(sizes, flags, *widths, rows=True)
    of_source = {"add_zero_attn": True, "reslink": sizes[3] == E}
    assert_as_source(sizes, flags, given, NONE, {}, of_source=of_source, **of_source)


def bands():
    """name -> (masks and flags of the call, what they add to the logits (N, H, L, S))."""
    rng = np.random.default_rng(5)
    hidden = rng.random((N, S)) < 0.5
    hidden[:, 1] = False
    floats = rng.standard_normal((N * H, L, S))
    minus = lambda x: np.where(x, -np.inf, 0.0)  # noqa: E731
    row, column = np.arange(L)[:, None], np.arange(S)
    window = np.array([[0, 1, 0], [2, 5, 4]], np.int32)
    counts = np.array([[L, L], [4, 3]], np.int32)  # queries, keys
    outside = (column < window[0][:, None]) | (column >= window[1][:, None])
    outside = outside[None] | (column >= counts[1][:, None, None])
    return {
        "causal": ({"is_causal": True}, minus(column > row)[None, None]),
        "both": (
            {"attn_mask": floats, "key_padding_mask": hidden},
            floats.reshape(N, H, L, S) + minus(hidden)[:, None, None],
        ),
        "cudnn": (
            {"attn_mask": window, "key_padding_mask": counts, "maybe_cudnn_style_mask": True},
            minus(outside)[:, None],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["causal", "both", "cudnn"])
def test_masks_are_merged_by_the_rules(name):
    masks, added = bands()[name]
    rows = name == "cudnn"
    assert_as_source((E,) * 4, ALL, draw(rows=rows), added, masks)


def test_indices_of_a_narrow_dtype_do_not_wrap():
    """Of 300 keys uint8 tells 256 apart."""
    window, lengths = np.array([[0, 1, 2], [4, 5, 6]]), np.array([[3], [250]])
    query, key = np.ones((1, 3, 4)), np.random.default_rng(0).standard_normal((1, 300, 4))

    def weights(dtype):
        return megengine.multi_head_attention(
            query, key, key, 4, 2, 0.0, 0.0, np.ones(64), 4, 4, 4, 4, need_weights=True,
            maybe_cudnn_style_mask=True, attn_mask=window.astype(dtype),
            key_padding_mask=lengths.astype(dtype),
        )[1]  # fmt: skip

    np.testing.assert_array_equal(weights(np.uint8), weights(np.int32))


@pytest.mark.parametrize(
    "masks",
    [("attn_mask",), ("key_padding_mask",), ("attn_mask", "key_padding_mask")],
    ids="+".join,
)
def test_beside_a_mask_is_causal_changes_nothing(masks):
    """Nor does the hint do any harm: it is the same program."""
    given = draw(flags=(False,) * 4)
    every = {"attn_mask": np.eye(L, S, dtype=bool), "key_padding_mask": np.zeros((N, S))}
    masks = {name: every[name] for name in masks}

    def program(is_causal):
        return str(jax.make_jaxpr(lambda q, k, v, w: megengine.multi_head_attention(
            q, k, v, E, H, 0.0, 0.0, w, is_causal=is_causal, **masks))(*given.values()))  # fmt: skip

    assert program(True) == program(False)


@pytest.mark.parametrize("average", [False, True], ids=["per_head", "averaged"])
def test_unbatched_input_is_a_batch_of_one_without_its_axis(average):
    given = draw(batch=1)
    mask, padding = np.triu(np.ones((L, S), bool), 3), np.arange(S) > 3

    def run(given, mask, padding):
        return megengine.multi_head_attention(
            given["query"], given["key"], given["value"], E, H, 0.0, 0.0, given["io_weight_bias"],
            qbias=True, kbias=True, vbias=True, obias=True, need_weights=True,
            average_attn_weights=average, attn_mask=mask, key_padding_mask=padding,
        )  # fmt: skip

    alone = {name: x if name == "io_weight_bias" else x[0] for name, x in given.items()}
    both = jax.jit(
        lambda: (run(alone, mask, padding), run(given, mask, padding[None])), compiler_options=QUICK
    )
    (out, weights), (batched, of_batch) = both()
    assert out.shape == (L, E)
    assert weights.shape == ((L, S) if average else (H, L, S))
    assert_close(out, batched[0], 1e-13)
    assert_close(weights, of_batch[0] if average else of_batch, 1e-13)


def test_dropout_of_weights_and_output():
    """Weights come back as they multiply the values; the output is dropped after its bias; reslink is not."""
    given = draw((E, E, E, E), ALL)

    def run(training, attn_drop, out_drop, reslink=False):
        return megengine.multi_head_attention(
            given["query"], given["key"], given["value"], E, H, attn_drop, out_drop,
            given["io_weight_bias"], qbias=True, kbias=True, vbias=True, obias=True,
            need_weights=True, training=training, reslink=reslink, dropout_key=jax.random.key(1),
        )  # fmt: skip

    program = jax.jit(
        lambda: (run(True, 0.5, 0.0), run(True, 0.5, 0.4), run(True, 0.5, 0.4, True), run(False, 0.5, 0.4),
                 run(True, 0.0, 0.0)), compiler_options=QUICK,
    )  # fmt: skip
    (out, weights), (dropped, _), (linked, _), evaluated, plain = program()
    for x, y in zip(evaluated, plain, strict=True):
        np.testing.assert_array_equal(x, y)
    parts = megengine.unpack_io_weight_bias(
        given["io_weight_bias"],
        E,
        H,
        qbias=True,
        kbias=True,
        vbias=True,
        obias=True,
        k_size=6,
        v_size=10,
    )
    v = np.asarray(given["value"] @ parts.value_weight + parts.value_bias[None, None])
    v = np.moveaxis(v.reshape(N, S, H, E // H), 2, 1)
    z = np.moveaxis(np.asarray(weights).reshape(N, H, L, S) @ v, 1, 2).reshape(N, L, E)
    assert_close(out, z @ parts.out_weight + parts.out_bias[None, None], 1e-12)
    kept = np.asarray(weights) != 0
    assert_close(np.asarray(weights)[kept], 2 * np.asarray(plain[1])[kept], 1e-12)
    assert 0.3 < kept.mean() < 0.7
    kept = np.asarray(dropped) != 0
    assert 0.4 < kept.mean() < 0.8
    assert_close(np.asarray(dropped)[kept], np.asarray(out)[kept] / 0.6, 1e-12)
    assert_close(linked, dropped + given["query"], 1e-12)


def test_a_query_that_sees_nothing_gives_the_output_bias():
    given = draw()
    masks = {
        "attn_mask": np.array([[0, 1, 0], [2, 1, 4]]), "key_padding_mask": np.array([[L, 1], [S, 3]]),
        "maybe_cudnn_style_mask": True,
    }  # fmt: skip

    def run(given):
        return megengine.multi_head_attention(
            given["query"], given["key"], given["value"], E, H, 0.0, 0.0, given["io_weight_bias"],
            qbias=True, kbias=True, vbias=True, obias=True, need_weights=True, **masks,
        )  # fmt: skip

    cotangents = lambda outputs: tuple(np.ones(x.shape) for x in outputs)  # noqa: E731
    (out, weights), gradients = outputs_and_gradients(run, given, cotangents)
    empty = np.array([[False, True, False], [False, True, True]])
    bias = np.asarray(given["io_weight_bias"])[0, -E:]
    np.testing.assert_array_equal(np.asarray(out)[empty], np.broadcast_to(bias, (3, E)))
    np.testing.assert_array_equal(np.asarray(weights).reshape(N, H, L, S).swapaxes(1, 2)[empty], 0)
    np.testing.assert_array_equal(np.asarray(gradients["query"])[empty], 0)
    assert all(np.isfinite(g).all() for g in gradients.values())


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [((8, 8, 8, 8), ALL), ((0, 16, 6, 0), (False, True, False, False)),
     ((8, 8, 0, 5), (False, False, False, True))],
    ids=["all", "key_and_value", "no_value"],
)  # fmt: skip
def test_packing_round_trip(sizes, flags):
    packed = draw(sizes, flags)["io_weight_bias"]
    parts = megengine.unpack_io_weight_bias(packed, E, H, *sizes, *flags, k_size=6, v_size=10)
    widths = (E, 6, 10, sizes[2] or H * 10)
    for name, size, flag, width in zip(
        ("query", "key", "value", "out"), sizes, flags, widths, strict=True
    ):
        weight, bias = getattr(parts, f"{name}_weight"), getattr(parts, f"{name}_bias")
        assert weight is None if size == 0 else weight.shape == (width, size)
        assert bias.shape == (size,) if flag else bias is None
    first = next(x for x in parts if x is not None)
    np.testing.assert_array_equal(first.ravel(), packed[0, : first.size])
    np.testing.assert_array_equal(megengine.pack_io_weight_bias(*parts), packed)
    shaped = megengine.unpack_io_weight_bias(packed[0], E, H, *sizes, *flags, k_size=6, v_size=10)
    jax.tree.map(np.testing.assert_array_equal, shaped, parts)


PACKING_ERRORS = {
    "nothing": (lambda: megengine.pack_io_weight_bias(), ValueError, "at least one weight must be given"),
    "bias_alone": (
        lambda: megengine.pack_io_weight_bias(np.ones((2, 2)), out_bias=np.ones(2)),
        ValueError, "out_bias must be None without out_weight",
    ),
    "bias_width": (
        lambda: megengine.pack_io_weight_bias(np.ones((2, 3)), query_bias=np.ones(2)),
        ValueError, r"query_bias must have shape \(out,\) of its weight = \(3,\)",
    ),
    "rank": (lambda: megengine.pack_io_weight_bias(np.ones(2)), ValueError, "query_weight must have shape"),
    "length": (
        lambda: megengine.unpack_io_weight_bias(np.ones(255), E, H),
        ValueError, r"io_weight_bias must have 256 elements, got 255; it holds query_weight \(8, 8\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKING_ERRORS)
def test_bad_packing_gets_one_clear_error(name):
    function, error, words = PACKING_ERRORS[name]
    with pytest.raises(error, match=words):
        function()


CUDNN = dict(
    maybe_cudnn_style_mask=True,
    attn_mask=np.zeros((2, 3), int),
    key_padding_mask=np.zeros((2, 2), int),
)
ERRORS = {
    "length": (dict(io_weight_bias=np.zeros(7)), ValueError, "io_weight_bias must have 288 elements, got 7"),
    "no_weights": (dict(io_weight_bias=None), TypeError, "io_weight_bias must be a floating-point array"),
    "flag_alone": (dict(oproj_size=0), ValueError, "obias must be False where oproj_size is 0"),
    "heads": (dict(num_heads=3), ValueError, "qproj_size must be a multiple of num_heads = 3, got 8"),
    "value_heads": (dict(vproj_size=7), ValueError, "vproj_size must be a multiple of num_heads = 2"),
    "key_heads": (dict(kproj_size=6), ValueError, "kproj_size must make key heads as wide as query heads, 4"),
    "size": (dict(qproj_size=-8), ValueError, "qproj_size must be an int, 0 or more, got -8"),
    "embed_dim": (dict(embed_dim=9), ValueError, r"query must have shape \(N, L, embed_dim\) = \(2, 3, 9\)"),
    "rank": (dict(query=np.zeros(8)), ValueError, "query must have shape"),
    "key_rank": (dict(key=np.zeros((5, 8))), ValueError, r"key must have shape \(N, S, k_size\)"),
    "value_length": (dict(value=np.zeros((2, 4, 8))), ValueError, r"value must have shape \(N, S, v_size\)"),
    "bias_k_alone": (dict(bias_k=np.zeros((1, 1, 8))), ValueError, "bias_v must be given together"),
    "bias_v_alone": (dict(bias_v=np.zeros((1, 1, 8))), ValueError, "bias_k must be given together"),
    "row_shape": (
        dict(bias_k=np.zeros((1, 1, 4)), bias_v=np.zeros((1, 1, 8))),
        ValueError, r"bias_k must have shape \(1, 1, kproj_size or k_size\) = \(1, 1, 8\)",
    ),
    "reslink": (
        dict(oproj_size=0, obias=False, vproj_size=4, io_weight_bias=np.zeros(180), reslink=True),
        ValueError, "reslink must be False for an output of width 4 and a query of width 8",
    ),
    "narrow": (
        dict(num_heads=16, qproj_size=16, kproj_size=16, vproj_size=16, io_weight_bias=np.zeros(568)),
        ValueError, "embed_dim must be num_heads = 16 or more",
    ),
    "mask_shape": (
        dict(attn_mask=np.zeros((2, 3), bool)), ValueError,
        r"attn_mask must have shape \(L, S\) = \(3, 5\), got \(2, 3\); a mask in cudnn style needs",
    ),
    "mask_heads": (dict(attn_mask=np.zeros((2, 3, 5))), ValueError, r"shape \(N \* num_heads, L, S\)"),
    "padding_shape": (dict(key_padding_mask=np.zeros((5, 2))), ValueError, r"shape \(N, S\) = \(2, 5\)"),
    "integers": (dict(attn_mask=np.zeros((3, 5), int)), TypeError, "attn_mask must be boolean"),
    "cudnn_one": (CUDNN | dict(key_padding_mask=None), ValueError, "key_padding_mask must be given with"),
    "cudnn_none": (dict(maybe_cudnn_style_mask=True), ValueError, "attn_mask must be given with"),
    "cudnn_shape": (CUDNN | dict(attn_mask=np.zeros((3, 5), int)), ValueError, r"shape \(2, L\), with"),
    "cudnn_lengths": (CUDNN | dict(key_padding_mask=np.zeros((2, 5), int)), ValueError, r"shape \(2, N\)"),
    "cudnn_floats": (CUDNN | dict(attn_mask=np.zeros((2, 3))), TypeError, "attn_mask must be integers"),
    "dtypes": (dict(key=np.zeros((2, 5, 8), np.float32)), TypeError, "must have one dtype"),
    "no_key": (dict(out_drop=0.5), ValueError, "dropout_key must be given in training with attn_drop = 0.0"),
    "rate": (dict(attn_drop=-0.5), ValueError, r"attn_drop must lie in \[0, 1\]"),
    "flag": (dict(is_causal=1), TypeError, "is_causal must be a Python bool, got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_gets_one_clear_error(name):
    wrong, error, words = ERRORS[name]
    arguments = {
        "query": np.zeros((N, L, E)), "key": np.zeros((N, S, E)), "value": np.zeros((N, S, E)),
        "embed_dim": E, "num_heads": H, "attn_drop": 0.0, "out_drop": 0.0,
        "io_weight_bias": np.zeros(288), "qbias": True, "kbias": True, "vbias": True, "obias": True,
    }  # fmt: skip
    with pytest.raises(error, match=f"^megengine.multi_head_attention: .*{words}"):
        megengine.multi_head_attention(**arguments | wrong)
