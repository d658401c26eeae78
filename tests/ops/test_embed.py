import mlx.core as mx
import pytest

from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.embed import embed_reference
from tests.close import assert_rows_alone, assert_same
from tests.ops.matrices import matrix


@pytest.mark.parametrize("type", ["F16", "BF16", "F32", "Q8_0"])
def test_rows_are_those_of_the_table(type):
    w = matrix(type, 20, 64)
    ids = mx.array([19, 0, 7, 7], mx.int32)
    assert_same(embed_reference(ids, w), dequantize(w)[ids])


def test_rows_of_a_block_equal_rows_alone():
    w = matrix("F16", 20, 64)
    assert_rows_alone(lambda ids: embed_reference(ids, w), mx.arange(8))
