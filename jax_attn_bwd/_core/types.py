"""Names for annotations of public arguments."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray
Integers: TypeAlias = Array | int | Sequence[int] | Sequence[Sequence[int]]  # what `checks.integers` takes
