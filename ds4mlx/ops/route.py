"""The router: which experts a token visits, and with what weight."""

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..packed import Matrix
from ..rows import each_row
from . import metal
from .columns import Columns, source, whole
from .linear import linear


@cache
def _best(scale: float) -> metal.Kernel:
    return metal.Kernel(
        "route",
        inputs=["logits", "bias"],
        outputs=["ids", "weights"],
        call=f"""threadgroup float keys[E + K];
uint n = threadgroup_position_in_grid.y;
route_best(logits + n * LOGITS_STRIDE + LOGITS_AT, bias, ids + n * K, weights + n * K, keys,
    keys + E, {metal.literal(scale)}, E, K, thread_index_in_threadgroup,
    threads_per_threadgroup.x);""",
    )


@cache
def _listed(scale: float) -> metal.Kernel:
    return metal.Kernel(
        "route",
        inputs=["logits", "ids"],
        outputs=["weights"],
        call=f"""threadgroup float chosen[K];
uint n = threadgroup_position_in_grid.y;
route_listed(logits + n * LOGITS_STRIDE + LOGITS_AT, ids + n * K, weights + n * K, chosen,
    {metal.literal(scale)}, E, K, thread_index_in_threadgroup);""",
    )


class Choice(NamedTuple):
    """What `route` chooses by."""

    logits: mx.array | Columns  # [N, E] float32, the gate's product
    k: int
    scale: float
    bias: mx.array | None = None  # [E]
    chosen: mx.array | None = None  # [N, k], the experts of a hash layer


def route(x, gate: Matrix, **settings):
    """x [N, D] float32, gate [E, D] -> ids [N, K] uint32, weights [N, K] float32 (model 11).

    settings: of Choice. `chosen` [N, K] are the experts of a hash layer; without it the k largest
    of score + bias, ties to the lowest expert. The bias [E] never enters the weight.
    """
    return chosen_by(Choice(linear(x, gate), **settings))


def chosen_by(choice: Choice) -> tuple[mx.array, mx.array]:
    """As `route`, of the gate's product."""
    logits, k, scale, bias, chosen = choice
    if not metal.enabled():
        return _reference(choice)
    N, E = logits.shape
    logits, at, stride = source(logits)
    assert k <= min(E, 32), (k, E)
    listed = chosen is not None
    kernel, group = (_listed, 32) if listed else (_best, min(1024, metal.round_up(E, 32)))
    kernel = kernel(scale)
    results = kernel(
        logits,
        chosen if listed else bias,
        template={"E": E, "K": k, "LOGITS_AT": at, "LOGITS_STRIDE": stride},
        grid=(group, N, 1),
        group=(group, 1, 1),
        shapes=[(N, k)] * len(kernel.outputs),
        dtypes=[mx.uint32, mx.float32][-len(kernel.outputs) :],
    )
    return (chosen, results[0]) if listed else tuple(results)


def route_reference(x, gate: Matrix, **settings):
    return _reference(Choice(linear(x, gate), **settings))


def _reference(choice: Choice):
    logits, k, scale, bias, chosen = choice
    logits = whole(logits)

    def one(logits, *chosen):
        score = mx.sqrt(mx.logaddexp(logits, mx.array(0.0)))
        ids = chosen[0] if chosen else mx.argsort(-(score + bias), axis=-1)[:, :k]
        picked = mx.take_along_axis(score, ids, axis=-1)
        total = mx.maximum(picked.sum(axis=-1, keepdims=True), 1e-20)
        return ids, picked / total * scale

    return each_row(one, logits, *(() if chosen is None else (chosen,)))
