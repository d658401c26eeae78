"""The best k of the entries that a query may read."""

import mlx.core as mx

from . import metal

NONE = 0xFFFFFFFF  # stands where fewer than k entries are ready
_kernel = metal.Kernel(
    "index_best",
    inputs=["scores", "ready"],
    outputs=["chosen"],
    call="""threadgroup uint counts[1024];
threadgroup uint2 held[16];
index_best(scores, ready, chosen, counts, held, scores_shape[1], K,
    threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
)


def index_best(scores: mx.array, ready: mx.array, k: int) -> mx.array:
    """scores [N, C] float32, C at least 8, ready [N] int32 -> uint32 [N, k], ascending.

    The entries below a row's `ready` with the k best scores, ties to the lowest entry, a NaN
    as minus infinity (model 8, 20.6). Where fewer than k are ready, all, then NONE.
    """
    N = scores.shape[0]
    if not metal.enabled():
        return index_best_reference(scores, ready, k)
    (chosen,) = _kernel(
        scores,
        ready,
        template={"K": k},
        grid=(512, N, 1),
        group=(512, 1, 1),
        shapes=[(N, k)],
        dtypes=[mx.uint32],
    )
    return chosen


def index_best_reference(scores, ready, k):
    C = scores.shape[1]
    hidden = (mx.arange(C) >= ready[:, None]) | mx.isnan(scores)
    order = mx.argsort(-mx.where(hidden, -mx.inf, scores), axis=-1)
    chosen = mx.sort(order[:, :k], axis=-1)
    chosen = mx.pad(chosen, [(0, 0), (0, max(0, k - C))])
    return mx.where(mx.arange(k) < ready[:, None], chosen, mx.array(NONE, mx.uint32))
