"""Makers of checkpoints in the released format, for tests."""

import json
import re
from pathlib import Path

import numpy as np

from ds4mlx.convert.blocks import as_blocks, spread
from ds4mlx.convert.encode import encode

# Matrices that the release stores as FP8; it has F32 for these, BF16 for the rest.
FP8 = r"\.attn\.w|shared_experts|indexer\.wq_b|main_proj"
FLOAT32 = r"hc_|attn_sink|\.ape|gate\.bias"


def e4m3_value(code: int) -> float:
    """One code of FP8 e4m3, by its definition."""
    sign, exponent, fraction = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    size = 2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8)
    return -size if sign else size


VALUES = np.array([e4m3_value(c) for c in range(256)], np.float32)


def to_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [rows, columns] -> codes uint8, and e8m0 scales of 128 x 128 blocks."""
    scales = np.full((-(-x.shape[0] // 128), -(-x.shape[1] // 128)), 127, np.uint8)
    codes = np.zeros(x.shape, np.uint8)
    sizes = VALUES[:127]
    for i, j in np.ndindex(scales.shape):
        part = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        if top := np.abs(x[part]).max():
            scales[i, j] = 127 + int(np.ceil(np.log2(top / 448)))
        y = x[part] / np.float32(2.0) ** (int(scales[i, j]) - 127)
        near = np.searchsorted((sizes[1:] + sizes[:-1]) / 2, np.abs(y)).astype(np.uint8)
        codes[part] = near | (np.signbit(y) << np.uint8(7))
    return codes, scales


def from_fp8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values in float64."""
    wide = np.kron(np.exp2(scales.astype(np.float64) - 127), np.ones((128, 128)))
    return VALUES[codes] * wide[: codes.shape[0], : codes.shape[1]]


def to_fp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values on the grid -> codes, the even column in the low nibble, and a scale per 32."""
    blocks = as_blocks("MXFP4", encode("MXFP4", x))
    codes = spread("MXFP4", blocks).reshape(x.shape)
    return codes[:, ::2] | (codes[:, 1::2] << 4), blocks["scales"].copy()


def stored(name: str, x: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """A tensor as the release has it: names -> (dtype, array of bits)."""
    scale = name.removesuffix(".weight") + ".scale"
    if x.dtype == np.int32:
        return {name: ("I64", x.astype(np.int64))}
    if ".experts." in name:
        codes, scales = to_fp4(x)
        return {name: ("I8", codes), scale: ("F8_E8M0", scales)}
    if re.search(FP8, name):
        codes, scales = to_fp8(x)
        return {name: ("F8_E4M3", codes), scale: ("F8_E8M0", scales)}
    if re.search(FLOAT32, name):
        return {name: ("F32", x)}
    return {name: ("BF16", (x.view(np.uint32) >> 16).astype(np.uint16))}


def released(model: dict[str, np.ndarray]) -> dict[str, tuple[str, np.ndarray]]:
    """All tensors of a model as the release has them."""
    return {n: t for name, x in model.items() for n, t in stored(name, x).items()}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]):
    header, at = {}, 0
    for name, (dtype, x) in tensors.items():
        offsets = [at, at + x.nbytes]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": offsets}
        at += x.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in tensors.values():
            file.write(x.tobytes())


def write_checkpoint(folder: Path, tensors: dict, config: dict, tokenizer: dict) -> Path:
    """Three shards and their index: the target's two, and the draft's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = [n for n in tensors if not n.startswith("mtp.")]
    draft = [n for n in tensors if n.startswith("mtp.")]
    where = {}
    for i, names in enumerate((own[::2], own[1::2], draft)):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        write_safetensors(folder / file, {n: tensors[n] for n in names})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
