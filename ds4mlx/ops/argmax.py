"""The likeliest token of each row, and by how much it is the likeliest."""

import mlx.core as mx

from . import metal

_GROUP = 1024
_kernel = metal.Kernel(
    "argmax",
    inputs=["logits"],
    outputs=["ids", "margins"],
    call="""threadgroup float2 values[32];
threadgroup uint places[32];
argmax(logits, ids, margins, values, places, V, threadgroup_position_in_grid.y,
    thread_index_in_threadgroup, threads_per_threadgroup.x);""",
)


def argmax(logits: mx.array) -> tuple[mx.array, mx.array]:
    """logits [N, V] float32, V at least 8 -> ids [N] int32, margins [N] float32: top-1 minus top-2.

    Ties go to the lowest id; a NaN counts as minus infinity.
    """
    if not metal.enabled():
        return argmax_reference(logits)
    N, V = logits.shape
    group = min(_GROUP, metal.round_up(V, 32))
    return tuple(
        _kernel(
            logits,
            template={"V": V},
            grid=(group, N, 1),
            group=(group, 1, 1),
            shapes=[(N,), (N,)],
            dtypes=[mx.int32, mx.float32],
        )
    )


def argmax_reference(logits):
    logits = mx.where(mx.isnan(logits), -mx.inf, logits)
    pair = mx.topk(logits, 2, axis=-1)
    margins = pair.max(axis=-1) - pair.min(axis=-1)
    return mx.argmax(logits, axis=-1).astype(mx.int32), margins
