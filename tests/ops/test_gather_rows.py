import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.gather_rows import EMPTY, gather_rows
from tests.close import assert_same
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.metal.lint import generated, lint


def make(S, D, dtype=mx.float32, per=1):
    mx.random.seed(S)
    x = mx.random.normal((S, D))
    ids = mx.random.randint(0, S * per, (8, 3)).astype(mx.uint32)
    return lambda ids: gather_rows(x, ids, dtype, per), [ids]


CASES = {
    "odd": Case(lambda: make(5, 24), "check"),
    "half, six to a row": Case(lambda: make(7, 40, mx.float16, 6), "check"),
    "flash": Case(lambda: make(40, 4096, mx.float16, 6), "guard"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_gives_exactly_the_rows_of_the_reference(case):
    case.verify()


def test_of_an_empty_id_nothing_is_written():
    x, ids = mx.ones((4, 16)), mx.array([[1, EMPTY], [EMPTY, 3]], mx.uint32)
    with executed("check"):
        out = np.array(gather_rows(x, ids))
    assert np.isnan(out).all(axis=2).tolist() == [[False, True], [True, False]]


def test_the_address_spaces_hold():
    for n in (1, 9):
        ids = mx.zeros(n, mx.uint32)
        (source,) = generated(lambda x, ids=ids: gather_rows(x, ids), mx.zeros((4, 16)))
        assert lint(source) == []


def test_a_table_of_odd_rows_takes_the_reference():
    x, ids = mx.random.normal((4, 5)), mx.array([3, 0], mx.uint32)
    with executed("check"):
        assert_same(gather_rows(x, ids), x[ids])
