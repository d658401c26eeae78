"""The gated feed-forward of one expert, with DeepSeek's limits."""

import mlx.core as mx

from ..packed import Matrix
from .linear import linear, linears


def mlp(x: mx.array, w1: Matrix, w3: Matrix, w2: Matrix, limit: float) -> mx.array:
    """x [N, D]; w1 (gate), w3 (up) [F, D]; w2 (down) [D, F] -> [N, D] (model 12)."""
    return mlp_reference(x, w1, w3, w2, limit)


def mlp_reference(x, w1, w3, w2, limit):
    return linear(swiglu(*linears(x, (w1, w3)), limit), w2)


def swiglu(gate: mx.array, up: mx.array, limit: float) -> mx.array:
    """silu(gate) up: the gate is limited from above only, the up branch on both sides."""
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(gate) * mx.clip(up, -limit, limit)
