import mlx.core as mx
import pytest

from ds4mlx.ops.grouped_linear import grouped_linear_reference
from ds4mlx.ops.linear import linear
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.ops.matrices import TYPES, matrix


def test_reference_matches_golden_vectors():
    v = {k: op_vectors()[f"out_proj.{k}"] for k in ("o", "wo_a", "wo_b", "y")}
    y = linear(grouped_linear_reference(v["o"].reshape(4, 3, 80), v["wo_a"]), v["wo_b"])
    assert_close(y, v["y"], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("type", TYPES)
def test_rows_of_a_block_equal_rows_alone(type):
    w = matrix(type, 2 * 5, 256)
    mx.random.seed(2)
    assert_rows_alone(lambda x: grouped_linear_reference(x, w), mx.random.normal((8, 2, 256)))
