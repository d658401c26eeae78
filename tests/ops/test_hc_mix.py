import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.hc_expand import hc_expand
from ds4mlx.ops.hc_mix import coefficients, hc_mix
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.golden_data import op_vectors
from tests.metal.cases import Case

SETTINGS = dict(iterations=20, eps=1e-6, norm_eps=1e-6)


def make(HC, D, dtype, written=True):
    mx.random.seed(9)
    M, K = (2 + HC) * HC, HC * D
    fn = (mx.random.normal((M, K)) * K**-0.5).astype(dtype)
    scale, base, norm = mx.array([0.5, 2.0, 1.5]), mx.random.normal((M,)), mx.random.normal((D,))
    x, y, post = (mx.random.normal((8, *shape)) for shape in ((HC, D), (D,), (HC,)))
    comb = mx.random.uniform(shape=(8, HC, HC))

    def op(x, *write):
        return hc_mix(x, write or None, fn, scale, base, norm, **SETTINGS)

    return op, [x, y, post, comb] if written else [x]


CASES = {
    "two streams": Case(lambda: make(2, 9, mx.float32), "check", atol=2e-5),
    "odd": Case(lambda: make(4, 97, mx.float32), "check", atol=2e-5),
    "odd first": Case(lambda: make(4, 65, mx.bfloat16, False), "check", atol=2e-5),
    "flash half": Case(lambda: make(4, 4096, mx.float16), "guard", atol=2e-5),
    "flash": Case(lambda: make(4, 4096, mx.float32, False), "guard", atol=2e-5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


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


def test_the_reference_writes_the_sublayer_back_before_it_mixes():
    op, (x, *written) = make(4, 64, mx.float32)
    after, y, post, comb = op(x, *written)
    want = hc_expand(x, *written)
    assert_same(after, want)
    for got, alone in zip((y, post, comb), op(want)[1:], strict=True):
        assert_same(got, alone)
