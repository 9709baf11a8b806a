"""Where cuDNN runs by itself: on cards whose kernels are not ours, where it takes the call."""

import re

import jax
import numpy as np
import pytest
from ops.dot_product.kernel_calls import gpu, shapes
from ops.dot_product.test_kernels_cudnn import BIAS, GROUPED, I32, IDS, LENGTHS, NAME, OLD, PLAIN, array

import jax_attn_bwd
from jax_attn_bwd import dot_product_attention
from jax_attn_bwd.ops.dot_product.kernels import cudnn

HOPPER = NAME if OLD else "mosaic_gpu"  # its kernels passed on JAX 0.11.2
CARDS = {
    "NVIDIA A100-SXM4-80GB": NAME,
    "NVIDIA A10G": NAME,
    "NVIDIA L40S": NAME,
    "NVIDIA GeForce RTX 3050 Laptop GPU": NAME,
    "NVIDIA GeForce RTX 4090": NAME,
    "NVIDIA GeForce RTX 5080": NAME,
    "NVIDIA RTX A6000": NAME,
    "NVIDIA RTX 6000 Ada Generation": NAME,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": NAME,
    "NVIDIA B200": NAME,
    "NVIDIA GB300": NAME,
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA GH200 480GB": HOPPER,
    "Tesla V100-SXM2-16GB": "xla",
    "Tesla T4": "xla",
    "Quadro RTX 6000": "xla",
    "NVIDIA GeForce RTX 2080 Ti": "xla",
    "NVIDIA GeForce GTX 1080": "xla",
}
# what runs by itself on a card whose kernels are cuDNN's alone
BY_ITSELF = {
    "causal": (PLAIN, {"is_causal": True}, NAME),
    "grouped": (GROUPED, {"deterministic_sums": False}, NAME),
    "padding": (PLAIN | {"mask": array(2, 1, 1, 128, dtype=bool)}, {}, NAME),
    "bias": (PLAIN | BIAS, {}, NAME),
    "documents": (PLAIN | dict.fromkeys(IDS, array(2, 128, dtype=I32)), {}, NAME),
    "lengths, window": (PLAIN | LENGTHS, {"is_causal": True, "local_window_size": (30, 0)}, NAME),
    "the same bits": (PLAIN, {"deterministic_sums": True}, "xla"),
    "float32": (shapes(dtype=np.float32), {}, "xla"),
    "soft cap": (PLAIN, {"logits_soft_cap": 30.0}, "xla"),
    "dropout": (PLAIN, {"dropout_rate": 0.1, "dropout_key": np.zeros(2, np.uint32)}, "xla"),
}


def picked(function, *args, **kwargs):
    return next(
        name for name, reason in jax_attn_bwd.explain(function, *args, **kwargs).items() if reason == "ok"
    )


@pytest.mark.parametrize("kind", CARDS)
def test_it_runs_by_itself_on_every_card_whose_kernels_are_not_ours(kind):
    with gpu(kind):
        assert picked(dot_product_attention, **PLAIN) == CARDS[kind]
        if CARDS[kind] == NAME:
            for arrays, options, name in BY_ITSELF.values():
                assert picked(dot_product_attention, **arrays, **options) == name


@pytest.mark.parametrize(
    ("chip", "name"), [("L40S", NAME), ("GeForce RTX 4090", NAME), ("RTX 3060", NAME), ("Tesla T4", "xla")]
)
def test_cards_are_known_by_the_names_of_everyday_speech(chip, name):
    assert picked(dot_product_attention, **PLAIN, platform=chip) == name


def test_layers_and_exchanges_take_it_by_themselves():
    x, params = array(2, 128, 4, 64), jax_attn_bwd.MultiHeadAttentionParams()
    layer = lambda x: jax_attn_bwd.multi_head_attention(params, x, num_heads=4)
    assert picked(layer, array(2, 128, 64), platform="A100") == NAME
    assert picked(jax.vmap(jax_attn_bwd.attention_fn), x, x, x, platform="A100") == NAME


def test_the_library_that_is_here_must_be_there_and_new_enough(monkeypatch):
    monkeypatch.setattr("jax_attn_bwd._core.targets.is_here", lambda: True)
    reason = lambda: jax_attn_bwd.explain(dot_product_attention, **PLAIN, platform="A100")[NAME]
    assert re.match("JAX finds no cuDNN here .*; `pip install", reason())  # that of this CPU
    for found, capability, words in (
        (90600, (8, 0), "ok"),
        (90600, (12, 0), "cuDNN is 9.6.0: it does not know this GPU; `pip install -U nvidia-cudnn"),
        (91001, (8, 9), "cuDNN is 9.10.1: its results are wrong"),
        (91002, (10, 3), "cuDNN is 9.10.2: it does not know this GPU"),
        (91100, (10, 3), "ok"),
    ):
        monkeypatch.setattr(cudnn, "version", lambda found=found: found)
        monkeypatch.setattr("jax_attn_bwd._core.targets.compute_capability", lambda c=capability: c)
        assert words in reason()


def test_what_a_version_has_wrong_is_refused(monkeypatch):
    """Windows beside lengths over many keys; without lengths, keys whose number 128 does not divide."""
    monkeypatch.setattr("jax_attn_bwd._core.targets.is_here", lambda: True)
    lengths = {name: array(1, dtype=I32) for name in LENGTHS}
    window = {"is_causal": True, "local_window_size": (30, 0)}
    calls = {
        "even": (shapes(T=64, S=1280), {}),
        "odd": (shapes(T=64, S=1300), {}),
        "odd, lengths": (shapes(T=64, S=1300) | lengths, {}),
        "odd, one query": (shapes(T=1, S=1300), {}),
        "lengths, window": (shapes(T=64, S=1280) | lengths, window),
    }
    for version, wrong in ((91400, {"odd", "lengths, window"}), (91500, {"odd"}), (91501, set())):
        monkeypatch.setattr(cudnn, "version", lambda found=version: found)
        for name, (arrays, options) in calls.items():
            reason = jax_attn_bwd.explain(dot_product_attention, **arrays, **options, platform="A100")[NAME]
            assert reason.startswith("cuDNN is 9.1") == (name in wrong), (version, name)
