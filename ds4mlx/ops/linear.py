"""Products with a weight matrix, packed or not; the rows of a small block stay exact."""

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from .dequantize import NATIVE, dequantize, native

_TILE = 1 << 26  # elements of a matrix that prefill widens at a time (256 MB of float32)


def linear(x: mx.array, w: Matrix) -> mx.array:
    """x [N, K] float32, w [M, K] -> x w^T, [N, M] float32."""
    return linear_reference(x, w)


def linear_reference(x: mx.array, w: Matrix) -> mx.array:
    if x.shape[0] <= FEW:
        return each_row(lambda row: _few(row, w), x)
    M, K = w.shape
    tile = max(1, _TILE // K)
    if tile >= M:
        return x @ dequantize(w).T
    parts = [x @ dequantize(w[i : min(i + tile, M)]).T for i in range(0, M, tile)]
    return mx.concatenate(parts, axis=1)


def _few(x: mx.array, w: Matrix) -> mx.array:
    if isinstance(w, Packed) and w.type in NATIVE:
        codes, form = native(w)
        return mx.quantized_matmul(x, codes, **form, transpose=True)
    return x @ dequantize(w).T
