"""Attention with a sink: one key row that is also the value, a window and compressed entries."""

from functools import cache

import mlx.core as mx

from ..rows import FEW
from . import metal
from .attention_shares import attention_shares
from .columns import Columns, source, whole
from .gather_rows import gather_rows
from .rms_norm import rms_norm
from .rope import rope

_FEW, _SPLITS, _HEADS = 4, 32, 4  # of attention.metal; heads that a simdgroup owns
QUERIES = 128  # query rows that prefill handles at a time
_WHOLE = 8  # keys of prefill are whole so many: a fifth of the speed is left by odd ones on CUDA


def attention(
    q: mx.array | Columns,
    rows: mx.array,
    ring,
    sink: mx.array,
    turns: mx.array,
    position: int | mx.array,
    *,
    window: int,
    eps: float,
    entries: mx.array | None = None,
    ratio: int = 0,
    selected=None,
    causal: bool = True,
) -> mx.array:
    """q [N, H * Dh], as wq_b gives it -> [N, H, Dh] float32 (model 5, 9).

    q is normed and rotated by `turns` (complex64 [N, R / 2]), the result rotated back. Keys are
    the first Dh columns of `rows`, which are of positions `position` .., and of the `ring` (a
    cache.Ring) before it, as `latents` gives them: [N, W], or for up to FEW all that the ring is
    to hold. A query sees the last `window` that end with its own, and of `entries` [C, Dh] one
    for each `ratio` tokens up to itself, or where these are more than k the k in its row of
    `selected` [N, k] uint32. sink [H] enters the denominator only. Scale Dh^-1/2.
    W is a multiple of 4. Without `causal` every query sees `window` positions before the block
    and all of the block (a draft's, model 16.2).
    `position` is an int, or for the kernel what `placed` gives of it. The kernel takes up to
    FEW rows, Dh of whole 128 channels up to 1,024, and R of whole 4.
    """
    N, H, R = q.shape[0], sink.shape[0], 2 * turns.shape[-1]
    Dh = q.shape[1] // H
    if not metal.enabled() or N > FEW or not attends(Dh, R):
        return attention_reference(
            q,
            rows,
            ring,
            sink,
            turns,
            position,
            window=window,
            eps=eps,
            entries=entries,
            ratio=ratio,
            selected=selected,
            causal=causal,
        )
    topk = 0 if selected is None else selected.shape[1]
    entries = rows if entries is None else entries
    q, first, stride = source(q)
    template = {"H": H, "DH": Dh, "R": R, "Q_AT": first, "Q_STRIDE": stride}
    template |= {"WINDOW": window, "RATIO": ratio, "TOPK": topk, "CAUSAL": causal}
    where, turns = metal.placed(position), turns.view(mx.float32)
    part, stat = _part(eps)(
        q,
        turns,
        rows,
        entries,
        selected if topk else rows,
        where,
        template=template,
        grid=(metal.round_up(32 * -(-H // _HEADS), 32 * _FEW), _SPLITS, N),
        group=(32 * _FEW, 1, 1),
        shapes=[(N, _SPLITS, H, Dh), (N, _SPLITS, H, 2)],
        dtypes=[mx.float32, mx.float32],
    )
    (out,) = _merge(
        part,
        stat,
        turns,
        sink,
        where,
        template=template,
        grid=(Dh, H, N),
        group=(32 * _FEW, 1, 1),
        shapes=[(N, H, Dh)],
        dtypes=[mx.float32],
    )
    return out


def attends(Dh: int, R: int) -> bool:
    """Whether the kernel is there for heads of Dh channels, of which R are rotated."""
    return Dh % 128 == 0 and Dh <= 1024 and R % 4 == 0


def attention_reference(
    q,
    rows,
    ring,
    sink,
    turns,
    position,
    *,
    window,
    eps,
    entries=None,
    ratio=0,
    selected=None,
    causal=True,
):
    N, H = q.shape[0], sink.shape[0]
    q = whole(q).reshape(N, H, -1)
    Dh = q.shape[-1]
    q = rope(rms_norm(q, None, eps), turns)
    start = max(0, position - window + causal)
    if N <= FEW:
        raw = ring.holding(rows).read(start, position + N)[:, :Dh]
    else:
        raw = rows[:, :Dh]
        if start < position:
            raw = mx.concatenate([ring.read(start, position)[:, :Dh], raw])
    ready = [(position + i + 1) // ratio for i in range(N)] if ratio else ()
    entries = entries[: ready[-1]] if ratio and ready[-1] else None
    if selected is not None and N <= FEW:
        k = selected.shape[1]
        selected = [s if n > k else None for s, n in zip(selected, ready, strict=True)]
    o = attend(
        q,
        raw,
        sink,
        window=window,
        entries=entries,
        ready=ready,
        selected=selected,
        causal=causal,
    )
    return rope(o, turns, inverse=True)  # values carried the keys' rotation


_LIST = "attention_list<WINDOW, RATIO, TOPK, CAUSAL>(position[0], threadgroup_position_in_grid.z"
_PLACE = """threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup"""
_merge = metal.Kernel(
    "attention",
    inputs=["part", "stat", "turns", "sink", "position"],
    outputs=["out"],
    call=f"""threadgroup float weights[{_SPLITS}];
threadgroup float4 sums[{32 * _FEW}];
attention_merge<DH, R>(part, stat, turns, sink, out, weights, sums, {_LIST}, part_shape[0]), H,
    {_PLACE});""",
)


@cache
def _part(eps: float) -> metal.Kernel:
    return metal.Kernel(
        "attention",
        inputs=["q", "turns", "rows", "entries", "ids", "position"],
        outputs=["part", "stat"],
        partial=True,
        call=f"""threadgroup float4 staged[2 * {_FEW} * DH / 4];
attention_keys list = {_LIST}, q_shape[0]);
attention_rows from = {{rows, entries, int(rows_shape[0]), int(rows_shape[1])}};
attention_part<DH, R, {_HEADS}>(q + Q_AT, turns, from, ids + threadgroup_position_in_grid.z * TOPK,
    part, stat, staged, list, {metal.literal(eps)}, H, Q_STRIDE, {_PLACE});""",
    )


def attend(q, raw, sink, *, window, entries=None, ready=(), selected=None, causal=True):
    """Attention alone: q [N, H, Dh] normed and rotated -> [N, H, Dh], not rotated back.

    raw [S, Dh]: the key rows up to and including the block's own N, in order of position; a
    query sees the last `window` of those that end with its own, and the first ready[i] entries,
    or those of them in `selected`.
    """
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
    """Blocks of queries over the keys that any of a block may see."""
    scale, outputs = q.shape[-1] ** -0.5, []
    for i in range(0, q.shape[0], QUERIES):
        rows = q[i : i + QUERIES]
        n = rows.shape[0]
        last = before + i + n
        first = max(0, before + i + 1 - window)
        keys = raw[max(0, first - (first - last) % _WHOLE) : last]
        scores = rows @ keys.T
        own = len(keys) - n  # the place of the first query's own key
        most = ready[i + n - 1] if entries is not None else 0
        if not most:
            weights, _ = attention_shares(scores, sink, own, window, scale)
            outputs.append(weights @ keys)
            continue
        if selected is None:
            some, ids = entries[: most + -most % _WHOLE], None
            others = rows @ some.T
        else:
            ids = selected[i : i + n]
            some = gather_rows(entries, mx.minimum(ids, most - 1))  # [n, K, Dh]
            others = rows @ some.swapaxes(1, 2)
        weights, more = attention_shares(
            scores, sink, own, window, scale, others, ready[i : i + n], ids
        )
        outputs.append(weights @ keys + more @ some)
    return mx.concatenate(outputs)
