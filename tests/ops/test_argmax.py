import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.argmax import argmax, argmax_reference
from tests.close import assert_close
from tests.metal.bench import executed
from tests.metal.cases import Case


def make(V):
    mx.random.seed(21)
    return argmax, [mx.random.normal((8, V))]


CASES = {
    "few": Case(lambda: make(9), "check"),
    "odd": Case(lambda: make(1057), "check"),
    "flash": Case(lambda: make(129280), "guard"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def kernel(logits):
    with executed("check"):
        return argmax(logits)


@pytest.mark.parametrize("op", [argmax_reference, kernel])
def test_ties_go_to_the_lowest_id_without_a_margin(op):
    logits = np.zeros((1, 100), np.float32)
    logits[0, [7, 39, 71]] = 2
    ids, margins = op(mx.array(logits))
    assert np.array(ids)[0] == 7
    assert np.array(margins)[0] == 0


@pytest.mark.parametrize("op", [argmax_reference, kernel])
def test_nan_never_wins(op):
    logits = np.full((1, 40), -5, np.float32)
    logits[0, [0, 3, 38]] = np.nan
    logits[0, 20] = -4
    ids, margins = op(mx.array(logits))
    assert np.array(ids)[0] == 20
    assert_close(margins, [1.0], atol=0)


@pytest.mark.parametrize("op", [argmax_reference, kernel])
def test_a_row_of_minus_infinity_gives_a_valid_id(op):
    ids, _ = op(mx.full((1, 40), -mx.inf))
    assert np.array(ids)[0] == 0
