"""Values of a packed matrix, and the forms in which kernels and MLX's quantised matmuls read it."""

import math
from functools import cache

import mlx.core as mx
import numpy as np

from ..packed import Matrix, Packed
from . import metal

_REGISTERS = 1 << 16  # of a multiprocessor
_STEPS = 8  # octets that a thread widens of a listed matrix
NATIVE = ("Q8_0", "Q4_0", "Q4_K", "MXFP4")  # types that MLX's quantised matmuls can read


def dequantize(w: Matrix, dtype: mx.Dtype = mx.float32) -> mx.array:
    """w [..., M, K] of any type -> `dtype` [..., M, K], the values of spec section 3.

    They are exact in float32, else rounded once. The kernel takes packed matrices of 2048
    elements or more.
    """
    elements = math.prod(w.shape)
    if not (metal.enabled() and isinstance(w, Packed) and 2048 <= elements < 1 << 31):
        return dequantize_reference(w).astype(dtype)
    (out,) = _kernel(w.type)(
        *arrays(w),
        template={"ELEMENTS": elements},
        grid=(metal.round_up(elements // 8, 512), 1, 1),
        group=(512, 1, 1),
        shapes=[w.shape],
        dtypes=[dtype],
    )
    return out


def dequantize_listed(w: Matrix, ids: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
    """w [E, M, K], ids [B] uint32 -> `dequantize(w[ids])`, `dtype` [B, M, K].

    Of an id of E or more nothing is read or written. The kernel takes every type, and E M K of
    2048 elements or more, up to 2^32.
    """
    if not metal.enabled():
        return dequantize_reference(w[ids]).astype(dtype)
    E, M, K = w.shape
    (out,) = _kernel_listed(kind(w))(
        ids,
        *arrays(w),
        template={"E": E, "ELEMENTS": M * K},
        grid=(metal.round_up(-(-M * K // 8 // _STEPS), 512), ids.shape[0], 1),
        group=(512, 1, 1),
        shapes=[(ids.shape[0], M, K)],
        dtypes=[dtype],
    )
    return out


def dequantize_reference(w: Matrix) -> mx.array:
    if isinstance(w, mx.array):
        return w.astype(mx.float32)
    if w.type in NATIVE:
        codes, form = native(w)
        return mx.dequantize(codes, **form, dtype=mx.float32)
    return _DECODERS[w.type](w.planes).reshape(w.shape)


@cache
def _kernel(type: str) -> metal.Kernel:
    inputs, readers_ = readers({"w": type})
    return metal.Kernel(
        "dequantize",
        inputs=inputs,
        outputs=["out"],
        call=f"{readers_}dequantize<ELEMENTS>(w, out, thread_position_in_grid.x);",
    )


@cache
def _kernel_listed(kind_: str | mx.Dtype) -> metal.Kernel:
    inputs, readers_ = readers({"w": kind_})
    # A matrix that is left out costs no table.
    return metal.Kernel(
        "dequantize",
        inputs=["ids", *inputs],
        outputs=["out"],
        partial=True,
        call=f"""uint listed = threadgroup_position_in_grid.y;
uint matrix = ids[listed];
if (matrix >= E) {{
  return;
}}
{readers_}dequantize_listed<ELEMENTS>(w, matrix, out + listed * ELEMENTS,
    thread_position_in_grid.x, threads_per_grid.x);""",
    )


def native(w: Packed) -> tuple[mx.array, dict]:
    """Codes, and keywords for `mx.quantized_matmul`: exact, the scales widened to float32."""
    codes, scales = w.planes["codes"], w.planes["scales"]
    if w.type == "MXFP4":
        return codes, dict(scales=scales, group_size=32, bits=4, mode="mxfp4")
    if w.type == "Q4_K":
        scales, mins = _k_scales(w.planes)
        return codes, dict(scales=scales, biases=-mins, group_size=32, bits=4)
    bits, zero = (8, 128) if w.type == "Q8_0" else (4, 8)
    scales = scales.astype(mx.float32)
    return codes, dict(scales=scales, biases=-zero * scales, group_size=32, bits=bits)


# What a matrix is for a kernel: its struct in metal/dequantize.h, and its planes in order.
_FLOAT = ("data",)
STRUCTS = {
    mx.float32: ("dense<float>", _FLOAT),
    mx.float16: ("dense<half>", _FLOAT),
    mx.bfloat16: ("dense<bfloat>", _FLOAT),
    "Q8_0": ("q8_0", ("codes", "scales")),
    "Q4_0": ("q4_0", ("codes", "scales")),
    "MXFP4": ("mxfp4", ("codes", "scales")),
    "Q4_K": ("q4_k", ("codes", "scales", "d")),
    "Q5_K": ("q5_k", ("codes", "high", "scales", "d")),
    "Q6_K": ("q6_k", ("codes", "high", "scales", "d")),
    "Q2_K": ("q2_k", ("codes", "scales", "d")),
    "IQ2_XXS": ("iq2_xxs", ("grid", "signs", "d")),
}


def kind(w: Matrix) -> str | mx.Dtype:
    """The key of STRUCTS for a matrix."""
    return w.type if isinstance(w, Packed) else w.dtype


def readers(kinds: dict[str, str | mx.Dtype]) -> tuple[list[str], str]:
    """Matrices by their names in a kernel's call -> names of its inputs, and their declarations."""
    inputs, lines = [], []
    if "IQ2_XXS" in kinds.values():
        inputs.append("table")
        lines.append(_TABLE)
    for name, kind in kinds.items():
        struct, planes = STRUCTS[kind]
        planes = [f"{name}_{plane}" for plane in planes]
        inputs += planes
        table = ["magnitudes"] if kind == "IQ2_XXS" else []
        lines.append(f"{struct} {name} = {{{', '.join(planes + table)}}};\n")
    return inputs, "".join(lines)


def arrays(*ws: Matrix) -> list[mx.array]:
    """The inputs of `readers` for matrices of its kinds."""
    table = [_magnitudes()] if any(kind(w) == "IQ2_XXS" for w in ws) else []
    planes = [w.planes if isinstance(w, Packed) else {"data": w} for w in ws]
    return table + [p[n] for w, p in zip(ws, planes, strict=True) for n in STRUCTS[kind(w)][1]]


def bounds(threads: int, *ws: Matrix, registers: int = 72) -> dict[str, int]:
    """Of a template (`cuda.translate`): so many registers a thread, enough for packed words.

    A compiler by itself takes more, of which a threadgroup fewer fits, or spares them and moves
    loads behind what they should overlap.
    """
    packed = all(isinstance(w, Packed) for w in ws)
    resident = max(1, _REGISTERS // registers // threads)
    return {"THREADS": threads, "RESIDENT": resident} if packed else {}


_TABLE = """threadgroup uint2 magnitudes[256];
for (uint i = thread_index_in_threadgroup; i < 256;
     i += 32 * simdgroups_per_threadgroup) {
  magnitudes[i] = uint2(table[2 * i], table[2 * i + 1]);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
"""


@cache
def _magnitudes() -> mx.array:
    """What IQ2_XXS's 256 codes stand for, uint32 [256, 2], as the struct wants the 8 bytes."""
    from ..convert.blocks import iq2xxs_grid

    order = [1, 2, 3, 0, 5, 6, 7, 4]
    return mx.array(np.ascontiguousarray(iq2xxs_grid()[:, order]).view(np.uint32))


def _unpack(words: mx.array, bits: int) -> mx.array:
    """uint32 [..., n] of sequential codes -> float32 [..., n * 32 / bits]."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    codes = (words[..., None] >> shifts) & mx.array((1 << bits) - 1, mx.uint32)
    return codes.flatten(-2).astype(mx.float32)


def _k_scales(planes: dict) -> tuple[mx.array, mx.array]:
    """Scales and minima of Q4_K and Q5_K, each float32 [..., K / 32]."""
    s, d = planes["scales"], planes["d"].astype(mx.float32)
    low, middle, high = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scales = mx.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    mins = mx.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return (
        (scales.astype(mx.float32) * d[..., 0:1]).flatten(-2),
        (mins.astype(mx.float32) * d[..., 1:2]).flatten(-2),
    )


def _q5_k(planes: dict) -> mx.array:
    scales, mins = _k_scales(planes)
    codes = _unpack(planes["codes"], 4) + 16 * _unpack(planes["high"], 1)
    codes = codes.reshape(*scales.shape, 32)
    return codes * scales[..., None] - mins[..., None]


def _q6_k(planes: dict) -> mx.array:
    codes = _unpack(planes["codes"], 4) + 16 * _unpack(planes["high"], 2) - 32
    scales = planes["scales"].astype(mx.float32)
    d = planes["d"].astype(mx.float32)
    scales = (scales.reshape(*d.shape, 16) * d[..., None]).flatten(-2)
    return codes.reshape(*scales.shape, 16) * scales[..., None]


def _q2_k(planes: dict) -> mx.array:
    d = planes["d"].astype(mx.float32)
    packed = planes["scales"].reshape(*d.shape[:-1], 16)
    scales = (packed & 15).astype(mx.float32) * d[..., 0:1]
    mins = (packed >> 4).astype(mx.float32) * d[..., 1:2]
    codes = _unpack(planes["codes"], 2).reshape(*scales.shape, 16)
    return codes * scales[..., None] - mins[..., None]


def _iq2_xxs(planes: dict) -> mx.array:
    grid, sign = _iq2_xxs_tables()
    packed, d = planes["signs"], planes["d"].astype(mx.float32)
    scales = (packed >> 28).astype(mx.float32).reshape(*d.shape, 8)
    scales = (d[..., None] * (0.5 + scales) * 0.25).flatten(-2)
    index = (packed[..., None] >> mx.array([0, 7, 14, 21], mx.uint32)) & mx.array(127, mx.uint32)
    values = grid[planes["grid"].reshape(index.shape)] * sign[index]
    return values * scales[..., None, None]


@cache
def _iq2_xxs_tables() -> tuple[mx.array, mx.array]:
    from ..convert.blocks import iq2xxs_grid, iq2xxs_signs

    bits = np.unpackbits(iq2xxs_signs()[:, None], axis=1, bitorder="little")
    return mx.array(iq2xxs_grid().astype(np.float32)), mx.array(1 - 2 * bits.astype(np.float32))


_DECODERS = {"Q5_K": _q5_k, "Q6_K": _q6_k, "Q2_K": _q2_k, "IQ2_XXS": _iq2_xxs}
