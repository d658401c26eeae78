"""The likeliest token of each row, and by how much it is the likeliest."""

import mlx.core as mx

from . import metal

_THREADS, _PER = 256, 8  # of a threadgroup of the first launch; logits of a thread
_kernel = metal.Kernel(
    "argmax",
    inputs=["logits"],
    outputs=["values", "places"],
    call="""threadgroup float2 among[THREADS / 32];
threadgroup uint among_places[THREADS / 32];
argmax<THREADS, PER>(logits, values, places, among, among_places, V,
    uint2(threadgroup_position_in_grid.x, threadgroups_per_grid.x), threadgroup_position_in_grid.y,
    thread_index_in_threadgroup);""",
)
_last = metal.Kernel(
    "argmax",
    inputs=["values", "places"],
    outputs=["ids", "margins"],
    call="""argmax_last(values, places, ids, margins, values_shape[1],
    threadgroup_position_in_grid.y, thread_index_in_simdgroup);""",
)


def argmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """logits [N, V] float32, V at least 8 -> ids [N] int32, margins [N] float32: top-1 minus top-2.

    Ties go to the lowest id; a NaN counts as minus infinity.
    """
    if not metal.enabled():
        return argmax_reference(logits)
    N, V = logits.shape
    parts = -(-V // (_THREADS * _PER))
    values, places = _kernel(
        logits,
        template={"V": V, "THREADS": _THREADS, "PER": _PER},
        grid=(_THREADS * parts, N, 1),
        group=(_THREADS, 1, 1),
        shapes=[(N, parts, 2), (N, parts)],
        dtypes=[mx.float32, mx.uint32],
    )
    return tuple(
        _last(
            values,
            places,
            template={},
            grid=(32, N, 1),
            group=(32, 1, 1),
            shapes=[(N,), (N,)],
            dtypes=[mx.int32, mx.float32],
        )
    )


def argmax_reference(logits):
    logits = mx.where(mx.isnan(logits), -mx.inf, logits)
    pair = mx.topk(logits, 2, axis=-1)
    margins = pair.max(axis=-1) - pair.min(axis=-1)
    return mx.argmax(logits, axis=-1).astype(mx.int32), margins
