"""The block-diagonal product of the output projection: group g of the heads meets block g only."""

import mlx.core as mx

from ..packed import Matrix
from .linear import linear_reference, products, takes


def grouped_linear(x: mx.array, w: Matrix, G: int) -> mx.array:
    """x [N, ...] float32 as [N, G, K], w [G * R, K] -> [N, G * R], block g of w times x[:, g].

    Section 10 of the model. The kernel, for the shapes that `linear` says, is that of `linear`:
    one launch.
    """
    if not takes(x, w):
        return grouped_linear_reference(x, w, G)
    return products(x, [w], G)[0]


def grouped_linear_reference(x: mx.array, w: Matrix, G: int) -> mx.array:
    x, R = x.reshape(x.shape[0], G, -1), w.shape[0] // G
    return mx.concatenate(
        [linear_reference(x[:, g], w[g * R : (g + 1) * R]) for g in range(G)], axis=-1
    )
