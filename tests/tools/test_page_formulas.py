"""What pages say by a formula, beside a naive one in float64: recipes, gates of other packages, numbers."""

import ast
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, quick_jit, thorough

import jax_attn_bwd
from jax_attn_bwd._core.jaxpr.walk import called_jaxpr

PAGES = Path(__file__).parents[2] / ".docs" / "pages"


@pytest.fixture(autouse=True)
def _as_readers_have_it():
    """JAX's own promotion, of the code of pages."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def defined(page: str, *wanted: str) -> list:
    """Functions that a page defines; of its code nothing else is run but imports."""
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {}
    for block in blocks:
        of_block = [
            x for x in ast.parse(block).body if isinstance(x, (ast.FunctionDef, ast.ImportFrom, ast.Import))
        ]
        if {x.name for x in of_block if isinstance(x, ast.FunctionDef)} & set(wanted):
            exec(compile(ast.Module(of_block, []), page, "exec"), names)
    return [names[name] for name in wanted]


@pytest.mark.parametrize(
    ("buckets", "longest", "far", "bucket"), [(32, 939, 728, 31), (128, 441, 168, 95), (16, 800, 80, 12)]
)
def test_the_buckets_of_t5_begin_where_its_float32_does(buckets, longest, far, bucket):
    """Exact arithmetic gives 30 and 96, a product with a quotient 11."""
    (starts,) = defined("models.md", "t5_starts")
    assert sum(far >= start for start in starts(buckets, longest)) == bucket


@thorough
@pytest.mark.parametrize("is_local", [True, False])
def test_the_recipe_of_gemma(is_local):
    """Norms of q and k of weight + 1, a scale that is not that of the size, windows of `window` tokens."""
    pytest.importorskip("flax")
    E, N, K, H, window = 6, 4, 2, 4, 3
    draw = partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
    shapes = dict(q_proj=(N * H, E), k_proj=(K * H, E), v_proj=(K * H, E), o_proj=(E, N * H))
    weights = {f"{name}.weight": draw(shape) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": draw(H) for name in ("q_norm", "k_norm")}
    x, dout = draw((2, 1, 7, E))

    exact = {name: x.astype(np.float64) for name, x in weights.items()}

    def formula(x):
        heads = lambda name: (x @ exact[f"{name}_proj.weight"].T).reshape(1, 7, -1, H)
        normal = lambda y, name: y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * (1 + exact[name])
        angle = np.arange(7.0)[:, None] * (1e4 if is_local else 1e6) ** (-2 * np.arange(H // 2) / H)
        turn = np.exp(1j * angle)[:, None]  # of feature j and j + H / 2

        def turned(y):
            y = (y[..., : H // 2] + 1j * y[..., H // 2 :]) * turn
            return jnp.concatenate([y.real, y.imag], -1)

        q, k = (turned(normal(heads(name), f"{name}_norm.weight")) for name in "qk")
        k, v = (jnp.repeat(y, N // K, axis=2) for y in (k, heads("v")))
        far = np.subtract.outer(np.arange(7), np.arange(7))
        seen = (far >= 0) & (far < (window if is_local else 7))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * 9**-0.5
        probs = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", probs, v).reshape(1, 7, -1) @ exact["o_proj.weight"].T

    (gemma3,) = defined("models.md", "gemma3")
    layer = gemma3(is_local, (E, N, K, H, 9, window), weights)

    @quick_jit
    def both(x, dout):
        runs = (lambda x: layer(x, is_causal=True)), formula
        dtypes = (np.float32, np.float64)
        pairs = [jax.vjp(run, x.astype(dtype)) for run, dtype in zip(runs, dtypes, strict=True)]
        return [(out, *pullback(dout.astype(out.dtype))) for out, pullback in pairs]

    for found, expected in zip(*both(x, dout), strict=True):
        assert_close(found, expected, 2e-6)


def codes(row: str) -> list[str]:
    """What stands as code in the right cell of a row of the page on calls of other systems."""
    text = (PAGES / "vendors.md").read_text()
    (cell,) = re.findall(rf"^\| {row}.*\| (.*) \|$", text, re.MULTILINE)
    return [code.removeprefix("log_decay = ") for code in re.findall("`(.*?)`", cell)]


def recurrence(q, k, v, decay, beta=None):
    """Token by token, in NumPy; the state `[N, H, Hv]` is multiplied by `decay [T, N, H or 1]`."""
    state, out = np.zeros((*v.shape[1:2], *k.shape[2:], *v.shape[2:])), []
    for t in range(len(v)):
        state = decay[t][..., None] * state
        read = np.einsum("nhv,nh->nv", state, k[t])
        state = (
            state + k[t][..., None] * (v[t] if beta is None else beta[t][:, None] * (v[t] - read))[:, None]
        )
        out.append(np.einsum("nhv,nh->nv", state, q[t]))
    return np.stack(out)


T, N, H, Hv = 5, 2, 3, 2
softplus, sigmoid = (lambda x: np.log1p(np.exp(x))), (lambda x: 1 / (1 + np.exp(-x)))
# the row, which of its codes, the shape of a gate, and how FLA's naive form reads it
GATES = {
    "use_gate_in_kernel, by head": (
        "`use_gate_in_kernel", 1, N, lambda g, A_log, dt_bias: -np.exp(A_log) * softplus(g + dt_bias)
    ),
    "use_gate_in_kernel, by channel": (
        "`use_gate_in_kernel", 3, N * H,
        lambda g, A_log, dt_bias: -np.exp(A_log).repeat(H) * softplus(g + dt_bias),
    ),
    "lower_bound": (
        "that of `chunk_kda` with `lower_bound`", 0, N * H,
        lambda g, A_log, dt_bias: -5 * sigmoid(np.exp(A_log).repeat(H) * (g + dt_bias)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["lower_bound", *(pytest.param(x, marks=thorough) for x in list(GATES)[:2])])
def test_gates_of_fla(name):
    """With `allow_neg_eigval` beside each: betas up to 2."""
    row, place, size, formula = GATES[name]
    draw = np.random.default_rng(0).standard_normal
    q, k, v, g, beta = (draw((T, *shape)) for shape in ((N, H), (N, H), (N, Hv), (size,), (N,)))
    A_log, dt_bias = draw(N), draw(size)
    shape = (T, N) if size == N else (T, N, H)
    names = dict(g=g.reshape(shape), A_log=A_log, dt_bias=dt_bias, beta=beta, lower_bound=-5.0, N=N, H=H)
    of_page = lambda code: eval(code, {"jax": jax, "jnp": jnp}, names)
    (of_beta,) = [code for code in codes("`beta`") if "(" in code]
    rule = quick_jit(partial(jax_attn_bwd.gated_delta_rule, scale=1.0))
    found = rule(q, k, v, of_page(codes(row)[place]), 2 * of_page(of_beta))
    decay = np.exp(formula(g, A_log, dt_bias)).reshape(T, N, -1)
    assert_close(found, recurrence(q, k, v, decay, 2 * sigmoid(beta)), 1e-12)


@thorough
def test_mappings_of_mamba_2_and_lightning_attention():
    names = {"gated_linear_attention": jax_attn_bwd.gated_linear_attention, "jnp": jnp}
    draw = np.random.default_rng(0).standard_normal
    C, B, x, dt, A_log, D = (draw(shape) for shape in ((T, 1, H), (T, 1, H), (T, N, Hv), (T, N), (N,), (N,)))
    dt = softplus(dt)
    call, rate, *_ = (code for code in codes("Mamba-2") if "(" in code)
    given = dict(C=C, B=B, x=x, dt=dt, A_log=A_log, D=D)
    given["A"] = eval(rate.removeprefix("A = "), names, given)
    decay, (queries, keys) = np.exp(-dt * np.exp(A_log))[..., None], (y.repeat(N, axis=1) for y in (C, B))
    expected = recurrence(queries, keys, dt[..., None] * x, decay) + D[:, None] * x
    run = lambda call, given: quick_jit(lambda given: eval(call, names, given))(given)
    assert_close(run(call, given), expected, 1e-12)

    (call,) = codes("lightning attention")
    q, k, slope = draw((T, N, H)), draw((T, N, H)), np.array([0.5, 0.25])
    decay = np.broadcast_to(np.exp(-slope)[:, None], (T, N, 1))
    assert_close(run(call, dict(q=q, k=k, v=x, slope=slope)), recurrence(q, k, x, decay), 1e-12)


def products(jaxpr) -> int:
    """Operations of all products: loops count as often as they run, of branches the dearest."""
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = equation.params.get("branches") or ([found] if (found := called_jaxpr(equation)) else [])
        if equation.primitive.name == "scan":
            inner = [equation.params["jaxpr"]]
        total += equation.params.get("length", 1) * max(map(products, inner), default=0)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    return total


def test_operations_by_formula():
    """Those of dense attention in tiles; `cost_analysis` counts those of one tile."""
    text = (PAGES / "measuring.md").read_text()
    (cells,) = re.findall(r"^\| dense attention.*\| `(.*?)`.*\| `(.*?)` \|$", text, re.MULTILINE)
    sizes = dict(B=1, N=2, T=2048, S=2048, H=32, Hv=16)
    q, k = (jax.ShapeDtypeStruct((1, sizes[x], 2, 32), np.float32) for x in "TS")
    v, dout = (jax.ShapeDtypeStruct((1, sizes[x], 2, 16), np.float32) for x in "ST")
    attend = lambda *x: jax_attn_bwd.dot_product_attention(*x)
    step = lambda dout, *x: jax.vjp(attend, *x)[1](dout)
    forward = products(jax.make_jaxpr(attend)(q, k, v))
    both = products(jax.make_jaxpr(step)(dout, q, k, v))
    expected = [eval(re.sub(" ([+/]) ", r"\1", cell).replace(" ", "*"), {}, sizes) for cell in cells]
    assert [forward, both - forward] == expected
