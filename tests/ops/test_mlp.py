import mlx.core as mx
import pytest

from ds4mlx.ops.mlp import mlp_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.ops.matrices import matrix


@pytest.mark.parametrize("limit, name", [(10.0, "y10"), (2.0, "y2"), (float("inf"), "y_none")])
def test_reference_matches_golden_vectors(limit, name):
    v = {k: op_vectors()[f"expert.{k}"] for k in ("x", "w1", "w3", "w2", name)}
    got = mlp_reference(v["x"], v["w1"], v["w3"], v["w2"], limit)
    assert_close(got, v[name], atol=5e-7 * float(mx.abs(v[name]).max()))


def test_rows_of_a_block_equal_rows_alone():
    w1, w3, w2 = matrix("Q8_0", 96, 64), matrix("Q8_0", 96, 64, seed=1), matrix("Q8_0", 64, 96)
    assert_rows_alone(lambda x: mlp_reference(x, w1, w3, w2, 10.0), mx.random.normal((8, 64)))
