import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.rope import rope, rope_reference, rotation
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.golden_data import op_vectors
from tests.metal.cases import Case


def make(R, inverse, *shape):
    mx.random.seed(16)
    turn = rotation(mx.arange(1000, 1008), 0.5 ** mx.arange(R // 2))
    return lambda x, turn: rope(x, turn, inverse), [mx.random.normal((8, *shape)), turn]


CASES = {
    "odd": Case(lambda: make(6, False, 9), "check", atol=1e-6),
    "odd heads inverse": Case(lambda: make(6, True, 5, 39), "check", atol=1e-6),
    "flash": Case(lambda: make(64, False, 64, 512), "guard", atol=1e-6),
    "flash inverse": Case(lambda: make(64, True, 64, 512), "guard", atol=1e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


sets = pytest.mark.parametrize("name", ["rope.main", "rope.comp"])


@sets
def test_angles_are_those_of_the_published_code(name):
    v = op_vectors()
    turn = rotation(v[f"{name}.pos"], v[f"{name}.freq"])
    assert_close(mx.real(turn), v[f"{name}.cos"], atol=2e-7)
    assert_close(mx.imag(turn), v[f"{name}.sin"], atol=2e-7)


@sets
def test_reference_matches_golden_vectors(name):
    v = op_vectors()
    turn = v[f"{name}.cos64"] + 1j * v[f"{name}.sin64"]
    assert_close(rope_reference(v[f"{name}.x"], turn), v[f"{name}.y"], atol=1e-6)
    assert_close(rope_reference(v[f"{name}.x"], turn, inverse=True), v[f"{name}.y_inv"], atol=1e-6)


def test_leading_channels_pass():
    x = mx.random.normal((3, 2, 20))
    turn = rotation(mx.array([5, 6, 7]), mx.array([1.0, 0.1]))
    assert_same(rope_reference(x, turn)[..., :16], x[..., :16])
    assert np.abs(np.array(rope_reference(x, turn) - x)[..., 16:]).min() > 0


def test_rows_of_a_block_equal_rows_alone():
    turn = rotation(mx.arange(100, 108), mx.array([1.0, 0.3, 0.01]))
    assert_rows_alone(rope_reference, mx.random.normal((8, 5, 9)), turn)
