"""What the target remembers of a sequence; `rewind` forgets the newest rows exactly (model 13).

Every row lies at a place that its absolute position decides, and a ring has FEW spare rows.
So nothing is moved or restored on a rewind: the position goes back, later rows become invisible
and are overwritten.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from numbers import Integral

import mlx.core as mx

from .config import TargetConfig
from .errors import UsageError
from .rows import FEW


class Ring:
    """The newest rows [., D] float32 of a sequence, at their position modulo the capacity."""

    def __init__(self, capacity: int, width: int):
        self.rows = mx.zeros((capacity, width))

    def holding(self, rows: mx.array) -> "Ring":
        """Another ring, of these rows [capacity, D]."""
        ring = copy(self)
        ring.rows = rows
        return ring

    def write(self, position: int, rows: mx.array):
        """Put `rows` [N, D] at positions `position` ..; the last `capacity` of them stay."""
        capacity = self.rows.shape[0]
        skip = max(0, rows.shape[0] - capacity)
        for at, part in self._parts(position + skip, position + rows.shape[0]):
            self.rows[at : at + part] = rows[skip : skip + part]
            skip += part

    def written(self, position: int, rows: mx.array) -> mx.array:
        """What `write` would leave, [capacity, D]; this ring stays."""
        ring = self.holding(mx.array(self.rows))
        ring.write(position, rows)
        return ring.rows

    def read(self, start: int, stop: int) -> mx.array:
        """Rows of positions start .. stop-1 in order, [stop - start, D]."""
        parts = [self.rows[at : at + n] for at, n in self._parts(start, stop)]
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(index, count) of the one or two pieces that hold these positions."""
        capacity = self.rows.shape[0]
        assert stop - start <= capacity, (start, stop, capacity)
        at = start % capacity
        first = min(stop - start, capacity - at)
        yield at, first
        if first < stop - start:
            yield 0, stop - start - first


