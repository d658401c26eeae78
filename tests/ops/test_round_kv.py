import mlx.core as mx

from ds4mlx.ops.round_kv import round_kv_reference
from tests.close import assert_rows_alone, assert_same
from tests.golden_data import op_vectors


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
