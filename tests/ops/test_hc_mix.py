import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.hc_mix import coefficients, hc_mix
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.ops.backs import SETTINGS, mixture, shares, streams


def make(HC, D, dtype):
    mx.random.seed(9)
    weights = mixture(HC, D, dtype)
    return lambda x: hc_mix(x, None, *weights, **SETTINGS), streams(HC, D)[:1]


CASES = {
    "two streams": Case(lambda: make(2, 9, mx.float32), "check", atol=2e-5),
    "odd": Case(lambda: make(4, 97, mx.float32), "check", atol=2e-5),
    "odd half": Case(lambda: make(4, 65, mx.bfloat16), "check", atol=2e-5),
    "flash half": Case(lambda: make(4, 4096, mx.float16), "guard", atol=2e-5),
    "flash": Case(lambda: make(4, 4096, mx.float32), "guard", atol=2e-5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_many_rows_match_the_reference():
    op, arrays = make(4, 65, mx.float16)
    arrays = [mx.concatenate([a, a[:3]]) for a in arrays]
    want = op(*arrays)
    with executed("check"):
        got = op(*arrays)
    for g, w in zip(got, want, strict=True):
        assert_close(g, np.array(w), atol=2e-5)


def test_reference_matches_golden_vectors():
    v = {k.removeprefix("hc."): a for k, a in op_vectors().items() if k.startswith("hc.")}
    pre, post, comb = coefficients(v["x"], v["fn"], v["scale"], v["base"], **SETTINGS)
    assert_close(pre, v["pre"], atol=2e-6)
    assert_close(post, v["post"], atol=2e-6)
    assert_close(comb, v["comb"], atol=2e-6)


def test_one_iteration_more_or_less_is_seen():
    v = {k.removeprefix("hc."): a for k, a in op_vectors().items() if k.startswith("hc.")}
    for iterations in (19, 21):
        changed = SETTINGS | {"iterations": iterations}
        *_, comb = coefficients(v["x"], v["fn"], v["scale"], v["base"], **changed)
        assert np.abs(np.array(comb) - np.array(v["comb"])).max() > 5e-5


def test_columns_of_comb_sum_to_one():
    mx.random.seed(4)
    x, fn = mx.random.normal((3, 4, 16)), mx.random.normal((24, 64))
    *_, comb = coefficients(x, fn, mx.ones(3), mx.random.normal((24,)), **SETTINGS)
    assert_close(comb.sum(axis=1), np.ones((3, 4)), atol=1e-5)


def test_rows_of_a_block_equal_rows_alone():
    mx.random.seed(5)
    fn, base = mx.random.normal((24, 4 * 96)).astype(mx.float16), mx.random.normal((24,))
    assert_rows_alone(
        lambda x: coefficients(x, fn, mx.ones(3), base, **SETTINGS),
        mx.random.normal((8, 4, 96)),
    )


@pytest.mark.parametrize("channels", [4, 8, 100])
def test_a_part_that_is_given_says_all_of_fn(channels):
    mx.random.seed(3)
    (x, *_), (fn, *rest) = streams(4, 36), mixture(4, 36)
    part = mx.array(shares(x, fn, channels).astype(np.float32))
    with executed("check"):
        got = hc_mix(x, part, mx.zeros_like(fn), *rest, **SETTINGS)
    for mine, want in zip(got, hc_mix(x, None, fn, *rest, **SETTINGS), strict=True):
        assert_close(mine, want, atol=1e-5)
