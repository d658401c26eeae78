"""Makers of tiny GGUF files for tests, written from the format and not with the package's code."""

import math
import struct
from pathlib import Path

import numpy as np

# type -> (code, elements of a block, bytes of a block)
BLOCKS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ3_XXS": (18, 256, 98),
    "I32": (26, 1, 4),
    "I64": (27, 1, 8),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
    "unknown": (105, 1, 4),
}
_SCALARS = {
    **dict(uint8=(0, "B"), int8=(1, "b"), uint16=(2, "H"), int16=(3, "h"), uint32=(4, "I")),
    **dict(int32=(5, "i"), float32=(6, "f"), bool=(7, "?"), uint64=(10, "Q"), int64=(11, "q")),
    "float64": (12, "d"),
}
_DEFAULT = {int: "uint32", float: "float32", bool: "bool"}


def write_gguf(
    path, metadata: dict, tensors: dict, *, version: int = 3, alignment: int = 32, order: str = "<"
) -> Path:
    """Write a GGUF. metadata: key -> int (uint32), float (float32), bool, str, a NumPy scalar or
    array (its own type), or a list of str. tensors: name -> (type, shape outermost first) for
    seeded random bytes, or (type, shape, bytes). An `alignment` other than 32 needs the key too.
    """
    path, rng = Path(path), np.random.default_rng(0)
    head, blobs, offset = [], [], 0
    for key, value in metadata.items():
        head += [string(key, order), _value(value, order)]
    for name, (kind, shape, *data) in tensors.items():
        code, elements, size = BLOCKS[kind]
        n = math.prod(shape) // elements * size
        blob = data[0] if data else _random(rng, kind, n)
        assert len(blob) == n, (name, len(blob), n)
        head.append(tensor_info(name, shape[::-1], code, offset, order))
        blobs.append(blob + bytes(-n % alignment))
        offset += n + -n % alignment
    head = b"".join(head)
    start = b"GGUF" + struct.pack(f"{order}IQQ", version, len(tensors), len(metadata)) + head
    path.write_bytes(start + bytes(-len(start) % alignment) + b"".join(blobs))
    return path


def string(text: str, order: str = "<") -> bytes:
    return struct.pack(f"{order}Q", len(text.encode())) + text.encode()


def tensor_info(name: str, dims, code: int, offset: int, order: str = "<") -> bytes:
    """A tensor's entry in the header; `dims` in GGUF order, innermost first."""
    shape = struct.pack(f"{order}I{len(dims)}Q", len(dims), *dims)
    return string(name, order) + shape + struct.pack(f"{order}IQ", code, offset)


def header(metadata: bytes = b"", keys: int = 0, tensors: bytes = b"", count: int = 0) -> bytes:
    """A GGUF of hand-made entries, padded to 32 bytes."""
    data = b"GGUF" + struct.pack("<IQQ", 3, count, keys) + metadata + tensors
    return data + bytes(-len(data) % 32)


def _value(value, order: str) -> bytes:
    if isinstance(value, str):
        return struct.pack(f"{order}I", 8) + string(value, order)
    if isinstance(value, list):
        items = b"".join(string(text, order) for text in value)
        return struct.pack(f"{order}IIQ", 9, 8, len(value)) + items
    if isinstance(value, np.ndarray):
        code, letter = _SCALARS[value.dtype.name]
        items = struct.pack(f"{order}{value.size}{letter}", *value)
        return struct.pack(f"{order}IIQ", 9, code, value.size) + items
    code, letter = _SCALARS[_DEFAULT.get(type(value)) or value.dtype.name]
    return struct.pack(f"{order}I{letter}", code, value)


