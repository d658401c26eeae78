import mlx.core as mx
import pytest

from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.embed import embed, embed_reference
from tests.close import assert_rows_alone, assert_same
from tests.metal.cases import Case
from tests.ops.matrices import matrix


def make(type, V, D):
    w = matrix(type, V, D)
    if type in ("F16", "BF16"):  # not widened, as on a GPU
        w = w.astype({"F16": mx.float16, "BF16": mx.bfloat16}[type])
    ids = mx.array([V - 1, 0, 7, 7, 1, 2, V - 2, 3], mx.int32)
    return lambda ids: embed(ids, w), [ids]


CASES = {
    "f32": Case(lambda: make("F32", 70, 32), "check"),
    "bf16": Case(lambda: make("BF16", 70, 96), "check"),
    "q8_0": Case(lambda: make("Q8_0", 70, 160), "check"),
    "flash": Case(lambda: make("F16", 1000, 4096), "guard"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


@pytest.mark.parametrize("type", ["F16", "BF16", "F32", "Q8_0"])
def test_rows_are_those_of_the_table(type):
    w = matrix(type, 20, 64)
    ids = mx.array([19, 0, 7, 7], mx.int32)
    assert_same(embed_reference(ids, w), dequantize(w)[ids])


def test_rows_of_a_block_equal_rows_alone():
    w = matrix("F16", 20, 64)
    assert_rows_alone(lambda ids: embed_reference(ids, w), mx.arange(8))
