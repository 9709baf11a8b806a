"""THE DEFINITION of multi-scale deformable attention: whole arrays, plain jnp, any dtype.

x = loc_x W - 1/2, y = loc_y H - 1/2                                pixel centres lie at integers
out[b, q, m] = sum over samples k of weight[k] * value at (x_k, y_k), bilinear, 0 outside
"""

import jax
import jax.numpy as jnp


def multi_scale_deformable_attention(
    value,
    sampling_locations,
    attention_weights,
    *,
    spatial_shapes,
    num_points=None,
    padding_mode="zeros",
    method="bilinear",
    normalize=None,
):
    """`out [B, Q, M * D]` of `jax_attn_bwd.multi_scale_deformable_attention`."""
    (B, _, M, D), Q, out = value.shape, sampling_locations.shape[1], 0
    points = num_points or (sampling_locations.shape[-2],) * len(spatial_shapes)
    location = sampling_locations.reshape(B, Q, M, sum(points), 2)
    weight = attention_weights.reshape(B, Q, M, sum(points))
    if normalize == "softmax":
        location = jnp.where(weight[..., None] == -jnp.inf, jnp.nan, location)
        top = weight.max(-1, keepdims=True, initial=-jnp.inf)
        weight = jnp.exp(weight - jnp.where(top == -jnp.inf, 0, jax.lax.stop_gradient(top)))
        total = weight.sum(-1, keepdims=True)
        weight = weight / jnp.where(total == 0, 1, total)
    b, m = jnp.arange(B)[:, None, None, None], jnp.arange(M)[:, None]
    start = first = 0
    for (H, W), P in zip(spatial_shapes, points, strict=True):
        at = location[..., first : first + P, :]
        counts = jnp.isfinite(at).all(-1)
        between = [True, True]  # whether the next pixel has a part in it
        x, y = at[..., 0] * W, at[..., 1] * H  # [B, Q, M, P]
        if method == "discrete":
            x, y = jnp.floor(x + 0.5), jnp.floor(y + 0.5)
            x, y = jnp.clip(x, 0, W - 1), jnp.clip(y, 0, H - 1)
        else:
            x, y = x - 0.5, y - 0.5
            if padding_mode == "border":
                between = [(z >= 0) & (z < n - 1) for z, n in ((x, W), (y, H))]
                x, y = (
                    jnp.where(free, z, jax.lax.stop_gradient(jnp.clip(z, 0, n - 1)))
                    for z, n, free in ((x, W, between[0]), (y, H, between[1]))
                )
            counts &= (x > -1) & (x < W) & (y > -1) & (y < H)
        x, y = jnp.where(counts, x, -2), jnp.where(counts, y, -2)
        x0, y0 = jnp.floor(x), jnp.floor(y)
        fx, fy = x - x0, y - y0
        for dy in (0, 1):
            for dx in (0, 1):
                cx, cy = x0.astype(jnp.int32) + dx, y0.astype(jnp.int32) + dy
                fraction = (fx if dx else 1 - fx) * (fy if dy else 1 - fy)
                inside = (cx >= 0) & (cx < W) & (cy >= 0) & (cy < H)
                inside &= (between[0] if dx else True) & (between[1] if dy else True)
                index = jnp.where(inside, start + cy * W + cx, 0)
                pixel = jnp.where(inside[..., None], value[b, index, m], 0)  # [B, Q, M, P, D]
                scale = jnp.where(counts, weight[..., first : first + P] * fraction, 0)
                out += (scale[..., None] * pixel).sum(-2)
        start, first = start + H * W, first + P
    return jnp.asarray(out, value.dtype).reshape(B, Q, M * D)
