import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.hc_expand import Back, hc_expand, hc_expand_reference, written
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.golden_data import op_vectors
from tests.metal.cases import Case


def make(D):
    mx.random.seed(7)
    shapes = ((8, 4, D), (8, D), (8, 4), (8, 4, 4))
    return hc_expand, [mx.random.normal(s) for s in shapes]


CASES = {
    "odd": Case(lambda: make(97), "check", atol=2e-6),
    "flash": Case(lambda: make(4096), "guard", atol=2e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_reference_matches_golden_vectors():
    v = {k: op_vectors()[f"hc.{k}"] for k in ("x", "y", "post", "comb", "out")}
    out = hc_expand_reference(v["x"], v["y"], v["post"], v["comb"])
    assert_close(out, v["out"], atol=2e-6, rtol=1e-6)


def test_the_sum_runs_over_the_first_index_of_an_asymmetric_comb():
    mx.random.seed(6)
    x, y = mx.random.normal((2, 4, 8)), mx.random.normal((2, 8))
    post, comb = mx.random.uniform(shape=(2, 4)), mx.random.uniform(shape=(2, 4, 4))
    X, C = np.array(x, dtype=np.float64), np.array(comb, dtype=np.float64)
    want = np.einsum("njk,njd->nkd", C, X) + np.array(post)[..., None] * np.array(y)[:, None]
    assert_close(hc_expand_reference(x, y, post, comb), want, atol=1e-5)


def test_rows_of_a_block_equal_rows_alone():
    _, arrays = make(97)
    assert_rows_alone(hc_expand_reference, *arrays)


def test_an_output_is_written_back_where_that_is_asked_for():
    _, (x, y, post, comb) = make(97)
    assert written(y, None) is y
    streams, part = written(y, Back(x, post, comb, mx.zeros((24, 4 * 97))))
    assert_same(streams, hc_expand_reference(x, y, post, comb))
    assert part is None
