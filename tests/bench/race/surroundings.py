"""What stands around a call: producers and a consumer, a `vmap`, a scan of layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from bench.race.call import Call, Function, Lot, parameter


def _layer_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-5)).astype(x.dtype)


_NEIGHBOURS: dict[str, Callable[..., jax.Array]] = {
    "sine": jnp.sin,
    "GELU": jax.nn.gelu,
    "layer norm": _layer_norm,
    "product": lambda x, kernel: x @ kernel,
}
_WIDEST = 1024  # rows that are multiplied by a square kernel


def between(lot: Lot, call: Call) -> Call:
    """Puts a producer in front of each activation, and a consumer behind the result."""
    produced = {name: x.shape for name, x in call.inputs.items() if x.produced}
    places = {"before": produced, "behind": {"out": call.out}}
    # which, and the kernels of products
    kinds, kernels = {}, {}
    for place, shapes in places.items():
        fits = all(len(shape) > 1 and shape[-1] <= _WIDEST for shape in shapes.values())
        kinds[place] = lot.one_of([kind for kind in _NEIGHBOURS if fits or kind != "product"])
        if kinds[place] == "product":
            for name, (*_, width) in shapes.items():
                kernels[f"{name}_product"] = parameter(width, width, spread=width**-0.5)

    def wrap(function: Function) -> Function:
        def run(data, arrays):
            own = {name: x for name, x in arrays.items() if name not in kernels}

            def apply(place, name, x):
                read = [arrays[f"{name}_product"]] if kinds[place] == "product" else []
                return _NEIGHBOURS[kinds[place]](x, *read)

            made = {name: apply("before", name, own[name]) for name in produced}
            return apply("behind", "out", function(data, {**own, **made}))

        return run

    name = ", ".join(f"{kind} {place}" for place, kind in kinds.items())
    return call.inside(name, wrap, inputs=call.inputs | kernels)


def mapped(call: Call, count: int) -> Call:
    """Maps it over a new axis of all but parameters and graphs."""
    axes = {name: 0 if x.mapped else None for name, x in call.inputs.items()}
    inputs = {name: x._replace(shape=(count, *x.shape)) if x.mapped else x for name, x in call.inputs.items()}
    wrap = lambda function: jax.vmap(function, (None, axes))
    return call.inside(f"vmap of {count}", wrap, inputs=inputs, out=(count, *call.out))


def layers(call: Call, count: int, remat: bool) -> Call:
    """Scans over layers, each behind a layer norm, and added to what came before.

    Where the result has another shape than the first input, each layer reads that input anew.
    """
    first, x = next(iter(call.inputs.items()))
    hands_on = call.out == x.shape
    scale = parameter(*(1 for _ in x.shape[1:]), x.shape[-1], spread=0.1, mean=1.0)
    inputs = {
        name: x._replace(shape=(count, *x.shape)) if x.layered else x
        for name, x in (call.inputs | {"layer_scale": scale}).items()
    }

    def wrap(function: Function) -> Function:
        def run(data, arrays):
            learned = {name: x for name, x in arrays.items() if inputs[name].layered}
            shared = {name: x for name, x in arrays.items() if name not in learned}

            def layer(found, learned):
                learned = dict(learned)
                read = _layer_norm(found if hands_on else shared[first]) * learned.pop("layer_scale")
                return found + function(data, {**shared, **learned, first: read}), None

            start = shared[first] if hands_on else jnp.zeros(call.out, shared[first].dtype)
            return lax.scan(jax.checkpoint(layer) if remat else layer, start, learned)[0]

        return run

    return call.inside(f"scan of {count} layers" + ", remat" * remat, wrap, inputs=inputs)
