import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.index_weigh import index_weigh
from tests.close import assert_close
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.metal.lint import generated, lint


def make(Hi, C):
    mx.random.seed(C)
    return index_weigh, [mx.random.normal((8, Hi, C)), mx.random.normal((8, Hi))]


CASES = {
    "odd": Case(lambda: make(3, 17), "check", atol=1e-5),
    "more than a threadgroup": Case(lambda: make(9, 259), "check", atol=1e-5),
    "flash": Case(lambda: make(64, 2048), "guard", atol=1e-4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_kernel_hides_no_nan():
    products, w = mx.ones((2, 3, 9)), mx.ones((2, 3))
    products[1, 2, 4] = mx.nan
    with executed("check"):
        got = np.array(index_weigh(products, w))
    assert np.argwhere(np.isnan(got)).tolist() == [[1, 4]]


def test_reference_matches_float64():
    _, (products, w) = make(5, 11)
    P, W = np.array(products, np.float64), np.array(w, np.float64)
    want = (W[:, :, None] * np.maximum(P, 0)).sum(axis=1)
    assert_close(index_weigh(products, w), want, atol=1e-5)


@pytest.mark.parametrize("n", [1, 9])
def test_the_address_spaces_hold(n):
    products, w = mx.zeros((n, 4, 9)), mx.zeros((n, 4))
    (source,) = generated(index_weigh, products, w)
    assert lint(source) == []
