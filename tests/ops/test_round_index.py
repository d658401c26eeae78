import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.round_index import fp4, round_index, round_index_reference
from ds4mlx.ops.round_kv import power_of_two_scale
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.golden_data import op_vectors
from tests.metal.bench import executed
from tests.metal.cases import Case


def make(*shape):
    # Small integers: every sum is exact, so that no order of summation moves a value over a step.
    mx.random.seed(16)
    return round_index, [mx.round(9 * mx.random.normal((8, *shape)))]


CASES = {
    "one block": Case(lambda: make(32), "check"),
    "two channels a lane": Case(lambda: make(64), "check"),
    "flash": Case(lambda: make(64, 128), "guard"),
    "wide": Case(lambda: make(256), "guard"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30])
def test_kernel_rounds_very_small_and_large_rows_as_the_reference(size):
    x = size * mx.round(9 * mx.random.normal((2, 128)))
    with executed("check"):
        assert_close(round_index(x), np.array(round_index_reference(x)), atol=0)


def test_fp4_equals_golden_vectors_exactly():
    x, y = op_vectors()["fp4.x"], op_vectors()["fp4.y"]
    blocks = x.reshape(6, -1, 32)
    scale = power_of_two_scale(blocks, floor=6 * 2.0**-126, largest=6.0)
    assert_same((fp4(blocks / scale) * scale).reshape(x.shape) + 0.0, y + 0.0)


def test_ties_go_to_the_even_code():
    x = mx.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -2.5])
    want = [0, 1, 1, 2, 2, 4, 4, -1, -2]
    assert np.array(fp4(x)).astype(int).tolist() == want


def test_reference_matches_golden_vectors():
    v = op_vectors()
    assert_close(mx.hadamard_transform(v["hadamard.x"]), v["hadamard.y"], atol=1e-6)
    assert_close(round_index_reference(v["hadamard.x"]), v["hadamard.y_sim"], atol=1e-6)


def test_rows_of_a_block_equal_rows_alone():
    assert_rows_alone(round_index_reference, mx.random.normal((8, 3, 128)))
