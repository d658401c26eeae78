import mlx.core as mx
import numpy as np

from ds4mlx.ops.pool import pool_reference
from tests.close import assert_close, assert_rows_alone, assert_same


def test_reference_matches_float64():
    mx.random.seed(9)
    c, s = mx.random.normal((3, 8, 20)), 5 * mx.random.normal((3, 8, 20))
    C, S = np.array(c, dtype=np.float64), np.array(s, dtype=np.float64)
    w = np.exp(S - S.max(1, keepdims=True))
    assert_close(pool_reference(c, s), (C * w).sum(1) / w.sum(1), atol=2e-6)


def test_a_missing_candidate_has_weight_exactly_zero():
    mx.random.seed(10)
    c, s = mx.random.normal((1, 4, 20)), mx.random.normal((1, 4, 20))
    padded = [
        mx.concatenate([mx.full((1, 4, 20), fill), a], axis=1)
        for a, fill in ((c, 1e30), (s, -mx.inf))
    ]
    assert_close(pool_reference(*padded), pool_reference(c, s), atol=1e-6)


def test_rows_of_a_block_equal_rows_alone():
    mx.random.seed(11)
    assert_rows_alone(
        pool_reference, mx.random.normal((8, 128, 33)), mx.random.normal((8, 128, 33))
    )


def test_one_candidate_is_its_own_value():
    c = mx.random.normal((2, 1, 5))
    assert_same(pool_reference(c, mx.random.normal((2, 1, 5))), c[:, 0])
