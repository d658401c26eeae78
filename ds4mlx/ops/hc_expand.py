"""Write a sublayer's output back into the residual streams."""

import mlx.core as mx

from ..rows import each_row


def hc_expand(x: mx.array, y: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """x [N, HC, D], y [N, D], post [N, HC], comb [N, HC, HC] -> [N, HC, D] (model 4.3).

    out_k = post_k y + sum_j comb[j, k] x_j: the sum runs over the first index of comb.
    """
    return hc_expand_reference(x, y, post, comb)


def hc_expand_reference(x, y, post, comb):
    def one(x, y, post, comb):
        return post[..., None] * y[:, None] + comb.swapaxes(1, 2) @ x

    return each_row(one, x, y, post, comb)
