"""Make the embedded pair: a folder of safetensors under official names -> two GGUF files.

    python -m ds4mlx.convert.pair NANO_DIR OUT_DIR [--experts mxfp4|q4_k|iq2_xxs]

Keys, names and types are those of ds4's own files (the format's description, 1.3 to 1.7 and 2).
"""

import argparse
import json
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import Ds4Error, FileError
from .blocks import decode
from .encode import encode
from .gguf import Tensor, open_gguf
from .names import draft_name, gguf_name, target_name
from .safetensors import Entry, read_safetensors
from .write import typed, write_gguf

# Types of the routed experts: gate and up, down.
EXPERTS = {
    "mxfp4": ("MXFP4", "MXFP4"),
    "q4_k": ("Q4_K", "Q4_K"),
    "iq2_xxs": ("IQ2_XXS", "Q2_K"),
}
_EXPERT = re.compile(r"(.+\.experts\.)([0-9]+)\.(w[123]\.weight)")


def make_pair(source, out, experts: str = "mxfp4") -> str:
    """Write `nano.gguf` and `nano-dspark.gguf` into `out`; the report says what was rounded.

    Raises FileError if a tensor has no place there, or if MXFP4 cannot hold an expert exactly.
    """
    source, out = Path(source), Path(out)
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    rounded = Counter()
    for name, prefix, metadata in (
        ("nano.gguf", "target", target_metadata(config) | tokenizer_metadata(tokenizer, config)),
        ("nano-dspark.gguf", "draft", draft_metadata(config)),
    ):
        tensors = _tensors(_entries(source, prefix), EXPERTS[experts], rounded)
        write_gguf(out / name, metadata, tensors)
    return "".join(f"{count} values rounded in {kind}\n" for kind, count in sorted(rounded.items()))


def transcode(path, out, experts: str):
    """Write a GGUF again with its routed experts encoded anew, all else as it was."""
    gguf = open_gguf(path)
    write_gguf(out, typed(gguf.metadata), [_transcoded(t, experts) for t in gguf.tensors.values()])


def _transcoded(t: Tensor, experts: str) -> tuple:
    if "_exps." not in t.name:
        return t.name, t.type, t.shape, t.read
    type = EXPERTS[experts]["_down_" in t.name]
    return t.name, type, t.shape, lambda: _encode(t.name, type, decode(t.type, t.read()))


