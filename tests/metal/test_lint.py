"""What MLX generates for every kernel: its parameters are ours, its address spaces hold."""

import mlx.core as mx
import pytest

from ds4mlx.msl.call import ATTRIBUTES, TYPES

from .cases import all_cases
from .lint import Parameter, generated, lint, signature, threadgroup_bytes
from .test_faults import CALL, SOURCE, Planted

CASES = all_cases()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_address_spaces_of_every_kernel_hold(name, rows):
    op, arrays = CASES[name].launched(rows)
    sources = generated(op, *arrays)
    assert sources
    assert [fault for source in sources for fault in lint(source)] == []


def test_the_executor_binds_the_parameters_that_mlx_generates():
    call = f"// {' '.join(ATTRIBUTES)} many_shape"
    kernel = Planted("", call, ["few", "many", "one"], ["out", "half_out"])
    few, many, one = mx.zeros((7,)), mx.zeros((2, 4), mx.bfloat16), mx.array(1, mx.uint32)

    def op(*inputs):
        return kernel(
            *inputs,
            template={"T": mx.float16, "K": 3, "B": True},
            grid=(32, 1, 1),
            group=(32, 1, 1),
            shapes=[(32,), (32,)],
            dtypes=[mx.float32, mx.float16],
        )

    (source,) = generated(op, few, many, one)
    assert "template <typename T, int K, bool B>" in source
    mlx_names = {"half": "float16_t", "bfloat": "bfloat16_t"}
    ours = {t: mlx_names.get(TYPES[t], TYPES[t]) for t in TYPES}
    found = signature(source)
    assert {n: found.pop(n).type for n in ATTRIBUTES} == ATTRIBUTES
    assert found == {
        "few": Parameter("constant", "float", "*"),
        "many": Parameter("device", ours[mx.bfloat16], "*"),
        "many_shape": Parameter("constant", "int", "*"),
        "one": Parameter("constant", ours[mx.uint32], "&"),
        "out": Parameter("device", "float", "*"),
        "half_out": Parameter("device", ours[mx.float16], "*"),
    }


def planted(text: str, call: str = CALL, K: int = 512) -> str:
    def op(x):
        return Planted(text, call).launch(x)

    return generated(op, mx.zeros((3, K)))[0]


def test_a_good_kernel_raises_no_alarm():
    assert lint(planted(SOURCE)) == []


MISTAKES = {
    "pointer without a space": ("const device float4* row", "const float4* row"),
    "parameter without a space": ("device float* out,", "float* out,"),
    "threadgroup pointer as device": ("threadgroup float* staged,", "device float* staged,"),
    "device pointer as constant": ("const device float* x,", "constant float* x,"),
    "cast to another space": ("(const device float4*)", "(const threadgroup float4*)"),
    "write to a constant table": ("float sum = 0;", "weight[0] = 1; float sum = 0;"),
    "double": ("float sum", "double sum"),
    "std::": ("dot(", "std::dot("),
    "undeclared name": ("simd_sum(", "simd_total("),
    "bfloat without a cast": ("float sum = 0;", "bfloat b = 1.0f; float sum = b;"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_seen(mistake):
    old, new = MISTAKES[mistake]
    assert old in SOURCE
    assert lint(planted(SOURCE.replace(old, new, 1)))


def test_an_input_of_few_elements_bound_to_device_is_seen():
    assert lint(planted("METAL_FUNC void f(const device float* x) {}", "f(x);", K=2))


def test_threadgroup_memory_is_counted_with_the_arguments_of_the_template():
    call = "threadgroup float4 a[K * 128];\nthreadgroup uint b[(K + 1) / 2];"
    kernel = Planted("", call, ["few", "many", "one"], ["out", "half_out"])

    def source(K):
        def op(*inputs):
            return kernel(
                *inputs,
                template={"K": K},
                grid=(32, 1, 1),
                group=(32, 1, 1),
                shapes=[(32,), (32,)],
                dtypes=[mx.float32, mx.float16],
            )

        return generated(op, mx.zeros((7,)), mx.zeros((2, 4)), mx.array(1, mx.uint32))[0]

    assert threadgroup_bytes(source(3)) == 16 * 3 * 128 + 4 * 2
    assert "32800 bytes of threadgroup memory, of 32768" in lint(source(16))[-1]
