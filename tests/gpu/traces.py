"""What the kernels that ran on a chip trace to, as digests: a change of a kernel that has not run is noticed.

`PYTHONPATH=tests python -m gpu.traces` prints the digests of the code at hand, `--write` keeps them in
`traces.json` and tells what to write in `GENERATIONS`, in `jax_attn_bwd/_core/targets.py`. A digest is of the
programs of all kernels that a training step launches, as JAX 0.12 prints them, and of the types of what they
read. What stands around them, which XLA compiles, is not part of it.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_attn_bwd
from jax_attn_bwd import mods
from jax_attn_bwd._core import targets
from jax_attn_bwd._core.cases import is_floating

FILE = Path(__file__).with_name("traces.json")
JAX = (0, 12)  # whose printed programs the digests are of
CHIP = "H100"
_PALLAS = ("mpmd_map", "core_map", "pallas_call")
_CUDNN = ("dot_product_attention_fwd", "dot_product_attention_bwd")


class Call(NamedTuple):
    """A training step of an operator: the types of its arrays, and its options."""

    operator: str
    arrays: dict[str, jax.ShapeDtypeStruct]
    options: dict[str, Any]


def _array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _dense(B=2, T=1024, S=1024, N=8, K=8, H=128, Hv=128, dtype="bfloat16", more=None, **options):
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv)}
    arrays = {name: _array(*shape, dtype=dtype) for name, shape in shapes.items()}
    return Call("dot_product_attention", arrays | (more or {}), options)


def _softmax(*shape, dtype="bfloat16", more=None, **options):
    return Call("scaled_masked_softmax", {"x": _array(*shape, dtype=dtype)} | (more or {}), options)


def _tokens(*names, shape=(2,)):
    return {name: _array(*shape, dtype="int32") for name in names}


_SEGMENTS = _tokens("query_segment_ids", "key_value_segment_ids", shape=(2, 1024))
_LENGTHS = _tokens("query_seq_lengths", "key_value_seq_lengths")
_DENSE = {
    "full, H=64": _dense(H=64, Hv=64),
    "causal": _dense(is_causal=True),
    "causal, H=256": _dense(H=256, Hv=256, is_causal=True),
    "causal, any order": _dense(is_causal=True, deterministic_sums=False),
    "causal, grouped, Hv=64": _dense(K=2, Hv=64, is_causal=True),
    "T=300, S=500": _dense(T=300, S=500),
    "causal, float16": _dense(dtype="float16", is_causal=True),
    "window": _dense(is_causal=True, local_window_size=(256, 0)),
    "segments": _dense(more=_SEGMENTS, is_causal=True),
    "lengths": _dense(more=_LENGTHS),
    "bias": _dense(more={"bias": _array(1, 8, 1024, 1024)}),
    "mask": _dense(more={"mask": _array(2, 1, 1024, 1024, dtype=bool)}),
    "padding": _dense(more={"mask": _array(2, 1, 1, 1024, dtype=bool)}),
    "sink": _dense(more={"sink": _array(8)}, is_causal=True),
}
_OURS_ALONE = {
    "dropout": _dense(more={"dropout_key": _array(2, dtype="uint32")}, dropout_rate=0.1),
    "soft cap": _dense(is_causal=True, logits_soft_cap=30.0),
    "mask_mod": _dense(mask_mod=mods.static_prefix_lm(100)),
    "score_mod": _dense(more={"mod_args": (_array(8, dtype="float32"),)}, score_mod=mods.alibi),
    "softmax": _softmax(8, 16, 1024, 1024),
    "softmax, causal": _softmax(4, 8, 512, 512, is_causal=True),
    "softmax, float32, padding": _softmax(
        4, 8, 512, 1000, dtype="float32", more={"mask": _array(4, 1, 1, 1000, dtype=bool)}
    ),
    "softmax, long rows": _softmax(64, 65536),
}
CALLS = {"mosaic_gpu": _DENSE | _OURS_ALONE, "cudnn": _DENSE}


def of_code() -> dict[str, dict[str, str]]:
    """Returns the digest of each call, by implementation, as the code at hand traces it."""
    with targets.aimed_at(CHIP):
        return {
            name: {
                call: _digest("".join(_kernels(_step(name, given).jaxpr))) for call, given in calls.items()
            }
            for name, calls in CALLS.items()
        }


def of_all(digests: dict[str, str]) -> str:
    """Returns one digest of all calls of an implementation: the word of `GENERATIONS`."""
    return _digest(json.dumps(digests, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _step(implementation: str, call: Call) -> Any:
    """Traces the outputs and all gradients of a call."""
    function = getattr(jax_attn_bwd, call.operator)
    moves = lambda x: all(map(is_floating, jax.tree.leaves(x)))
    moving = {name: x for name, x in call.arrays.items() if moves(x)}
    others = {name: x for name, x in call.arrays.items() if name not in moving}

    def step(moving, others):
        run = lambda moving: function(**moving, **others, **call.options, implementation=implementation)
        out, pullback = jax.vjp(run, moving)
        return out, pullback(out)

    return jax.make_jaxpr(step)(moving, others)


def _kernels(jaxpr: Any) -> Iterator[str]:
    """Prints the kernels of a program, in their order."""
    for equation in jaxpr.eqns:
        types = [str(x.aval) for x in equation.invars]
        name, parameters = equation.primitive.name, equation.params
        if name.removesuffix("_p") in _CUDNN:
            yield f"{name} {types} {sorted((key, str(x)) for key, x in parameters.items())}\n"
        elif name in _PALLAS:
            yield re.sub(r"0x[0-9a-f]+", "", f"{types} {parameters.get('jaxprs') or parameters['jaxpr']}\n")
        else:
            is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            for x in jax.tree.leaves(list(parameters.values()), is_leaf=is_program):
                if is_program(x):
                    yield from _kernels(getattr(x, "jaxpr", x))


def main() -> None:
    """Prints the digests of the code at hand, or keeps them."""
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m gpu.traces", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the digests in traces.json")
    found = of_code()
    if not parser.parse_args().write:
        print(json.dumps(found))
        return
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    for name, digests in found.items():
        print(f'{name}: traces="{of_all(digests)}"')


if __name__ == "__main__":
    main()
