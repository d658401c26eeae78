import mlx.core as mx

from ds4mlx.ops.hc_head import hc_head_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors

SETTINGS = dict(eps=1e-6, norm_eps=1e-6)


def test_reference_matches_golden_vectors():
    v = op_vectors()
    out = hc_head_reference(
        v["hc.x"], v["hc.head_fn"], v["hc.head_scale"], v["hc.head_base"], **SETTINGS
    )
    assert_close(out, v["hc.head"], atol=2e-6, rtol=1e-6)


def test_rows_of_a_block_equal_rows_alone():
    mx.random.seed(8)
    fn, base = mx.random.normal((4, 4 * 96)), mx.random.normal((4,))
    assert_rows_alone(
        lambda x: hc_head_reference(x, fn, mx.ones(1), base, **SETTINGS),
        mx.random.normal((8, 4, 96)),
    )
