import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.index_best import NONE, index_best, index_best_reference
from tests.close import assert_same
from tests.metal.bench import executed
from tests.metal.cases import Case


def make(C, k, ready, distinct):
    """Random scores of both signs, `distinct` of them different, so that the k-th best ties."""
    mx.random.seed(18)
    scores = mx.round(distinct / 4 * mx.random.normal((8, C))) / 7
    return lambda *arrays: index_best(*arrays, k), [scores, mx.array(ready, mx.int32)]


CASES = {
    "few": Case(lambda: make(9, 3, [9, 0, 1, 2, 3, 4, 5, 8], 4), "check"),
    "ties": Case(lambda: make(1333, 70, [1333, 69, 70, 71, 1023, 1024, 1025, 1100], 9), "check"),
    "chunks": Case(
        lambda: make(17000, 40, [17000, 0, 39, 16384, 16385, 16400, 16424, 16425], 1e4), "guard"
    ),
    "flash": Case(
        lambda: make(9000, 512, [9000, 511, 512, 513, 4095, 4096, 4097, 8999], 1e7), "guard"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def kernel(*arguments):
    with executed("check"):
        return index_best(*arguments)


ops = pytest.mark.parametrize("op", [index_best_reference, kernel])


def chosen(op, scores, ready, k):
    return list(np.array(op(mx.array([scores]), mx.array([ready], mx.int32), k))[0])


@ops
def test_ties_go_to_the_lowest_entry(op):
    scores = np.zeros(1100, np.float32)
    scores[[7, 1090]] = 1, 2
    assert chosen(op, scores.tolist(), 1100, 5) == [0, 1, 2, 7, 1090]


@ops
def test_the_zeros_tie(op):
    assert chosen(op, [-0.0] + [0.0] * 8, 9, 1) == [0]


@ops
def test_an_entry_that_is_not_ready_is_never_chosen(op):
    assert chosen(op, [-1.0, -3.0, -2.0, -4.0] + [9.0] * 6, 4, 2) == [0, 2]


@ops
def test_what_is_missing_is_filled(op):
    assert chosen(op, [1.0] * 9, 2, 4) == [0, 1, NONE, NONE]


@ops
def test_nan_and_minus_infinity_come_last(op):
    scores = [np.nan, -np.inf, -5.0, np.nan, 1.0, -1e38, 0.0, 2.0, 3.0]
    assert chosen(op, scores, 9, 7) == [0, 2, 4, 5, 6, 7, 8]


def test_kernel_finds_the_best_512_of_a_million_tokens():
    mx.random.seed(19)
    scores, ready = mx.random.normal((1, 262144)), mx.array([262100], mx.int32)
    with executed("guard"):
        got = index_best(scores, ready, 512)
    assert_same(got, index_best_reference(scores, ready, 512))
