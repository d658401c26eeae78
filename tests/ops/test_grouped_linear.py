import mlx.core as mx
import pytest

from ds4mlx.ops.grouped_linear import grouped_linear, grouped_linear_reference
from ds4mlx.ops.linear import linear
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.golden_data import op_vectors
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.ops.matrices import TYPES, matrix


def make(G, R, K):
    w = matrix("Q8_0", G * R, K)
    mx.random.seed(3)
    return lambda x: grouped_linear(x, w, G), [mx.random.normal((8, G, K))]


CASES = {
    "odd": Case(lambda: make(3, 5, 288), "check", atol=1e-4),
    "flash": Case(lambda: make(8, 128, 4096), "guard", atol=3e-3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_reference_matches_golden_vectors():
    v = {k: op_vectors()[f"out_proj.{k}"] for k in ("o", "wo_a", "wo_b", "y")}
    y = linear(grouped_linear_reference(v["o"].reshape(4, 3, 80), v["wo_a"], 3), v["wo_b"])
    assert_close(y, v["y"], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("type", TYPES)
def test_rows_of_a_block_equal_rows_alone(type):
    w = matrix(type, 2 * 5, 256)
    mx.random.seed(2)
    assert_rows_alone(lambda x: grouped_linear_reference(x, w, 2), mx.random.normal((8, 2, 256)))


def test_groups_may_lie_in_any_axes():
    op, (x,) = make(3, 5, 288)
    heads = x.reshape(8, 6, 144)
    assert_same(op(heads), op(x))
    with executed():
        assert_same(op(heads), op(x))
