"""Attention with a sink: one key row that is also the value, a window and compressed entries."""

from collections.abc import Sequence

import mlx.core as mx

from ..rows import FEW
from . import metal

_TILE, _MAX_SPLITS, _HEADS = 32, 32, 2  # of attention.metal; heads that a simdgroup owns
_part = metal.Kernel(
    "attention",
    inputs=["q", "raw", "entries", "ids", "rows"],
    outputs=["part", "stat"],
    call="""uint sg = threadgroup_position_in_grid.x * simdgroups_per_threadgroup
    + simdgroup_index_in_threadgroup;
attention_part<DH, HEADS>(q, raw, entries, ids, rows, part, stat, q_shape[0], q_shape[1],
    threadgroup_position_in_grid.y, sg, thread_index_in_simdgroup);""",
)
_merge = metal.Kernel(
    "attention",
    inputs=["part", "stat", "rows", "sink"],
    outputs=["out"],
    call="""attention_merge<DH>(part, stat, rows, sink, out, part_shape[1],
    thread_position_in_grid, thread_index_in_simdgroup);""",
)
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
    causal: bool = True,
) -> mx.array:
    """q [N, H, Dh] -> [N, H, Dh] float32 (model 9).

    raw [S, Dh]: the key rows up to and including the block's own N, in order of position; a
    query sees the last `window` of those that end with its own. entries [C, Dh]: compressed
    rows, of which query i sees the first ready[i], or those of them in `selected` (as
    `index_select` gives it). sink [H] enters the denominator only. Scale Dh^-1/2.
    Without `causal` every query sees all of raw (the block of a draft, model 16.2).
    The kernel takes up to FEW rows and heads of whole 128 channels.
    """
    N, _, Dh = q.shape
    if not metal.enabled() or N > FEW or Dh % 128:
        return attention_reference(
            q,
            raw,
            sink,
            window=window,
            entries=entries,
            ready=ready,
            selected=selected,
            causal=causal,
        )
    rows, ids, splits = [], [], 0
    for i in range(N):
        end = raw.shape[0] - N + i + 1 if causal else raw.shape[0]
        first = max(0, end - window) if causal else 0
        count, start = 0, -1
        if causal and entries is not None and ready[i]:
            count = ready[i]
            if selected is not None and selected[i] is not None:
                count, start = selected[i].shape[0], sum(s.shape[0] for s in ids)
                ids.append(selected[i])
        rows.append((first, end - first, count, start, splits))
        splits += _splits(end - first + count)
    entries = raw if entries is None else entries
    return _attend(q, raw, sink, entries, mx.array(rows, mx.int32), ids, splits)


def _attend(q, raw, sink, entries, rows: mx.array, ids: list[mx.array], splits: int) -> mx.array:
    """rows: an attention_keys of attention.metal each; ids: the lists of selected entries."""
    N, H, Dh = q.shape
    pairs = -(-H // _HEADS)  # of heads, a simdgroup each
    group = 32 * min(4, pairs)
    part, stat = _part(
        q,
        raw,
        entries,
        mx.concatenate(ids) if ids else mx.array([0], mx.uint32),
        rows,
        template={"DH": Dh, "HEADS": _HEADS},
        grid=(metal.round_up(32 * pairs, group), splits, 1),
        group=(group, 1, 1),
        shapes=[(splits, H, Dh), (splits, H, 2)],
        dtypes=[mx.float32, mx.float32],
    )
    (out,) = _merge(
        part,
        stat,
        rows,
        sink,
        template={"DH": Dh},
        grid=(Dh // 4, H, N),
        group=(Dh // 4, 1, 1),
        shapes=[q.shape],
        dtypes=[mx.float32],
    )
    return out


def _splits(keys: int) -> int:
    """Among how many splits a query's keys are divided, as attention_split_size has it."""
    tiles = -(-keys // _TILE)
    return -(-tiles // -(-tiles // _MAX_SPLITS))


def attention_reference(
    q, raw, sink, *, window, entries=None, ready=(), selected=None, causal=True
):
    N = q.shape[0]
    if not causal:
        return mx.stack([_one(q[i], [raw], sink) for i in range(N)])
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