def target_metadata(config: dict) -> dict[str, tuple]:
    """Metadata of the target from its `config.json`: key -> (type, value)."""
    layers, yarn = config["num_hidden_layers"], config["rope_scaling"]
    u32 = {
        "block_count": layers,
        "embedding_length": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "attention.output_group_count": config["o_groups"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "hash_layer_count": config["num_hash_layers"],
        "expert_group_count": 0,
        "expert_group_used_count": 0,
        "expert_gating_func": 4,  # sqrt of softplus
        "attention.sliding_window": config["sliding_window"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
        "context_length": config["max_position_embeddings"],
    }
    f32 = {
        "rope.freq_base": config["rope_theta"],
        "attention.compress_rope_freq_base": config["compress_rope_theta"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "hyper_connection.epsilon": config["hc_eps"],
        "rope.scaling.factor": yarn["factor"],
        "rope.scaling.yarn_beta_fast": yarn["beta_fast"],
        "rope.scaling.yarn_beta_slow": yarn["beta_slow"],
    }
    other = {
        "attention.compress_ratios": ("[UINT32]", config["compress_ratios"][:layers]),
        "swiglu_clamp_exp": ("[FLOAT32]", [config["swiglu_limit"]] * layers),
        "expert_weights_norm": ("BOOL", config["norm_topk_prob"]),
        "rope.scaling.type": ("STRING", yarn["type"]),
    }
    values = {key: ("UINT32", value) for key, value in u32.items()}
    values |= {key: ("FLOAT32", value) for key, value in f32.items()} | other
    return {
        "general.architecture": ("STRING", "deepseek4"),
        "general.name": ("STRING", "DeepSeek V4 nano"),
        "general.alignment": ("UINT32", 32),
        **{f"deepseek4.{key}": value for key, value in values.items()},
        "ds4mlx.chat": ("BOOL", False),  # the roles' tokens exist but were never trained
    }


def tokenizer_metadata(tokenizer: dict, config: dict) -> dict[str, tuple]:
    """The `tokenizer.ggml` keys from a `tokenizer.json` (byte-level BPE, GPT-2's byte alphabet)."""
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    if [index for _, index in vocab] != list(range(config["vocab_size"])):
        raise FileError(
            f"tokenizer.json: ids of {len(vocab)} tokens, wanted 0 to {config['vocab_size'] - 1}"
        )
    kinds = [1] * len(tokens)
    for added in tokenizer["added_tokens"]:
        marker = added["content"].startswith("<｜") and added["content"].endswith("｜>")
        kinds[added["id"]] = 3 if added["special"] or marker else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": ("STRING", "gpt2"),
        "tokenizer.ggml.pre": ("STRING", "joyai-llm"),
        "tokenizer.ggml.tokens": ("[STRING]", tokens),
        "tokenizer.ggml.token_type": ("[INT32]", kinds),
        "tokenizer.ggml.merges": ("[STRING]", merges),
        "tokenizer.ggml.bos_token_id": ("UINT32", config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": ("UINT32", config["eos_token_id"]),
    }


def draft_metadata(config: dict) -> dict[str, tuple]:
    """The nine keys of a DSpark support file, in ds4's order."""
    return {
        "general.architecture": ("STRING", "deepseek4-dspark"),
        "general.name": ("STRING", "DeepSeek V4 nano DSpark support"),
        "general.alignment": ("UINT32", 32),
        "dspark.block_size": ("UINT32", config["dspark_block_size"]),
        "dspark.markov_rank": ("UINT32", config["dspark_markov_rank"]),
        "dspark.noise_token_id": ("UINT32", config["dspark_noise_token_id"]),
        "dspark.target_layer_ids": ("[UINT32]", config["dspark_target_layer_ids"]),
        "dspark.stage_count": ("UINT32", config["n_mtp_layers"]),
        "dspark.n_layers": ("UINT32", config["n_mtp_layers"]),
    }


def _entries(source: Path, prefix: str) -> dict[str, Entry]:
    entries = {}
    for path in sorted(source.glob(f"{prefix}_weights*.safetensors")):
        entries |= read_safetensors(path)
    if not entries:
        raise FileError(f"{source}: no tensors in {prefix}_weights*.safetensors")
    return entries


def _tensors(entries: dict[str, Entry], experts: tuple[str, str], rounded: Counter) -> list:
    """What `write_gguf` takes, sorted by name. Raises FileError that names what has no place."""
    stacks, tensors, problems = {}, {}, []
    for official, entry in entries.items():
        match = _EXPERT.fullmatch(official)
        stacked, index = (match[1] + match[3], int(match[2])) if match else (official, None)
        stacks.setdefault(stacked, {})[index] = entry
        if entry.dtype not in ("F32", "F16", "BF16", "I32"):
            problems.append(f"{official} is {entry.dtype}, wanted F32, F16, BF16 or I32")
    for official, parts in stacks.items():
        name = gguf_name(official)
        if official not in (target_name(name), draft_name(name, 0)):
            problems.append(f"{official} has no place in a GGUF")
        if None not in parts and set(parts) != set(range(len(parts))):
            problems.append(f"{official} has experts {sorted(parts)}, wanted 0, 1, ..")
        first = next(iter(parts.values()))
        type = _type(official, first, experts)
        if None in parts:
            tensors[name] = (type, first.shape, partial(_plain, name, type, first, rounded))
        else:
            stack = [parts[index] for index in sorted(parts)]
            shape = (len(stack), *first.shape)
            tensors[name] = (type, shape, partial(_experts, name, type, stack))
    if problems:
        raise FileError(f"tensors that cannot be converted: {'; '.join(problems)}")
    return [(name, *tensors[name]) for name in sorted(tensors, key=str.encode)]


def _type(official: str, entry: Entry, experts: tuple[str, str]) -> str:
    """The type that ds4's own files give a tensor (the format's description, 1.5 and 2.2)."""
    if entry.dtype == "I32":
        return "I32"
    if len(entry.shape) == 1:
        return "F32"
    if ".ffn.experts." in official:
        return experts[official.endswith("w2.weight")]
    half = ("embed.weight", "hc_", ".compressor.", ".indexer.")
    router = official.startswith("layers.") and official.endswith("ffn.gate.weight")
    return "F16" if router or any(part in official for part in half) else "Q8_0"


def _plain(name: str, type: str, entry: Entry, rounded: Counter) -> np.ndarray:
    values = entry.values().reshape(-1, entry.shape[-1])
    raw = _encode(name, type, values)
    if type == "F16":
        kind = re.sub(r"\.[0-9]+\.", ".N.", name) + f" ({entry.dtype} to F16)"
        rounded[kind] += int((decode(type, raw) != values).sum())
    return raw


def _experts(name: str, type: str, parts: list[Entry]) -> np.ndarray:
    encoded = []
    for index, entry in enumerate(parts):
        values = entry.values()
        raw = _encode(name, type, values)
        if type == "MXFP4" and (decode(type, raw).view("u4") != values.view("u4")).any():
            raise FileError(f"{name}: expert {index} does not lie on the MXFP4 grid")
        encoded.append(raw)
    return np.stack(encoded)


def _encode(name: str, type: str, values: np.ndarray) -> np.ndarray:
    try:
        return encode(type, values)
    except FileError as error:
        raise FileError(f"{name}: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m ds4mlx.convert.pair", description=__doc__)
    parser.add_argument("source", metavar="NANO_DIR")
    parser.add_argument("out", metavar="OUT_DIR")
    parser.add_argument("--experts", choices=EXPERTS, default="mxfp4")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(make_pair(options.source, options.out, options.experts))
    except (Ds4Error, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return getattr(error, "status", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
