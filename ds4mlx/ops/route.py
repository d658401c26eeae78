"""The router: which experts a token visits, and with what weight."""

import mlx.core as mx

from ..packed import Matrix
from ..rows import each_row
from .linear import linear


def route(x, gate: Matrix, *, k: int, scale: float, bias=None, chosen=None):
    """x [N, D] float32, gate [E, D] -> ids [N, K] uint32, weights [N, K] float32 (model 11).

    `chosen` [N, K] are the experts of a hash layer; without it the k largest of score + bias,
    ties to the lowest expert. The bias [E] never enters the weight.
    """
    return route_reference(x, gate, k=k, scale=scale, bias=bias, chosen=chosen)


def route_reference(x, gate, *, k, scale, bias=None, chosen=None):
    def one(x, *chosen):
        score = mx.sqrt(mx.logaddexp(linear(x, gate), mx.array(0.0)))
        ids = chosen[0] if chosen else mx.argsort(-(score + bias), axis=-1)[:, :k]
        picked = mx.take_along_axis(score, ids, axis=-1)
        total = mx.maximum(picked.sum(axis=-1, keepdims=True), 1e-20)
        return ids, picked / total * scale

    return each_row(one, x) if chosen is None else each_row(one, x, chosen)
