from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops import Back, metal
from ds4mlx.ops.experts_down import experts_down, experts_down_reference
from tests.close import assert_close, assert_rows_alone
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.ops.backs import assert_written_back, mixed
from tests.ops.matrices import TYPES, exact, matrix


def block(type, E, D, F, K):
    """experts_down(...) with random weights, and 8 rows for it."""
    w2 = matrix(type, E, D, F)
    rng = np.random.default_rng(E)
    mx.random.seed(E)
    ids = mx.array(np.stack([rng.permutation(E)[:K] for _ in range(8)]), mx.uint32)
    return (lambda h, ids: experts_down(h, ids, w2)), [mx.random.normal((8, K, F)) / 8, ids]


def back(type, E, D, F, K, HC, dtype, shared=True):
    w2, (_, (h, ids)) = matrix(type, E, D, F), block("F32", E, D, F, K)
    last = [mx.random.normal((8, D))] * shared

    def op(h, ids, *rest):
        *last, back = rest
        return experts_down(h, ids, w2, *(last or [None]), back)

    return mixed(op, [h, ids, *last], HC, D, dtype)


CASES = {  # atol: about 1e-5 of the greatest element
    "odd": Case(lambda: block("MXFP4", 5, 36, 96, 3), "check", atol=1e-4),
    "one expert": Case(lambda: block("Q2_K", 1, 8, 256, 1), "check", atol=1e-4),
    "iq2": Case(lambda: block("IQ2_XXS", 3, 8, 256, 2), "check", atol=1e-4),
    # Flash's rows of 2048 and k of 6, and fewer of them
    "flash": Case(lambda: block("MXFP4", 8, 128, 2048, 6), "guard", atol=1e-3),
    "flash q2": Case(lambda: block("Q2_K", 8, 64, 2048, 6), "guard", atol=1e-3),
    "a simdgroup for two blocks": Case(lambda: block("MXFP4", 8, 32, 2048, 8), "guard", atol=1e-3),
    "back odd": Case(lambda: back("MXFP4", 5, 36, 96, 3, 4, mx.float32), "check", atol=1e-4),
    "back two streams": Case(
        lambda: back("MXFP4", 3, 80, 64, 2, 2, mx.float16, False), "check", atol=1e-4
    ),
    "back flash": Case(lambda: back("Q2_K", 7, 512, 2048, 6, 4, mx.float16), "guard", atol=1e-3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


@pytest.mark.parametrize("type", TYPES)
def test_kernel_reads_the_exact_value_of_every_weight(type):
    w2 = matrix(type, 2, 8, 512)
    ids = mx.ones((8, 1), mx.uint32)
    one_hot = mx.eye(512).reshape(64, 8, 1, 512)
    with executed():
        read = mx.concatenate([experts_down(h, ids, w2) for h in one_hot])
    assert np.array_equal(np.array(read).T, exact(w2)[1])


@pytest.mark.parametrize("D, channels", [(36, 4), (64, 16)])
def test_a_sum_written_back_is_the_sum_and_then_hc_expand(D, channels):
    w2, (_, (h, ids)) = matrix("MXFP4", 4, D, 64), block("F32", 4, D, 64, 3)
    assert_written_back(
        lambda n, back=None: experts_down(h[:n], ids[:n], w2, None, back), D, channels
    )


@pytest.mark.parametrize(
    "N, HC, names",
    [(8, 4, ["experts_down"]), (9, 4, ["hc_expand"]), (1, 3, ["experts_down", "hc_expand"])],
)
def test_what_experts_down_back_does_not_take_is_written_back_in_a_launch_of_its_own(N, HC, names):
    kernels, D = Counter(), 32
    x = [mx.zeros((N, *shape)) for shape in ((HC, D), (HC,), (HC, HC))]
    fn = mx.zeros(((2 + HC) * HC, HC * D))
    with metal.traced(kernels):
        h, ids = mx.zeros((N, 2, 64)), mx.zeros((N, 2), mx.uint32)
        _, part = experts_down(h, ids, matrix("MXFP4", 2, D, 64), None, Back(*x, fn))
    assert kernels == Counter(names) and (part is None) == ("hc_expand" in names)


@pytest.mark.parametrize("columns, launches", [(8192, 1), (8224, 0)])
def test_rows_too_long_for_threadgroup_memory_go_to_the_reference(columns, launches):
    kernels = Counter()
    with metal.traced(kernels):
        w2 = matrix("MXFP4", 1, 4, columns)
        experts_down(mx.zeros((1, 1, columns)), mx.zeros((1, 1), mx.uint32), w2)
    assert kernels.total() == launches


@pytest.mark.parametrize("type", ["MXFP4", "Q2_K", "F32"])
def test_reference_matches_float64(type):
    _, (h, ids) = block("F32", 4, 64, 256, 3)
    w2 = matrix(type, 4, 64, 256)
    want = np.einsum("nkdf,nkf->nd", exact(w2)[np.array(ids)], np.array(h, dtype=np.float64))
    got = experts_down_reference(h, ids, w2)
    assert_close(got, want, atol=2e-5 * np.abs(want).max())


def test_rows_of_a_block_equal_rows_alone():
    op, arrays = block("Q2_K", 4, 64, 256, 3)
    assert_rows_alone(op, *arrays)
