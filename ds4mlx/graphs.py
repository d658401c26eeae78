"""What is compiled to one graph a kind: traced by Python once, then launched without it."""

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from weakref import WeakMethod

import mlx.core as mx


class Graphs:
    """What `make(*kind)`, a method, gives for every kind, kept.

    `traces` counts those of all graphs: a time in which it grew is no measure of a step.
    """

    traces = 0

    def __init__(self, make: Callable[..., Callable]):
        # Held weakly: a cycle would keep the weights until Python looks for cycles.
        self._make, self._kept = WeakMethod(make), {}

    def __call__(self, *kind) -> Callable:
        # One a thread: MLX's streams, which a graph keeps, belong to theirs.
        key = (get_ident(), *kind)
        if key not in self._kept:
            self._kept[key] = self._make()(*kind)
        return self._kept[key]


def compiled(run: Callable) -> Callable:
    """`run` of arrays as a graph. It is traced at first, and again for arrays of other shapes."""

    @wraps(run)
    def tracing(*arrays):
        Graphs.traces += 1
        return run(*arrays)

    return mx.compile(tracing)
