"""Weigh a token's residual streams into the one row that a sublayer reads."""

import mlx.core as mx

from ..rows import each_row


def hc_collapse(x: mx.array, pre: mx.array) -> mx.array:
    """x [N, HC, D], pre [N, HC] -> sum_j pre_j x_j, [N, D] (model 4.2)."""
    return hc_collapse_reference(x, pre)


def hc_collapse_reference(x: mx.array, pre: mx.array) -> mx.array:
    return each_row(lambda x, pre: (pre[:, None] @ x).squeeze(1), x, pre)
