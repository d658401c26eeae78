"""The small files of a converted folder, from a GGUF's metadata: settings and tokenizer."""

import json
import os
from pathlib import Path

from ..errors import FileError
from ..tokenizer import BOS, EOS, Tokenizer
from .config import draft_config, target_config
from .gguf import GGUF, some
from .inventory import SUPPORTED, check_target
from .names import by_official_name, draft_name, kind

QUANT_METHOD = "ds4mlx"  # of config.json's quantization_config: planes of ggml's blocks
DRAFT_TYPE = "deepseek_v4_dspark"  # model_type of a draft's config.json

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name in the GGUF -> official name, shape


def describe(gguf: GGUF) -> tuple[dict[str, dict], Shapes]:
    """The JSON files of a folder by name, and which tensors the model reads.

    Raises UsageError or FileError for a file that is neither a target nor a draft, or damaged.
    """
    if kind(gguf) == "draft":
        config = {"model_type": DRAFT_TYPE} | draft_config(gguf)
        official = _draft_shapes(gguf, config["n_mtp_layers"])
        files = {}
    else:
        config = target_config(gguf)
        tensors = check_target(gguf, config)
        if config["tie_word_embeddings"]:
            del tensors["head.weight"]
        official = {t.name: (name, t.shape) for name, t in tensors.items()}
        config["chat"] = bool(gguf.metadata.get("ds4mlx.chat", True))
        files = _tokenizer_files(gguf, config)
    types = {
        name: {"type": gguf.tensors[n].type, "shape": shape}
        for n, (name, shape) in sorted(official.items(), key=lambda item: item[1])
    }
    method = {"quant_method": QUANT_METHOD, "tensors": types}
    return files | {"config.json": config | {"quantization_config": method}}, official


def path_text(path: Path) -> str:
    """A path to write down; bytes that are no UTF-8 as escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def to_json(value) -> bytes:
    """As all files of a folder are written: the same bytes for the same value."""
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _draft_shapes(gguf: GGUF, stages: int) -> Shapes:
    # Copies of the target's embedding and head, which a draft shares.
    own = [t for t in gguf.tensors.values() if t.name not in ("token_embd.weight", "output.weight")]
    found, problems = by_official_name(own, lambda name: draft_name(name, stages))
    problems += [
        f"{t.name} is {t.type}, wanted one of {', '.join(SUPPORTED)}"
        for t in found.values()
        if t.type not in SUPPORTED
    ]
    if problems:
        raise FileError(f"{gguf.path}: {len(problems)} problems with its tensors: {some(problems)}")
    return {t.name: (name, t.shape) for name, t in found.items()}


def _tokenizer_files(gguf: GGUF, config: dict) -> dict[str, dict]:
    tokenizer = Tokenizer.from_gguf(gguf.metadata)
    ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    if template := gguf.metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    if config["chat"] and tokenizer.has_chat_roles:
        # For mlx-lm, where ds4mlx.mlx_lm registers these names; 0731 where the file does not tell.
        settings["chat_template_type"] = f"ds4mlx_{config['release'] or '0731'}"
        settings["tool_parser_type"] = "ds4mlx"
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": settings,
        "generation_config.json": ids,
    }
