"""Columns of one array: what a launch has made side by side, for the next one to read in place."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx


class Columns(NamedTuple):
    """Columns `first` .. of an array [N, P]; an array of its own for each costs the host time."""

    of: mx.array
    first: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.of.shape[0], self.width


def whole(x: mx.array | Columns) -> mx.array:
    """The same as an array of its own."""
    return x.of[:, x.first : x.first + x.width] if isinstance(x, Columns) else x


def source(x: mx.array | Columns) -> tuple[mx.array, int, int]:
    """Where a kernel finds them, in fours: an array, the first column, how far rows are apart."""
    fours = isinstance(x, Columns) and x.first % 4 == x.of.shape[1] % 4 == 0
    return (x.of, x.first, x.of.shape[1]) if fours else (whole(x), 0, x.shape[1])


def joined(parts: Sequence[mx.array | Columns]) -> tuple[mx.array, list[int]]:
    """One array with all of them, and their first columns: the one that has them, or a new one."""
    if all(isinstance(p, Columns) and p.of is parts[0].of for p in parts):
        return parts[0].of, [p.first for p in parts]
    firsts = [sum(p.shape[1] for p in parts[:i]) for i in range(len(parts))]
    return mx.concatenate([whole(p) for p in parts], axis=1), firsts
