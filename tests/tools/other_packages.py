"""What other packages make of an operator: `python tests/tools/other_packages.py`, of those installed.

Each tool is a function of a function of one array. It runs on the plain formula, on our call, and where that
is refused on our call with `forward_mode=True`. A row is what `.docs/pages/other_packages.md` says: "right",
"forward_mode=True", or the words of a refusal. One that differs from `EXPECTED` is marked, and the exit code
is 1. With arguments, only the tools whose names hold one of them run.
"""

import contextlib
import importlib
import importlib.metadata
import io
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_attn_bwd

TOOLS: dict[
    str, tuple[str, Callable[[Callable[..., Any]], Any]]
] = {}  # by name: what it needs, and what it does
EXPECTED = {
    "quax": "forward_mode=True",
    "quax, of a gradient": "right",
    "folx": "forward_mode=True",
    "uncpy": "forward_mode=True",
    "equinox noinline": "right",
    "equinox filter_grad, filter_jit": "right",
    "lineax": "forward_mode=True",
    "optimistix fixed point": "forward_mode=True",
    "optimistix Levenberg-Marquardt": "forward_mode=True",
    "diffrax explicit": "right",
    "diffrax implicit": "forward_mode=True",
    "optax differential privacy": "right",
    "mpx": "right",
    "numpyro": "right",
    "blackjax": "right",
    "jet": "refused",
    "checkify": "right",
    "export": "right",
    "hessian": "right",
    "jacfwd": "forward_mode=True",
    "jax2onnx": "right",
}
X = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 1, 2)), "float32")


def plain(x):
    logits = jnp.einsum("btnh,bsnh->bnts", x, x) * 2**-0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), x)


def ours(x, **options):
    return jax_attn_bwd.dot_product_attention(x, x, x, **options)


def tool(name: str, needs: str = "jax") -> Callable[[Any], Any]:
    def kept(run):
        TOOLS[name] = (needs, run)
        return run

    return kept


@tool("quax", "quax")
def _(f):
    import quax
    from quax.examples import lora

    x = lora.LoraArray(X[0, :, 0], rank=1, key=jax.random.key(0))
    return quax.quaxify(lambda w: f((w @ jnp.eye(2))[None, :, None]))(x)


@tool("quax, of a gradient", "quax")
def _(f):
    import quax

    return quax.quaxify(jax.grad(lambda x: f(x).sum()))(X)


@tool("folx", "folx")
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


@tool("lineax", "lineax")
def _(f):
    import lineax

    operator = lineax.JacobianLinearOperator(lambda x, _: x + 0.1 * f(x), X)
    return lineax.linear_solve(operator, X, lineax.GMRES(1e-6, 1e-6), throw=False).value


@tool("optimistix fixed point", "optimistix")
def _(f):
    import optimistix

    step = lambda y, x: 0.1 * f(y) + x
    solve = lambda x: optimistix.fixed_point(step, optimistix.FixedPointIteration(1e-7, 1e-7), x, args=x)
    return jax.grad(lambda x: (solve(x).value ** 2).sum())(X)


@tool("optimistix Levenberg-Marquardt", "optimistix")
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


@tool("diffrax implicit", "diffrax")
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


@tool("numpyro", "numpyro")
def _(f):
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    def model():
        x = numpyro.sample("x", dist.Normal(0, 1).expand([2]))
        numpyro.factor("fit", -(f(X * x) ** 2).sum())

    sampler = MCMC(NUTS(model), num_warmup=5, num_samples=2, progress_bar=False)
    sampler.run(jax.random.PRNGKey(0))
    return sampler.get_samples()["x"]


@tool("blackjax", "blackjax")
def _(f):
    import blackjax

    density = lambda x: -(f(X * x) ** 2).sum() - (x**2).sum()
    kernel = blackjax.nuts(density, 0.1, jnp.ones(2))
    state = kernel.init(jnp.ones(2))
    return jax.jit(kernel.step)(jax.random.key(0), state)[0].position


@tool("jet")
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


@tool("hessian")
def _(f):
    return jax.hessian(lambda x: (f(x) ** 2).sum())(X)


@tool("jacfwd")
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


@tool("uncpy", "uncpy")  # the last: its import sets jax_enable_x64
def _(f):
    import uncpy

    found = uncpy.wrap(f)(uncpy.uarray(X, 0.1 * jnp.ones_like(X)))
    return uncpy.value(found), uncpy.stdunc(found)


def outcome(run: Callable[[Any], Any]) -> str:
    """Returns "right", "forward_mode=True", "wrong", or "refused" and the words."""
    expected, words = run(plain), ""
    for name, options in (("right", {}), ("forward_mode=True", {"forward_mode": True})):
        try:
            found = run(lambda x, options=options: ours(x, **options))
        except Exception as error:
            words = words or f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            continue
        pairs = zip(*map(jax.tree.leaves, (expected, found)), strict=True)
        return name if all(np.allclose(x, y, 1e-2, 4e-3) for x, y in pairs) else "wrong"
    return f"refused: {words}"


def main() -> int:
    wrong = 0
    logging.disable(logging.ERROR)
    for name, (package, run) in TOOLS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        try:
            importlib.import_module(package)
            jax.config.update("jax_enable_x64", False)
        except Exception as error:
            print(f"{name:34} not here: {type(error).__name__}", flush=True)
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                found = outcome(run)
            except Exception as error:
                found = f"the plain formula fails: {type(error).__name__}: {str(error)[:200]}"
        differs = not found.startswith(EXPECTED[name])
        wrong += differs
        print(
            f"{name:34} {version:10} {found}{'   <- EXPECTED ' + EXPECTED[name] if differs else ''}",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    print(f"JAX {jax.__version__}")
    sys.exit(main())
