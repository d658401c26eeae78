"""What a kernel's own test says about it: inputs, a tolerance, and where it is judged."""

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from ds4mlx.ops import metal
from tests.close import assert_close, assert_rows_alone

from .bench import executed


@dataclass(frozen=True)
class Case:
    """make() -> (op, arrays): 8 rows along the first axis of every array, weights in `op`.

    mode: "check" at small odd shapes, "guard" at Flash's. rtol, atol: against the reference.
    """

    make: Callable
    mode: str
    atol: float = 0.0
    rtol: float = 0.0

    def launched(self, rows: int) -> tuple[Callable, list[mx.array]]:
        """An op and its arguments, to be traced."""
        op, arrays = self.make()
        return op, [a[:rows] for a in arrays]

    def verify(self, place: Callable | None = None):
        """The kernel agrees with its reference, and rows 1 to 8 with rows alone.

        place: a context manager that has kernels run; the CPU executor if none is given.
        """
        op, arrays = self.make()
        place = place or partial(executed, self.mode)
        for n in (1, 8):
            rows = [a[:n] for a in arrays]
            with metal.reference():
                want = _tuple(op(*rows))
            with place():
                got = _tuple(op(*rows))
            for g, w in zip(got, want, strict=True):
                assert_close(g, np.array(w.astype(mx.float32)), atol=self.atol, rtol=self.rtol)
        with place():
            assert_rows_alone(op, *arrays)


def all_cases() -> dict[str, Case]:
    """Every case of every kernel, by "stem-name"."""
    found = {}
    for path in sorted((Path(__file__).parents[1] / "ops").glob("test_*.py")):
        module = importlib.import_module(f"tests.ops.{path.stem}")
        for name, case in getattr(module, "CASES", {}).items():
            found[f"{path.stem.removeprefix('test_')}-{name}"] = case
    return found


@contextmanager
def on_gpu():
    """Run kernels through MLX on this machine's GPU, each awaited, so that a failure names it."""
    before = mx.default_device()
    mx.set_default_device(mx.gpu)
    try:
        with metal.eager(mx.eval):
            yield
    finally:
        mx.set_default_device(before)


def _tuple(result) -> tuple[mx.array, ...]:
    return result if isinstance(result, tuple) else (result,)
