"""Hopper backward of linear attention (Pallas Mosaic GPU): decays that all channels of a head share.

The equations are those of `backward.py`, the letters f, h and E those of `hopper_tiles.py`. Four kernels:

    planes       P and M of all chunks once more, side by side
    reverse      walks over the chunks, the last first, with the transposed cotangent of the state [64, H] in
                 registers, as the forward does with the state: dU, dR, dV by (7), (8)
    again        the states within each group of chunks, from the one that is saved, and U: side by side
    gradients    (9) to (18) of a chunk, side by side

In the last one r = dR S0^T and e = U dS1^T are [C, H]; so is w = dO S0^T. With them, and with

    X_ij = E_ij dP_ij,   D_ij = b_i E_ij dA_ij,

all that queries and keys get is, before the factors f and h of their own tokens,

    dq_i = exp(c_i) w_i + sum_j X_ij h_j k_j                                                   (12)
    dk_i = - b_i exp(c_i) r_i + exp(c_C - c_i) e_i + sum_j (D_ij + D_ji) h_j k_j + X_ji f_j q_j   (13), (14)
    db_i = <dR_i, v_i> - h_i exp(c_i) <k_i, r_i> + sum_j dA_ij <k_i, k_j>_G                    (11)

and of the decays, with Z_ij = dP_ij P_ij + dA_ij A_ij, each as a sum over the tokens from t on:

    dg_t = sum over i >= t of sum_j (Z_ij - Z_ji) + <q^_i, w_i> - b_i <k^_i, r_i> - <k~_i, e_i>
         + sum over all i of <k~_i, e_i> + exp(c_C) sum S0 dS1                                 (18)

References:
  As in `forward.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_attn_bwd._core import mosaic_gpu, pallas
from jax_attn_bwd._core.mosaic_gpu import COLUMNS, ROWS, tile
from jax_attn_bwd._core.sharding import match_type
from jax_attn_bwd.ops.linear_attention import layout
from jax_attn_bwd.ops.linear_attention.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.linear_attention.kernels import inputs
from jax_attn_bwd.ops.linear_attention.kernels.hopper_forward import corrected, passed
from jax_attn_bwd.ops.linear_attention.kernels.hopper_tiles import (
    CHUNK,
    SIZE,
    along_columns,
    along_rows,
    product,
    shared_product,
    two_numbers,
)
from jax_attn_bwd.ops.linear_attention.kernels.inputs import NUMBERS, Inputs
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Options, Residuals

_STAGES = 2


class ChunkCotangents(NamedTuple):
    """What the gradients of a chunk are made of beside the tokens, in their dtype."""

    dout: Any  # [B, T, N, Hv]
    corrections: Any  # dR, [B, T, N, Hv]; None without a delta rule
    u: Any  # [B, T, N, Hv]
    states: Any  # transposed S0, [B, N, chunks, Hv, H]
    dstates: Any  # transposed dS1, [B, N, chunks, Hv, H]


def backward(
    plan: Plan, residuals: Residuals, wanted: frozenset[str], dout: jax.Array | None, dfinal: jax.Array | None
) -> dict[str, jax.Array]:
    """Computes the gradients of the operands in `wanted`; a cotangent that is None is zero."""
    operands = residuals.operands
    run = partial(_backward, plan, pallas.is_interpreted(mosaic_gpu.NAME))
    found = pallas.on_local_shards(run, inputs.gradient_specs, (residuals, dout, dfinal))
    if "log_decay" in wanted:
        found["log_decay"] = inputs.log_decay_gradient(operands, found["log_decay"])
    return {name: match_type(found[name], getattr(operands, name)) for name in wanted}


@partial(jax.jit, static_argnums=(0, 1))
def _backward(plan, interpret, residuals, dout, dfinal):
    operands, options = residuals.operands, plan.options
    (*batch, T, N, Hv), (K, H) = operands.value.shape, operands.key.shape[-2:]
    given = inputs.of_call(plan, operands, (SIZE, SIZE))
    dout = jnp.zeros_like(operands.value) if dout is None else dout
    dout = inputs.padded_rows(plan, operands, dout, SIZE)
    saved = residuals.states.reshape(-1, *batch, N, H, Hv)
    saved = jax.vmap(lambda x: inputs.padded_state(x, given.query, given.value))(saved)
    dfinal = inputs.padded_state(dfinal, given.query, given.value)
    given, dout, saved, dfinal = pallas.vary_alike((given, dout, saved, dfinal))
    given = given._replace(state=None)

    planes = tiles.planes(options, interpret, given, "planes_again")
    dvalue, dstates, dfirst, *corrections = _reverse(options, interpret, given, planes, dout, dfinal)
    states, *u = _again(plan, interpret, given, planes, saved)
    cotangents = ChunkCotangents(dout, *(corrections or [None]), *(u or [given.value]), states, dstates)
    lines, dquery, dkey = _gradients(options, interpret, given, cotangents)

    # of all value heads of a key head, without padding, in the shapes of the call
    def of_keys(parts):
        x = parts[0]
        if len(parts) > 1:
            x = sum(map(inputs.wide, parts))
            x = x.reshape(*x.shape[:2], K, -1, x.shape[-1]).sum(3)
        return x[:, :T, :, :H].reshape(operands.key.shape).astype(operands.key.dtype)

    def of_tokens(x):
        return x[..., :T].swapaxes(1, 2).reshape(*batch, T, N)

    found = {
        "query": of_keys(dquery),
        "key": of_keys(dkey),
        "value": dvalue[:, :T, :, :Hv].reshape(*batch, T, N, Hv),
        "log_decay": of_tokens(lines[0]),
        "beta": of_tokens(lines[-1]),
        "initial_state": dfirst[..., :H, :Hv].reshape(*batch, N, H, Hv),
    }
    seen = layout.seen_tokens(operands)
    hide = lambda x: x if seen is None else jnp.where(seen if x.ndim == seen.ndim else seen[..., 0], x, 0)
    return {name: x if name == "initial_state" else hide(x) for name, x in found.items()}


# ---- the cotangents of the states, the last chunk first


def _reverse(
    options: Options, interpret: bool, given: Inputs, planes: Any, dout: jax.Array, dfinal: Any
) -> list[jax.Array]:
    """Computes dV, the transposed dS1 of each chunk, that of the first state, and dR of a delta rule."""
    (B, T, _, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    out_type, rows = partial(pallas.out_type, operands=given), tile((CHUNK, SIZE), dtype)
    of_tokens = out_type((B, T, N, Hv), dtype)
    results = [
        of_tokens,
        out_type((B, N, T // CHUNK, Hv, H), dtype),
        out_type((B, N, H, Hv), jnp.float32),
        *[of_tokens] * options.is_delta,
    ]
    scratch = tiles.rings(_STAGES, given, len(planes)) | dict(
        row_tiles=[rows] * (2 if options.is_delta else 1),
        dstate_tile=tile((SIZE, H), dtype),
        state_tile=tile((H, SIZE), jnp.float32),
        first=plgpu.Barrier(),
    )
    return mosaic_gpu.launch(
        _reverse_kernel,
        "linear_attention_reverse",
        interpret=interpret,
        out_type=results,
        scratch=scratch | tiles.spare_tile(interpret, H, dtype),
        grid={"column": Hv // SIZE, "head": N, "batch": B},
        warpgroups=2,
    )(given._replace(value=dout), planes, dfinal)


def _reverse_kernel(
    given: Inputs, planes: Any, dfinal_ref, dvalue_ref, dstates_ref, dfirst_ref, *corrections_ref,
    rings, loaded, free, row_tiles, dstate_tile, state_tile, first, spare=None,
):  # fmt: skip
    """Walks over the chunks of 64 columns of one value head, the last first; `value` in `given` is dO."""
    b, n, wg = (lax.axis_index(name) for name in ("batch", "head", "wg"))
    columns = pl.ds(lax.axis_index("column") * SIZE, SIZE)
    count = jnp.int32(given.value.shape[1] // CHUNK)
    number = lambda t: count - 1 - t

    @pl.when(wg == 1)
    def _load():
        sources = partial(tiles.sources, given, planes, b, n, columns)
        tiles.stream(count, _STAGES, lambda t: sources(number(t)), rings, loaded, free)

    @pl.when(wg == 0)
    def _compute():
        def step(t, dstate):
            slot, c = lax.rem(t, jnp.int32(_STAGES)), number(t)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            dstate_tile[...] = dstate.astype(dstate_tile.dtype)
            plgpu.barrier_wait(loaded.at[slot])
            chunk = tiles.at_slot(rings, slot)
            numbers = chunk.numbers(COLUMNS)
            # (7)
            dout = tiles.load_transposed(chunk.value)
            du = product(dstate, chunk.key.T, spare) * along_columns(numbers.at_end)
            du = product(dout, chunk.reads, spare, du)
            # (8)
            before = product(
                dout * along_columns(numbers.from_start), chunk.query, spare, dstate * numbers.whole
            )
            found = [du]
            if corrections_ref:
                dr = product(du, chunk.solved, spare)
                dv = dr * along_columns(numbers.beta)
                before = product(-dv * along_columns(numbers.at_start), chunk.key, spare, before)
                found = [dv, dr]
            plgpu.barrier_arrive(free.at[slot])

            for there, x in zip(row_tiles, found, strict=True):
                tiles.store_transposed(there, x)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dstate_tile, dstates_ref.at[b, n, c, columns])
            for there, ref in zip(row_tiles, (dvalue_ref, *corrections_ref), strict=True):
                plgpu.copy_smem_to_gmem(there, ref.at[b, tiles.tokens(c), n, columns])
            return before

        if dfinal_ref is None:
            start = tiles.zeros(SIZE, given.key.shape[-1])
        else:
            start = tiles.load_state(dfinal_ref.at[b, n, :, columns], state_tile, first)
        dstate = lax.fori_loop(jnp.int32(0), count, step, start)
        tiles.store_transposed(state_tile, dstate)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state_tile, dfirst_ref.at[b, n, :, columns])
        plgpu.wait_smem_to_gmem(0)


# ---- the states again


def _again(plan: Plan, interpret: bool, given: Inputs, planes: Any, saved: jax.Array) -> list[jax.Array]:
    """Computes the transposed S0 of each chunk from `saved` `[g, B, N, H, Hv]`, and U of a delta rule."""
    (B, T, _, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    out_type = partial(pallas.out_type, operands=given)
    results = [out_type((B, N, T // CHUNK, Hv, H), dtype)]
    results += [out_type((B, T, N, Hv), dtype)] * plan.options.is_delta
    scratch = tiles.rings(_STAGES, given, len(planes)) | dict(
        row_tile=tile((CHUNK, SIZE), dtype),
        narrow_tile=tile((SIZE, H), dtype),
        state_tile=tile((H, SIZE), jnp.float32),
        first=plgpu.Barrier(),
    )
    return mosaic_gpu.launch(
        _again_kernel,
        "linear_attention_again",
        interpret=interpret,
        out_type=results,
        scratch=scratch | tiles.spare_tile(interpret, H, dtype),
        grid={"column": Hv // SIZE, "group": saved.shape[0], "head": N, "batch": B},
        warpgroups=2,
    )(given, planes, saved)


def _again_kernel(
    given: Inputs, planes: Any, saved, states_ref, *u_ref,
    rings, loaded, free, row_tile, narrow_tile, state_tile, first, spare=None,
):  # fmt: skip
    """Walks over the chunks of a group."""
    b, n, group, wg = (lax.axis_index(name) for name in ("batch", "head", "group", "wg"))
    columns = pl.ds(lax.axis_index("column") * SIZE, SIZE)
    count = jnp.int32(given.value.shape[1] // CHUNK // saved.shape[0])
    number = lambda t: group * count + t

    @pl.when(wg == 1)
    def _load():
        sources = partial(tiles.sources, given, planes, b, n, columns)
        tiles.stream(count, _STAGES, lambda t: sources(number(t)), rings, loaded, free)

    @pl.when(wg == 0)
    def _compute():
        def step(t, state):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            narrow_tile[...] = state.astype(narrow_tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(narrow_tile, states_ref.at[b, n, number(t), columns])
            slot = lax.rem(t, jnp.int32(_STAGES))
            plgpu.barrier_wait(loaded.at[slot])
            chunk = tiles.at_slot(rings, slot)
            u = corrected(chunk, state, spare)
            state = passed(chunk, state, u, spare)
            plgpu.barrier_arrive(free.at[slot])
            for ref in u_ref:
                tiles.store_transposed(row_tile, u)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(row_tile, ref.at[b, tiles.tokens(number(t)), n, columns])
            return state

        start = tiles.load_state(saved.at[group, b, n, :, columns], state_tile, first)
        lax.fori_loop(jnp.int32(0), count, step, start)
        plgpu.wait_smem_to_gmem(0)


# ---- the gradients of all chunks, side by side


def _gradients(
    options: Options, interpret: bool, given: Inputs, cotangents: ChunkCotangents
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Computes dg, and db of a delta rule, `[B, N, T]`, and dq and dk of each value head, `[B, T, N, H]`.

    Where several value heads share a key head, these are two numbers each: they are still to be added.
    """
    (B, T, K, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    rows, wide, state = tile((CHUNK, Hv), dtype), tile((CHUNK, H), dtype), tile((Hv, H), dtype)
    plane, of_tokens = tile((CHUNK, CHUNK), dtype), plgpu.SMEM((NUMBERS, CHUNK), jnp.float32)
    is_delta = options.is_delta
    cotangent_tiles = ChunkCotangents(rows, rows if is_delta else None, rows, state, state)
    scratch = dict(
        query=wide,
        key=wide,
        value=rows if is_delta else None,
        given_tiles=cotangent_tiles,
        of_rows=of_tokens,
        of_columns=of_tokens,
        planes=[plane] * (2 if is_delta else 1),
        out_tile=wide,
        line_tile=plgpu.SMEM((2, CHUNK), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=8 + 2 * is_delta),
    )
    parts = 1 if K == N else 2
    out_type = partial(pallas.out_type, operands=given)
    gradient = [out_type((B, T, N, H), dtype)] * parts
    lines, dquery, dkey = mosaic_gpu.launch(
        partial(_gradients_kernel, options),
        "linear_attention_gradients",
        interpret=interpret,
        out_type=([out_type((B, N, T), jnp.float32)] * (2 if is_delta else 1), gradient, gradient),
        scratch={name: x for name, x in scratch.items() if x is not None}
        | tiles.spare_tile(interpret, CHUNK, dtype),
        grid={"chunk": T // CHUNK, "head": N, "batch": B},
    )(given, cotangents)
    return lines, dquery, dkey


def _gradients_kernel(
    options: Options, given: Inputs, cotangents: ChunkCotangents, line_refs, dquery_refs, dkey_refs,
    query, key, given_tiles, of_rows, of_columns, planes, out_tile, line_tile, loaded, value=None, spare=None,
):  # fmt: skip
    """Computes the gradients of one chunk of one value head."""
    b, n, t = (lax.axis_index(name) for name in ("batch", "head", "chunk"))
    here, head = tiles.tokens(t), lax.div(n, jnp.int32(given.value.shape[2] // given.key.shape[2]))
    load = lambda source, target: plgpu.copy_gmem_to_smem(source, target, loaded)
    load(given.query.at[b, here, head], query)
    load(given.key.at[b, here, head], key)
    for target in (of_rows, of_columns):
        load(given.numbers.at[b, n, :, here], target)
    for name in ("dout", "corrections", "u"):
        if (target := getattr(given_tiles, name)) is not None:
            load(getattr(cotangents, name).at[b, here, n], target)
    for name in ("states", "dstates"):
        load(getattr(cotangents, name).at[b, n, t], getattr(given_tiles, name))
    if value is not None:
        load(given.value.at[b, here, n], value)
    plgpu.barrier_wait(loaded)
    dout, corrections, u, state, dstate = given_tiles

    # dq (12), by halves of the channels, from X by (9); the sums of Z
    row, column = tiles.position()
    rows, x = tiles.numbers(of_rows, ROWS), shared_product(dout, u.T)
    x, of_keys = _decayed(x, column <= row, rows, of_columns)
    z = x * shared_product(query, key.T) * along_rows(rows.query_factor) * of_keys
    decays, sums = z.sum(axis=1), z.sum(axis=0)
    planes[0][...] = (x * along_rows(rows.query_factor)).astype(out_tile.dtype)
    halves = [pl.ds(i, SIZE) for i in range(0, query.shape[1], SIZE)]
    x, start, found = x * of_keys, jnp.exp(rows.c), []
    for half in halves:
        w = shared_product(dout, state.at[:, half])
        decays = decays + rows.from_start * _row_dot(query.at[:, half], w)
        found.append(product(x, key.at[:, half], spare, w * along_rows(start)))
    _write(
        options, found, query, halves, rows.query_factor, options.scale, out_tile, dquery_refs, (b, here, n)
    )

    # D, and its part of the sums
    dbeta: Any = None
    d: Any = None
    if options.is_delta:
        da = -shared_product(corrections, u.T)
        da, of_keys = _decayed(da, column < row, rows, of_columns)
        overlaps = da * shared_product(key, key.T) * along_rows(rows.key_factor) * of_keys
        dbeta, z = overlaps.sum(axis=1), overlaps * along_rows(rows.beta)
        decays, sums = decays + z.sum(axis=1), sums + z.sum(axis=0)
        d = da * along_rows(rows.beta)
        planes[1][...] = (d * along_rows(rows.key_factor)).astype(out_tile.dtype)
        d = d * of_keys
    plgpu.commit_smem()

    # dk (13), (14)
    found, ends, overlap = [], jnp.zeros_like(decays), jnp.zeros_like(decays)
    end = jnp.exp(rows.last - rows.c)
    for half in halves:
        e = shared_product(u, dstate.at[:, half])
        ends = ends + rows.at_end * _row_dot(key.at[:, half], e)
        y = e * along_rows(end)
        if options.is_delta:
            r = shared_product(corrections, state.at[:, half])
            overlap = overlap + rows.at_start * _row_dot(key.at[:, half], r)
            y = y - r * along_rows(start * rows.beta)
            y = product(d, key.at[:, half], spare, y)
            y = _add_shared(y, planes[1].T, key.at[:, half], spare)
        found.append(_add_shared(y, planes[0].T, query.at[:, half], spare))
    _write(options, found, key, halves, rows.key_factor, 1.0, out_tile, dkey_refs, (b, here, n))

    # the lines
    passed: Any = None
    for i in range(0, state.shape[0], SIZE):
        for half in halves:
            x = tiles.load(state.at[pl.ds(i, SIZE), half]) * tiles.load(dstate.at[pl.ds(i, SIZE), half])
            passed = x if passed is None else passed + x
    if options.is_delta:
        decays = decays - overlap * rows.beta
        for i in range(0, value.shape[1], SIZE):
            part = pl.ds(i, SIZE)
            dbeta = dbeta + _row_dot(corrections.at[:, part], tiles.load(value.at[:, part]))
        line_tile[1] = dbeta - overlap
    # (18): of rows less of columns, summed over the tokens from each one on
    line_tile[0] = sums
    decays = decays - ends - mosaic_gpu.load(line_tile.at[0], layout=ROWS, optimized=False)
    of_all = (ends + passed.sum(axis=1) * rows.whole).sum()
    line_tile[0] = jnp.where(column <= row, along_rows(decays), 0.0).sum(axis=0) + of_all
    plgpu.commit_smem()
    for i, ref in enumerate(line_refs):
        plgpu.copy_smem_to_gmem(line_tile.at[i], ref.at[b, n, here])
    plgpu.wait_smem_to_gmem(0)


def _decayed(x: jax.Array, is_read: jax.Array, rows: Any, of_columns: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (`x` times E where that is read, else 0; the key factors of its columns)."""
    columns = tiles.numbers(of_columns, COLUMNS)
    decay = jnp.exp(along_rows(rows.c) - along_columns(columns.c))
    return jnp.where(is_read, x * decay, 0.0), along_columns(columns.key_factor)


def _row_dot(ref: Any, x: jax.Array) -> jax.Array:
    """Returns the products of rows of shared memory and of registers."""
    return (tiles.load(ref) * x).sum(axis=1)


def _add_shared(acc: jax.Array, a: Any, b: Any, spare: Any) -> jax.Array:
    """Returns `acc + a @ b` of tiles of shared memory."""
    if spare is not None:  # the interpreter does not start an accumulator from registers
        return acc + shared_product(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def _write(options: Options, found, given, halves, factor, scale, out_tile, refs, here) -> None:
    """Writes the gradient of rows from that of the rows with their `factor`, which is `scale` without a norm.

    With the l2 norm, by its derivative: r (y - r^2 x <x, y>), r = factor / scale.
    """
    if options.l2_norm_epsilon is not None and scale != 0:
        dot = sum(_row_dot(given.at[:, half], y) for half, y in zip(halves, found, strict=True))
        dot = dot * (factor * factor) * (1 / scale**2)
        found = [
            y - tiles.load(given.at[:, half]) * along_rows(dot) for half, y in zip(halves, found, strict=True)
        ]
    found = [two_numbers(y * along_rows(factor), out_tile.dtype) for y in found]
    for i, ref in enumerate(refs):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for half, parts in zip(halves, found, strict=True):
            out_tile[:, half] = parts[i]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, ref.at[here])
    plgpu.wait_smem_to_gmem(0)
