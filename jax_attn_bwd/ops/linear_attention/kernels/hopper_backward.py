"""Hopper backward of linear attention (Pallas Mosaic GPU).

The equations are those of `backward.py`, the letters f, h and E those of `hopper_tiles.py`. The kernels:

    planes       P and M of all chunks once more, side by side
    ends         where few programs walk, what pieces make of a cotangent (`hopper_pieces.py`)
    reverse      walks over the chunks, the last first, with the transposed cotangent of the state [64, H] in
                 registers, as the forward does with the state: dU, dR, dV by (7), (8)
    again        the states within each group of chunks, from the one that is saved, and U: side by side
    gradients    (9) to (18) of a chunk, side by side

Where each channel has a decay of its own, the last one is that of `hopper_channel_gradients.py`. Else, in it,
r = dR S0^T and e = U dS1^T are [C, H]; so is w = dO S0^T. With them, and with

    X_ij = E_ij dP_ij,   D_ij = b_i E_ij dA_ij,

all that queries and keys get is, before the factors f and h of their own tokens,

    dq_i = exp(c_i) w_i + sum_j X_ij h_j k_j                                                   (12)
    dk_i = - b_i exp(c_i) r_i + exp(c_C - c_i) e_i + sum_j (D_ij + D_ji) h_j k_j + X_ji f_j q_j   (13), (14)
    db_i = <dR_i, v_i> - h_i exp(c_i) <k_i, r_i> + sum_j dA_ij <k_i, k_j>_G                    (11)

and of the decays, with Z_ij = dP_ij P_ij + dA_ij A_ij,

    dg_t = sum over j < t <= i of Z_ij + exp(c_C) sum S0 dS1
         + sum over i >= t of <q^_i, w_i> - b_i <k^_i, r_i> + sum over j < t of <k~_j, e_j>    (18)

What a product reads of X, D and Z stands in shared memory as two numbers of 16 bits, or it is rounded there.

References:
  As in `forward.py`.
"""

from collections.abc import Sequence
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
from jax_attn_bwd.ops.linear_attention.kernels import hopper_channel_gradients as channel_gradients
from jax_attn_bwd.ops.linear_attention.kernels import hopper_channels as channels
from jax_attn_bwd.ops.linear_attention.kernels import hopper_pieces as pieces
from jax_attn_bwd.ops.linear_attention.kernels import hopper_tiles as tiles
from jax_attn_bwd.ops.linear_attention.kernels import inputs
from jax_attn_bwd.ops.linear_attention.kernels.hopper_forward import corrected, passed
from jax_attn_bwd.ops.linear_attention.kernels.hopper_tiles import (
    CHUNK,
    SIZE,
    ChunkCotangents,
    along_columns,
    along_rows,
    product,
    row_dot,
    shared_product,
    two_numbers,
)
from jax_attn_bwd.ops.linear_attention.kernels.inputs import NUMBERS, Inputs
from jax_attn_bwd.ops.linear_attention.plan import Plan
from jax_attn_bwd.ops.linear_attention.spec import Options, Residuals

