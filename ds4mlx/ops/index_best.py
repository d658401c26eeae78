"""The best k of the entries that a query may read."""

import mlx.core as mx

from . import metal

NONE = 0xFFFFFFFF  # stands where fewer than k entries are ready
_CHUNK = 16384  # of index_best.metal: entries of a threadgroup
_GROUP = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
_VARIABLES = "threadgroup uint counts[32];\nthreadgroup uint2 held[16];"
_kernel = metal.Kernel(
    "index_best",
    inputs=["scores", "ready"],
    outputs=["chosen"],
    partial=True,
    call=f"""{_VARIABLES}
index_best(scores, ready, chosen, counts, held, scores_shape[1], K,
    threadgroup_position_in_grid.yz, threadgroups_per_grid.y, {_GROUP});""",
)
_kernel_of = metal.Kernel(
    "index_best",
    inputs=["scores", "ready", "ids"],
    outputs=["chosen"],
    call=f"""{_VARIABLES}
index_best_of(scores, ready, ids, chosen, counts, held, scores_shape[1], K,
    threadgroup_position_in_grid.z, ids_shape[1], {_GROUP});""",
)


def index_best(scores: mx.array, ready: mx.array, k: int) -> mx.array:
    """scores [N, C] float32, C at least 8, ready [N] int32 -> uint32 [N, k], ascending.

    The entries below a row's `ready` with the k best scores, ties to the lowest entry, a NaN
    as minus infinity (model 8, 20.6). Where fewer than k are ready, all, then NONE. The kernel
    takes k up to 16,384 over the number of 16,384 entries.
    """
    N, C = scores.shape
    chunks = -(-C // _CHUNK)
    if not metal.enabled() or chunks * k > _CHUNK:
        return index_best_reference(scores, ready, k)

    def choose(kernel, *inputs, chunks):
        (chosen,) = kernel(
            scores,
            ready,
            *inputs,
            template={"K": k},
            grid=(512, chunks, N),
            group=(512, 1, 1),
            shapes=[(N, chunks, k)],
            dtypes=[mx.uint32],
        )
        return chosen

    chosen = choose(_kernel, chunks=chunks)
    if chunks > 1:
        chosen = choose(_kernel_of, chosen, chunks=1)
    return chosen.reshape(N, k)


def index_best_reference(scores, ready, k):
    C = scores.shape[1]
    hidden = (mx.arange(C) >= ready[:, None]) | mx.isnan(scores)
    order = mx.argsort(-mx.where(hidden, -mx.inf, scores), axis=-1)
    chosen = mx.sort(order[:, :k], axis=-1)
    chosen = mx.pad(chosen, [(0, 0), (0, max(0, k - C))])
    return mx.where(mx.arange(k) < ready[:, None], chosen, mx.array(NONE, mx.uint32))
