"""What the target remembers of a sequence; `rewind` forgets the newest rows exactly (model 13).

Every row lies at a place that its absolute position decides, and a ring has FEW spare rows.
So nothing is moved or restored on a rewind: the position goes back, later rows become invisible
and are overwritten.
"""

from collections.abc import Iterator

import mlx.core as mx

from .config import TargetConfig
from .errors import UsageError
from .rows import FEW


class Ring:
    """The newest rows [., D] float32 of a sequence, at their position modulo the capacity."""

    def __init__(self, capacity: int, width: int):
        self.rows = mx.zeros((capacity, width))

    def write(self, position: int, rows: mx.array):
        """Put `rows` [N, D] at positions `position` ..; the last `capacity` of them stay."""
        capacity = self.rows.shape[0]
        skip = max(0, rows.shape[0] - capacity)
        for at, part in self._parts(position + skip, position + rows.shape[0]):
            self.rows[at : at + part] = rows[skip : skip + part]
            skip += part

    def read(self, start: int, stop: int) -> mx.array:
        """Rows of positions start .. stop-1 in order, [stop - start, D]."""
        parts = [self.rows[at : at + n] for at, n in self._parts(start, stop)]
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(index, count) of the one or two stretches that hold these positions."""
        capacity = self.rows.shape[0]
        assert stop - start <= capacity, (start, stop, capacity)
        at = start % capacity
        first = min(stop - start, capacity - at)
        yield at, first
        if first < stop - start:
            yield 0, stop - start - first


class CompressorCache:
    """Open-window rows (values `c` and scores `s`) and finished entries of one compressor."""

    def __init__(self, ratio: int, width: int, entry_width: int, ctx: int):
        windows = 2 if ratio == 4 else 1  # ratio 4 pools over the previous window too
        self.c = Ring(windows * ratio + FEW, width)
        self.s = Ring(windows * ratio + FEW, width)
        self.entries = mx.zeros((ctx // ratio + 1, entry_width))

    def write_entries(self, first: int, entries: mx.array):
        """Put finished `entries` [n, D] at indices `first` .. ."""
        self.entries[first : first + entries.shape[0]] = entries


class LayerCache:
    """State of one attention layer."""

    def __init__(self, config: TargetConfig, ratio: int, ctx: int):
        self.ratio = ratio
        self.window = Ring(config.sliding_window + FEW, config.head_dim)
        self.compressor = self.indexer = None
        twice = 2 if ratio == 4 else 1  # ratio 4 overlaps: two halves a row
        if ratio:
            d = config.head_dim
            self.compressor = CompressorCache(ratio, twice * d, d, ctx)
        if ratio == 4:
            d = config.index_head_dim
            self.indexer = CompressorCache(ratio, twice * d, d, ctx)


class Sequence:
    """How many tokens a state holds, and how many of the newest it can still forget."""

    def __init__(self):
        self.position = 0  # tokens processed
        self._furthest = 0  # tokens ever written: rows FEW behind it are the last sure ones

    def advance(self, n: int):
        """`n` more tokens have been written everywhere."""
        self.position += n
        self._furthest = max(self._furthest, self.position)

    def rewind(self, n: int):
        """Forget the newest `n` tokens, as if they had never been seen.

        Raises UsageError for more than FEW (8) tokens behind the furthest, or before the start.
        """
        oldest = max(0, self._furthest - FEW)
        if n < 0 or self.position - n < oldest:
            raise UsageError(
                f"rewind({n}): wanted 0 to {self.position - oldest} at position {self.position}"
            )
        self.position -= n


class Cache(Sequence):
    """State of the whole target for one sequence of at most `ctx` tokens."""

    def __init__(self, config: TargetConfig, ctx: int):
        if ctx < 1:
            raise UsageError(f"ctx is {ctx}, wanted at least 1 token")
        super().__init__()
        self.ctx = ctx
        self.layers = [LayerCache(config, r, ctx) for r in config.compress_ratios]

    def arrays(self) -> list[mx.array]:
        """Every array of the state, to be evaluated with the step that wrote it."""
        return [a for layer in self.layers for a in _arrays(layer)]

    def live(self) -> list[mx.array]:
        """What can still be read: last rows of the windows, open windows, finished entries.

        Two states that agree here decode the same. What lies beyond was rejected or left.
        """
        return [a for layer in self.layers for a in _live(layer, self.position)]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


class DraftCache(Sequence):
    """The context of a draft: of each stage, the key rows of the newest committed positions."""

    def __init__(self, config: TargetConfig, stages: int):
        super().__init__()
        self.window = config.sliding_window
        self.rings = [Ring(self.window + FEW, config.head_dim) for _ in range(stages)]

    def read(self) -> list[mx.array]:
        """The rows that a block sees, per stage [S, Dh]: at most `window`, oldest first."""
        start = max(0, self.position - self.window)
        return [ring.read(start, self.position) for ring in self.rings]

    def arrays(self) -> list[mx.array]:
        return [ring.rows for ring in self.rings]

    def live(self) -> list[mx.array]:
        """The same rows as `read` gives: nothing else is ever looked at."""
        return self.read()


def _arrays(layer: LayerCache) -> Iterator[mx.array]:
    yield layer.window.rows
    for part in (layer.compressor, layer.indexer):
        if part is not None:
            yield from (part.c.rows, part.s.rows, part.entries)


def _live(layer: LayerCache, n: int) -> Iterator[mx.array]:
    yield layer.window.read(max(0, n - layer.window.rows.shape[0] + FEW), n)
    ratio = layer.ratio
    for part in (layer.compressor, layer.indexer):
        if part is not None:
            start = max(0, n - n % ratio - (ratio if ratio == 4 else 0))
            yield from (ring.read(start, n) for ring in (part.c, part.s))
            yield part.entries[: n // ratio]
