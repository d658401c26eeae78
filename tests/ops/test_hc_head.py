import mlx.core as mx
import pytest

from ds4mlx.ops.hc_head import hc_head, hc_head_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.metal.cases import Case

SETTINGS = dict(eps=1e-6, norm_eps=1e-6)


def make(HC, D, dtype):
    mx.random.seed(9)
    fn = (mx.random.normal((HC, HC * D)) * (HC * D) ** -0.5).astype(dtype)
    scale, base = mx.array([1.5]), mx.random.normal((HC,))
    return lambda x: hc_head(x, fn, scale, base, **SETTINGS), [mx.random.normal((8, HC, D))]


CASES = {
    "two streams": Case(lambda: make(2, 5, mx.float32), "check", atol=4e-6),
    "odd": Case(lambda: make(4, 97, mx.bfloat16), "check", atol=4e-6),
    "flash half": Case(lambda: make(4, 4096, mx.float16), "guard", atol=1e-5),
    "flash": Case(lambda: make(4, 4096, mx.float32), "guard", atol=1e-5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


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
