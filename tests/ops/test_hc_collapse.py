import mlx.core as mx

from ds4mlx.ops.hc_collapse import hc_collapse_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors


def test_reference_matches_golden_vectors():
    v = op_vectors()
    assert_close(hc_collapse_reference(v["hc.x"], v["hc.pre"]), v["hc.collapsed"], atol=2e-6)


def test_rows_of_a_block_equal_rows_alone():
    assert_rows_alone(
        hc_collapse_reference, mx.random.normal((8, 4, 97)), mx.random.uniform(shape=(8, 4))
    )
