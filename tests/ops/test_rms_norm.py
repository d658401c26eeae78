import mlx.core as mx

from ds4mlx.ops.rms_norm import rms_norm_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors


def test_reference_matches_golden_vectors():
    v = {k: op_vectors()[f"norm.{k}"] for k in ("x", "w", "y", "y_plain")}
    assert_close(rms_norm_reference(v["x"], v["w"], 1e-6), v["y"], atol=1e-6)
    assert_close(rms_norm_reference(v["x"], None, 1e-6), v["y_plain"], atol=1e-6)


def test_rows_of_a_block_equal_rows_alone():
    mx.random.seed(3)
    w = mx.random.normal((515,))
    assert_rows_alone(lambda x: rms_norm_reference(x, w, 1e-6), mx.random.normal((8, 515)))
    assert_rows_alone(lambda x: rms_norm_reference(x, None, 1e-6), mx.random.normal((8, 3, 96)))
