"""Hyper-connection coefficients: how a sublayer reads the residual streams and writes them back."""

import mlx.core as mx

from ..rows import each_row
from .linear import linear


def hc_mix(x, fn, scale, base, *, iterations: int, eps: float, norm_eps: float):
    """Coefficients of one sublayer (model 4.1), all float32.

    x [N, HC, D]; fn [(2 + HC) * HC, HC * D]; scale [3]; base [(2 + HC) * HC]
    -> pre [N, HC], post [N, HC], comb [N, HC, HC] (first index: source stream).
    """
    return hc_mix_reference(x, fn, scale, base, iterations=iterations, eps=eps, norm_eps=norm_eps)


def hc_mix_reference(x, fn, scale, base, *, iterations: int, eps: float, norm_eps: float):
    HC = x.shape[1]
    scales = mx.concatenate([mx.repeat(scale[:2], HC), mx.repeat(scale[2:], HC * HC)])

    def one(x):
        m = normed_product(x, fn, norm_eps) * scales + base
        gates = mx.sigmoid(m[:, : 2 * HC])
        comb = sinkhorn(m[:, 2 * HC :].reshape(-1, HC, HC), iterations, eps)
        return gates[:, :HC] + eps, 2 * gates[:, HC:], comb

    return each_row(one, x)


def normed_product(x: mx.array, fn, norm_eps: float) -> mx.array:
    """x [N, HC, D] flattened, divided by its root mean square, times fn^T."""
    flat = x.flatten(1)
    return linear(mx.fast.rms_norm(flat, None, norm_eps), fn)


def sinkhorn(a: mx.array, iterations: int, eps: float) -> mx.array:
    """a [N, HC, HC] logits -> softmax over the last axis, then column and row divisions."""
    a = mx.softmax(a, axis=-1) + eps
    a = a / (a.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(axis=-1, keepdims=True) + eps)
        a = a / (a.sum(axis=-2, keepdims=True) + eps)
    return a
