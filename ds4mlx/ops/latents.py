"""From an attention layer's products to what attention reads: the low-rank query, the rows that
the ring keeps, and the compressed entries of the windows that close."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..packed import Matrix
from ..rows import FEW
from . import metal
from .columns import Columns, joined, whole
from .embed import embed
from .pool import pool
from .rms_norm import rms_norm
from .rope import rope
from .round_kv import round_kv

_COPIED = 2048  # of latents.metal


class Pool(NamedTuple):
    """A compressor's share of a block of N tokens; ratio 4 pools overlapping windows (model 7)."""

    c: mx.array | Columns  # [N, width] float32, width = d, or 2 d for ratio 4
    s: mx.array | Columns  # [N, width], scores
    ape: Matrix  # [ratio, width], what a token's place in its window adds to them
    norm: mx.array  # [d]
    turns: mx.array | None  # complex64 [n, R / 2] of the n windows that close; None: none does
    ratio: int
    rounded: bool  # entries go through fp8


def latents(
    q: mx.array | Columns,
    kv: mx.array | Columns,
    q_norm: mx.array,
    kv_norm: mx.array,
    turns: mx.array,
    pools: Sequence[Pool],
    ring,
    position: int | mx.array,
    *,
    rounded: bool,
    eps: float,
) -> tuple[mx.array, mx.array, list[mx.array]]:
    """The products of N rows -> qr [N, Rq], rows [., W], entries [n, d] of each closing pool.

    q [N, Rq], kv [N, Dh] float32; turns complex64 [N, R / 2] (model 5, 6, 7, 15). A row of the
    `ring` (a cache.Ring of rows [CAP, W]) is kv, normed, rotated and, where `rounded`, through
    fp8; then c and s + ape of each pool. `rows` are the N new ones; for up to FEW all that the
    ring is to hold, [CAP, W], the new ones in their places. `position` is the first row's, an
    int, or for the kernel what `placed` gives of it. The kernel takes up to FEW rows.
    """
    if not metal.enabled() or q.shape[0] > FEW:
        return latents_reference(
            q, kv, q_norm, kv_norm, turns, pools, ring, position, rounded=rounded, eps=eps
        )
    N, Dh = kv.shape
    W = Dh + sum(2 * p.c.shape[1] for p in pools)
    closing = [p for p in pools if p.turns is not None]
    closed = closing[0].turns.shape[0] if closing else 0
    products, firsts = joined([q, kv, *(part for p in pools for part in (p.c, p.s))])
    inputs = [products, q_norm, kv_norm, _pairs(turns), metal.placed(position)]
    template = {"Q": q.shape[1], "DH": Dh, "R": 2 * turns.shape[-1], "W": W, "CLOSED": closed}
    names = ["Q", "KV", *(f"{name}{i}" for i in range(len(pools)) for name in "CS")]
    template |= {f"{name}_AT": at for name, at in zip(names, firsts, strict=True)}
    template["P"] = products.shape[1]
    for p in pools:
        ape = p.ape if isinstance(p.ape, mx.array) else embed(mx.arange(p.ratio), p.ape)
        inputs += [ape, *([p.norm, _pairs(p.turns)] if p.turns is not None else [])]
    shapes = [q.shape, ring.rows.shape, *((closed, p.norm.shape[0]) for p in closing)]
    copies = -(-ring.rows.size // _COPIED)
    kinds = tuple((p.ratio, p.norm.shape[0], p.rounded, p.turns is not None) for p in pools)
    qr, rows, *entries = _kernel(kinds, rounded, eps)(
        *inputs,
        ring.rows,
        template=template,
        grid=(256, (2 + len(pools)) * N + closed * len(closing) + copies, 1),
        group=(256, 1, 1),
        shapes=shapes,
        dtypes=[mx.float32] * len(shapes),
    )
    return qr, rows, entries


def latents_reference(q, kv, q_norm, kv_norm, turns, pools, ring, position, *, rounded, eps):
    q, kv = whole(q), whole(kv)
    pools = [p._replace(c=whole(p.c), s=whole(p.s)) for p in pools]
    kv = rope(rms_norm(kv, kv_norm, eps), turns)
    R = 2 * turns.shape[-1]
    rows = [round_kv(kv, R) if rounded else kv]
    entries, at = [], kv.shape[1]
    for p in pools:
        s = p.s + embed((position + mx.arange(len(p.s))) % p.ratio, p.ape)
        rows += [p.c, s]
        if p.turns is not None:
            pooled = pool(*_candidates(p, s, ring, at, position))
            entry = rope(rms_norm(pooled, p.norm, eps), p.turns)
            entries.append(round_kv(entry, R) if p.rounded else entry)
        at += 2 * s.shape[1]
    rows = mx.concatenate(rows, axis=1) if pools else rows[0]
    if q.shape[0] <= FEW:
        rows = ring.written(position, rows)
    return rms_norm(q, q_norm, eps), rows, entries


def _candidates(p: Pool, s, ring, at: int, position: int) -> tuple[mx.array, mx.array]:
    """Values and scores [n, M, d] of the n windows that close; at: the ring's column of c."""
    width, n, first = s.shape[1], p.turns.shape[0], position // p.ratio
    start = max(0, first - (p.ratio == 4)) * p.ratio
    c = p.c
    if start < position:
        old = ring.read(start, position)
        c = mx.concatenate([old[:, at : at + width], c])
        s = mx.concatenate([old[:, at + width : at + 2 * width], s])
    stop = (first + n) * p.ratio - start
    if p.ratio == 4:
        return _overlap(c[:stop], 0.0, first, n), _overlap(s[:stop], -mx.inf, first, n)
    return c[:stop].reshape(n, p.ratio, width), s[:stop].reshape(n, p.ratio, width)


def _overlap(rows: mx.array, missing: float, first: int, n: int) -> mx.array:
    """Candidates of n windows of 4: `a` halves of the window before, `b` halves of its own.

    rows [4 (n + 1), 2 d] from the window before `first` on (it is missing when first = 0)
    -> [n, 8, d].
    """
    d = rows.shape[-1] // 2
    if first == 0:
        rows = mx.concatenate([mx.full((4, 2 * d), missing), rows])
    windows = rows.reshape(n + 1, 4, 2 * d)
    return mx.concatenate([windows[:-1, :, :d], windows[1:, :, d:]], axis=1)


def _pairs(turns: mx.array) -> mx.array:
    return turns.view(mx.float32)


@cache
def _kernel(kinds: tuple[tuple[int, int, bool, bool], ...], rounded: bool, eps: float):
    """kinds: of each pool the ratio, d, whether it is rounded, and whether a window closes."""
    inputs, outputs = ["products", "q_norm", "kv_norm", "turns", "position"], ["qr", "held"]
    column, keeps, closes, windows = "DH", "", "", ""
    for i, (ratio, d, pool_rounded, closing) in enumerate(kinds):
        inputs += [f"ape{i}", *([f"norm{i}", f"turns{i}"] if closing else [])]
        width = 2 * d if ratio == 4 else d
        windows += f"""latents_window window{i} = {{ring + {column}, products + C{i}_AT,
    products + S{i}_AT, int(ring_shape[0]), W, P, {width}, {ratio}, int(first),
    int(first) / {ratio} + int(at)}};
"""
        made = f"latents_made(window{i}, ape{i})"
        keeps += f"""}} else if (y < {3 + i} * N) {{
  latents_keep({made}, n, held + place * W + {column}, thread_index_in_threadgroup);
"""
        if closing:
            outputs.append(f"entries{i}")
            closes += f"""}} else if (at < {len(outputs) - 2} * CLOSED) {{
  window{i}.window -= {len(outputs) - 3} * CLOSED;
  at -= {len(outputs) - 3} * CLOSED;
  latents_row<{d}, R, {str(pool_rounded).lower()}>({made}, norm{i}, turns{i} + at * R,
      entries{i} + at * {d}, sums, {metal.literal(eps)}, sg, lane);
"""
        column += f" + 2 * {width}"
    return metal.Kernel(
        "latents",
        inputs=[*inputs, "ring"],
        outputs=outputs,
        call=f"""threadgroup float sums[8];
uint y = threadgroup_position_in_grid.y, N = products_shape[0], n = y % N;
uint first = position[0], CAP = ring_shape[0], place = (first + n) % CAP;
uint at = y - {2 + len(kinds)} * N;
uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
{windows}if (y < N) {{
  latents_product product = {{products + n * P + Q_AT}};
  latents_row<Q, 0, false>(product, q_norm, turns, qr + n * Q, sums, {metal.literal(eps)}, sg,
      lane);
}} else if (y < 2 * N) {{
  latents_product product = {{products + n * P + KV_AT}};
  latents_row<DH, R, {str(rounded).lower()}>(product, kv_norm, turns + n * R, held + place * W,
      sums, {metal.literal(eps)}, sg, lane);
{keeps}{closes}}} else {{
  latents_copy<W>(ring, held, CAP, first, N, at - {len(outputs) - 2} * CLOSED,
      thread_index_in_threadgroup);
}}""",
    )
