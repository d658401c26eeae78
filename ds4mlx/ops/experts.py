"""The routed experts: each row meets its own k, weighed by the router."""

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from .dequantize import NATIVE, dequantize, native
from .mlp import mlp, swiglu


def experts(x, ids, weights, w1: Matrix, w3: Matrix, w2: Matrix, limit: float) -> mx.array:
    """x [N, D], ids [N, K] uint32, weights [N, K]; w1, w3 [E, F, D], w2 [E, D, F] -> [N, D].

    The weight is applied before w2 (model 12).
    """
    return experts_reference(x, ids, weights, w1, w3, w2, limit)


def experts_reference(x, ids, weights, w1, w3, w2, limit):
    def gathered(x, ids, weights):
        up = swiglu(_gather(x[:, None], w1, ids), _gather(x[:, None], w3, ids), limit)
        return _gather(up * weights[..., None], w2, ids).sum(axis=1)

    if x.shape[0] <= FEW:
        return each_row(gathered, x, ids, weights)
    if all(isinstance(w, Packed) and w.type in NATIVE for w in (w1, w3, w2)):
        return gathered(x, ids, weights)
    # One expert after the other over all rows: each is widened once, and memory stays small.
    total = mx.zeros_like(x)
    for e in range(w1.shape[0]):
        share = mx.where(ids == e, weights, 0.0).sum(axis=1, keepdims=True)
        total = total + share * mlp(x, w1[e], w3[e], w2[e], limit)
    return total


def _gather(x: mx.array, w: Matrix, ids: mx.array) -> mx.array:
    """x [N, K or 1, D], w [E, M, D], ids [N, K] -> x[n, k] w[ids[n, k]]^T, [N, K, M]."""
    x = x[:, :, None]
    if isinstance(w, Packed) and w.type in NATIVE:
        if w.type != "MXFP4" and ids.shape[0] == 1:
            # Scales are widened for the call: for the chosen experts, not for all.
            w, ids = w[ids[0]], mx.arange(ids.shape[1], dtype=mx.uint32)[None]
        codes, form = native(w)
        return mx.gather_qmm(x, codes, **form, rhs_indices=ids, transpose=True).squeeze(2)
    return (x @ dequantize(w[ids]).swapaxes(-1, -2)).squeeze(2)
