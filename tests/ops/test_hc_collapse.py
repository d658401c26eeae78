import mlx.core as mx
import pytest

from ds4mlx.ops.hc_collapse import hc_collapse, hc_collapse_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.metal.cases import Case


def make(D):
    mx.random.seed(8)
    return hc_collapse, [mx.random.normal((8, 4, D)), mx.random.uniform(shape=(8, 4))]


CASES = {
    "odd": Case(lambda: make(97), "check", atol=2e-6),
    "flash": Case(lambda: make(4096), "guard", atol=2e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_reference_matches_golden_vectors():
    v = op_vectors()
    assert_close(hc_collapse_reference(v["hc.x"], v["hc.pre"]), v["hc.collapsed"], atol=2e-6)


def test_rows_of_a_block_equal_rows_alone():
    assert_rows_alone(
        hc_collapse_reference, mx.random.normal((8, 4, 97)), mx.random.uniform(shape=(8, 4))
    )