_STAGES = 2


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

    inside = channels.inside(options, interpret, given, "planes_again")
    dvalue, dstates, dfirst, *corrections = _reverse(plan, interpret, given, inside, dout, dfinal)
    states, *u = _again(plan, interpret, given, inside, saved)
    cotangents = ChunkCotangents(dout, *(corrections or [None]), *(u or [given.value]), states, dstates)
    if given.decays is None:
        lines, dquery, dkey = _gradients(options, interpret, given, cotangents)
        dbeta, ddecay = lines[:, :, -1], lines[:, :, 0]
    else:
        found = channel_gradients.gradients(options, interpret, given, inside.whole, cotangents)
        dquery, dkey, ddecay, dbeta = found
        for dr in corrections:
            of_values = (inputs.wide(dr) * inputs.wide(given.value)).sum(-1)
            dbeta = dbeta.sum(2) + of_values.swapaxes(1, 2)

    # of all value heads of a key head, without padding, in the shapes of the call
    def of_keys(parts):
        x = parts[0]
        if len(parts) > 1:
            x = sum(map(inputs.wide, parts))
            x = x.reshape(*x.shape[:2], K, -1, x.shape[-1]).sum(3)
        return x[:, :T, :, :H].reshape(operands.key.shape).astype(operands.key.dtype)

    def of_tokens(x):
        return x[..., :T].swapaxes(1, 2).reshape(*batch, T, N)

    def of_channels(parts):
        return sum(map(inputs.wide, parts))[:, :T, :, :H].reshape(*batch, T, N, H)

    if given.decays is not None:
        ddecay = of_channels(ddecay)
    else:
        ddecay = of_tokens(ddecay)
        if operands.log_decay is not None and operands.log_decay.ndim == operands.value.ndim:
            ddecay = ddecay[..., None]
    found = {
        "query": of_keys(dquery),
        "key": of_keys(dkey),
        "value": dvalue[:, :T, :, :Hv].reshape(*batch, T, N, Hv),
        "log_decay": ddecay,
        "beta": of_tokens(dbeta) if options.is_delta else None,
        "initial_state": dfirst[..., :H, :Hv].reshape(*batch, N, H, Hv),
    }
    seen = layout.seen_tokens(operands)
    hide = lambda x: x if seen is None else jnp.where(seen if x.ndim == seen.ndim else seen[..., 0], x, 0)
    return {n: x if x is None or n == "initial_state" else hide(x) for n, x in found.items()}


# ---- the cotangents of the states, the last chunk first


