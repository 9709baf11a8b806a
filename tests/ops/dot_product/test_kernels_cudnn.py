"""cuDNN under our contract: what it is handed is what `jax.nn` hands it, and what is made of its answers.

No GPU: programs are lowered for one, and a twin in jnp stands for the two primitives. `tests/contract` holds
the twin against the definition, with poison.
"""

import contextlib
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, quick_jit, thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops.dot_product.kernel_calls import BF16, gpu, shapes

import jax_attn_bwd
from jax_attn_bwd import dot_product_attention
from jax_attn_bwd._core import pallas
from jax_attn_bwd.ops.dot_product.kernels import cudnn
from jax_attn_bwd.parallel import ring_attention

NAME = "cudnn"
OLD = jax.__version_info__ < (0, 11)
I32 = np.int32


@pytest.fixture
def twin():
    with pallas.interpreting(NAME):
        yield


@contextlib.contextmanager
def lowered_for_gpu(monkeypatch, kind="NVIDIA H200"):
    """Programs that are traced here are for that GPU; the primitives do not lower on an abstract device."""
    with monkeypatch.context() as patch:
        patch.setattr("jax_attn_bwd._core.targets.platform", lambda: "gpu")
        patch.setattr("jax_attn_bwd._core.targets.device_kind", lambda: kind)
        patch.setattr(f"{cudnn._MODULE}.check_cudnn_version", lambda: 91900)
        patch.setattr(f"{cudnn._MODULE}.check_compute_capability", lambda capability: True)
        yield


