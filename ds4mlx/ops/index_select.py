"""The indexer: score the compressed entries that a query may read, and keep the best k (CSA)."""

from collections.abc import Sequence

import mlx.core as mx

from ..rows import FEW
from . import metal
from .index_best import index_best
from .index_scores import weigh

PRODUCTS = 1 << 24  # products of heads, rows and entries that prefill holds at a time
_MORE = 2  # times as many on CUDA, whose GPUs few rows leave idle


def index_select(q, w, keys, ready: Sequence[int], k: int) -> list[mx.array | None] | mx.array:
    """q [N, Hi, Di], w [N, Hi], keys [C, Di] float32, ready: entries each row may see.

    -> up to FEW rows: a list with, per row, uint32 [k] in ascending order, or None where
    ready <= k and all are read; more rows: uint32 [N, min(k, C)], ids at or above a row's
    `ready` to be masked. Ties go to the lowest entry (model 8, 20.6).
    """
    if q.shape[0] <= FEW or not metal.enabled() or keys.shape[0] <= k:
        return index_select_reference(q, w, keys, ready, k)
    blocks = []
    for at in _blocks(q, keys):
        limit = mx.array(ready[at], mx.int32)
        blocks.append(index_best(weigh(q[at], w[at], keys), limit, k))
    return mx.concatenate(blocks)


def index_select_reference(q, w, keys, ready, k):
    C = keys.shape[0]
    if q.shape[0] <= FEW:
        return [
            _best(weigh(q[i : i + 1], w[i : i + 1], keys[:n]), k)[0] if n > k else None
            for i, n in enumerate(ready)
        ]
    blocks = []
    for at in _blocks(q, keys):
        scores = weigh(q[at], w[at], keys)
        limit = mx.array(ready[at])[:, None]
        hidden = mx.arange(C)[None] >= limit
        blocks.append(_best(mx.where(hidden, -mx.inf, scores), min(k, C)))
    return mx.concatenate(blocks)


def scored(kind: str | None) -> int:
    """PRODUCTS on a device of this kind, as `metal.backend` names it."""
    return PRODUCTS * (_MORE if kind == "cuda" else 1)


def _blocks(q, keys) -> list[slice]:
    """Rows that are scored at a time."""
    rows = max(1, scored(metal.backend()) // (q.shape[1] * keys.shape[0]))
    return [slice(i, i + rows) for i in range(0, q.shape[0], rows)]


def _best(scores: mx.array, k: int) -> mx.array:
    return mx.sort(mx.argsort(-scores, axis=-1)[:, :k], axis=-1)
