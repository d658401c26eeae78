"""The router: which experts a token visits, and with what weight."""

import mlx.core as mx

from ..packed import Matrix
from ..rows import each_row
from . import metal
from .linear import linear

_best = metal.Kernel(
    "route",
    inputs=["logits", "bias", "scale"],
    outputs=["ids", "weights"],
    call="""threadgroup float keys[E + K];
route_best(logits, bias, ids, weights, keys, keys + E, scale, E, K,
    threadgroup_position_in_grid.y, thread_index_in_threadgroup, threads_per_threadgroup.x);""",
)
_listed = metal.Kernel(
    "route",
    inputs=["logits", "ids", "scale"],
    outputs=["weights"],
    call="""threadgroup float chosen[K];
route_listed(logits, ids, weights, chosen, scale, E, K, threadgroup_position_in_grid.y,
    thread_index_in_threadgroup);""",
)


def route(x, gate: Matrix, *, k: int, scale: float, bias=None, chosen=None):
    """x [N, D] float32, gate [E, D] -> ids [N, K] uint32, weights [N, K] float32 (model 11).

    `chosen` [N, K] are the experts of a hash layer; without it the k largest of score + bias,
    ties to the lowest expert. The bias [E] never enters the weight.
    """
    if not metal.enabled():
        return route_reference(x, gate, k=k, scale=scale, bias=bias, chosen=chosen)
    N, E = x.shape[0], gate.shape[0]
    k = k if chosen is None else chosen.shape[1]
    assert k <= min(E, 32), (k, E)
    launch, group = (_best, min(1024, metal.round_up(E, 32))) if chosen is None else (_listed, 32)
    results = launch(
        linear(x, gate),
        bias if chosen is None else chosen,
        mx.array(scale),
        template={"E": E, "K": k},
        grid=(group, N, 1),
        group=(group, 1, 1),
        shapes=[(N, k)] * len(launch.outputs),
        dtypes=[mx.uint32, mx.float32][-len(launch.outputs) :],
    )
    return tuple(results) if chosen is None else (chosen, results[0])


def route_reference(x, gate, *, k, scale, bias=None, chosen=None):
    def one(x, *chosen):
        score = mx.sqrt(mx.logaddexp(linear(x, gate), mx.array(0.0)))
        ids = chosen[0] if chosen else mx.argsort(-(score + bias), axis=-1)[:, :k]
        picked = mx.take_along_axis(score, ids, axis=-1)
        total = mx.maximum(picked.sum(axis=-1, keepdims=True), 1e-20)
        return ids, picked / total * scale

    return each_row(one, x) if chosen is None else each_row(one, x, chosen)
