"""The bench catches a planted bug of every kind, and names the line; it accepts good kernels."""

import mlx.core as mx
import pytest

from ds4mlx.ops import metal

from .bench import CompileError, KernelFault, executed

SOURCE = """\
constant float weight[4] = {1, 2, 3, 4};

METAL_FUNC void planted(
    const device float* x, device float* out, threadgroup float* staged,
    uint K, uint tid, uint lane, uint sg, uint group) {
  const device float4* row = (const device float4*)(x + group * K);
  for (uint i = tid; i < K / 4; i += 64) {
    staged[i] = dot(row[i], float4(1, 2, 3, 4)) * weight[i & 3];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  for (uint i = lane; i < K / 4; i += 32) {
    sum += staged[i] + staged[i ^ 1];
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    out[2 * group + sg] = sum + sg;
  }
}
"""
CALL = """threadgroup float staged[128];
planted(x, out, staged, K, thread_index_in_threadgroup, thread_index_in_simdgroup,
        simdgroup_index_in_threadgroup, threadgroup_position_in_grid.x);"""


class Planted(metal.Kernel):
    """A kernel from a text instead of a file."""

    header = property(lambda self: self.text)

    def __init__(self, text: str, call: str = CALL, inputs=("x",), outputs=("out",)):
        super().__init__("planted", inputs=list(inputs), outputs=list(outputs), call=call)
        self.text = f'#line 1 "planted.metal"\n{text}'

    def launch(self, x: mx.array) -> mx.array:
        (out,) = self(
            x,
            template={"K": x.shape[1]},
            grid=(3 * 64, 1, 1),
            group=(64, 1, 1),
            shapes=[(3, 2)],
            dtypes=[mx.float32],
        )
        return out

    def run(self, mode: str, x: mx.array | None = None) -> mx.array:
        with executed(mode):
            return self.launch(mx.ones((3, 512)) if x is None else x)


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
BUGS = {  # name: (text, its replacement, what is found, at the line with this text)
    "missing barrier": (BARRIER, "", "RACE: read of staged and a write", "sum += staged"),
    "barrier without memory": ("mem_threadgroup)", "mem_none)", "RACE: read", "sum += staged"),
    "barrier of a simdgroup": ("threadgroup_barrier", "simdgroup_barrier", "RACE: read", "sum +="),
    "wrong lane": ("lane == 0", "lane < 2", "RACE: write of out and a write", "out[2"),
    "wrong simdgroup": ("2 * group + sg]", "2 * group]", "RACE: write of out", "out[2"),
    "wrong threadgroup": ("2 * group + sg]", "sg]", "by another threadgroup", "out[sg]"),
    "read past the end": ("(x + group", "(x + 4 + group", "OUT OF BOUNDS: read.* x", "staged[i] ="),
    "read before the start": ("(x + group", "(x - 4 + group", "OUT OF BOUNDS: read", "staged[i] ="),
    "write past the end": ("out[2", "out[2 + 2", "OUT OF BOUNDS: write.* out", "out[2 + 2"),
    "threadgroup memory past the end": (
        "staged[i ^ 1]",
        "staged[i + 1]",
        "OUT OF.* staged",
        "+ 1]",
    ),
    "table past the end": ("i & 3", "i & 7", "INDEX outside the array", "staged[i] ="),
    "uninitialised": ("i = tid", "i = tid + 1", "UNINITIALISED: read of staged", "sum +="),
    "uninitialised output": ("= sum + sg", "+= sum", "UNINITIALISED: read of out", "+= sum"),
    "output not written": ("lane == 0", "lane == 0 && sg == 0", "NEVER WRITTEN: out", None),
    "divergent simd operation": (
        "sum = simd_sum",
        "if (lane < 16) sum = simd_sum",
        "DIVERGENT",
        "simd_s",
    ),
    "divergent barrier": (BARRIER, f"if (lane) {BARRIER}", "DIVERGENT", BARRIER),
    "barrier after a return": (BARRIER, f"if (tid > 40) return; {BARRIER}", "DIVERGENT", BARRIER),
    "barrier in one simdgroup": (BARRIER, f"if (sg == 0) {BARRIER}", "DIVERGENT", BARRIER),
    "absent lane": ("simd_sum(sum)", "simd_shuffle(sum, lane + 1)", "SHUFFLE", "simd_shuffle"),
    "misaligned": ("(x + group", "(x + 1 + group", "MISALIGNED", "staged[i] ="),
    "shift too far": ("sum + sg", "sum + (1 << (sg + 31))", "SHIFT too far", "out[2"),
    "division by zero": ("sum + sg", "sum + 1 / int(sg)", "DIVISION by zero", "out[2"),
    "write to an input": (
        "float sum = 0;",
        "((device float*)x)[0] = 1; float sum = 0;",
        "WRITE",
        "= 1;",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_check_catches_a_planted(bug):
    old, new, kind, where = BUGS[bug]
    assert old in SOURCE
    text = SOURCE.replace(old, new, 1)
    if where:
        number = 1 + text[: text.index(where)].count("\n")
        kind += rf".*planted\.metal:{number}\b"
    with pytest.raises(KernelFault, match=kind):
        Planted(text).run("check")


@pytest.mark.parametrize("mode", ["guard", "check"])
def test_a_good_kernel_raises_no_alarm(mode):
    Planted(SOURCE).run(mode)


def test_guard_catches_a_read_past_the_end():
    old, new, *_ = BUGS["read past the end"]
    with pytest.raises(
        KernelFault, match=r"OUT OF BOUNDS: x of 6144 bytes at byte 61\d\d at planted"
    ):
        Planted(SOURCE.replace(old, new)).run("guard")


def test_guard_catches_a_write_into_the_padding_of_an_output():
    old, new, *_ = BUGS["write past the end"]
    with pytest.raises(KernelFault, match="OUT OF BOUNDS: out written at byte 24 of 24"):
        Planted(SOURCE.replace(old, new)).run("guard")


def test_too_much_threadgroup_memory_is_refused():
    with pytest.raises(KernelFault, match="THREADGROUP MEMORY: 32772 bytes with staged"):
        Planted(SOURCE, CALL.replace("128", "8193")).run("guard")


@pytest.mark.parametrize("wrong", ["half4 h = float4(1.0f);", "bfloat b = 1.0f;"])
def test_a_missing_conversion_does_not_compile(wrong):
    with pytest.raises(CompileError, match=r"planted\.metal:11:"):
        Planted(SOURCE.replace("float sum = 0;", f"{wrong} float sum = 0;")).run("guard")
