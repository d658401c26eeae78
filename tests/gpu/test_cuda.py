"""Every kernel on this machine's GPU, through MLX, against its reference and row by row.

On a machine with an NVIDIA GPU: pip install 'ds4mlx[cuda]' pytest; pytest tests/gpu
"""

from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx.errors import Ds4Error
from ds4mlx.ops import metal
from ds4mlx.ops.attention_shares import attention_shares
from ds4mlx.ops.experts import experts_reference
from ds4mlx.ops.experts_grouped import experts_grouped
from tests.close import assert_close
from tests.metal.cases import all_cases, on_gpu
from tests.metal.test_faults import SOURCE, Planted
from tests.ops.matrices import matrix
from tests.ops.test_attention_shares import ARGUMENTS, make
from tests.ops.test_experts_grouped import LIMIT, routing
from tests.test_embedded import PROMPTS, continued

pytestmark = pytest.mark.skipif(
    not (mx.cuda.is_available() or mx.metal.is_available()),
    reason="MLX sees no GPU: kernels were run on the CPU executor only",
)
CASES = all_cases()


@pytest.fixture
def gpu():
    before = mx.default_device()
    mx.set_default_device(mx.gpu)
    yield
    mx.set_default_device(before)


@pytest.mark.parametrize("way", [nullcontext, metal.reference], ids=["kernels", "references"])
def test_the_embedded_models_greedy_texts_are_the_recorded_ones(way, gpu):
    with ds4mlx.load() as model, way():
        found = [continued(model._target, case["prompt"], len(case["on"])) for case in PROMPTS]
    assert found == [case["on"] for case in PROMPTS]


@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(name):
    CASES[name].verify(on_gpu)


@pytest.mark.parametrize("sizes", ARGUMENTS.values(), ids=ARGUMENTS)
def test_the_shares_of_prefills_attention_match_their_reference(sizes):
    arguments = make(*sizes)
    with metal.reference():
        want = [a for a in attention_shares(*arguments) if a is not None]
    with on_gpu():
        got = [a for a in attention_shares(*arguments) if a is not None]
    for g, w in zip(got, want, strict=True):
        assert_close(g, np.array(w), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("types", [("IQ2_XXS", "Q2_K"), ("MXFP4", "MXFP4"), ("Q8_0", "Q8_0")])
def test_prefills_experts_match_their_reference(types):
    """Products are of float16 there, summed in float32."""
    mx.random.seed(4)
    up, down = types
    w = [matrix(up, 5, 256, 512), matrix(up, 5, 256, 512, seed=1), matrix(down, 5, 512, 256)]
    n = 300
    ids, x = routing("spread", n), mx.random.normal((n, 512)) / 64
    weights = mx.random.uniform(shape=(n, 2))
    want = np.array(experts_reference(x, ids, weights, *w, LIMIT))
    with on_gpu():
        got = experts_grouped(x, ids, weights, *w, LIMIT)
    assert_close(got, want, atol=4e-3 * np.abs(want).max())


def test_a_kernel_with_barriers_and_simd_operations_comes_out_as_on_the_cpu():
    x = mx.random.normal((3, 512))
    with on_gpu():
        got = Planted(SOURCE).launch(x)
    want = Planted(SOURCE).run("guard", x)
    assert mx.allclose(got, want, rtol=1e-5, atol=1e-5, stream=mx.cpu)


def test_a_kernel_that_does_not_compile_is_named():
    with on_gpu(), pytest.raises(Ds4Error, match=r"kernel planted \(x .*3, 512.* on (cuda|metal)"):
        Planted(SOURCE.replace("simd_sum", "no_such_function")).launch(mx.ones((3, 512)))
