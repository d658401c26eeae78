"""The Hadamard transform and fp4 round trip of indexer queries and keys (model 15)."""

import mlx.core as mx

from . import metal
from .round_kv import power_of_two_scale

BLOCK = 32
WIDTHS = (32, 64, 128, 256)  # of round_index.h
_kernel = metal.Kernel(
    "round_index",
    inputs=["x"],
    outputs=["out"],
    call="round_index<C>(x, out, threadgroup_position_in_grid.x, thread_index_in_simdgroup);",
)


def round_index(x: mx.array) -> mx.array:
    """x [..., Di] float32, Di a power of two -> Walsh-Hadamard, then e2m1 in blocks of 32.

    The kernel takes Di of 32 to 256.
    """
    Di = x.shape[-1]
    if not metal.enabled() or Di not in WIDTHS:
        return round_index_reference(x)
    (out,) = _kernel(
        x,
        template={"C": Di // 32},
        grid=(32 * (x.size // Di), 1, 1),
        group=(32, 1, 1),
        shapes=[x.shape],
        dtypes=[mx.float32],
    )
    return out


def round_index_reference(x: mx.array) -> mx.array:
    blocks = mx.hadamard_transform(x).reshape(*x.shape[:-1], -1, BLOCK)
    scale = power_of_two_scale(blocks, floor=6 * 2.0**-126, largest=6.0)
    return (fp4(blocks / scale) * scale).reshape(x.shape)


def fp4(x: mx.array) -> mx.array:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with its sign; ties go to the even code."""
    size = mx.minimum(mx.abs(x), 6.0)
    step = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    return mx.sign(x) * mx.round(size / step) * step
