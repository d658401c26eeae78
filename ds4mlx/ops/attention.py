"""Attention with a sink: one key row that is also the value, a window and compressed entries."""

from collections.abc import Sequence

import mlx.core as mx

from ..rows import FEW

_BLOCK = 128  # query rows that prefill handles at a time


def attention(
    q: mx.array,
    raw: mx.array,
    sink: mx.array,
    *,
    window: int,
    entries: mx.array | None = None,
    ready: Sequence[int] = (),
    selected=None,
) -> mx.array:
    """q [N, H, Dh] -> [N, H, Dh] float32 (model 9).

    raw [S, Dh]: the key rows up to and including the block's own N, in order of position; a
    query sees the last `window` of those that end with its own. entries [C, Dh]: compressed
    rows, of which query i sees the first ready[i], or those of them in `selected` (as
    `index_select` gives it). sink [H] enters the denominator only. Scale Dh^-1/2.
    """
    return attention_reference(
        q, raw, sink, window=window, entries=entries, ready=ready, selected=selected
    )


def attention_reference(q, raw, sink, *, window, entries=None, ready=(), selected=None):
    N = q.shape[0]
    before = raw.shape[0] - N  # rows older than the block
    if N > FEW:
        return _many(q, raw, sink, window, before, entries, ready, selected)
    outputs = []
    for i in range(N):
        end = before + i + 1
        keys = [raw[max(0, end - window) : end]]
        if entries is not None and ready[i]:
            chosen = None if selected is None else selected[i]
            keys.append(entries[: ready[i]] if chosen is None else entries[chosen])
        outputs.append(_one(q[i], keys, sink))
    return mx.stack(outputs)


def _one(q: mx.array, keys: list[mx.array], sink: mx.array) -> mx.array:
    """One query [H, Dh] over all rows of `keys`."""
    q = q * q.shape[-1] ** -0.5
    scores = [q @ k.T for k in keys] + [sink[:, None]]
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
    at, total = 0, 0
    for k in keys:
        total = total + weights[:, at : at + k.shape[0]] @ k
        at += k.shape[0]
    return total


def _many(q, raw, sink, window, before, entries, ready, selected):
    outputs = []
    for i in range(0, q.shape[0], _BLOCK):
        rows = q[i : i + _BLOCK] * q.shape[-1] ** -0.5
        n = rows.shape[0]
        first, last = max(0, before + i + 1 - window), before + i + n
        keys = raw[first:last]
        own = mx.arange(before + i, last)[:, None]  # each query's own row
        at = mx.arange(first, last)[None]
        seen = (at <= own) & (at > own - window)
        scores = [mx.where(seen[:, None], rows @ keys.T, -mx.inf)]
        if entries is not None and ready[i + n - 1]:
            limit = mx.array(ready[i : i + n])[:, None]
            if selected is None:
                some, ids = entries[: ready[i + n - 1]], mx.arange(ready[i + n - 1])[None]
                products = rows @ some.T
            else:
                ids = selected[i : i + n]
                some = entries[ids]  # [n, K, Dh]
                products = rows @ some.swapaxes(1, 2)
            scores.append(mx.where((ids < limit)[:, None], products, -mx.inf))
        scores.append(mx.broadcast_to(sink[:, None], (*rows.shape[:2], 1)))
        weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
        S = keys.shape[0]
        total = weights[..., :S] @ keys
        if len(scores) == 3:
            total = total + weights[..., S:-1] @ some
        outputs.append(total)
    return mx.concatenate(outputs)