def _random(rng, kind: str, n: int) -> bytes:
    if kind in ("F32", "F16"):
        dtype = {"F32": np.float32, "F16": np.float16}[kind]
        return (rng.standard_normal(n // BLOCKS[kind][2]) / 8).astype(dtype).tobytes()
    if kind == "I32":
        return rng.integers(0, 4, n // 4, dtype=np.int32).tobytes()
    return rng.integers(0, 256, n, dtype=np.uint8).tobytes()


# A tiny target and draft ---------------------------------------------------------------------

SIZES = dict(D=64, V=48, H=2, dh=32, Rq=32, G=2, Ro=32, E=4, K=2, F=32, HC=4, Hi=2, di=32)
RATIOS = (0, 0, 4, 8, 4)  # three hash routed layers; 8 stands for 128
TARGET_METADATA = {
    "general.architecture": "deepseek4",
    "general.name": "tiny",
    **{
        f"deepseek4.{key}": value
        for key, value in {
            "block_count": 5,
            "context_length": 4096,
            "embedding_length": 64,
            "vocab_size": 48,
            "attention.head_count": 2,
            "attention.head_count_kv": 1,
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 16,
            "attention.q_lora_rank": 32,
            "attention.output_lora_rank": 32,
            "attention.output_group_count": 2,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "hash_layer_count": 3,
            "attention.sliding_window": 8,
            "attention.indexer.head_count": 2,
            "attention.indexer.key_length": 32,
            "attention.indexer.top_k": 4,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 3,
            "attention.compress_ratios": np.array(RATIOS + (0,), np.int32),
            "swiglu_clamp_exp": np.full(5, 10, np.float32),
            "rope.freq_base": 10000.0,
            "attention.compress_rope_freq_base": 160000.0,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "expert_gating_func": 4,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "hyper_connection.epsilon": 1e-6,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": np.uint64(65536),
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        }.items()
    },
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(48)],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
DRAFT_METADATA = {
    "general.architecture": "deepseek4-dspark",
    "general.name": "tiny DSpark support",
    "general.alignment": 32,
    "dspark.block_size": 5,
    "dspark.markov_rank": 32,
    "dspark.noise_token_id": 7,
    "dspark.target_layer_ids": np.array([2, 3, 4], np.uint32),
    "dspark.stage_count": 3,
    "dspark.n_layers": 3,
}


def target_tensors() -> dict:
    """ds4's names, types and shapes (spec 1.5), at SIZES; K-quants do not fit so short rows."""
    D, V, HC = SIZES["D"], SIZES["V"], SIZES["HC"]
    out = {
        "token_embd.weight": ("F16", (V, D)),
        "output_hc_base.weight": ("F32", (HC,)),
        "output_hc_fn.weight": ("F16", (HC, HC * D)),
        "output_hc_scale.weight": ("F32", (1,)),
        "output_norm.weight": ("F32", (D,)),
        "output.weight": ("Q8_0", (V, D)),
    }
    for i, ratio in enumerate(RATIOS):
        out |= {f"blk.{i}.{name}": t for name, t in _layer(ratio, i < 3, "F16").items()}
    return out


def draft_tensors(head: str = "Q8_0", router: str = "Q8_0") -> dict:
    """ds4's names, types and shapes of a DSpark file (spec 2.2); `head`: of the Markov matrices
    and the confidence row."""
    D, V, HC = SIZES["D"], SIZES["V"], SIZES["HC"]
    out = {}
    for s in range(3):
        out |= {f"mtp.{s}.{name}": t for name, t in _layer(0, False, router).items()}
    return out | {
        "mtp.0.main_proj.weight": ("Q8_0", (D, 3 * D)),
        "mtp.0.main_norm.weight": ("F32", (D,)),
        "mtp.2.norm.weight": ("F32", (D,)),
        "mtp.2.hc_head_base.weight": ("F32", (HC,)),
        "mtp.2.hc_head_fn.weight": ("F16", (HC, HC * D)),
        "mtp.2.hc_head_scale.weight": ("F32", (1,)),
        "mtp.2.markov_head.markov_w1.weight": (head, (V, 32)),
        "mtp.2.markov_head.markov_w2.weight": (head, (V, 32)),
        "mtp.2.confidence_head.proj.weight": (head, (1, D + 32)),
    }


def _layer(ratio: int, hashed: bool, router: str) -> dict:
    D, V, H, dh, Rq, G, Ro, E, K, F, HC, Hi, di = SIZES.values()
    out = {
        "attn_norm": ("F32", (D,)),
        "attn_q_a": ("Q8_0", (Rq, D)),
        "attn_q_a_norm": ("F32", (Rq,)),
        "attn_q_b": ("Q8_0", (H * dh, Rq)),
        "attn_kv": ("Q8_0", (dh, D)),
        "attn_kv_a_norm": ("F32", (dh,)),
        "attn_sinks": ("F32", (H,)),
        "attn_output_a": ("Q8_0", (G * Ro, H * dh // G)),
        "attn_output_b": ("Q8_0", (D, G * Ro)),
        "ffn_norm": ("F32", (D,)),
        "ffn_gate_inp": (router, (E, D)),
        "ffn_gate_exps": ("MXFP4", (E, F, D)),
        "ffn_up_exps": ("MXFP4", (E, F, D)),
        "ffn_down_exps": ("MXFP4", (E, D, F)),
        "ffn_gate_shexp": ("Q8_0", (F, D)),
        "ffn_up_shexp": ("Q8_0", (F, D)),
        "ffn_down_shexp": ("Q8_0", (D, F)),
    }
    for part in ("attn", "ffn"):
        out[f"hc_{part}_fn"] = ("F16", (HC * (HC + 2), HC * D))
        out[f"hc_{part}_scale"] = ("F32", (3,))
        out[f"hc_{part}_base"] = ("F32", (HC * (HC + 2),))
    if ratio:
        out |= _compressor("attn", ratio, dh, D)
    if ratio == 4:
        out |= _compressor("indexer", ratio, di, D)
        out["indexer.attn_q_b"] = ("F16", (Hi * di, Rq))
        out["indexer.proj"] = ("F16", (Hi, D))
    if hashed:
        out["ffn_gate_tid2eid"] = ("I32", (V, K))
    out = {f"{name}.weight": t for name, t in out.items()}
    return out if hashed else out | {"exp_probs_b.bias": ("F32", (E,))}


def _compressor(part: str, ratio: int, width: int, D: int) -> dict:
    rows = 2 * width if ratio == 4 else width
    return {
        f"{part}_compressor_ape": ("F16", (ratio, rows)),
        f"{part}_compressor_kv": ("F16", (rows, D)),
        f"{part}_compressor_gate": ("F16", (rows, D)),
        f"{part}_compressor_norm": ("F32", (width,)),
    }


def tiny_target(path, metadata: dict | None = None, tensors: dict | None = None, rename=None):
    """A complete five-layer target. `metadata` and `tensors` replace or add; None removes.
    `rename(name)` gives each tensor its name in the file.
    """
    return _tiny(path, TARGET_METADATA, target_tensors(), metadata, tensors, rename)


def tiny_draft(
    path, metadata: dict | None = None, tensors: dict | None = None, rename=None, **types
):
    """A complete three-stage DSpark draft for `tiny_target`, in ds4's layout."""
    return _tiny(path, DRAFT_METADATA, draft_tensors(**types), metadata, tensors, rename)


def _tiny(path, keys: dict, inventory: dict, metadata, tensors, rename) -> Path:
    keys = {k: v for k, v in (keys | (metadata or {})).items() if v is not None}
    inventory = {k: v for k, v in (inventory | (tensors or {})).items() if v is not None}
    return write_gguf(path, keys, {(rename or str)(name): t for name, t in inventory.items()})
