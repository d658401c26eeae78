import sys
from collections import Counter
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops import Back, hc_expand, linears, metal
from ds4mlx.ops import linear as linear_op
from ds4mlx.ops.linear import Gated, linear_reference, swiglu
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.metal.lint import generated, lint
from tests.ops.backs import assert_written_back, mixed, mixture, streams
from tests.ops.matrices import TYPES, exact, matrix

# The module: the package's attribute of this name is the op.
MODULE = sys.modules["ds4mlx.ops.linear"]


def stored(type, M, K):
    """A random matrix that is not widened, as on a GPU."""
    dtype = {"F16": mx.float16, "BF16": mx.bfloat16}.get(type)
    w = matrix(type, M, K)
    return w.astype(dtype) if dtype else w


def make(type, M, K):
    w = stored(type, M, K)
    mx.random.seed(3)
    return lambda x: linear_op(x, w), [mx.random.normal((8, K))]


MIXED = [("Q8_0", 13), ("Q8_0", 4100), ("F16", 70), ("IQ2_XXS", 8)]


def several():
    ws = [stored(type, M, 256) for type, M in MIXED]
    mx.random.seed(4)
    return (lambda x: tuple(linears(x, ws))), [mx.random.normal((8, 256))], ws


def gated(type, M, K, limit=2.0):
    """Beside another product."""
    before, *both = stored("F16", 12, K), *(matrix(type, M, K, seed=i) for i in range(2))
    x = mx.random.normal((8, K), key=mx.random.key(5)) / 8
    return (lambda x: tuple(linears(x, [before, Gated(*both, limit)]))), [x]


def back(type, D, K, HC, dtype):
    w = stored(type, D, K)
    mx.random.seed(3)
    inputs = [mx.random.normal((8, K))]
    return mixed(lambda x, back: linear_op(x, w, back), inputs, HC, D, dtype)


