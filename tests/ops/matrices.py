"""Random matrices of each type, in memory as a loader leaves them."""

import gguf
import mlx.core as mx
import numpy as np

from ds4mlx.packed import Matrix
from ds4mlx.weights import as_matrix

FLOATS = ("F32", "F16", "BF16")
PACKED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ2_XXS", "MXFP4")
TYPES = FLOATS + PACKED
_HALVES = {  # byte offsets of the float16 fields of a block
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "IQ2_XXS": [0],
}


def raw_bytes(type: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks, uint8 [rows, row bytes]: every field random, scales finite and moderate."""
    rng = np.random.default_rng([seed, rows, columns])
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    if type in FLOATS:
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        if type == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if type == "F16" else np.float32).view(np.uint8)
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in _HALVES.get(type, []):
        halves = rng.normal(size=raw.shape[:2] + (1,)).astype(np.float16) / np.float16(64)
        raw[..., at : at + 2] = halves.view(np.uint8)
    if type == "MXFP4":
        raw[..., 0] = rng.integers(118, 130, raw.shape[:2], dtype=np.uint8)
    return raw.reshape(rows, -1)


def values(type: str, raw: np.ndarray) -> np.ndarray:
    """What ggml's own decoder makes of the bytes, float32 [rows, columns]."""
    if type == "F32":
        return raw.view(np.float32)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])


def matrix(type: str, *shape: int, seed: int = 0) -> Matrix:
    """A random matrix [..., M, K] of a type."""
    rows = int(np.prod(shape[:-1]))
    return as_matrix(type, raw_bytes(type, rows, shape[-1], seed), shape)


def exact(w: Matrix) -> np.ndarray:
    """Its values in float64."""
    from ds4mlx.ops.dequantize import dequantize

    return np.array(dequantize(w).astype(mx.float32), dtype=np.float64)
