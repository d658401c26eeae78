"""The loop: prefill the prompt, decode token by token, stop where told."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .cache import Cache
from .errors import UsageError
from .target import Target

Progress = Callable[[str, int, int], None]


def prefill(
    target: Target,
    ids: Sequence[int],
    cache: Cache,
    *,
    chunk: int = 512,
    progress: Progress | None = None,
) -> Iterator[tuple[mx.array, mx.array]]:
    """Feed `ids` in chunks; yields each chunk's (streams [n, HC, D], taps [n, T * D])."""
    for at in range(0, len(ids), chunk):
        part = mx.array(ids[at : at + chunk], mx.int32)
        streams, taps = target(part, cache)
        mx.eval(streams, taps, cache.arrays())
        if progress:
            progress("prefill", min(at + chunk, len(ids)), len(ids))
        yield streams, taps
