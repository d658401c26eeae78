"""The read-out collapse before the output head."""

import mlx.core as mx

from ..rows import each_row
from .hc_collapse import hc_collapse
from .hc_mix import normed_product


def hc_head(x, fn, scale, base, *, eps: float, norm_eps: float) -> mx.array:
    """x [N, HC, D], fn [HC, HC * D], scale [1], base [HC] -> [N, D] (model 4.4)."""
    return hc_head_reference(x, fn, scale, base, eps=eps, norm_eps=norm_eps)


def hc_head_reference(x, fn, scale, base, *, eps: float, norm_eps: float) -> mx.array:
    def one(x):
        pre = mx.sigmoid(normed_product(x, fn, norm_eps) * scale + base) + eps
        return hc_collapse(x, pre)

    return each_row(one, x)