def custom_calls(function, *arguments):
    """The calls of cuDNN: target, options, and the types and layouts of operands and results."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"stablehlo\.custom_call @(__cudnn\S+?)\(.*?\) (\{.*)", text)
    assert len(found) == text.count("@__cudnn")
    return found


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


PLAIN = {"query": array(2, 128, 4, 64), "key": array(2, 128, 4, 64), "value": array(2, 128, 4, 64)}
GROUPED = {"query": array(2, 128, 4, 64), "key": array(2, 256, 2, 64), "value": array(2, 256, 2, 64)}
LENGTHS = {"query_seq_lengths": array(2, dtype=I32), "key_value_seq_lengths": array(2, dtype=I32)}
BIAS, MASK = {"bias": array(1, 4, 128, 128)}, {"mask": array(2, 1, 128, 128, dtype=bool)}
HANDED = {
    "plain": (PLAIN, {}),
    "scale": (PLAIN, {"scale": 0.3}),
    "float16": ({name: array(*x.shape, dtype=jnp.float16) for name, x in PLAIN.items()}, {}),
    "wide heads": ({name: array(2, 128, 4, 256) for name in PLAIN}, {"is_causal": True}),
    "causal": (PLAIN, {"is_causal": True}),
    "causal, grouped": (GROUPED, {"is_causal": True}),
    "window": (PLAIN, {"is_causal": True, "local_window_size": (30, 0)}),
    "lengths": (PLAIN | LENGTHS, {}),
    "lengths, causal": (GROUPED | LENGTHS, {"is_causal": True}),
    "lengths, window": (PLAIN | LENGTHS, {"is_causal": True, "local_window_size": (30, 0)}),
    "bias": (PLAIN | BIAS, {}),
    "bias, mask, causal": (PLAIN | BIAS | MASK, {"is_causal": True}),
    "mask": (PLAIN | MASK, {}),
}


@pytest.mark.parametrize("name", HANDED)
def test_cudnn_is_handed_what_jax_nn_hands_it(name, monkeypatch):
    arrays, options = HANDED[name]
    floats = [n for n in ("query", "key", "value", "bias") if n in arrays]

    def step(call):
        def run(arrays):
            inputs = {n: arrays[n] for n in floats}
            out, pull = jax.vjp(lambda i: call(**{**arrays, **i}, **options, implementation=NAME), inputs)
            return out, pull(jnp.ones_like(out))

        return run

    with lowered_for_gpu(monkeypatch):
        ours, theirs = (
            custom_calls(step(f), arrays) for f in (dot_product_attention, jax.nn.dot_product_attention)
        )
    assert [target for target, _ in ours] == [target for target, _ in theirs]
    assert len(ours) == 2
    assert ours[0] == theirs[0]
    if not (OLD and name == "mask"):  # jax.nn of then computes the gradient of a mask, too
        assert ours[1] == theirs[1]


def test_the_cotangent_of_lse_is_a_second_call_with_other_arrays(monkeypatch):
    def loss(q, k, v):
        out, lse = dot_product_attention(q, k, v, return_residual=True, implementation=NAME)
        return out.astype(jnp.float32).sum() + lse.sum()

    with lowered_for_gpu(monkeypatch):
        found = custom_calls(jax.grad(loss, (0, 1, 2)), *PLAIN.values())
    assert [target for target, _ in found] == ["__cudnn$fmhaSoftmax"] + ["__cudnn$fmhaSoftmaxBackward"] * 2
    assert found[1] == found[2]


@pytest.mark.parametrize("names", [("attention_out", "attention_lse"), ()], ids=["saved", "not saved"])
def test_remat_by_name_saves_the_forward(names, monkeypatch):
    """Else it is run again, by the same call; the backward is run once in either case."""

    def layer(q, k, v):
        return jnp.sin(dot_product_attention(q, k, v, implementation=NAME).astype(np.float32)).sum()

    policy = jax.checkpoint_policies.save_only_these_names(*names)
    remat = jax.value_and_grad(jax.checkpoint(layer, policy=policy), (0, 1, 2))
    with lowered_for_gpu(monkeypatch):
        found = custom_calls(remat, *PLAIN.values())
    *forwards, (last, _) = found
    assert last == "__cudnn$fmhaSoftmaxBackward"
    assert [target for target, _ in forwards] == ["__cudnn$fmhaSoftmax"] * (1 if names else 2)
    assert len(set(forwards)) == 1


def test_the_private_functions_are_those_that_are_known():
    assert cudnn.unknown() is None
    added = {"score_mod_name", "score_mod_jaxpr"} if jax.__version_info__ >= (0, 12) else set()
    assert set(cudnn._private().more) == added


@pytest.mark.parametrize("change", ["gone", "renamed", "another option"])
def test_other_private_functions_are_not_called_and_explain_says_so(change, monkeypatch):
    name = f"{cudnn._MODULE}._dot_product_attention_bwd_cuda_lowering"
    if change == "gone":
        monkeypatch.delattr(name)
    else:
        more = "sinks" if change == "another option" else "page_table_v"
        arrays = ", ".join(("ctx", *cudnn._ARRAYS, *cudnn._SAVED)).replace("page_table_v, ", "")
        monkeypatch.setattr(name, eval(f"lambda {arrays}, *, {more}: None"))
    cudnn._private.cache_clear()
    try:
        with gpu():
            reason = jax_attn_bwd.explain(dot_product_attention, **shapes())[NAME]
        assert reason.startswith(
            f"JAX {jax.__version__} is not known: its private functions are not those of"
        )
    finally:
        cudnn._private.cache_clear()


def some(seed=0, B=2, T=6, S=8, N=4, K=2, H=8, dtype=BF16, **more):
    rng = np.random.default_rng(seed)
    made = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H), **more}
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in made.items()}


def linear(dtype=np.float32, **options):
    """A loss of both outputs."""

    def loss(arrays):
        out, lse = dot_product_attention(**arrays, **options, return_residual=True)
        weights = (jnp.sin(jnp.arange(x.size, dtype=dtype)).reshape(x.shape) for x in (out, lse))
        return sum((x.astype(dtype) * w).sum() for x, w in zip((out, lse), weights, strict=True))

    return loss


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    ("axes", "bias"), [((0, None), (1, 1, 6, 8)), ((None, 0), (2, 1, 6, 8))], ids=["query", "bias"]
)
def test_vmap_adds_to_the_batch(axes, bias):
    """The bias may be common to what is mapped over, and to the batch; its gradients are of each entry."""
    of_query, of_bias = axes
    arrays, extra = some(bias=bias), some(1, bias=bias)
    both = lambda name: jnp.stack([arrays[name], extra[name]])
    given = arrays | ({"query": both("query")} if of_query == 0 else {})
    given |= {"bias": both("bias")} if of_bias == 0 else {}
    in_axes = dict.fromkeys(arrays) | {"query": of_query, "bias": of_bias}
    each = jax.value_and_grad(linear(implementation=NAME, is_causal=True))
    got = quick_jit(jax.vmap(each, (in_axes,)))(given)
    for i in range(2):
        alone = {name: given[name] if in_axes[name] is None else given[name][i] for name in arrays}
        expected = quick_jit(each)(alone)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert_close(x[i].astype(np.float32), y.astype(np.float32), 1e-2)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("manual", [False, pytest.param(True, marks=thorough)], ids=["explicit", "shard_map"])
def test_shards_of_batch_and_heads(manual):
    arrays = some(N=4, K=4, bias=(1, 4, 6, 8), sink=(4,))
    specs = dict.fromkeys(("query", "key", "value"), P("b", None, "n"))
    specs |= {"bias": P(None, "n"), "sink": P("n")}
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    squares = lambda out, lse: (out.astype(np.float32) ** 2).sum() + jnp.sin(lse).sum()
    call = lambda a: dot_product_attention(**a, implementation=NAME, is_causal=True, return_residual=True)
    expected = quick_jit(jax.grad(lambda a: squares(*call(a))))(arrays)
    out_specs = (specs["query"], P("b", None, "n"))
    run = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=out_specs) if manual else call
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})
        got = quick_jit(jax.grad(lambda a: squares(*run(a))))(placed)
    for name in arrays:
        assert_close(got[name].astype(np.float32), expected[name].astype(np.float32), 1e-2, name)


@thorough
@pytest.mark.usefixtures("twin")
def test_remat_gives_the_same_bits():
    arrays = some(sink=(4,))
    loss = linear(implementation=NAME, is_causal=True, key_value_seq_lengths=np.array([7, 0], I32))
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    forms = loss, jax.checkpoint(loss), jax.checkpoint(loss, policy=policy)
    expected, *others = quick_jit(lambda arrays: [jax.value_and_grad(f)(arrays) for f in forms])(arrays)
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.usefixtures("twin")
def test_a_ring_hands_each_block_the_lse_and_the_output_of_whole_rows():
    arrays = some(T=8, sink=(4,))
    specs = {name: P() if name == "sink" else P(None, "s") for name in arrays}
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def step(name):
        def block(**arrays):
            return ring_attention(
                **arrays, axis_name="s", is_causal=True, return_residual=True, implementation=name
            )

        run = jax.shard_map(
            lambda a: block(**a), mesh=mesh, in_specs=(specs,), out_specs=(P(None, "s"), P(None, "s"))
        )

        def loss(arrays):
            out, lse = run(arrays)
            return (out.astype(np.float32) ** 2).sum() + jnp.sin(lse).sum()

        return quick_jit(jax.grad(loss))(arrays)

    got, expected = step(NAME), step("xla")
    for name in arrays:
        assert_close(got[name].astype(np.float32), expected[name].astype(np.float32), 2e-2, name)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    ("dtype", "least"), [(BF16, -1e13), (jnp.float16, -65504.0)], ids=["bfloat16", "float16"]
)
def test_biases_far_below_what_hides(dtype, least):
    """Rows all of whose keys are hidden by large negative numbers, as float masks do, are tied."""
    arrays = some(T=8, dtype=dtype)
    bias, mask = np.zeros((1, 1, 8, 8)), np.ones((8, 8), bool)
    bias[..., 2, :], bias[..., 3, :5], bias[..., 4, :] = least, least, -least
    mask[2, 3:], mask[3, 5:], mask[6] = False, False, False
    arrays["bias"] = jnp.asarray(bias, dtype)

    def run(arrays, name):
        call = lambda key: dot_product_attention(
            **{**arrays, "key": key}, mask=mask, return_residual=True, implementation=name
        )
        (out, lse), pull = jax.vjp(call, arrays["key"])
        return out, lse, *pull((jnp.cos(out), jnp.ones_like(lse)))

    got = quick_jit(lambda a: run(a, NAME))(arrays)
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    expected = quick_jit(lambda a: run(a, "xla"))(wide)
    for x, y, rtol in zip(got, expected, (1e-2, 1e-6, 2e-2), strict=True):
        assert_close(x, y, rtol)


@pytest.mark.parametrize("dtype", [BF16, jnp.float16], ids=["bfloat16", "float16"])
def test_a_float32_is_held_by_three_narrow_numbers(dtype):
    rest = jnp.asarray(np.outer([1e-4, 1.0, 3e7], np.random.default_rng(0).standard_normal(100)), np.float32)
    q = jnp.zeros((3, 100, 1, 8), dtype)
    arrays, out, dout = cudnn._rest_of_delta(cudnn.Arrays(q, q, q), rest[..., None])
    held = (out.astype(np.float64) * dout.astype(np.float64)).sum(-1)[..., 0]
    assert not np.asarray(arrays.v).any()
    for x, y in zip(held, rest, strict=True):
        assert_close(x, y, 1e-6)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    ("T", "mask", "read", "has_ends"),
    [
        (8, True, (8, 256), False),
        (8, False, (8, 192), False),
        (1, False, (1, 192), True),
        (1, True, (2, 256), False),
    ],
)
def test_what_versions_have_wrong_of_low_logits_is_gone_round(monkeypatch, T, mask, read, has_ends):
    """On Hopper dq was NaN beside a bias where half of the last 128 keys is left; dk and dv of one query."""
    arrays = some(T=T, S=192)
    if mask:
        arrays["mask"] = jnp.arange(192) % 5 > 0
    seen, twin = [], cudnn.TWIN

    def backward(call, arrays, *given):
        seen.append(arrays)
        return twin.backward(call, arrays, *given)

    monkeypatch.setattr(cudnn, "TWIN", SimpleNamespace(forward=twin.forward, backward=backward))
    moving = {name: x for name, x in arrays.items() if name != "mask"}
    rest = {name: x for name, x in arrays.items() if name == "mask"}
    got, expected = (
        jax.grad(lambda x, name=name: linear(implementation=name)(x | rest))(moving) for name in (NAME, "xla")
    )
    assert (seen[0].q.shape[1], seen[0].k.shape[1]) == read
    assert (seen[0].rows_end is not None) == has_ends
    for name, x in got.items():
        assert_close(x.astype(np.float32), expected[name].astype(np.float32), 2e-2)


BIG = {**PLAIN, "key": array(1, 40000, 1, 64), "value": array(1, 40000, 1, 64), "query": array(1, 8, 1, 64)}
LONG = array(8, 2**14, 16, 64)
IDS = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), array(8, 2**14, dtype=I32))
DOCUMENTS = dict.fromkeys(PLAIN, LONG) | IDS
REFUSED = {
    "float32": (shapes(dtype=np.float32), {}, "multiplies bfloat16 and float16, not float32"),
    "bias": (
        {**PLAIN, "bias": array(128, 128, dtype=np.float32)},
        {},
        "bias has the dtype of query, bfloat16, not",
    ),
    "H": (shapes(H=257, Hv=8), {}, "to 128, on Hopper to 256, got H = 257 and Hv = 8"),
    "no keys": (shapes(S=0), {}, "nothing to compute"),
    "soft cap": (PLAIN, {"logits_soft_cap": 30.0}, "no soft cap"),
    "dropout": (PLAIN, {"dropout_rate": 0.1, "dropout_key": np.zeros(2, np.uint32)}, "other random bits"),
    "mask_mod": (PLAIN, {"mask_mod": lambda b, h, row, column: column <= row}, "it takes no functions"),
    "scale": (PLAIN, {"scale": -1.0}, "a positive scale, got -1.0"),
    "precision": (PLAIN, {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}, "one product algorithm"),
    "window": (PLAIN, {"local_window_size": 3}, "to the left of causal attention, got"),
    "window, T > S": (
        shapes(T=70, S=40),
        {"is_causal": True, "local_window_size": 3},
        "as many keys as queries",
    ),
    "one": (shapes(T=1, S=1), {}, "no backward for one query and one key"),
    "keys": (BIG, {"mask": array(1, 40000, dtype=bool)}, "up to 32768 keys, got 40000"),
    "elements": ({name: array(64, 2**15, 16, 64) for name in PLAIN}, {}, "for 2147483648 elements of query"),
    "documents": (DOCUMENTS, {}, "a bias of 4.0 GiB would be formed of what hides and adds, 2 are allowed"),
    "documents, a bias by head": (
        {**DOCUMENTS, "bias": array(1, 16, 1, 1)},
        {},
        "a bias of 64.0 GiB would be formed of what hides and adds, 2 are allowed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    arrays, options, reason = REFUSED[name]
    with gpu():
        found = jax_attn_bwd.explain(dot_product_attention, **arrays, **options)
    assert reason in found.refused[NAME]


def test_what_the_caller_gave_may_be_of_any_size():
    """Of `DOCUMENTS`, one of the eight entries by itself, and all of them beside a mask of their size."""
    alone = {name: array(1, *x.shape[1:], dtype=x.dtype) for name, x in DOCUMENTS.items()}
    beside = DOCUMENTS | {"mask": array(8, 1, 2**14, 2**14, dtype=bool)}
    for arrays in (alone, beside):
        assert jax_attn_bwd.explain(dot_product_attention, **arrays, platform="A100")[NAME] == "ok"


def test_where_it_can_run_it_is_picked_or_named_by_the_environment(monkeypatch):
    for kind, size, runs in (("NVIDIA A100-SXM4-80GB", 128, True), ("NVIDIA H200", 256, True),
                             ("NVIDIA B200", 256, False), ("Tesla V100", 64, False)):  # fmt: skip
        with gpu(kind):
            found = jax_attn_bwd.explain(dot_product_attention, **shapes(H=size))
        assert (NAME not in found.refused) == runs, kind
    monkeypatch.setenv("JAX_ATTN_BWD_GPU_KERNELS", NAME)
    with gpu("NVIDIA A100-SXM4-80GB"):
        assert jax_attn_bwd.explain(dot_product_attention, **shapes())[NAME] == "ok"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true")
    with gpu():
        assert "crashes" in jax_attn_bwd.explain(dot_product_attention, **shapes())[NAME]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with gpu():
        assert jax_attn_bwd.explain(dot_product_attention, **shapes())[NAME] == "ok"
