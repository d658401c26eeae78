"""The block-diagonal product of the output projection: group g of the heads meets block g only."""

import mlx.core as mx

from ..packed import Matrix
from .linear import linear_reference, products, takes


def grouped_linear(x: mx.array, w: Matrix) -> mx.array:
    """x [N, G, K] float32, w [G * R, K] -> [N, G * R], block g of w times x[:, g] (model 10).

    The kernel, for the shapes that `linear` says, is that of `linear`: one launch.
    """
    N, G, K = x.shape
    if not takes(x, w):
        return grouped_linear_reference(x, w)
    return products(x if G > 1 else x.reshape(N, K), [w], G)[0]


def grouped_linear_reference(x: mx.array, w: Matrix) -> mx.array:
    G = x.shape[1]
    R = w.shape[0] // G
    return mx.concatenate(
        [linear_reference(x[:, g], w[g * R : (g + 1) * R]) for g in range(G)], axis=-1
    )
