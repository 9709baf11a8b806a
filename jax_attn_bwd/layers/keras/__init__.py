"""Layers for Keras 3 on its JAX backend."""

import keras

if keras.backend.backend() != "jax":
    raise ImportError(
        f"jax_attn_bwd.layers.keras needs Keras' JAX backend, got {keras.backend.backend()!r}; set the "
        "environment variable KERAS_BACKEND=jax before Keras is imported"
    )

from jax_attn_bwd.layers.keras.in_place import use_attention
from jax_attn_bwd.layers.keras.multi_head import GroupedQueryAttention, MultiHeadAttention

__all__ = ["GroupedQueryAttention", "MultiHeadAttention", "use_attention"]