class LayerCache:
    """State of one attention layer: a ring of its rows, and the finished compressed entries.

    A row holds the key row [Dh], then for each of the layer's `compressors` (its own, and the
    indexer's) what a window is pooled from, values and scores (see `ops.latents`).
    """

    def __init__(self, config: TargetConfig, ratio: int, ctx: int):
        self.ratio, self.window, self.head_dim = ratio, config.sliding_window, config.head_dim
        self.topk = config.index_topk
        dims = {0: (), 4: (config.head_dim, config.index_head_dim)}.get(ratio, (config.head_dim,))
        twice = 2 if ratio == 4 else 1  # ratio 4 overlaps: two halves a row, two windows
        width = config.head_dim + sum(2 * twice * d for d in dims)
        self.ring = Ring(max(self.window, twice * ratio) + FEW, width)
        self.entries = [mx.zeros((ctx // ratio + 1, d)) for d in dims]

    def arrays(self) -> list[mx.array]:
        return [self.ring.rows, *self.entries]

    def write(self, step: "Step", rows: mx.array):
        """Put the rows of a block in the ring, as `ops.latents` gives them."""
        if step.rows <= FEW:
            self.ring.rows = rows
        else:
            self.ring.write(step.position, rows)

    def write_entries(self, places: slice | mx.array, entries: list[mx.array]):
        """Put the entries [n, d] of the windows that a block closes in these places."""
        for i, new in enumerate(entries):
            self.entries[i][places] = new

    def read_bytes(self, position: int) -> int:
        """Of the window, and of the entries: those that an indexer lets through, and its keys."""
        total = min(self.window, position + 1) * self.head_dim
        counts = [(position + 1) // max(1, self.ratio)] * len(self.entries)
        if len(counts) == 2:
            counts[0] = min(counts[0], self.topk)
        total += sum(n * e.shape[1] for n, e in zip(counts, self.entries, strict=True))
        return 4 * total

    def live(self, position: int) -> Iterator[mx.array]:
        """What can still be read at `position`: the window, the open windows, the entries."""
        yield self.ring.read(max(0, position - self.window), position)[:, : self.head_dim]
        if self.ratio:
            start = max(
                0, position - position % self.ratio - (self.ratio if self.ratio == 4 else 0)
            )
            yield self.ring.read(start, position)[:, self.head_dim :]
        yield from (e[: position // self.ratio] for e in self.entries)


@dataclass(frozen=True)
class Step:
    """A block of rows: where it begins, and what it closes and selects."""

    position: int | mx.array | None  # in a graph an array, or only in the Turns made of it
    rows: int
    closing: dict[int, int]  # by ratio: how many windows close
    selecting: bool  # there are more entries than an indexer lets through

    @classmethod
    def of(cls, config: TargetConfig, position: int, rows: int) -> "Step":
        end = position + rows
        closing = {r: end // r - position // r for r in sorted({*config.compress_ratios} - {0})}
        return cls(position, rows, closing, end // 4 > config.index_topk)

    @property
    def kind(self) -> tuple[int, tuple[tuple[int, int], ...], bool]:
        """All but the position: steps of a kind share their graphs."""
        return self.rows, tuple(self.closing.items()), self.selecting

    @classmethod
    def of_kind(cls, position: mx.array | None, rows: int, closing, selecting: bool) -> "Step":
        """`kind`, with a position again."""
        return cls(position, rows, dict(closing), selecting)

    def windows(self, ratio: int) -> mx.array | None:
        """First positions [n] int32 of the windows that close; None if none does."""
        n = self.closing[ratio]
        return (self.position // ratio + mx.arange(n)) * ratio if n else None

    def closed(self, ratio: int) -> slice | mx.array:
        """Indices of their entries."""
        first, n = self.position // ratio, self.closing[ratio]
        return slice(first, first + n) if isinstance(first, int) else first + mx.arange(n)

    def ready(self, ratio: int) -> mx.array:
        """How many entries [rows] int32 each row may read; of a compiled step 4 or more."""
        rows = self.rows if isinstance(self.position, int) else max(4, self.rows)  # see ops.placed
        return (self.position + mx.arange(rows) + 1) // ratio


class Sequence:
    """How many tokens a state holds, and how many of the newest it can still forget."""

    def __init__(self):
        self.position = 0  # tokens processed
        self._furthest = 0  # tokens ever written: rows FEW behind it are the last sure ones

    def reach(self, n: int):
        """`n` more tokens are about to be written: a step that breaks leaves some of their rows."""
        self._furthest = max(self._furthest, self.position + n)

    def advance(self, n: int):
        """`n` more tokens have been written everywhere."""
        self.reach(n)
        self.position += n

    def rewind(self, n: int):
        """Forget the newest `n` tokens, as if they had never been seen.

        Raises UsageError for more than FEW (8) tokens behind the furthest, or before the start.
        """
        oldest = max(0, self._furthest - FEW)
        if not isinstance(n, Integral) or n < 0 or self.position - n < oldest:
            raise UsageError(
                f"rewind({n!r:.60}): wanted 0 to {self.position - oldest} "
                f"at position {self.position}"
            )
        self.position -= n

    def snapshot(self) -> tuple[int, int, list[mx.array]]:
        """The state as it is, for `restore`; what is written later is written to copies."""
        return self.position, self._furthest, [mx.array(a) for a in self.arrays()]

    def restore(self, snapshot: tuple[int, int, list[mx.array]]):
        """Put a state back, as often as wanted."""
        self.position, self._furthest, arrays = snapshot
        self.replace([mx.array(a) for a in arrays])


def replace(layers: Iterable[LayerCache], arrays: Iterable[mx.array]):
    """Put `arrays`, in the order of the layers' own, in their places."""
    following = iter(arrays)
    for layer in layers:
        layer.ring.rows = next(following)
        layer.entries = [next(following) for _ in layer.entries]


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
        return [a for layer in self.layers for a in layer.arrays()]

    def replace(self, arrays: Iterable[mx.array]):
        """Put `arrays`, in the order of the method of that name, in their places."""
        replace(self.layers, arrays)

    def live(self) -> list[mx.array]:
        """What can still be read: last rows of the windows, open windows, finished entries.

        Two states that agree here decode the same. What lies beyond was rejected or left.
        """
        return [a for layer in self.layers for a in layer.live(self.position)]

    def read_bytes(self, position: int) -> int:
        """Bytes of the state that the token at `position` reads."""
        return sum(layer.read_bytes(position) for layer in self.layers)

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

    def replace(self, arrays: Iterable[mx.array]):
        for ring, rows in zip(self.rings, arrays, strict=True):
            ring.rows = rows

    def live(self) -> list[mx.array]:
        """The same rows as `read` gives: nothing else is ever looked at."""
        return self.read()
