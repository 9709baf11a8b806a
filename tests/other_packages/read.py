"""Packages that read a program or a layer, to export, count or change it; and those that no longer run."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from other_packages.tools import X, tool


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


@tool(
    "jax2tf, polymorphic_shapes",
    "tensorflow",
    expected="right" if jax.__version_info__ < (0, 11) else "fails by itself",
)
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

    adaptive = {f"use_adaptive_{name}": True for name in ("learning_rate", "momentum", "damping")}
    options = dict(initial_damping=1.0, l2_reg=0.0, multi_device=False, num_burnin_steps=0)
    optimizer = kfac_jax.Optimizer(jax.value_and_grad(loss), **adaptive, **options)
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
