"""Pallas kernels of deformable attention: `gpu_*` for any NVIDIA GPU from Ampere on, `tpu_*`."""

from jax_attn_bwd.ops.deformable.spec import Operands

MOST_CHANNELS = 256


def unsupported(operands: Operands, dtypes: tuple[str, ...]) -> str | None:
    """Tells why no kernel of `dtypes` can run this call; None if one may."""
    if not all(isinstance(n, int) for x in operands for n in x.shape):
        return "its shapes must be known, not symbolic"
    for name, x in operands._asdict().items():
        if x.dtype.name not in dtypes:
            return f"{name} must be one of {dtypes}, got {x.dtype}"
        if x.size == 0:
            return f"{name} must not be empty, got shape {x.shape}"
    if (channels := operands.value.shape[3]) > MOST_CHANNELS:
        return f"a head may have at most {MOST_CHANNELS} channels, got {channels}"
    return None
