import mlx.core as mx
import pytest

from ds4mlx.ops.rms_norm import rms_norm, rms_norm_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.metal.cases import Case


def make(weighted, *shape):
    mx.random.seed(15)
    w = mx.random.normal(shape[-1:]) if weighted else None
    return lambda x: rms_norm(x, w, 1e-6), [mx.random.normal((8, *shape))]


CASES = {
    "tiny": Case(lambda: make(True, 3), "check", atol=1e-6),
    "odd": Case(lambda: make(True, 515), "check", atol=2e-6),
    "odd heads": Case(lambda: make(False, 3, 96), "check", atol=2e-6),
    "flash": Case(lambda: make(True, 4096), "guard", atol=1e-6, rtol=4e-6),
    "flash heads": Case(lambda: make(False, 64, 512), "guard", atol=1e-6, rtol=4e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_reference_matches_golden_vectors():
    v = {k: op_vectors()[f"norm.{k}"] for k in ("x", "w", "y", "y_plain")}
    assert_close(rms_norm_reference(v["x"], v["w"], 1e-6), v["y"], atol=1e-6)
    assert_close(rms_norm_reference(v["x"], None, 1e-6), v["y_plain"], atol=1e-6)


def test_rows_of_a_block_equal_rows_alone():
    mx.random.seed(3)
    w = mx.random.normal((515,))
    assert_rows_alone(lambda x: rms_norm_reference(x, w, 1e-6), mx.random.normal((8, 515)))
    assert_rows_alone(lambda x: rms_norm_reference(x, None, 1e-6), mx.random.normal((8, 3, 96)))
