import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.experts import experts_reference
from tests.close import assert_close, assert_rows_alone
from tests.ops.matrices import exact, matrix

KINDS = [
    ("IQ2_XXS", "Q2_K"),
    ("Q4_K", "Q4_K"),
    ("MXFP4", "MXFP4"),
    ("Q8_0", "Q8_0"),
    ("BF16", "F32"),
]
E, F, D, K, LIMIT = 5, 256, 512, 3, 2.0


def make(up, down, rows):
    w1, w3, w2 = matrix(up, E, F, D), matrix(up, E, F, D, seed=1), matrix(down, E, D, F)
    rng = np.random.default_rng(rows)
    mx.random.seed(rows)
    x = mx.random.normal((rows, D)) / 8
    ids = np.stack([rng.permutation(E)[:K] for _ in range(rows)])
    return x, mx.array(ids, mx.uint32), mx.random.uniform(shape=(rows, K)), w1, w3, w2


@pytest.mark.parametrize("up, down", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_reference_matches_float64(up, down, rows):
    x, ids, weights, *w = make(up, down, rows)
    W1, W3, W2 = (exact(m) for m in w)
    X, P = np.array(x, dtype=np.float64), np.array(weights, dtype=np.float64)
    want = np.zeros((rows, D))
    for n, chosen in enumerate(np.array(ids)):
        for e, p in zip(chosen, P[n], strict=True):
            gate = np.minimum(W1[e] @ X[n], LIMIT)
            up_ = np.clip(W3[e] @ X[n], -LIMIT, LIMIT)
            want[n] += p * (W2[e] @ (gate / (1 + np.exp(-gate)) * up_))
    got = experts_reference(x, ids, weights, *w, LIMIT)
    assert_close(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("up, down", KINDS)
def test_rows_of_a_block_equal_rows_alone(up, down):
    x, ids, weights, *w = make(up, down, 8)
    assert_rows_alone(
        lambda x, ids, weights: experts_reference(x, ids, weights, *w, LIMIT), x, ids, weights
    )


@pytest.mark.parametrize("rows", [1, 33, 63])
@pytest.mark.parametrize("type", ["MXFP4", "Q8_0", "Q4_K"])
def test_gathered_products_equal_a_dense_loop_at_ragged_sizes(type, rows):
    """MLX's gather_qmm has had silently wrong tails: K = 96 is no multiple of 64, rows are odd."""
    columns = 256 if type == "Q4_K" else 96
    w1, w3 = matrix(type, 8, 64, columns), matrix(type, 8, 64, columns, seed=1)
    w2 = matrix("Q8_0", 8, columns, 64)
    mx.random.seed(13)
    x = mx.random.normal((rows, columns))
    ids = mx.array(np.random.default_rng(2).integers(0, 8, (rows, 1)), mx.uint32)
    ones = mx.ones((rows, 1))
    got = experts_reference(x, ids, ones, w1, w3, w2, 1e9)
    W1, W3, W2 = (exact(m) for m in (w1, w3, w2))
    X = np.array(x, dtype=np.float64)
    for n, e in enumerate(np.array(ids)[:, 0]):
        gate = W1[e] @ X[n]
        want = W2[e] @ (gate / (1 + np.exp(-gate)) * (W3[e] @ X[n]))
        assert_close(got[n], want, atol=1e-4 * np.abs(want).max())
