"""What the keys of a block of queries weigh in prefill: a masked softmax, with a sink."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from . import metal


def attention_shares(
    scores: mx.array,
    sink: mx.array,
    own: int,
    window: int,
    scale: float,
    others: mx.array | None = None,
    ready: Sequence[int] = (),
    ids: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """scores [n, H, A], sink [H], others [n, H, B] float32 -> the softmax of both times `scale`
    and of the sink, of which that is left out; 0 where a query does not see.

    Of raw keys query q sees (own + q - window, own + q]; of entries those below ready[q], by
    their place or, where they were selected, by ids [n, B] uint32. The kernel takes scores and
    others of 8 elements or more.
    """
    n, H, A = scores.shape
    B = 0 if others is None else others.shape[2]
    if not metal.enabled() or scores.size < 8 or 0 < B * n * H < 8:
        return attention_shares_reference(scores, sink, own, window, scale, others, ready, ids)
    entries = (others, mx.array(ready, mx.uint32)) if B else ()
    selected = () if ids is None else (ids,)
    weights, *more = _kernel(scale, B > 0, ids is not None)(
        scores,
        sink,
        metal.placed(own),
        *entries,
        *selected,
        template={"WINDOW": window},
        grid=(metal.round_up(32 * n * H, 256), 1, 1),
        group=(256, 1, 1),
        shapes=[scores.shape, *((n, H, B) for _ in entries[:1])],
        dtypes=[mx.float32] * (2 if B else 1),
    )
    return weights, more[0] if B else None


@cache
def _kernel(scale: float, entries: bool, selected: bool) -> metal.Kernel:
    others, more, ready, B = "scores", "weights", "sink", "0"
    if entries:
        others, more, ready, B = "others", "more", "ready", "others_shape[2]"
    return metal.Kernel(
        "attention_shares",
        inputs=[
            "scores",
            "sink",
            "own",
            *["others", "ready"][: 2 * entries],
            *["ids"][:selected],
        ],
        outputs=["weights", *["more"][:entries]],
        call=f"""attention_shares<WINDOW, {str(selected).lower()}>(scores, {others}, sink, {ready},
    {"ids" if selected else ready}, weights, {more}, {metal.literal(scale)}, own[0],
    uint3(scores_shape[1], scores_shape[2], {B}), scores_shape[0] * scores_shape[1],
    thread_position_in_grid.x / 32, thread_index_in_simdgroup);""",
    )


def attention_shares_reference(scores, sink, own, window, scale, others=None, ready=(), ids=None):
    n, _, A = scores.shape
    mine = own + mx.arange(n)[:, None]  # each query's own key
    at = mx.arange(A)[None]
    hidden = (at > mine) | (at <= mine - window)
    parts = [mx.where(hidden[:, None], -mx.inf, scores * scale)]
    if others is not None:
        others = others * scale
        B = others.shape[2]
        if min(ready) < B:
            entries = mx.arange(B)[None] if ids is None else ids
            hidden = entries >= mx.array(ready)[:, None]
            others = mx.where(hidden[:, None], -mx.inf, others)
        parts.append(others)
    top = sink[:, None]
    for part in parts:
        top = mx.maximum(top, part.max(axis=-1, keepdims=True))
    shares = [mx.exp(part - top) for part in parts]
    total = mx.exp(sink[:, None] - top)
    for share in shares:
        total = total + share.sum(axis=-1, keepdims=True)
    shares = [share / total for share in shares]
    return shares[0], shares[1] if others is not None else None
