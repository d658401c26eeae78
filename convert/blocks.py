"""ggml's block types: how the bytes of each lie, and what values they stand for.

Block layouts of the format's description, section 3; all little-endian.
"""

from functools import cache
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """One type: elements of a block, its fields, and which of them hold codes.

    `codes` gives, per field, the bits of a code and the bytes of a group: byte j of a group holds
    elements j, j + bytes, j + 2 * bytes ... from its low bits up.
    """

    elements: int
    block: np.dtype
    codes: dict[str, tuple[int, int]]

    @property
    def bytes(self) -> int:
        return self.block.itemsize


def _layout(elements: int, fields: list[tuple], **codes: tuple[int, int]) -> Layout:
    return Layout(elements, np.dtype(fields), codes)


_D = ("d", "<f2", 2)  # of the scales, and of the minima
_SIX_BIT = ("scales", "u1", 12)  # eight scales and eight minima
_IQ2_GROUP = np.dtype([("grid", "u1", 4), ("signs", "<u4")])
LAYOUTS = {
    "F32": _layout(1, [("data", "<f4")]),
    "F16": _layout(1, [("data", "<f2")]),
    "BF16": _layout(1, [("data", "<u2")]),
    "I32": _layout(1, [("data", "<i4")]),
    "Q4_0": _layout(32, [("scales", "<f2"), ("codes", "u1", 16)], codes=(4, 16)),
    "Q8_0": _layout(32, [("scales", "<f2"), ("codes", "u1", 32)], codes=(8, 32)),
    "MXFP4": _layout(32, [("scales", "u1"), ("codes", "u1", 16)], codes=(4, 16)),
    "Q2_K": _layout(256, [("scales", "u1", 16), ("codes", "u1", 64), _D], codes=(2, 32)),
    "Q4_K": _layout(256, [_D, _SIX_BIT, ("codes", "u1", 128)], codes=(4, 32)),
    "Q5_K": _layout(
        256, [_D, _SIX_BIT, ("high", "u1", 32), ("codes", "u1", 128)], codes=(4, 32), high=(1, 32)
    ),
    "Q6_K": _layout(
        256,
        [("codes", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")],
        codes=(4, 64),
        high=(2, 32),
    ),
    "IQ2_XXS": _layout(256, [("d", "<f2"), ("groups", _IQ2_GROUP, 8)]),
}
PLAIN = ("F32", "F16", "BF16", "I32")
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)  # doubled, as ggml counts


def decode(type: str, raw: np.ndarray) -> np.ndarray:
    """The values of packed rows: uint8 [rows, row bytes] -> float32 [rows, in] (I32: int32)."""
    blocks = as_blocks(type, raw)
    if type == "BF16":
        return (blocks["data"].astype(np.uint32) << 16).view(np.float32)
    if type in PLAIN:
        return blocks["data"].astype(np.int32 if type == "I32" else np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be anything
        return _DECODERS[type](blocks).reshape(len(raw), -1)


def as_blocks(type: str, raw: np.ndarray) -> np.ndarray:
    """uint8 [rows, row bytes] as structured blocks [rows, row bytes / block bytes]; a view."""
    layout = LAYOUTS[type]
    assert raw.dtype == np.uint8 and raw.shape[1] % layout.bytes == 0, (type, raw.dtype, raw.shape)
    return raw.view(layout.block)


def spread(type: str, blocks: np.ndarray, field: str = "codes") -> np.ndarray:
    """The codes of blocks [...], one uint8 each, in element order: [..., elements]."""
    bits, size = LAYOUTS[type].codes[field]
    groups = blocks[field].reshape(*blocks.shape, -1, 1, size)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((groups >> shifts) & np.uint8((1 << bits) - 1)).reshape(*blocks.shape, -1)


def gather(type: str, codes: np.ndarray, field: str = "codes") -> np.ndarray:
    """The inverse of `spread`: uint8 codes [..., elements] -> the field's bytes [..., bytes]."""
    bits, size = LAYOUTS[type].codes[field]
    groups = codes.reshape(*codes.shape[:-1], -1, 8 // bits, size)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(groups << shifts, axis=-2).reshape(*codes.shape[:-1], -1)


def k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and minima of Q4_K and Q5_K: uint8 [..., 12] -> two of uint8 [..., 8]."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    mins = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scales, mins


def pack_k_scales(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """The inverse of `k_scales`."""
    first, last = slice(0, 4), slice(4, 8)
    low = scales[..., first] | ((scales[..., last] >> 4) << 6)
    middle = mins[..., first] | ((mins[..., last] >> 4) << 6)
    high = (scales[..., last] & 15) | ((mins[..., last] & 15) << 4)
    return np.concatenate([low, middle, high], axis=-1)


def half_scale(exponents: np.ndarray) -> np.ndarray:
    """2 ** (e - 128) for MXFP4's scale bytes e, exactly; float32 (subnormal for 0 and 1)."""
    e = exponents.astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


@cache
def iq2xxs_grid() -> np.ndarray:
    """The magnitudes of 8 elements for each of 256 codes: uint8 [256, 8] of 8, 25 and 43."""
    from gguf.quants import IQ2_XXS

    IQ2_XXS.init_grid()
    return IQ2_XXS.grid.reshape(256, 8).astype(np.uint8)


@cache
def iq2xxs_signs() -> np.ndarray:
    """The sign bits of 8 elements for each of 128 codes: uint8 [128], a set bit is negative."""
    from gguf.quants import IQ2_XXS

    return np.frombuffer(IQ2_XXS.ksigns, np.uint8)


def _q4_0(blocks):
    return blocks["scales"][..., None].astype(np.float32) * (
        spread("Q4_0", blocks).astype(np.float32) - 8
    )


def _q8_0(blocks):
    codes = blocks["codes"].view(np.int8).astype(np.float32)
    return codes * blocks["scales"][..., None].astype(np.float32)


def _mxfp4(blocks):
    table = np.concatenate([E2M1, -E2M1])
    return half_scale(blocks["scales"])[..., None] * table[spread("MXFP4", blocks)]


def _affine(codes, scales, mins, d):
    """d * scale * code - dmin * min, per sub-block; codes [..., 256], scales and mins [..., n]."""
    codes = codes.reshape(*scales.shape, -1).astype(np.float32)
    d = d.astype(np.float32)
    scales = d[..., 0:1] * scales.astype(np.float32)
    mins = d[..., 1:2] * mins.astype(np.float32)
    return scales[..., None] * codes - mins[..., None]


def _q2_k(blocks):
    scales = blocks["scales"]
    return _affine(spread("Q2_K", blocks), scales & 15, scales >> 4, blocks["d"])


def _q4_k(blocks):
    return _affine(spread("Q4_K", blocks), *k_scales(blocks["scales"]), blocks["d"])


def _q5_k(blocks):
    codes = spread("Q5_K", blocks) | (spread("Q5_K", blocks, "high") << 4)
    return _affine(codes, *k_scales(blocks["scales"]), blocks["d"])


def _q6_k(blocks):
    codes = spread("Q6_K", blocks) | (spread("Q6_K", blocks, "high") << 4)
    codes = codes.reshape(*blocks.shape, 16, 16).astype(np.float32) - 32
    d = blocks["d"][..., None].astype(np.float32)
    return (d * blocks["scales"].astype(np.float32))[..., None] * codes


def _iq2_xxs(blocks):
    groups = blocks["groups"]
    words = groups["signs"]
    d = blocks["d"][..., None].astype(np.float32)
    scales = d * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.25)
    index = (words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)) & 127
    negative = np.unpackbits(iq2xxs_signs()[index][..., None], axis=-1, bitorder="little")
    grid = iq2xxs_grid()[groups["grid"]].astype(np.float32)
    values = scales[..., None, None] * grid
    return np.where(negative == 1, -values, values)


_DECODERS = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ2_XXS": _iq2_xxs,
}
