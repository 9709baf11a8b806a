"""What other packages make of an operator: `python tests/tools/other_packages.py`, of those installed.

Each tool is a function of a function of one array, or of what makes a layer. It runs on the plain formula, on
our call, and where that is refused on our call with `forward_mode=True`. A row is what
`.docs/pages/other_packages.md` says: "right", "forward_mode=True", the words of a refusal, or "fails by
itself", if the tool cannot be imported or takes the plain formula no more than ours. One that differs from
its expectation is marked, and the exit code is 1. With arguments, only the tools whose names hold one of them
run.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn_bwd

X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 2)), "float32")


def plain(x):
    logits = jnp.einsum("btnh,bsnh->bnts", x, x) * 2**-0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), x)


def ours(x, **options):
    return jax_attn_bwd.dot_product_attention(x, x, x, **options)


def softmax(x, **options):
    return jax_attn_bwd.scaled_masked_softmax(x, **options)


def flax_layer():
    from flax import nnx

    return nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=nnx.Rngs(0))


def our_layer(**options):
    from flax import nnx

    from jax_attn_bwd.layers.flax_nnx import MultiHeadAttention

    return MultiHeadAttention(2, 8, 8, decode=False, rngs=nnx.Rngs(0), **options)


OF = {"attention": (plain, ours), "softmax": (jax.nn.softmax, softmax), "layer": (flax_layer, our_layer)}


class Tool(NamedTuple):
    """What is run on what, and what is expected."""

    package: str  # what it imports
    of: str
    expected: str
    run: Callable[[Any], Any]


TOOLS: dict[str, Tool] = {}


def tool(name: str, package: str = "jax", *, of: str = "attention", expected: str = "right"):
    def kept(run):
        TOOLS[name] = Tool(package, of, expected, run)
        return run

    return kept


@tool("quax", "quax", expected="forward_mode=True")
def _(f):
    import quax
    from quax.examples import lora

    x = lora.LoraArray(X[0, :, 0], rank=1, key=jax.random.key(0))
    return quax.quaxify(lambda w: f((w @ jnp.eye(2))[None, :, None]))(x)


@tool("quax, of a gradient", "quax")
def _(f):
    import quax

    return quax.quaxify(jax.grad(lambda x: f(x).sum()))(X)


@tool("folx", "folx", expected="forward_mode=True")
def _(f):
    import folx

    found = folx.forward_laplacian(lambda x: (f(x.reshape(X.shape)) ** 2).sum())(X.ravel())
    return found.x, found.laplacian


@tool("equinox noinline", "equinox")
def _(f):
    import equinox.internal as eqxi

    return jax.vmap(jax.grad(lambda x: eqxi.noinline(f)(x).sum()))(jnp.stack([X, 2 * X]))


@tool("equinox filter_grad, filter_jit", "equinox")
def _(f):
    import equinox as eqx

    return eqx.filter_jit(eqx.filter_grad(lambda x: (f(x) ** 2).sum()))(X)


@tool("lineax", "lineax", expected="forward_mode=True")
def _(f):
    import lineax

    operator = lineax.JacobianLinearOperator(lambda x, _: x + 0.1 * f(x), X)
    return lineax.linear_solve(operator, X, lineax.GMRES(1e-6, 1e-6), throw=False).value


@tool("optimistix fixed point", "optimistix", expected="forward_mode=True")
def _(f):
    import optimistix

    step = lambda y, x: 0.1 * f(y) + x
    solve = lambda x: optimistix.fixed_point(step, optimistix.FixedPointIteration(1e-7, 1e-7), x, args=x)
    return jax.grad(lambda x: (solve(x).value ** 2).sum())(X)


@tool("optimistix Levenberg-Marquardt", "optimistix", expected="forward_mode=True")
def _(f):
    import optimistix

    solver = optimistix.LevenbergMarquardt(1e-6, 1e-6)
    return optimistix.least_squares(lambda y, _: f(y) + y - X, solver, X, throw=False).value


def integrated(f, solver):
    import diffrax

    term = diffrax.ODETerm(lambda t, y, _: -y + 0.1 * f(y))
    solve = lambda x: diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.25, x).ys
    return solve(X), jax.grad(lambda x: (solve(x) ** 2).sum())(X)


@tool("diffrax explicit", "diffrax")
def _(f):
    import diffrax

    return integrated(f, diffrax.Tsit5())


@tool("diffrax implicit", "diffrax", expected="forward_mode=True")
def _(f):
    import diffrax
    import optimistix

    return integrated(f, diffrax.ImplicitEuler(root_finder=optimistix.Newton(1e-6, 1e-6)))


@tool("optax differential privacy", "optax")
def _(f):
    import optax.contrib

    rule = optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
    each = jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()))(jnp.stack([X, 2 * X]))
    return rule.update(each, rule.init(X))[0]


@tool("mpx", "mpx")
def _(f):
    import mpx

    scaling = mpx.DynamicLossScaling(jnp.float32(2.0**10), jnp.float32(1))
    loss = lambda x: (f(x.astype("float16")).astype("float32") ** 2).sum()
    return mpx.filter_grad(loss, scaling)(X)[2]


def sampled(f, **options):
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    def model():
        x = numpyro.sample("x", dist.Normal(0, 1).expand([2]))
        numpyro.factor("fit", -(f(X * x) ** 2).sum())

    sampler = MCMC(NUTS(model, **options), num_warmup=5, num_samples=2, progress_bar=False)
    sampler.run(jax.random.PRNGKey(0))
    return sampler.get_samples()["x"]


@tool("numpyro", "numpyro")
def _(f):
    return sampled(f)


@tool("numpyro, forward_mode_differentiation", "numpyro", expected="forward_mode=True")
def _(f):
    return sampled(f, forward_mode_differentiation=True)


@tool("blackjax", "blackjax")
def _(f):
    import blackjax

    density = lambda x: -(f(X * x) ** 2).sum() - (x**2).sum()
    kernel = blackjax.nuts(density, 0.1, jnp.ones(2))
    state = kernel.init(jnp.ones(2))
    return jax.jit(kernel.step)(jax.random.key(0), state)[0].position


@tool("jet", expected="refused")
def _(f):
    from jax.experimental import jet

    return jet.jet(f, (X,), ((X, X),))


@tool("jet, of softmax", of="softmax", expected="forward_mode=True")
def _(f):
    from jax.experimental import jet

    return jet.jet(f, (X,), ((X, X),))


@tool("checkify")
def _(f):
    from jax.experimental import checkify

    error, found = checkify.checkify(jax.grad(lambda x: (f(x) ** 2).sum()), errors=checkify.all_checks)(X)
    error.throw()
    return found


@tool("export")
def _(f):
    (n,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, *X.shape[1:]), X.dtype)
    exported = jax.export.export(jax.jit(f))(shape)
    restored = jax.export.deserialize(exported.serialize(vjp_order=2))
    loss = lambda x: (restored.call(x) ** 2).sum()
    return jax.grad(loss)(X), jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(X)


@tool("export, vjp_order=0", expected="fails by itself: ValueError: No VJP is available")
def _(f):
    exported = jax.export.export(jax.jit(f))(X)
    restored = jax.export.deserialize(exported.serialize(vjp_order=0))
    return jax.grad(lambda x: restored.call(x).sum())(X)


@tool("jax2tf", "tensorflow")
def _(f):
    import tensorflow
    from jax.experimental import jax2tf

    x, call = tensorflow.constant(X), jax2tf.convert(f, with_gradient=True)
    with tensorflow.GradientTape() as tape:
        tape.watch(x)
        out = call(x)
        loss = tensorflow.reduce_sum(out**2)
    return out.numpy(), tape.gradient(loss, x).numpy()


@tool("jax2tf, polymorphic_shapes", "tensorflow", expected="fails by itself")
def _(f):
    import tensorflow
    from jax.experimental import jax2tf

    return jax2tf.convert(f, polymorphic_shapes=["(1, n, 1, 2)"])(tensorflow.constant(X)).numpy()


@tool("asdex", "asdex")
def _(f):
    import asdex

    found = jnp.asarray(asdex.jacobian_sparsity(f, X).todense())
    return ((found == 0) & (jax.jacrev(f)(X).reshape(found.shape) != 0)).sum()  # entries that it misses


@tool("qwix, int8", "qwix", of="layer")
def _(make):
    import qwix
    from flax import nnx

    rule = qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    model = qwix.quantize_model(make(), qwix.PtqProvider([rule]), jnp.ones((1, 3, 8)))
    return sum(x.dtype == jnp.int8 for x in jax.tree.leaves(nnx.state(model)))


@tool("qwix, LoRA", "qwix", of="layer")
def _(make):
    import qwix
    from flax import nnx

    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=1.0)
    model = qwix.apply_lora_to_model(make(), provider, jnp.ones((1, 3, 8)), rngs=nnx.Rngs(0))
    paths = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    return sum("lora" in jax.tree_util.keystr(path) for path, _ in paths)


@tool("nnx.tabulate", "flax", of="layer")
def _(make):
    from flax import nnx

    table = nnx.tabulate(make(), jnp.ones((1, 3, 8)), compute_flops=True)
    return int(re.findall(r"Total Parameters: (\d+)", table)[0])


@tool("nnx.tabulate, compute_vjp_flops", "flax", of="layer", expected="fails by itself")
def _(make):
    from flax import nnx

    nnx.tabulate(make(), jnp.ones((1, 3, 8)), compute_vjp_flops=True)


@tool("kfac-jax", "kfac_jax", expected="fails by itself")
def _(f):
    import kfac_jax

    def loss(w, batch):
        out = f((batch[0, :, 0] @ w)[None, :, None])[0, :, 0]
        kfac_jax.register_squared_error_loss(out, jnp.zeros_like(out))
        return (out**2).sum()

    options = dict(use_adaptive_damping=True, initial_damping=1.0, multi_device=False)
    optimizer = kfac_jax.Optimizer(
        jax.value_and_grad(loss), l2_reg=0.0, use_adaptive_learning_rate=True, **options
    )
    w, key = jnp.eye(2), jax.random.key(0)
    return optimizer.step(w, optimizer.init(w, key, X), key, batch=X, global_step_int=0)[0]


@tool("neural-tangents", "neural_tangents", expected="fails by itself")
def _(f):
    import neural_tangents

    return neural_tangents.empirical_ntk_fn(lambda x, w: f(x * w))(X, None, jnp.float32(1))


@tool("grampax", "grampax", expected="fails by itself")
def _(f):
    import grampax

    return grampax.autocast(f, jnp.bfloat16)(X)


@tool("jaxamp", "jaxamp", expected="fails by itself")
def _(f):
    import jaxamp

    return jaxamp.amp(f, compute_dtype=jnp.bfloat16)(X)


@tool("qax", "qax", expected="fails by itself")
def _(f):
    import qax

    return qax.use_implicit_args(f)(X)


@tool("jax-lorax", "lorax", expected="fails by itself")
def _(f):
    import lorax

    return lorax.lora(f)(X)


@tool("torchax", "torchax", expected="fails by itself")
def _(f):
    import torchax.interop

    return torchax.interop.call_jax(f, X)


@tool("hessian")
def _(f):
    return jax.hessian(lambda x: (f(x) ** 2).sum())(X)


@tool("jacfwd", expected="forward_mode=True")
def _(f):
    return jax.jacfwd(f)(X)


@tool("jax2onnx", "onnxruntime" if jax.__version_info__ < (0, 11) else "jax2onnx for this JAX")
def _(f):
    import jax2onnx
    import onnxruntime

    model = jax2onnx.to_onnx(f, [X])
    jax.clear_caches()  # of what jax2onnx put in the place of jax.numpy
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: np.asarray(X)})


@tool("uncpy", "uncpy", expected="forward_mode=True")  # the last: its import sets jax_enable_x64
def _(f):
    import uncpy

    found = uncpy.wrap(f)(uncpy.uarray(X, 0.1 * jnp.ones_like(X)))
    return uncpy.value(found), uncpy.stdunc(found)


def outcome(tool: Tool) -> str:
    """Returns "right", "forward_mode=True", "wrong", or "refused" or "fails by itself" and the words."""
    theirs, call = OF[tool.of]
    said = lambda error: f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    try:
        expected, words = tool.run(theirs), ""
    except Exception as error:
        return f"fails by itself: {said(error)}"
    for name, options in (("right", {}), ("forward_mode=True", {"forward_mode": True})):
        try:
            found = tool.run(partial(call, **options))
        except Exception as error:
            words = words or said(error)
            continue
        pairs = zip(*map(jax.tree.leaves, (expected, found)), strict=True)
        return name if all(np.allclose(x, y, 1e-2, 4e-3) for x, y in pairs) else "wrong"
    return f"refused: {words}"


def main() -> int:
    wrong = 0
    logging.disable(logging.ERROR)
    for name, tool in TOOLS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        if importlib.util.find_spec(tool.package) is None:
            print(f"{name:38} not here", flush=True)
            continue
        try:
            version = importlib.metadata.version(tool.package)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = outcome(tool)
        differs = not found.startswith(tool.expected)
        wrong += differs
        mark = f"   <- EXPECTED {tool.expected}" if differs else ""
        print(f"{name:38} {version:10} {found}{mark}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    print(f"JAX {jax.__version__}")
    sys.exit(main())
