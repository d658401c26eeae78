"""What kernels may use of Metal gives what Metal says, in the shim of the CPU and of CUDA."""

import re

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.errors import Ds4Error
from ds4mlx.msl.rewrite import CPU, CUDA, rewrite
from ds4mlx.ops import metal

from .bench import executed
from .lint import generated
from .test_faults import Planted

FEATURES = {  # expression in `i` (the lane), `f` = i / 8 - 1.5 as float -> its value
    "simd_sum(f)": lambda i, f: f.sum(),
    "simd_max(f) + simd_min(i)": lambda i, f: f.max(),
    "simd_product(i % 16 == 0 ? 3 : 1)": lambda i, f: 9,
    "simd_or(1u << i) == 0xffffffffu": lambda i, f: 1,
    "simd_shuffle(f, 31 - i)": lambda i, f: f[::-1],
    "simd_shuffle_xor(f, 5)": lambda i, f: f[i ^ 5],
    "simd_shuffle_down(f, 3)": lambda i, f: f[np.where(i < 29, i + 3, i)],
    "simd_shuffle_up(f, 3)": lambda i, f: f[np.where(i > 2, i - 3, i)],
    "simd_broadcast(f, 7) + simd_broadcast_first(f)": lambda i, f: f[7] + f[0],
    "simd_shuffle_xor(float4(f, 0, 1, i), 1).w": lambda i, f: i ^ 1,
    "simd_prefix_inclusive_sum(i)": lambda i, f: i.cumsum(),
    "simd_prefix_exclusive_sum(i)": lambda i, f: i.cumsum() - i,
    "simd_all(i < 32) + simd_any(i == 40)": lambda i, f: 1,
    "popcount(simd_vote::vote_t(simd_ballot(i % 3 == 0)))": lambda i, f: 11,
    "metal::fast::exp(f) - precise::exp(f)": lambda i, f: 0,
    "exp(f) + log2(4.0) + rsqrt(4.0f)": lambda i, f: np.exp(f) + 2.5,
    "max(f, 0.0f) + clamp(f, -1.0f, 1.0f) + abs(f)": lambda i, f: (
        f.clip(0) + f.clip(-1, 1) + abs(f)
    ),
    "rint(f) + round(f) + floor(f)": lambda i, f: (
        np.rint(f) + np.trunc(f + np.copysign(0.5, f)) + np.floor(f)
    ),
    "fma(f, 2.0f, 1.0f) + select(1.0f, 2.0f, f > 0)": lambda i, f: (
        2 * f + 1 + np.where(f > 0, 2, 1)
    ),
    "max(NAN, f) + min(f, INFINITY)": lambda i, f: 2 * f,
    "clz(i + 1) + ctz(i + 1)": lambda i, f: (
        32
        - np.array([int(n).bit_length() for n in i + 1])
        + np.array([int(n & -n).bit_length() - 1 for n in i + 1])
    ),
    "float(half(f) * 0.1h)": lambda i, f: f.astype(np.float16) * np.float16(0.1),
    "float(bfloat(f + 1.0f / 512))": lambda i, f: np.array(
        mx.array(f + np.float32(1 / 512)).astype(mx.bfloat16).astype(mx.float32)
    ),
    "as_type<float>(as_type<uint>(f) ^ 0x80000000u)": lambda i, f: -f,
    "as_type<half2>(0x3c004000u).y + as_type<uchar4>(0x01020304u).z": lambda i, f: 3,
    "dot(float4(half4(f)), float4(1, 2, 3, 4))": lambda i, f: 10 * f,
    "dot((float4(as_type<uchar4>(0x04030201u)) + f).wzyx, float4(1, 0, 0, 0))": lambda i, f: 4 + f,
    "dot(float4(uint4(i, 2, 3, 4)).xy + float2(f), float2(0, 1))": lambda i, f: 2 + f,
    "float(char(200))": lambda i, f: -56,
    "LOAD4(values, i & 1).y": lambda i, f: np.where(i & 1, 6, 2),
    "second(few) + first(values)": lambda i, f: 5 + 1,
}
SOURCE = """\
#define LOAD4(p, n) (((const device float4*)(p))[n])
constant constexpr int steps[] = {1, 2};  // threadgroup float inside[3];
template <typename P> METAL_FUNC float second(P p) { return p[steps[0]]; }
METAL_FUNC float first(const device float* p [[maybe_unused]]) { return *p; }
"""
CALL = "uint i = thread_index_in_simdgroup; float f = i / 8.0 - 1.5;\n" + "\n".join(
    f"out[{n} * 32 + i] = {expression};" for n, expression in enumerate(FEATURES)
)


def run() -> np.ndarray:
    kernel = Planted(SOURCE, CALL, inputs=["values", "few"])
    (out,) = kernel(
        mx.arange(1.0, 9.0),
        mx.array([4.0, 5.0]),
        template={},
        grid=(32, 1, 1),
        group=(32, 1, 1),
        shapes=[(len(FEATURES), 32)],
        dtypes=[mx.float32],
    )
    return np.array(out)


