"""An op that writes back into the streams, together with the mixture that reads what it gives."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ds4mlx.ops import Back, hc_expand, hc_mix
from tests.close import assert_close, assert_same
from tests.metal.bench import executed

SETTINGS = dict(iterations=20, eps=1e-6, norm_eps=1e-6)


def mixture(HC: int, D: int, dtype=mx.float32) -> list[mx.array]:
    """fn, scale, base and norm of a mixture."""
    M, K = (2 + HC) * HC, HC * D
    fn = (mx.random.normal((M, K)) * K**-0.5).astype(dtype)
    scale = mx.array([0.5, 2.0, 1.5])
    return [fn, scale, mx.random.normal((M,)), mx.random.normal((D,))]


def streams(HC: int, D: int) -> list[mx.array]:
    """8 rows of x, post and comb."""
    x, post = mx.random.normal((8, HC, D)), mx.random.normal((8, HC))
    return [x, post, mx.random.uniform(shape=(8, HC, HC))]


def mixed(product: Callable, inputs: list, HC: int, D: int, dtype=mx.float32):
    """product(*inputs, back) -> an op of (*inputs, x, post, comb), and 8 rows for it.

    It gives the streams, and the row, post and comb of the mixture that follows.
    """
    mx.random.seed(9)
    weights = mixture(HC, D, dtype)

    def op(*arrays):
        x, part = product(*arrays[:-3], Back(*arrays[-3:], weights[0]))
        return x, *hc_mix(x, part, *weights, **SETTINGS)

    return op, inputs + streams(HC, D)


def assert_written_back(product: Callable, D: int, channels: int):
    """product(n, back) of n rows is `hc_expand` of product(n), bit for bit, for 1 to 8 of them.

    And the next mixture's part of it, a share for so many channels, is the one made by hand.
    """
    rows, (fn, *_) = streams(4, D), mixture(4, D)
    parts = []
    for n in range(1, 9):
        here = [a[:n] for a in rows]
        with executed("check"):
            got, part = product(n, Back(*here, fn))
            assert_same(got, hc_expand(here[0], product(n), *here[1:]))
        want = shares(got, fn, channels)
        assert_close(part, want, atol=1e-6 * np.abs(want).max())
        parts.append(part[:1])
        assert_same(parts[n - 1], parts[0])


def shares(x: mx.array, fn: mx.array, channels: int) -> np.ndarray:
    """`Back`'s part of streams x, with a share for so many channels, in float64."""
    x, fn = (np.array(a.astype(mx.float32), dtype=np.float64) for a in (x, fn))
    N, HC, D = x.shape
    fn = fn.reshape(-1, HC, D)
    parts = [slice(i, i + channels) for i in range(0, D, channels)]
    products = [np.einsum("nkd,mkd->nm", x[..., p], fn[..., p]) for p in parts]
    squares = [(x[..., p] ** 2).sum(axis=(1, 2))[:, None] for p in parts]
    pairs = zip(products, squares, strict=True)
    return np.stack([np.concatenate(pair, axis=1) for pair in pairs], axis=1)
