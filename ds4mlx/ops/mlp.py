"""The gated feed-forward of one expert, with DeepSeek's limits."""

import mlx.core as mx

from ..packed import Matrix
from .linear import Gated, linear, linear_reference, linears, swiglu


def mlp(x: mx.array, w1: Matrix, w3: Matrix, w2: Matrix, limit: float) -> mx.array:
    """x [N, D]; w1 (gate), w3 (up) [F, D]; w2 (down) [D, F] -> [N, D] (model 12)."""
    return linear(linears(x, [Gated(w1, w3, limit)])[0], w2)


def mlp_reference(x, w1, w3, w2, limit):
    return linear_reference(swiglu(*(linear_reference(x, w) for w in (w1, w3)), limit), w2)
