"""Layers for Keras 3 on its JAX backend, which they choose where nothing has chosen one before Keras."""

import os
import sys

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

if keras.backend.backend() != "jax":
    raise ImportError(
        f"jax_attn_bwd.layers.keras needs the JAX backend of Keras, got {keras.backend.backend()!r}; set the "
        "environment variable KERAS_BACKEND=jax before Keras is imported"
    )

from jax_attn_bwd.layers.keras.in_place import use_attention
from jax_attn_bwd.layers.keras.multi_head import GroupedQueryAttention, MultiHeadAttention

__all__ = ["GroupedQueryAttention", "MultiHeadAttention", "use_attention"]
