"""Blocks to planes and back: the same bits, in arrays that MLX can index and its kernels can read.

Codes of an element sit in sequence, low bits first, in 32-bit words; everything else is copied.
"""

import numpy as np

from .blocks import LAYOUTS, PLAIN, as_blocks

CHUNK = 1 << 20  # bytes repacked at once: temporaries stay in cache, and small

# Exchanges (shift, mask in 64 bits) that transpose squares of 8 / bits fields in as many bytes.
# Each exchanges two bits of a field's place, so the whole is its own inverse.
_TRANSPOSE = {
    4: ((4, 0x00F000F000F000F0),),
    2: ((6, 0x00CC00CC00CC00CC), (12, 0x0000F0F00000F0F0)),
    1: ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)),
}


def repack(type: str, raw: np.ndarray) -> dict[str, np.ndarray]:
    """Packed rows, uint8 [rows, row bytes] -> planes with the same first axis.

    F32, F16, BF16 (as uint16), I32: `data` [rows, in], a view. All others hold `codes` of 8, 4 or
    2 bits, uint32 [rows, in * bits / 32], and their scales, one per group of 16 or 32:
    Q8_0 (codes + 128), Q4_0: `scales` float16 [rows, in / 32]; MXFP4: the same, uint8;
    Q4_K, Q5_K: `scales` uint8 [rows, in / 256, 12], as packed in the file;
    Q2_K, Q6_K: `scales` uint8 or int8 [rows, in / 16];
    Q5_K, Q6_K: `high`, the upper 1 or 2 bits of the codes, laid out as codes are;
    and `d` float16 [rows, in / 256] (Q6_K) or [rows, in / 256, 2] with the minima's (the others).
    IQ2_XXS: `grid` uint8 [rows, in / 8], `signs` uint32 [rows, in / 32], `d` [rows, in / 256].
    """
    blocks = as_blocks(type, raw)
    if type in PLAIN:
        return {"data": blocks["data"]}
    planes = _empty(type, *blocks.shape)
    for rows in _chunks(raw):
        for name, plane in planes.items():
            field, part = _field(blocks[rows], name), plane[rows]
            if name in LAYOUTS[type].codes:
                part.view(np.uint8).reshape(field.shape)[:] = _sequence(type, name, field)
            elif name == "grid":  # four bytes at once
                part.view(np.uint32).reshape(field.shape[:-1])[:] = field.view("<u4")[..., 0]
            else:
                part.reshape(field.shape)[:] = field
    return planes


def unpack(type: str, planes: dict[str, np.ndarray]) -> np.ndarray:
    """The inverse of `repack`: planes -> uint8 [rows, row bytes]."""
    layout = LAYOUTS[type]
    if type in PLAIN:
        return planes["data"].view(np.uint8)
    rows, width = planes["d" if "d" in planes else "scales"].shape[:2]
    blocks = np.empty((rows, width), layout.block)
    raw = blocks.view(np.uint8)
    for part in _chunks(raw):
        for name, plane in planes.items():
            field = _field(blocks[part], name)
            if name in layout.codes:
                codes = plane[part].view(np.uint8).reshape(field.shape)
                field[:] = _sequence(type, name, codes, back=True)
            else:
                field[:] = plane[part].reshape(field.shape)
    return raw


def _field(blocks: np.ndarray, name: str) -> np.ndarray:
    """The field of blocks that a plane is made of."""
    return (blocks["groups"] if name in ("grid", "signs") else blocks)[name]


def _empty(type: str, rows: int, width: int) -> dict[str, np.ndarray]:
    planes = {}
    names = LAYOUTS[type].block.names
    for name in ("grid", "signs", "d") if "groups" in names else names:
        field = _field(np.empty((0, 0), LAYOUTS[type].block), name)
        if name in LAYOUTS[type].codes:
            planes[name] = np.empty((rows, width * field.shape[2] // 4), np.uint32)
        elif name == "d" or field.shape[2:] == (12,):
            planes[name] = np.empty((rows, width, *field.shape[2:]), field.dtype)
        else:
            planes[name] = np.empty((rows, width * int(np.prod(field.shape[2:]))), field.dtype)
    return planes


def _chunks(raw: np.ndarray) -> list[slice]:
    step = max(1, CHUNK // max(1, raw.shape[1]))
    return [slice(start, start + step) for start in range(0, len(raw), step)]


def _sequence(type: str, name: str, field: np.ndarray, back: bool = False) -> np.ndarray:
    """Codes from the order of a block to the order of elements, or back; uint8 [..., bytes]."""
    bits, size = LAYOUTS[type].codes[name]
    if bits == 8:
        return (field.view(np.int8) ^ np.int8(-128)).view(np.uint8)
    fields = 8 // bits
    if back:
        field = _turned(field, fields, size // fields)
        return _transpose(field, bits).reshape(field.shape)
    return _turned(_transpose(field, bits), size // fields, fields).reshape(field.shape)


def _turned(codes: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Every `rows` x `columns` square of bytes transposed."""
    turned = np.ascontiguousarray(codes.reshape(-1, rows, columns).swapaxes(1, 2))
    return turned.reshape(codes.shape)


def _transpose(codes: np.ndarray, bits: int) -> np.ndarray:
    """Every square of fields transposed, in a new array; a row of codes is whole 64-bit words."""
    words = np.array(codes, order="C").view(np.uint64)
    moved = np.empty_like(words)
    for shift, mask in _TRANSPOSE[bits]:
        shift, mask = np.uint64(shift), np.uint64(mask)
        np.right_shift(words, shift, out=moved)
        moved ^= words
        moved &= mask
        words ^= moved
        np.left_shift(moved, shift, out=moved)
        words ^= moved
    return words.view(np.uint8)
