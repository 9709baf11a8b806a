"""Draws a training step by lot, and compiles it beside the plain one.

A seed and a number are one program, the same on every machine and in every version of JAX.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.measure import TOLERANCES, Contender, Results, Workload, compiled_contender, step
from bench.race import rounding, surroundings
from bench.race.call import Budget, Call, Function, Lot, normal
from bench.race.deformable import deformable
from bench.race.dense import dense, layer
from bench.race.graph import graph
from bench.race.linear import linear
from bench.race.softmax import softmax
from jax_attn_bwd._core.cases import cast

# how the calls of an operator are drawn, and how many lots it has
DRAWN: dict[str, tuple[Callable[[Lot, Budget], Call], int]] = {
    "softmax": (softmax, 2),
    "dot_product": (dense, 3),
    "multi_head": (layer, 2),
    "deformable": (deformable, 2),
    "graph": (graph, 3),
    "linear_attention": (linear, 2),
}
WHOLE, QUICK = Budget(), Budget(2**18, 2e8)


class Program(NamedTuple):
    """Holds a training step that was drawn; nothing of it is computed yet."""

    seed: int
    number: int
    operator: str
    dtype: str
    call: Call

    @property
    def name(self) -> str:
        """Tells all but the seed."""
        return f"{self.number}: {self.operator} {self.dtype}, {self.call.name}"


def draw(seed: int, number: int, operators: Collection[str], budget: Budget) -> Program:
    """Draws a program of one of `operators`: alone, between others, under `vmap` or in a scan of layers."""
    lots = [name for name, (_, many) in DRAWN.items() if name in operators for _ in range(many)]
    operator = Lot(seed, number).one_of(lots)
    lot = Lot(seed, number, operator)
    dtype = lot.one_of(("float32", "float32", "bfloat16"))
    place = lot.one_of(("alone", "between", "vmap", "scan"))
    count = lot.one_of((2, 3, 4)) if place in ("vmap", "scan") else 1
    call = DRAWN[operator][0](lot, Budget(*(part / count for part in budget)))
    if place == "between":
        call = surroundings.between(lot, call)
    elif place == "vmap":
        call = surroundings.mapped(call, count)
    elif place == "scan":
        call = surroundings.layers(call, count, remat=lot.chance(0.5))
    return Program(seed, number, operator, dtype, call)


class Numbers(NamedTuple):
    """Holds what a program is computed of."""

    dout: jax.Array
    own_data: Any  # which ours may read, as a graph that was built before
    plain_data: Any
    arrays: dict[str, jax.Array]


def numbers(program: Program) -> Numbers:
    """Draws the numbers of a program."""
    call, rng = program.call, np.random.default_rng((program.seed, program.number))
    own_data, plain_data = call.data(rng)
    arrays = {name: cast(x.fill(rng, x.shape), x.dtype or program.dtype) for name, x in call.inputs.items()}
    return Numbers(cast(normal(rng, call.out), program.dtype), own_data, plain_data, arrays)


def steps(call: Call, function: Function) -> Callable[..., tuple]:
    """Returns `(dout, data, arrays) -> (out, *gradients)` of what the program differentiates."""

    def run(dout, data, arrays):
        wanted = {name: x for name, x in arrays.items() if call.inputs[name].wanted}
        return step(lambda wanted: function(data, {**arrays, **wanted}))(dout, wanted)

    return run


def workload(program: Program) -> Workload:
    """Draws the numbers, and compiles both steps, each from empty caches."""
    call = program.call
    dout, own_data, plain_data, arrays = numbers(program)

    def contender(name: str, function: Function, data: Any, **more: Any) -> Contender:
        jax.clear_caches()
        return compiled_contender(name, steps(call, function), dout, data, arrays, costs=True, **more)

    found = [
        contender("jax_attn_bwd", call.ours, own_data),
        contender("plain", call.plain, plain_data, compare=call.checked is None),
    ]
    if call.checked is not None:
        found.append(contender("plain, our dropout", call.checked, plain_data, timed=False))

    # chips round the factors of float32 products
    rounded = program.dtype if jax.default_backend() == "cpu" else "bfloat16"

    def plain_results(*args: Any, **options: str | bool) -> Results:
        compiled = (
            jax.jit(steps(call, call.checked or call.plain)).lower(*args).compile(compiler_options=options)
        )
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(compiled(*args))]

    def is_rounding(ours: Results, plain: Results) -> bool:
        if rounded == "float32":
            return rounding.of_terms_that_cancel(TOLERANCES[rounded], ours, plain)
        read = (dout, plain_data, arrays)
        as_written = plain_results(*read, xla_allow_excess_precision=False)
        with jax.default_matmul_precision("highest"):
            exact = plain_results(*jax.tree.map(_wide, read))
        return rounding.of_narrow(rounded, ours, as_written, exact)

    return Workload(program.name, found, tolerance=TOLERANCES[rounded], rounding=is_rounding)


def _wide(x: jax.Array) -> jax.Array:
    """Returns numbers in float32, and what is none as it is."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
