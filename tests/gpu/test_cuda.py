"""Every kernel on this machine's GPU, through MLX, against its reference and row by row.

On a machine with an NVIDIA GPU: pip install 'ds4mlx[cuda]' pytest; pytest tests/gpu
"""

import mlx.core as mx
import pytest

from ds4mlx.errors import Ds4Error
from tests.metal.cases import all_cases, on_gpu
from tests.metal.test_faults import SOURCE, Planted

pytestmark = pytest.mark.skipif(
    not (mx.cuda.is_available() or mx.metal.is_available()),
    reason="MLX sees no GPU: kernels were run on the CPU executor only",
)
CASES = all_cases()


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(name):
    CASES[name].verify(on_gpu)


def test_a_kernel_with_barriers_and_simd_operations_comes_out_as_on_the_cpu():
    x = mx.random.normal((3, 512))
    with on_gpu():
        got = Planted(SOURCE).launch(x)
    want = Planted(SOURCE).run("guard", x)
    assert mx.allclose(got, want, rtol=1e-5, atol=1e-5, stream=mx.cpu)


def test_a_kernel_that_does_not_compile_is_named():
    with on_gpu(), pytest.raises(Ds4Error, match=r"kernel planted \(x .*3, 512.* on (cuda|metal)"):
        Planted(SOURCE.replace("simd_sum", "no_such_function")).launch(mx.ones((3, 512)))
