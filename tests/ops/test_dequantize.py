import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.dequantize import (
    NATIVE,
    dequantize,
    dequantize_listed,
    dequantize_reference,
    native,
)
from ds4mlx.weights import as_matrix
from tests.close import assert_close, assert_same
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.metal.lint import generated, lint
from tests.ops.matrices import PACKED, TYPES, matrix, raw_bytes, values


@pytest.mark.parametrize("type", TYPES)
def test_values_equal_ggml_for_rows_of_several_blocks(type):
    raw = raw_bytes(type, 3, 4 * 256)
    w = as_matrix(type, raw, (3, 1024))
    # + 0: a negative zero is a zero
    assert_same(dequantize_reference(w) + 0, mx.array(values(type, raw)) + 0)


@pytest.mark.parametrize("type", PACKED)
def test_a_stack_of_experts_decodes_like_its_parts(type):
    w = matrix(type, 3, 4, 256)
    stack = dequantize_reference(w)
    for e in range(3):
        assert_same(stack[e], dequantize_reference(w[e]))
    assert_same(dequantize_reference(w[mx.array([2, 0])]), stack[mx.array([2, 0])])


@pytest.mark.parametrize("type", PACKED)
def test_packed_bytes_are_those_of_the_file_within_one_percent(type):
    """MF-03."""
    raw = raw_bytes(type, 4, 1024)
    assert as_matrix(type, raw, (4, 1024)).nbytes <= 1.01 * raw.nbytes


def make(type, *shape):
    w = matrix(type, *shape)
    return lambda rows: dequantize(w, mx.float16 if shape[-1] == 512 else mx.float32)[rows], [
        mx.arange(8)
    ]


CASES = {
    f"{type}-{'flash' if shape[-1] == 4096 else 'half' if shape[-1] == 512 else 'odd'}": Case(
        lambda type=type, shape=shape: make(type, *shape), "guard" if shape[-1] == 4096 else "check"
    )
    for type in PACKED
    for shape in ((9, 256), (8, 512), *([(256, 4096)] if type in ("Q8_0", "IQ2_XXS") else []))
} | {
    f"{type}-listed": Case(
        lambda type=type: (
            lambda ids: dequantize_listed(matrix(type, 3, 40, 1024), ids, mx.float16),
            [mx.array([2, 0, 2, 1, 0, 0, 1, 2], mx.uint32)],
        ),
        "guard",
    )
    for type in ("Q8_0", "IQ2_XXS", "Q2_K")
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_gives_exactly_the_values_of_the_reference(case):
    case.verify()


@pytest.mark.parametrize("type", PACKED)
def test_the_address_spaces_of_every_type_hold(type):
    w, stack, ids = matrix(type, 8, 256), matrix(type, 3, 8, 256), mx.zeros(9, mx.uint32)
    sources = generated(lambda: dequantize(w)) + generated(lambda: dequantize_listed(stack, ids))
    assert len(sources) == 2 and [fault for s in sources for fault in lint(s)] == []


@pytest.mark.parametrize("shape", [(4, 9, 256), (3, 40, 1024)])
@pytest.mark.parametrize("type", TYPES)
def test_listed_matrices_have_exactly_the_values_of_the_reference(type, shape):
    w, ids = matrix(type, *shape), mx.array([2, 0, 2, 1, 0, 0, 1, 2], mx.uint32)
    want = dequantize_reference(w[ids])
    with executed("check"):
        # + 0: a negative zero is a zero
        assert_same(dequantize_listed(w, ids) + 0, want + 0)
        assert_same(dequantize_listed(w, ids, mx.float16) + 0, want.astype(mx.float16) + 0)


def test_of_an_id_beyond_the_matrices_nothing_is_written():
    w, ids = matrix("IQ2_XXS", 3, 8, 256), mx.array([1, 3, 0, 3, 3, 3, 3, 3], mx.uint32)
    with executed("check"):
        out = np.array(dequantize_listed(w, ids))
    assert np.isnan(out).all(axis=(1, 2)).tolist() == [False, True, False] + 5 * [True]


@pytest.mark.parametrize("type", NATIVE)
def test_the_form_for_mlx_has_the_same_values(type):
    w = matrix(type, 5, 256)
    codes, form = native(w)
    x = mx.eye(256)
    product = mx.quantized_matmul(x, codes, **form, transpose=True)
    assert_close(product.T, dequantize_reference(w), atol=0, rtol=1e-6)


def test_bf16_keeps_values_beyond_the_range_of_float16():
    x = np.array([[1e5, -3e38, 1e-7, 1.0]], np.float32)
    raw = (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    got = np.array(dequantize_reference(as_matrix("BF16", raw, (1, 4))))
    assert np.isfinite(got).all() and np.allclose(got, x, rtol=2**-8, atol=0)
