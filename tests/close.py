"""Comparisons that name the worst element."""

import mlx.core as mx
import numpy as np


def assert_close(actual: mx.array, expected, *, atol: float, rtol: float = 0.0):
    """Elementwise closeness; a failure names the worst element."""
    a = np.array(actual.astype(mx.float32), dtype=np.float64)
    e = np.array(expected, dtype=np.float64)
    assert a.shape == e.shape, f"got shape {a.shape}, expected {e.shape}"
    excess = np.abs(a - e) - (atol + rtol * np.abs(e))
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, f"at {worst}: got {a[worst]:.6g}, expected {e[worst]:.6g}"


def assert_same(actual: mx.array, expected: mx.array):
    """Equality bit for bit; a failure names the first element that differs."""
    a, e = np.array(actual), np.array(expected)
    assert a.shape == e.shape, f"got shape {a.shape}, expected {e.shape}"
    differ = np.argwhere(
        a.view(np.uint8 if a.dtype == bool else f"u{a.itemsize}")
        != e.view(np.uint8 if e.dtype == bool else f"u{e.itemsize}")
    )
    assert len(differ) == 0, (
        f"{len(differ)} of {a.size} differ, first at {tuple(differ[0])}: "
        f"got {a[tuple(differ[0])]!r}, expected {e[tuple(differ[0])]!r}"
    )


def assert_rows_alone(op, *arrays: mx.array):
    """Rows of a block of 2 to 8 come out of `op`, bit for bit, as each alone (first axis: rows)."""
    results = lambda *xs: r if isinstance(r := op(*xs), tuple) else (r,)  # noqa: E731
    alone = [results(*(a[i : i + 1] for a in arrays)) for i in range(8)]
    for n in range(2, 9):
        for k, block in enumerate(results(*(a[:n] for a in arrays))):
            assert_same(block, mx.concatenate([row[k] for row in alone[:n]]))
