import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops import linear as linear_op
from ds4mlx.ops.linear import linear_reference
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.ops.matrices import TYPES, exact, matrix


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_reference_matches_float64(type, rows):
    w = matrix(type, 7, 512)
    mx.random.seed(rows)
    x = mx.random.normal((rows, 512))
    want = np.array(x, dtype=np.float64) @ exact(w).T
    assert_close(linear_reference(x, w), want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("type", TYPES)
def test_rows_of_a_block_equal_rows_alone(type):
    w = matrix(type, 33, 768)
    mx.random.seed(1)
    assert_rows_alone(lambda x: linear_reference(x, w), mx.random.normal((8, 768)))


def test_a_tiled_matrix_gives_the_product_of_the_whole(monkeypatch):
    import sys

    w, x = matrix("Q2_K", 11, 256), mx.random.normal((9, 256))
    whole = linear_reference(x, w)
    monkeypatch.setattr(sys.modules["ds4mlx.ops.linear"], "_TILE", 4 * 256)
    assert_close(linear_reference(x, w), whole, atol=1e-5)


def test_the_op_is_the_reference_without_a_kernel():
    w, x = matrix("Q8_0", 4, 64), mx.random.normal((1, 64))
    assert_same(linear_op(x, w), linear_reference(x, w))
