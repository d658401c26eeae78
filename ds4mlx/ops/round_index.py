"""The Hadamard transform and fp4 round trip of indexer queries and keys (model 15)."""

import mlx.core as mx

from .round_kv import power_of_two_scale

BLOCK = 32


def round_index(x: mx.array) -> mx.array:
    """x [..., Di] float32, Di a power of two -> Walsh-Hadamard, then e2m1 in blocks of 32."""
    return round_index_reference(x)


def round_index_reference(x: mx.array) -> mx.array:
    blocks = mx.hadamard_transform(x).reshape(*x.shape[:-1], -1, BLOCK)
    scale = power_of_two_scale(blocks, floor=6 * 2.0**-126, largest=6.0)
    return (fp4(blocks / scale) * scale).reshape(x.shape)


def fp4(x: mx.array) -> mx.array:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with its sign; ties go to the even code."""
    size = mx.minimum(mx.abs(x), 6.0)
    step = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    return mx.sign(x) * mx.round(size / step) * step