def wanted() -> np.ndarray:
    i, f = np.arange(32), (np.arange(32) / 8 - 1.5).astype(np.float32)
    return np.stack([np.broadcast_to(value(i, f), 32) for value in FEATURES.values()])


@pytest.mark.parametrize("mode", ["guard", "check"])
def test_every_feature_means_what_metal_means(mode):
    with executed(mode):
        got = run()
    wrong = ~np.isclose(got, wanted(), rtol=1e-6, atol=1e-6)
    assert {name: got[n] for n, name in enumerate(FEATURES) if wrong[n].any()} == {}


def test_every_type_of_array_arrives_and_leaves():
    types = (mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32)
    types += (mx.int64, mx.float16, mx.bfloat16, mx.float32)
    for t in types:
        x = mx.arange(32).astype(t)
        kernel = Planted("", "out[thread_index_in_threadgroup] = x[thread_index_in_threadgroup];")
        with executed("check"):
            (out,) = kernel(
                x, template={}, grid=(32, 1, 1), group=(32, 1, 1), shapes=[(32,)], dtypes=[t]
            )
        assert out.dtype == t and mx.array_equal(out, x)


@pytest.mark.parametrize("dialect", [CPU, CUDA])
def test_rewriting_keeps_every_line(dialect):
    text = (
        "a /* x\n y */ [[b\n]] // device\nconstant\nconst int c[] = {1};\n#define D \\\n  device\n"
    )
    assert rewrite(text, dialect).count("\n") == text.count("\n")


@pytest.mark.parametrize("text", ["threadgroup float x = 1;", "threadgroup float x, y;"])
def test_a_threadgroup_variable_is_declared_alone_without_a_first_value(text):
    with pytest.raises(Ds4Error, match="one variable, without a first value"):
        rewrite(text, CPU, body=True)


@pytest.mark.parametrize("dialect, mark", [(CPU, "threadgroup_variable"), (CUDA, "__shared__")])
def test_each_of_two_threadgroup_variables_in_a_row_is_shared(dialect, mark):
    text = rewrite("threadgroup float a[4];\nthreadgroup int b;\na[0] = b;", dialect, body=True)
    assert text.count(mark) == 2 and "a[0] = b;" in text


def test_a_threadgroup_variable_in_a_metal_file_is_refused():
    with pytest.raises(Ds4Error, match="only the kernel's call may declare it"):
        rewrite("METAL_FUNC void f() { threadgroup float x[2]; }", CUDA)


def test_includes_are_replaced_and_lines_marked(tmp_path, monkeypatch):
    (tmp_path / "a.metal").write_text('// a\n#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text("int b;\n")
    monkeypatch.setattr(metal, "_SOURCES", tmp_path)
    text = metal.read_source("a.metal")
    assert text == '#line 1 "a.metal"\n// a\n#line 1 "b.h"\nint b;\n\n#line 3 "a.metal"\nint a;\n'


@pytest.mark.parametrize(
    "grid, group", [((48, 1, 1), (32, 1, 1)), ((16, 1, 1), (16, 1, 1)), ((2048,) * 3, (2048, 1, 1))]
)
def test_a_grid_that_is_not_whole_threadgroups_of_simdgroups_is_refused(grid, group):
    kernel = Planted("", "")
    with executed(), pytest.raises(Ds4Error, match=r"kernel planted \(x .*\[9\].* on cpu: grid"):
        kernel(mx.zeros(9), template={}, grid=grid, group=group, shapes=[], dtypes=[])


def test_a_launch_that_fails_is_named(monkeypatch):
    def launch(*_):
        raise RuntimeError("out of order")

    monkeypatch.setattr(metal, "launch", launch)
    with pytest.raises(Ds4Error, match=r"kernel planted \(x mlx.core.float32 \[3, 512\]; .* order"):
        Planted("").launch(mx.ones((3, 512)))


def test_an_eager_launch_waits_for_its_results(monkeypatch):
    monkeypatch.setattr(metal, "launch", lambda *_: ["result"])
    waited = []
    with metal.eager(waited.append):
        Planted("").launch(mx.ones((3, 512)))
    assert waited == [["result"]]


@pytest.mark.parametrize(
    "text, call", [("// another", "x[0];"), ("", "x[1];")], ids=["another file", "another call"]
)
def test_a_kernel_with_another_text_has_another_name(text, call):
    def name(kernel):
        (source,) = generated(kernel.launch, mx.ones((3, 512)))
        return re.search(r"void (custom_kernel_planted_\w+)\(", source)[1]

    assert name(Planted(text, call)) != name(Planted("", "x[0];"))


def test_reference_is_the_only_switch():
    assert not metal.enabled()
    with executed():
        assert metal.enabled()
        with metal.reference():
            assert not metal.enabled()
        assert metal.enabled()