CASES = {
    "q8_0-odd": Case(lambda: make("Q8_0", 13, 1056), "check", atol=2e-4),
    "f16-odd": Case(lambda: make("F16", 70, 32), "check", atol=2e-5),
    "q8_0-flash": Case(lambda: make("Q8_0", 512, 4096), "guard", atol=3e-3),
    "q8_0-one": Case(lambda: make("Q8_0", 1, 2048), "check", atol=2e-4),
    "q8_0-shared": Case(lambda: make("Q8_0", 4099, 2080), "guard", atol=3e-3),
    "q4_k-shared": Case(lambda: make("Q4_K", 4099, 2304), "guard", atol=2e-2),
    "mixed": Case(lambda: several()[:2], "guard", atol=2e-4),
    "gated-odd": Case(lambda: gated("Q8_0", 13, 1056), "check", atol=1e-4),
    "gated-k": Case(lambda: gated("Q2_K", 70, 256, 10.0), "check", atol=1e-4),
    "gated-no limit": Case(lambda: gated("MXFP4", 9, 288, float("inf")), "check", atol=2e-2),
    "gated-wide": Case(lambda: gated("Q8_0", 4100, 1056), "guard", atol=1e-4),
    "gated-flash": Case(lambda: gated("Q8_0", 256, 4096, 10.0), "guard", atol=1e-3),
    "q4_k-flash": Case(lambda: make("Q4_K", 512, 4096), "guard", atol=2e-2),
    "back-odd": Case(lambda: back("Q8_0", 36, 256, 4, mx.float32), "check", atol=1e-4),
    "back-two streams": Case(lambda: back("F16", 14, 160, 2, mx.float16), "check", atol=1e-4),
    "back-flash": Case(lambda: back("Q8_0", 4096, 8192, 4, mx.float16), "guard", atol=3e-3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_an_output_that_few_simdgroups_share_is_written_back_by_a_launch_of_its_own():
    """Of 512 columns one simdgroup takes all, and a threadgroup's outputs are not one tile."""
    w, x, some = stored("Q8_0", 4096, 512), mx.random.normal((2, 512)), streams(4, 4096)
    back = Back(*(a[:2] for a in some), mixture(4, 4096)[0])
    assert MODULE.split(w) == 1
    with executed("guard"):
        got, part = linear_op(x, w, back)
        assert part is None
        assert_same(got, hc_expand(back.x, linear_op(x, w), back.post, back.comb))


@pytest.mark.parametrize("type", ["Q4_0", "Q2_K"])
def test_kernel_matches_float64_where_a_lane_reads_several_vectors(type):
    w, x = matrix(type, 9, 768), mx.random.normal((3, 768))
    want = np.array(x, dtype=np.float64) @ exact(w).T
    with executed("check"):
        assert_close(linear_op(x, w), want, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("type", TYPES)
def test_the_kernel_reads_the_exact_value_of_every_weight(type):
    w = stored(type, 8, 256)
    with executed():
        read = mx.concatenate([linear_op(x, w) for x in mx.eye(256).reshape(32, 8, 256)])
    assert np.array_equal(np.array(read).T, exact(w))


@pytest.mark.parametrize("rows", [1, 6])
def test_products_of_one_launch_equal_those_of_several(rows):
    op, (x,), ws = several()
    names = []
    with executed(), pytest.MonkeyPatch.context() as patch:
        launch = metal.launch
        patch.setattr(metal, "launch", lambda k, *a: names.append(k.name) or launch(k, *a))
        together = op(x[:rows])
        assert names == ["linear"]
        for y, w in zip(together, ws, strict=True):
            assert_same(y, linear_op(x[:rows], w))


@pytest.mark.parametrize(
    "type, enough, channels", [("Q8_0", 99, 4), ("Q8_0", 9, 8), ("Q4_K", 9, 8)]
)
def test_a_product_written_back_is_the_product_and_then_hc_expand(
    type, enough, channels, monkeypatch
):
    monkeypatch.setattr(MODULE, "_ENOUGH", enough)
    D = 36  # a multiple of no group of channels but 4
    w, x = stored(type, D, 256), mx.random.normal((8, 256))
    assert_written_back(lambda n, back=None: linear_op(x[:n], w, back), D, channels)


@pytest.mark.parametrize(
    "rows, K, HC, dtype, names",
    [
        (8, 256, 4, mx.float16, ["linear"]),
        (9, 256, 4, mx.float16, ["hc_expand"]),
        (1, 260, 4, mx.float16, ["hc_expand"]),
        (1, 256, 3, mx.float16, ["linear", "hc_expand"]),
        (1, 256, 4, None, ["linear", "hc_expand"]),
    ],
)
def test_what_linear_back_does_not_take_is_written_back_in_a_launch_of_its_own(
    rows, K, HC, dtype, names
):
    kernels, D = Counter(), 32
    M = (2 + HC) * HC
    fn = matrix("Q8_0", M, HC * D) if dtype is None else mx.zeros((M, HC * D), dtype)
    x = [mx.zeros((rows, *shape)) for shape in ((K,), (HC, D), (HC,), (HC, HC))]
    with metal.traced(kernels):
        _, part = linear_op(x[0], matrix("F32", D, K), Back(*x[1:], fn))
    assert kernels == Counter(names) and (part is None) == ("hc_expand" in names)


def test_matrices_past_the_buffers_of_metal_take_another_launch():
    ws = [stored("Q4_K", 8, 256) for _ in range(9)]  # 3 planes, a shape and a product each
    sources = generated(lambda x: tuple(linears(x, ws)), mx.zeros((1, 256)))
    assert len(sources) == 2
    assert [fault for source in sources for fault in lint(source)] == []


def test_of_two_matrices_the_first_gates_the_second():
    w, x = [matrix("Q8_0", 40, 256, seed=i) for i in range(2)], mx.random.normal((3, 256)) / 8
    gate, up = (np.array(x, dtype=np.float64) @ exact(m).T for m in w)
    gate, up = np.minimum(gate, 3), np.clip(up, -3, 3)
    want = gate / (1 + np.exp(-gate)) * up
    for run in (nullcontext, lambda: executed("check")):
        with run():
            (got,) = linears(x, [Gated(*w, 3.0)])
        assert_close(got, want, atol=1e-5)


def test_gated_matrices_count_twice_among_the_buffers_of_metal():
    ws = [Gated(stored("Q5_K", 8, 256), matrix("Q5_K", 8, 256, seed=1), 2.0) for _ in range(4)]
    sources = generated(lambda x: tuple(linears(x, ws)), mx.zeros((1, 256)))
    assert len(sources) == 2
    assert [fault for source in sources for fault in lint(source)] == []


def test_a_gate_of_another_type_takes_the_references():
    w, x = [matrix("Q8_0", 16, 256), stored("F16", 16, 256)], mx.random.normal((2, 256))
    want = swiglu(*(linear_reference(x, m) for m in w), 2.0)
    with executed("check"):
        assert_same(*linears(x, [Gated(*w, 2.0)]), want)


def test_a_matrix_that_the_kernel_refuses_takes_the_reference_among_others():
    ws = [matrix("Q8_0", 13, 256), matrix("F32", 7, 256), matrix("F16", 9, 256)]
    x = mx.random.normal((2, 256))
    with executed():
        got = linears(x, ws)
        assert_same(got[1], linear_reference(x, ws[1]))
        assert_same(got[2], linear_op(x, ws[2]))


@pytest.mark.parametrize("type", TYPES)
def test_the_address_spaces_of_every_type_hold(type):
    w = stored(type, 8, 256)
    (source,) = generated(lambda x: linear_op(x, w), mx.zeros((3, 256)))
    assert lint(source) == []


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_address_spaces_of_a_product_written_back_hold(rows):
    op, arrays = back("Q8_0", 36, 256, 2, mx.float16)
    sources = generated(op, *(a[:rows] for a in arrays))
    assert len(sources) == 2
    assert [fault for source in sources for fault in lint(source)] == []


@pytest.mark.parametrize("rows, M, K", [(9, 16, 256), (1, 16, 132), (1, 7, 256)])
def test_other_shapes_take_the_reference(rows, M, K):
    w, x = matrix("F32", M, K), mx.random.normal((rows, K))
    with executed("check"):
        assert_same(linear_op(x, w), linear_reference(x, w))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_reference_matches_float64(type, rows):
    w = matrix(type, 7, 512)
    mx.random.seed(rows)
    x = mx.random.normal((rows, 512))
    want = np.array(x, dtype=np.float64) @ exact(w).T
    assert_close(linear_reference(x, w), want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("type", TYPES)
def test_rows_of_a_block_equal_rows_alone(type):
    w = matrix(type, 33, 768)
    mx.random.seed(1)
    assert_rows_alone(lambda x: linear_reference(x, w), mx.random.normal((8, 768)))


def test_a_tiled_matrix_gives_the_product_of_the_whole(monkeypatch):
    w, x = matrix("Q2_K", 11, 256), mx.random.normal((9, 256))
    whole = linear_reference(x, w)
    monkeypatch.setattr(MODULE, "WIDENED", 4 * 256)
    assert_close(linear_reference(x, w), whole, atol=1e-5)


def test_the_op_is_the_reference_without_a_kernel():
    w, x = matrix("Q8_0", 4, 64), mx.random.normal((1, 64))
    assert_same(linear_op(x, w), linear_reference(x, w))
