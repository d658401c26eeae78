"""Root mean square normalisation over the last axis."""

import mlx.core as mx

from ..rows import each_row


def rms_norm(x: mx.array, w: mx.array | None, eps: float) -> mx.array:
    """x [N, ..., D] float32, w [D] or None -> w x / sqrt(mean(x^2) + eps) (model 2)."""
    return rms_norm_reference(x, w, eps)


def rms_norm_reference(x: mx.array, w: mx.array | None, eps: float) -> mx.array:
    return each_row(lambda row: mx.fast.rms_norm(row, w, eps), x)
