"""Packages that differentiate, solve with, or sample from a function."""

import jax
import jax.numpy as jnp

from other_packages.tools import X, tool


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


@tool("hessian")
def _(f):
    return jax.hessian(lambda x: (f(x) ** 2).sum())(X)


@tool("jacfwd", expected="forward_mode=True")
def _(f):
    return jax.jacfwd(f)(X)