def _reverse(
    plan: Plan, interpret: bool, given: Inputs, inside: tiles.InsideChunks, dout: jax.Array, dfinal: Any
) -> list[jax.Array]:
    """Computes dV, the transposed dS1 of each chunk, that of the first state, and dR of a delta rule."""
    (B, T, _, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    given, options, cut = given._replace(value=dout), plan.options, pieces.cut(plan, T)
    ends = pieces.ends(plan, interpret, given, inside, _step, True)
    out_type, rows = partial(pallas.out_type, operands=given), tile((CHUNK, SIZE), dtype)
    of_tokens = out_type((B, T, N, Hv), dtype)
    results = [
        of_tokens,
        out_type((B, N, T // CHUNK, Hv, H), dtype),
        out_type((B, N, H, Hv), jnp.float32),
        *[of_tokens] * options.is_delta,
    ]
    scratch = tiles.rings(_STAGES, given, inside) | dict(
        row_tiles=[rows] * (2 if options.is_delta else 1),
        dstate_tile=tile((SIZE, H), dtype),
        state_tile=tile((H, SIZE), jnp.float32),
        first=plgpu.Barrier(),
    )
    return mosaic_gpu.launch(
        partial(_reverse_kernel, cut),
        "linear_attention_reverse",
        interpret=interpret,
        out_type=results,
        scratch=scratch | pieces.barriers(ends) | tiles.spare_tile(interpret, H, dtype),
        grid={"column": Hv // SIZE, "piece": cut.count, "head": N, "batch": B},
        warpgroups=2,
    )(given._replace(decays=None), inside, ends, dfinal)


def _reverse_kernel(
    cut: pieces.CutWalk, given: Inputs, inside: tiles.InsideChunks, ends: Any, dfinal_ref, dvalue_ref,
    dstates_ref, dfirst_ref, *corrections_ref, rings, loaded, free, row_tiles, dstate_tile, state_tile, first,
    started=None, spare=None,
):  # fmt: skip
    """Walks over a piece of 64 columns of one value head, the last chunk first; `value` in `given` is dO."""
    b, n, piece, wg = (lax.axis_index(name) for name in ("batch", "head", "piece", "wg"))
    columns = pl.ds(lax.axis_index("column") * SIZE, SIZE)
    start_of_piece, count = cut.steps(piece)
    number = lambda t: cut.total - 1 - start_of_piece - t

    @pl.when(wg == 1)
    def _load():
        pieces.wait_for_start(started)
        sources = partial(tiles.sources, given, inside, b, n, columns)
        tiles.stream(count, _STAGES, lambda t: sources(number(t)), rings, loaded, free)

    @pl.when(wg == 0)
    def _compute():
        def step(t, dstate):
            slot, c = lax.rem(t, jnp.int32(_STAGES)), number(t)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            dstate_tile[...] = dstate.astype(dstate_tile.dtype)
            plgpu.barrier_wait(loaded.at[slot])
            chunk = tiles.at_slot(rings, slot)
            dout = tiles.load_transposed(chunk.value)
            found = _corrected(chunk, dout, dstate, spare)
            before = _passed(chunk, dout, dstate, found[-1], spare)
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
        start = pieces.start(ends, start, piece, (b, n, columns), rings, state_tile, started, spare)
        dstate = lax.fori_loop(jnp.int32(0), count, step, start)

        @pl.when(piece == cut.count - 1)
        def _first():
            tiles.store_transposed(state_tile, dstate)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_tile, dfirst_ref.at[b, n, :, columns])

        plgpu.wait_smem_to_gmem(0)


def _corrected(chunk: tiles.ChunkArrays, dout: Any, dstate: jax.Array, spare: Any) -> list[jax.Array]:
    """Returns what is transposed of dV, and of dR under a delta rule, by (7) and (8); `dout` may be None."""
    numbers = chunk.numbers(COLUMNS)
    du = chunk.at_end(numbers).of(dstate, spare)
    if dout is not None:
        du = product(dout, chunk.reads, spare, du)
    if chunk.solved is None:
        return [du]
    dr = product(du, chunk.solved, spare)
    return [dr * along_columns(numbers.beta), dr]


def _passed(chunk: tiles.ChunkArrays, dout: Any, dstate: jax.Array, dr: Any, spare: Any) -> jax.Array:
    """Returns the transposed cotangent of the state before a chunk, by (8); `dr` is read of a delta rule."""
    numbers = chunk.numbers(COLUMNS)
    before = chunk.decayed(numbers, dstate)
    if dout is not None:
        rows = chunk.from_start(numbers)
        before = product(rows.times_factor(dout), rows.rows, spare, before)
    if chunk.solved is not None:
        rows = chunk.at_start(numbers)
        # the factor is negated, as in `corrected`
        erased = rows.times_factor(dr * along_columns(-numbers.beta))
        before = product(erased, rows.rows, spare, before)
    return before


def _step(chunk: tiles.ChunkArrays, dstate: jax.Array, spare: Any) -> jax.Array:
    dout = None if chunk.value is None else tiles.load_transposed(chunk.value)
    dr = None if chunk.solved is None else _corrected(chunk, dout, dstate, spare)[-1]
    return _passed(chunk, dout, dstate, dr, spare)


# ---- the states again


def _again(
    plan: Plan, interpret: bool, given: Inputs, inside: tiles.InsideChunks, saved: jax.Array
) -> list[jax.Array]:
    """Computes the transposed S0 of each chunk from `saved` `[g, B, N, H, Hv]`, and U of a delta rule."""
    (B, T, _, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    out_type = partial(pallas.out_type, operands=given)
    results = [out_type((B, N, T // CHUNK, Hv, H), dtype)]
    results += [out_type((B, T, N, Hv), dtype)] * plan.options.is_delta
    scratch = tiles.rings(_STAGES, given, inside) | dict(
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
    )(given._replace(decays=None), inside, saved)


def _again_kernel(
    given: Inputs, inside: tiles.InsideChunks, saved, states_ref, *u_ref,
    rings, loaded, free, row_tile, narrow_tile, state_tile, first, spare=None,
):  # fmt: skip
    """Walks over the chunks of a group."""
    b, n, group, wg = (lax.axis_index(name) for name in ("batch", "head", "group", "wg"))
    columns = pl.ds(lax.axis_index("column") * SIZE, SIZE)
    count = jnp.int32(given.value.shape[1] // CHUNK // saved.shape[0])
    number = lambda t: group * count + t

    @pl.when(wg == 1)
    def _load():
        sources = partial(tiles.sources, given, inside, b, n, columns)
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


class _ChunkMemory(NamedTuple):
    """What a chunk's gradients are made of, in shared memory."""

    query: Any  # [CHUNK, H]
    key: Any  # [CHUNK, H]
    value: Any  # [CHUNK, Hv]; None without a delta rule
    given: ChunkCotangents
    of_rows: Any  # the numbers of the tokens, [NUMBERS, CHUNK], and once more
    of_columns: Any
    reads: Sequence[Any]  # X h as two numbers, f X
    overlaps: Sequence[Any]  # D h as two numbers, h D; two without a delta rule, for what is written
    after: Any  # of j, t: 1 where j < t, else 0
    across: Any  # the sums of Z over j < t <= i, [CHUNK]
    moved: Any  # <q^_i, w_i>
    ends: Any  # <k~_i, e_i>
    erased: Any  # <k^_i, r_i>
    lines: Any  # dg, db


def _gradients(
    options: Options, interpret: bool, given: Inputs, cotangents: ChunkCotangents
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Computes dg, and db of a delta rule, `[B, N, 1 | 2, T]`, and dq and dk, `[B, T, N, H]`.

    Where several value heads share a key head, dq and dk are two numbers each: they are still to be added.
    """
    (B, T, K, H), (N, Hv), dtype = given.key.shape, given.value.shape[-2:], given.key.dtype
    rows, wide, state = tile((CHUNK, Hv), dtype), tile((CHUNK, H), dtype), tile((Hv, H), dtype)
    plane, of_tokens = tile((CHUNK, CHUNK), dtype), plgpu.SMEM((NUMBERS, CHUNK), jnp.float32)
    is_delta, lines, line = options.is_delta, 2 if options.is_delta else 1, plgpu.SMEM((CHUNK,), jnp.float32)
    of_delta = rows if is_delta else None
    scratch = dict(
        at=_ChunkMemory(
            query=wide,
            key=wide,
            value=of_delta,
            given=ChunkCotangents(rows, of_delta, rows, state, state),
            of_rows=of_tokens,
            of_columns=of_tokens,
            reads=[plane] * 3,
            overlaps=[plane] * (3 if is_delta else 2),
            after=tile((CHUNK, CHUNK), jnp.bfloat16),
            across=line,
            moved=line,
            ends=line,
            erased=line,
            lines=plgpu.SMEM((lines, CHUNK), jnp.float32),
        ),
        loaded=plgpu.Barrier(num_arrivals=8 + 2 * is_delta),
        has_reads=plgpu.Barrier(),
        has_sums=plgpu.Barrier(),
    )
    parts = 1 if K == N else 2
    out_type = partial(pallas.out_type, operands=given)
    gradient = [out_type((B, T, N, H), dtype)] * parts
    return mosaic_gpu.launch(
        partial(_gradients_kernel, options),
        "linear_attention_gradients",
        interpret=interpret,
        out_type=(out_type((B, N, lines, T), jnp.float32), gradient, gradient),
        scratch=scratch | tiles.spare_tile(interpret, CHUNK, jnp.bfloat16),
        grid={"chunk": T // CHUNK, "head": N, "batch": B},
        warpgroups=2,
    )(given, cotangents)


def _gradients_kernel(
    options: Options, given: Inputs, cotangents: ChunkCotangents, lines_ref, dquery_refs, dkey_refs,
    *, at, loaded, has_reads, has_sums, spare=None,
):  # fmt: skip
    """Computes the gradients of one chunk of one value head: a warpgroup dq, another the rest."""
    b, n, t, wg = (lax.axis_index(name) for name in ("batch", "head", "chunk", "wg"))
    here, head = tiles.tokens(t), lax.div(n, jnp.int32(given.value.shape[2] // given.key.shape[2]))

    @pl.when(wg == 0)
    def _load():
        sources = (
            given.query.at[b, here, head],
            given.key.at[b, here, head],
            *([] if at.value is None else [given.value.at[b, here, n]]),
            *(x.at[b, here, n] for x in cotangents[:3] if x is not None),
            *(x.at[b, n, t] for x in cotangents[3:]),
            *[given.numbers.at[b, n, :, here]] * 2,
        )
        for source, target in zip(sources, jax.tree.leaves(at[:6]), strict=True):
            plgpu.copy_gmem_to_smem(source, target, loaded)

    plgpu.barrier_wait(loaded)

    @pl.when(wg == 0)
    def _queries():
        _of_queries(options, at, dquery_refs, (b, here, n), has_reads, spare)
        plgpu.barrier_arrive(has_sums)

    @pl.when(wg == 1)
    def _others():
        _of_keys(options, at, dkey_refs, (b, here, n), has_reads, has_sums, spare)
        plgpu.copy_smem_to_gmem(at.lines, lines_ref.at[b, n, :, here])
        plgpu.wait_smem_to_gmem(0)


def _of_queries(options: Options, at: _ChunkMemory, refs: Any, here: Any, has_reads: Any, spare: Any) -> None:
    """Writes dq, the planes of X, and its share of (18)."""
    (dout, _, u, state, _), (row, column) = at.given, tiles.position()
    rows = tiles.numbers(at.of_rows, ROWS)
    at.after[...] = jnp.where(row < column, 1.0, 0.0).astype(at.after.dtype)

    # X, from (9)
    x, of_keys = _decayed(shared_product(dout, u.T), column <= row, rows, at.of_columns)
    at.reads[2][...] = (x * along_rows(rows.query_factor)).astype(at.key.dtype)
    x = x * of_keys
    tiles.store_two(at.reads[:2], x)
    z = x * shared_product(at.query, at.key.T) * along_rows(rows.query_factor)
    at.across[...] = _across_token(z, at.after, spare)
    plgpu.barrier_arrive(has_reads)

    # dq (12)
    start, moved, found = jnp.exp(rows.c), jnp.zeros_like(rows.c), _Found(options)
    for half in _halves(at.query):
        w = shared_product(dout, state.at[:, half])
        moved = moved + rows.from_start * row_dot(at.query.at[:, half], w)
        sums = [(plane, at.key.at[:, half]) for plane in at.reads[:2]]
        found.add(at.query.at[:, half], _add_shared(w * along_rows(start), sums, spare))
    at.moved[...] = moved
    found.write(rows.query_factor, options.scale, at.reads, refs, here)


def _of_keys(
    options: Options, at: _ChunkMemory, refs: Any, here: Any, has_reads: Any, has_sums: Any, spare: Any
) -> None:
    """Writes dk and the lines."""
    (_, corrections, u, state, dstate), (row, column) = at.given, tiles.position()
    rows = tiles.numbers(at.of_rows, ROWS)
    dbeta: Any = None

    # D, from (9)
    if options.is_delta:
        # - dA; its factors are negated, as in `corrected`
        a, of_keys = _decayed(shared_product(corrections, u.T), column < row, rows, at.of_columns)
        at.overlaps[2][...] = (a * along_rows(-rows.beta * rows.key_factor)).astype(at.key.dtype)
        a = a * of_keys
        tiles.store_two(at.overlaps[:2], a * along_rows(-rows.beta))
        z = a * shared_product(at.key, at.key.T) * along_rows(-rows.key_factor)
        dbeta = z.sum(axis=1)
        plgpu.barrier_wait(has_reads)  # sums of columns go through memory that both warpgroups share
        at.across[...] += _across_token(z * along_rows(rows.beta), at.after, spare)
    else:
        plgpu.barrier_wait(has_reads)

    # dk (13), (14)
    start, end, found = jnp.exp(rows.c), jnp.exp(rows.last - rows.c), _Found(options)

    def add(ref, x, half):
        # in memory, so that products are read to the end before the next ones
        ref[...] = x if half.start == 0 else x + mosaic_gpu.load(ref, layout=ROWS, optimized=False)

    for half in _halves(at.key):
        e = shared_product(u, dstate.at[:, half])
        r = shared_product(corrections, state.at[:, half]) if options.is_delta else None
        add(at.ends, rows.at_end * row_dot(at.key.at[:, half], e), half)
        y, sums = e * along_rows(end), [(at.reads[2].T, at.query.at[:, half])]
        if r is not None:
            add(at.erased, rows.at_start * row_dot(at.key.at[:, half], r), half)
            y = y + r * along_rows(-start * rows.beta)
            sums += [(plane, at.key.at[:, half]) for plane in (*at.overlaps[:2], at.overlaps[2].T)]
        found.add(at.key.at[:, half], _add_shared(y, sums, spare))
    found.write(rows.key_factor, 1.0, at.overlaps, refs, here)

    # (11), (18)
    passed = jnp.zeros_like(start)
    for i in range(0, state.shape[0], SIZE):
        for half in _halves(state):
            block = pl.ds(i, SIZE), half
            passed = passed + row_dot(state.at[block], tiles.load(dstate.at[block]))
    plgpu.barrier_wait(has_sums)
    ends, moved = (mosaic_gpu.load(x, layout=ROWS, optimized=False) for x in (at.ends, at.moved))
    if options.is_delta:
        erased = mosaic_gpu.load(at.erased, layout=ROWS, optimized=False)
        for part in _halves(at.value):
            dbeta = dbeta + row_dot(corrections.at[:, part], tiles.load(at.value.at[:, part]))
        at.lines[1] = dbeta - erased
        moved = moved - erased * rows.beta
    by_states = jnp.where(column <= row, along_rows(moved), along_rows(ends)) + along_rows(
        passed * rows.whole
    )
    of_pairs = mosaic_gpu.load(at.across, layout=COLUMNS, optimized=False)
    at.lines[0] = of_pairs + by_states.sum(axis=0)
    plgpu.commit_smem()


def _halves(ref: Any) -> list[Any]:
    """Returns the columns of a tile, `SIZE` at a time."""
    return [pl.ds(i, SIZE) for i in range(0, ref.shape[1], SIZE)]


def _decayed(x: jax.Array, is_read: jax.Array, rows: Any, of_columns: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (`x` times E where that is read, else 0; the key factors of its columns)."""
    columns = tiles.numbers(of_columns, COLUMNS)
    decay = jnp.exp(along_rows(rows.c) - along_columns(columns.c))
    return jnp.where(is_read, x * decay, 0.0), along_columns(columns.key_factor)


def _across_token(z: jax.Array, after: Any, spare: Any) -> jax.Array:
    """Returns the sums of `z` over j < t <= i, for each t; of bfloat16 `after`, as decays can be small."""
    row, column = tiles.position()
    found = product(z, after, spare)  # of i, t: over j < t
    return jnp.where(column <= row, found, 0.0).sum(axis=0)


def _add_shared(acc: jax.Array, factors: Sequence[tuple[Any, Any]], spare: Any) -> jax.Array:
    """Returns acc and the sum of `a @ b` for each a, b of `factors`, tiles of shared memory."""

    def add(ref):
        for a, b in factors:
            plgpu.wgmma(ref, a, b)

    if spare is None:
        return pl.run_state(add)(plgpu.ACC.init(acc))

    def alone(ref):  # the interpreter does not start an accumulator from registers
        add(ref)
        return ref[...]

    return acc + pl.run_scoped(alone, plgpu.ACC((acc.shape[0], acc.shape[1]), jnp.float32))


class _Found:
    """The gradients of rows times their factors, by halves of the channels, until they are written."""

    def __init__(self, options: Options):
        self.has_norm = options.l2_norm_epsilon is not None
        self.halves: list[tuple[Any, jax.Array]] = []
        self.dot: Any = None

    def add(self, given: Any, y: jax.Array) -> None:
        """Takes `y`, what the rows `given` get, in registers."""
        if self.has_norm:
            dot = row_dot(given, y)
            self.dot = dot if self.dot is None else self.dot + dot
        self.halves.append((given, y))

    def write(self, factor: jax.Array, scale: float, planes: Sequence[Any], refs: Any, here: Any) -> None:
        """Writes the gradients of the rows by way of `planes`, from their `factor`, `scale` without a norm.

        With the l2 norm, by its derivative: r (y - r^2 x <x, y>), r = factor / scale.
        """
        dot = None
        if self.has_norm and abs(scale) >= jnp.finfo(jnp.float32).tiny:  # else the factor is 0
            r = factor * (1 / scale)
            dot = self.dot * r * r
        for number, (given, y) in enumerate(self.halves):
            plane, half = planes[number], pl.ds(number * SIZE, SIZE)
            x = y if dot is None else y - tiles.load(given) * along_rows(dot)
            parts = two_numbers(x * along_rows(factor), plane.dtype)
            for i, ref in enumerate(refs):
                if i:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plane[...] = parts[i]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(plane, ref.at[(*here, half)])
        plgpu.wait_smem_to_gmem(0)
