import re
import sys

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.convert.blocks import iq2xxs_grid
from ds4mlx.ops import linear as linear_op
from ds4mlx.ops import metal
from ds4mlx.ops.dequantize import dequantize_reference
from ds4mlx.ops.linear import linear_reference
from ds4mlx.packed import Packed
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.metal.lint import generated, lint
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


CASES = {
    "q8_0-odd": Case(lambda: make("Q8_0", 13, 1056), "check", atol=2e-4),
    "f16-odd": Case(lambda: make("F16", 70, 32), "check", atol=2e-5),
    "q8_0-flash": Case(lambda: make("Q8_0", 512, 4096), "guard", atol=3e-3),
    "q4_k-flash": Case(lambda: make("Q4_K", 512, 4096), "guard", atol=2e-2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


@pytest.mark.parametrize("type", ["Q4_0", "Q2_K"])
def test_kernel_matches_float64_where_a_lane_reads_several_vectors(type):
    w, x = matrix(type, 9, 768), mx.random.normal((3, 768))
    want = np.array(x, dtype=np.float64) @ exact(w).T
    with executed("check"):
        assert_close(linear_op(x, w), want, atol=1e-6 * np.abs(want).max())


class Reader(metal.Kernel):
    """Writes what dequantize.h reads."""

    header = property(
        lambda self: (
            metal.read_source("dequantize.h")
            + """
template <typename W>
METAL_FUNC void reader(W w, device float4* out, uint i) {
  float4 v[W::QUADS];
  read(w, 4 * W::QUADS * i, v);
  for (int j = 0; j < W::QUADS; j++) {
    out[W::QUADS * i + j] = v[j];
  }
}
"""
        )
    )

    def __init__(self, w):
        self.struct, self.planes = MODULE._STRUCTS[w.type if isinstance(w, Packed) else w.dtype]
        planes = ", ".join(self.planes)
        call = f"""{self.struct} w = {{{planes}}};
if (thread_position_in_grid.x < ELEMENTS / (4 * w.QUADS)) {{
  reader(w, (device float4*)out, thread_position_in_grid.x);
}}"""
        super().__init__("reader", inputs=list(self.planes), outputs=["out"], call=call)

    def values(self, w):
        elements = w.shape[0] * w.shape[1]
        (out,) = self(
            *([w.planes[name] for name in self.planes] if isinstance(w, Packed) else [w]),
            template={"ELEMENTS": elements, **({} if isinstance(w, Packed) else {"T": w.dtype})},
            grid=(metal.round_up(elements // 4, 64), 1, 1),
            group=(64, 1, 1),
            shapes=[w.shape],
            dtypes=[mx.float32],
        )
        return out


@pytest.mark.parametrize("type", TYPES)
def test_the_kernel_reads_exactly_the_values_of_the_reference(type):
    w = stored(type, 33, 256)
    with executed("check"):
        got = Reader(w).values(w)
    assert_close(got, dequantize_reference(w), atol=0)  # 0 and -0 are one value


def test_the_grid_of_iq2_xxs_in_the_kernel_is_the_one_of_the_converter():
    table = re.findall(r"\b0x(\w{16})\b", metal.read_source("dequantize.h"))
    bytes_ = np.array([np.frombuffer(bytes.fromhex(word)[::-1], np.uint8) for word in table])
    assert np.array_equal(bytes_, iq2xxs_grid())


@pytest.mark.parametrize("type", TYPES)
def test_the_address_spaces_of_every_type_hold(type):
    w = stored(type, 8, 256)
    (source,) = generated(lambda x: linear_op(x, w), mx.zeros((3, 256)))
    assert lint(source) == []


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
    monkeypatch.setattr(MODULE, "_TILE", 4 * 256)
    assert_close(linear_reference(x, w), whole, atol=1e-5)


def test_the_op_is_the_reference_without_a_kernel():
    w, x = matrix("Q8_0", 4, 64), mx.random.normal((1, 64))
    assert_same(linear_op(x, w), linear_reference(x, w))
