import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.round_kv import round_kv, round_kv_reference
from tests.close import assert_rows_alone, assert_same
from tests.golden_data import op_vectors
from tests.metal.bench import executed
from tests.metal.cases import Case


def make(Dh, rope_dims):
    mx.random.seed(17)
    return lambda x: round_kv(x, rope_dims), [mx.random.normal((8, Dh)) * 30]


CASES = {
    "odd": Case(lambda: make(64 + 17, 17), "check"),
    "flash": Case(lambda: make(512, 64), "guard"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_kernel_equals_reference_at_every_code_its_neighbours_and_their_middles():
    codes = np.array(mx.from_fp8(mx.arange(127).astype(mx.uint8), dtype=mx.float32))
    middles = (codes[1:] + codes[:-1]) / 2
    around = [np.nextafter(middles, np.float32(to)) for to in (-1, 1000)]
    values = np.concatenate([codes, middles, *around]).astype(np.float32)
    values = np.concatenate([values, -values])
    values = np.resize(values, (-(-values.size // 63), 63))
    # 448 as the largest of a block keeps the scale at 1.
    x = mx.array(np.pad(values, ((0, 0), (0, 2)), constant_values=448))
    with executed():
        assert_same(round_kv(x, 1), round_kv_reference(x, 1))


def test_reference_equals_golden_vectors_exactly():
    x, y = op_vectors()["fp8.x"], op_vectors()["fp8.y"]
    tail = mx.random.normal((8, 16))
    out = round_kv_reference(mx.concatenate([x, tail], axis=-1), 16)
    assert_same(out[:, :-16], y)
    assert_same(out[:, -16:], tail)


def test_rounding_twice_is_rounding_once():
    once = round_kv_reference(mx.random.normal((5, 192)) * 30, 64)
    assert_same(round_kv_reference(once, 64), once)


def test_rows_of_a_block_equal_rows_alone():
    assert_rows_alone(lambda x: round_kv_reference(x, 64), mx.random.normal((8, 512)))
