"""The page of what runs where says what the kernels' `supports()` say."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import interpreted
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jax_attn_bwd
from jax_attn_bwd import BipartiteCSC, explain

PAGE = Path(__file__).parents[2] / ".docs" / "pages" / "what_runs_where.md"
CHIPS = {  # in the order of "A100 to B200"
    "mosaic_tpu": {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"},
    "mosaic_gpu": {name: f"NVIDIA {name}" for name in ("A100", "H100", "H200", "B200")},
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def softmax(array, size):
    return {"x": array(8, size)}


def dense(array, size):
    return {"query": array(1, 256, 2, size), "key": array(1, 256, 2, size), "value": array(1, 256, 2, size)}


def deformable(array, size):
    sampled = jax.ShapeDtypeStruct((1, 50, 2, 2, 4, 2), jnp.float32)
    weights = jax.ShapeDtypeStruct(sampled.shape[:-1], jnp.float32)
    shapes = ((6, 5), (3, 4))
    return {
        "value": array(1, 42, 2, size), "spatial_shapes": shapes,
        "sampling_locations": sampled, "attention_weights": weights,
    }  # fmt: skip


def graph(array, size):
    edges = BipartiteCSC.from_coo([0, 2, 1, 3], [1, 0, 1, 2], 4, 3)
    nodes = {"src": array(4, 16 * size), "dst": array(3, 16 * size)}
    return {"graph": edges, **nodes, "attention_weights": array(2 * 16 * size), "num_heads": 16}


def linear(array, size):
    return {"query": array(1, 256, 2, size), "key": array(1, 256, 2, size), "value": array(1, 256, 2, size),
            "log_decay": None, "beta": array(1, 256, 2)}  # fmt: skip


CALLS = {
    "scaled_masked_softmax": softmax,
    "gated_delta_rule": linear,
    "dot_product_attention": dense,
    "multi_scale_deformable_attention": deformable,
    "graph_attention": graph,
}


def cells(operator):
    """{implementation: what its cell says} of the operator's row; "-" is nothing."""
    lines = PAGE.read_text().splitlines()
    header = next(line for line in lines if line.startswith("| operator |"))
    row = next(line for line in lines if line.startswith(f"| `{operator}`"))
    columns = [re.search(r'"(\w+)"', title) for title in header.split("|")[2:-1]]
    found = zip(columns, row.split("|")[2:-1], strict=True)
    return {title[1]: text.strip() for title, text in found if text.strip() != "-"}


def chips(implementation, text):
    """Those that the cell names; all of the column if none."""
    names = list(CHIPS[implementation])
    if span := re.search(r"(\w+) to (\w+):", text):
        return set(names[names.index(span[1]) : names.index(span[2]) + 1])
    return {name for name in names if re.search(rf"\b{name}\b", text)} or set(names)


def runs(operator, implementation, chip, dtype, size):
    platform = implementation.removeprefix("mosaic_")
    device = AbstractDevice(CHIPS[implementation][chip], 100, platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    arguments = CALLS[operator](lambda *shape: jax.ShapeDtypeStruct(shape, dtype), size)
    with jax.sharding.use_abstract_mesh(mesh):
        reasons = explain(getattr(jax_attn_bwd, operator), **arguments)
        return implementation in reasons and implementation not in reasons.refused


@interpreted  # kernels of GPUs need the newer JAX
@pytest.mark.parametrize("operator", CALLS)
def test_it_tells_chips_dtypes_and_sizes(operator):
    told = cells(operator)
    for implementation in CHIPS:
        if implementation not in told:
            assert not any(runs(operator, implementation, c, "float32", 128) for c in CHIPS[implementation])
            continue
        text = told[implementation]
        (limit,) = re.findall(r" to (\d[\d,]*)", text)
        limit, named = int(limit.replace(",", "")), re.findall("bf16|fp16|fp32", text)
        for chip in CHIPS[implementation]:
            for name, dtype in DTYPES.items():
                expected = chip in chips(implementation, text) and name in (named or DTYPES)
                assert runs(operator, implementation, chip, dtype, 128) == expected, (chip, name)
                assert runs(operator, implementation, chip, dtype, limit) == expected, (chip, name, limit)
                assert not runs(operator, implementation, chip, dtype, 2 * limit), (chip, name, 2 * limit)


# a card of README's table, as its maker calls it; a cell: what the first implementation that is ok is
CARDS = {
    "H100, H200": ("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
    "A100": ("NVIDIA A100-SXM4-80GB",),
    "L40S": ("NVIDIA L40S",),
    "RTX 4090": ("NVIDIA GeForce RTX 4090",),
    "B200": ("NVIDIA B200",),
    "T4, V100 and older": ("Tesla T4", "Tesla V100-SXM2-16GB", "Tesla P100-PCIE-16GB"),
}
PICKED = {"mosaic_gpu": "our kernels", "cudnn": "cuDNN", "xla": "portable code"}


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="README tells of the newest JAX")
@pytest.mark.parametrize("cards", CARDS)
def test_readme_says_what_each_card_runs(cards):
    readme = PAGE.parents[2] / "README.md"
    (row,) = [x for x in readme.read_text().splitlines() if x.startswith(f"| {cards} | ")]
    halves = ("dot_product_attention", "bfloat16"), ("dot_product_attention", "float16")
    columns = [halves, [("dot_product_attention", "float32")], [("scaled_masked_softmax", "bfloat16")]]
    columns.append([(name, "bfloat16") for name in ("graph_attention", "multi_scale_deformable_attention")])
    for cell, calls in zip(row.split(" | ")[1:], columns, strict=True):
        for name, dtype in calls:
            array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
            for card in CARDS[cards]:
                found = explain(getattr(jax_attn_bwd, name), **CALLS[name](array, 64), platform=card)
                picked = next(i for i, reason in found.items() if reason == "ok")
                assert cell.removesuffix(" |").split(", kernels")[0] == PICKED[picked], (card, name, dtype)
                if calls is columns[-1]:
                    assert ("kernels to enable" in cell) == ("mosaic_gpu" not in found.refused)
