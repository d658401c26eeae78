"""The loop: prefill the prompt, decode token by token, stop where told."""

from collections.abc import Collection, Iterator, Sequence

import mlx.core as mx

from .cache import Cache
from .sampling import Sampler
from .target import Target
from .weights import Progress


def prefill(
    target: Target,
    ids: Sequence[int],
    cache: Cache,
    *,
    chunk: int,
    progress: Progress | None = None,
) -> Iterator[tuple[mx.array, mx.array]]:
    """Feed `ids` in chunks; yields the evaluated (streams [n, HC, D], taps [n, T * D]) of each."""
    for at in range(0, len(ids), chunk):
        part = mx.array(ids[at : at + chunk], mx.int32)
        streams, taps = target(part, cache)
        mx.eval(streams, taps, cache.arrays())
        if progress:
            progress("prefill", at + len(part), len(ids))
        yield streams, taps


def decode(
    target: Target,
    streams: mx.array,
    cache: Cache,
    sampler: Sampler,
    *,
    limit: int,
    stop: Collection[int],
) -> Iterator[int]:
    """Tokens after the last row of `streams`, at most `limit`; ends before a token of `stop`.

    The next step is under way while a token is handed out. Afterwards the cache holds the
    prompt and every token handed out but the last, whether or not the loop was left early.
    """
    token = sampler(target.logits(streams[-1:]))
    mx.async_eval(token)
    for left in range(limit, 0, -1):
        start = cache.position
        following = None
        if left > 1:
            streams, _ = target(token, cache)
            following = sampler(target.logits(streams))
            mx.async_eval(following, cache.arrays())
        done = False
        try:
            id = int(token.item())
            if id in stop:
                return
            yield id
            done = True
        finally:
            if not done:
                cache.rewind(cache.position - start)
        token = following
