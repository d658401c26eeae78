"""The indexer's scores of the compressed entries that a query may read (CSA)."""

import mlx.core as mx

from ..rows import FEW, each_row
from . import metal
from .columns import source, whole
from .index_weigh import index_weigh
from .rope import rope
from .round_index import round_index

_HEADS, _ENTRIES = 8, 16  # of index_scores.metal
_SHARES = 264  # threadgroups at most: enough to fill a GPU, each prepares its queries
_kernel = metal.Kernel(
    "index_scores",
    inputs=["q", "turn", "w", "keys", "ready"],
    outputs=["scores"],
    call=f"""threadgroup float part[2 * SIMDGROUPS * {_ENTRIES}];
uint n = threadgroup_position_in_grid.z;
index_scores<HI, C, SIMDGROUPS, ROUNDED>((const device vec<float, C>*)(q + n * Q_STRIDE + Q_AT),
    turn, w + n * W_STRIDE + W_AT, (const device vec<float, C>*)keys, ready, scores, part, R,
    keys_shape[0], threadgroup_position_in_grid.yz, threadgroups_per_grid.y,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
)


def index_scores(q, rotation, w, keys, ready: mx.array, *, rounded: bool) -> mx.array:
    """sum_h w_h relu(q_h . key) of q after `rope` and, if `rounded`, `round_index` (model 8).

    q [N, Hi * Di] float32, as wq_b gives it; rotation [N, R / 2] complex64; w [N, Hi], keys
    [C, Di] float32, rounded before; ready [N] int32: how many entries each row may see
    -> [N, C] float32, minus infinity at and past a row's `ready`. The kernel takes up to FEW
    rows, 128 heads, and Di of 64 or 128.
    """
    (N, Hi), Di = w.shape, keys.shape[1]
    if not metal.enabled() or N > FEW or Di not in (64, 128) or Hi > 128:
        return index_scores_reference(q, rotation, w, keys, ready, rounded=rounded)
    capacity, R = keys.shape[0], 2 * rotation.shape[1]
    simdgroups = -(-Hi // _HEADS)
    (q, q_at, q_stride), (w, w_at, w_stride) = source(q), source(w)
    (scores,) = _kernel(
        q,
        rotation.view(mx.float32),
        w,
        keys,
        ready,
        template={
            "HI": Hi,
            "C": Di // 32,
            "R": R,
            "ROUNDED": rounded,
            "SIMDGROUPS": simdgroups,
            **{"Q_AT": q_at, "Q_STRIDE": q_stride, "W_AT": w_at, "W_STRIDE": w_stride},
        },
        grid=(32 * simdgroups, min(-(-capacity // _ENTRIES), _SHARES // N), N),
        group=(32 * simdgroups, 1, 1),
        shapes=[(N, capacity)],
        dtypes=[mx.float32],
    )
    return scores


def index_scores_reference(q, rotation, w, keys, ready, *, rounded: bool):
    q, w = whole(q), whole(w)

    def one(q, rotation, w, ready):
        q = rope(q.reshape(*w.shape, -1), rotation)
        scores = weigh(round_index(q) if rounded else q, w, keys)
        return mx.where(mx.arange(keys.shape[0]) < ready[:, None], scores, -mx.inf)

    return each_row(one, q, rotation, w, ready)


def weigh(q: mx.array, w: mx.array, keys: mx.array) -> mx.array:
    """sum_h w_h relu(q_h . key) of finished queries, [N, C] float32."""
    return index_weigh(q @ keys.T, w)
