"""Byte-level BPE, rebuilt from a GGUF's own metadata; text can never become a control token."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from .errors import FileError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"

# How text is split before the merges (chat 13); the three names mean the same.
_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_PRE_NAMES = ("joyai-llm", "deepseek-v3", "hunyuan-dense")
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types of added tokens


class Control(str):
    """A control token that a renderer wrote; a plain str is always plain text."""


class Tokenizer:
    """Text to ids and back. `tokens` are all texts by id: base ones in the GPT-2 byte alphabet,
    those in `added` (ids) as they are; `merges` are pairs of token texts in order of rank.

    Raises FileError for a vocabulary that is not whole.
    """

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[tuple[str, str]], added: Iterable[int]
    ):
        self._tokens, self._merges = tokens, merges
        self._ids = {text: i for i, text in enumerate(tokens)}
        if len(self._ids) < len(tokens):
            twice = next(t for i, t in enumerate(tokens) if self._ids[t] != i)
            raise FileError(f"the tokenizer's vocabulary has the token {twice!r} more than once")
        self._added = {tokens[i]: i for i in added}
        missing = [text for text in (BOS, EOS) if text not in self._added]
        if missing:
            raise FileError(f"the tokenizer has no control token {' or '.join(missing)}")
        self.vocab_size = len(tokens)
        self.bos, self.eos = self._added[BOS], self._added[EOS]

    @classmethod
    def from_gguf(cls, metadata: Mapping) -> "Tokenizer":
        """From the keys `tokenizer.ggml.*` (chat 13). Raises FileError for missing or odd ones."""
        names = ("model", "pre", "tokens", "token_type", "merges")
        absent = [n for n in names if f"tokenizer.ggml.{n}" not in metadata]
        if absent:
            listed = ", ".join(f"tokenizer.ggml.{n}" for n in absent)
            raise FileError(f"the file's metadata lack the tokenizer's keys {listed}")
        model, pre, tokens, types, merges = (metadata[f"tokenizer.ggml.{n}"] for n in names)
        if model != "gpt2" or pre not in _PRE_NAMES:
            raise FileError(
                f"tokenizer model {model!r} with pre-tokenizer {pre!r}, wanted 'gpt2' with one of "
                f"{', '.join(_PRE_NAMES)}"
            )
        if len(types) != len(tokens):
            raise FileError(f"the tokenizer has {len(tokens)} tokens but {len(types)} token types")
        pairs = [tuple(line.split(" ", 1)) for line in merges]
        if odd := next((line for line, p in zip(merges, pairs, strict=True) if len(p) < 2), None):
            raise FileError(f"the tokenizer's merge {odd!r} is no pair of tokens")
        added = [i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)]
        return cls(tokens, pairs, added)

    @classmethod
    def from_json(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face tokenizer.json of the DeepSeek V3 family. Raises FileError."""
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            vocab, merges = data["model"]["vocab"], data["model"]["merges"]
            added = {t["id"]: t["content"] for t in data["added_tokens"]}
            splits = [
                p["pattern"]["Regex"] for p in data["pre_tokenizer"]["pretokenizers"][:-1]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"{path}: not a byte-level BPE tokenizer.json ({error!r})") from None
        if splits != list(_SPLITS):
            raise FileError(f"{path}: the pre-tokenizer is not that of DeepSeek V3 and V4")
        by_id = {i: text for text, i in vocab.items()} | added
        if sorted(by_id) != list(range(len(by_id))):
            raise FileError(f"{path}: the token ids are not 0 to {len(by_id) - 1}")
        pairs = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in merges]
        return cls([by_id[i] for i in range(len(by_id))], pairs, added)

    @cached_property
    def _bpe(self):
        from tokenizers import Regex, pre_tokenizers
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE

        try:
            backend = Backend(BPE(self._ids, self._merges))
        except Exception as error:  # the library raises nothing narrower
            raise FileError(f"the tokenizer's merges do not fit its tokens: {error}") from None
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
        return backend

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; a control token spelt out in it gives ordinary tokens."""
        return self._bpe.encode(text, add_special_tokens=False).ids if text else []

    def encode_parts(self, parts: Iterable[str]) -> list[int]:
        """A renderer's parts to ids: each Control is one id, each stretch of text by itself.

        Raises FileError for a Control that the vocabulary lacks.
        """
        ids = []
        for part in parts:
            if not isinstance(part, Control):
                ids += self.encode(part)
            elif part in self._added:
                ids.append(self._added[part])
            else:
                raise FileError(f"the tokenizer has no control token {part!s}")
        return ids

    def encode_marked(self, text: str) -> list[int]:
        """Like `encode`, but every added token that is spelt out becomes its id (trusted text)."""
        found = self._markers.split(text)
        return self.encode_parts(Control(t) if i % 2 else t for i, t in enumerate(found))

    @cached_property
    def _markers(self) -> re.Pattern:
        longest_first = sorted(self._added, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def special(self, text: str) -> int | None:
        """The id of an added token by its text."""
        return self._added.get(text)

    @property
    def has_chat_roles(self) -> bool:
        return all(t in self._added for t in (USER, ASSISTANT, THINK, END_THINK))

    @property
    def stop_ids(self) -> frozenset[int]:
        """The end token; as a guard also those that can only start a forged turn (chat 10)."""
        texts = (EOS, BOS, USER, ASSISTANT)
        return frozenset(self._added[t] for t in texts if t in self._added)

    def token_bytes(self, id: int) -> bytes:
        """What a token writes."""
        text = self._tokens[id]
        if text in self._added:
            return text.encode()
        return bytes(_BYTES[c] for c in text)

    def is_added(self, id: int) -> bool:
        """Whether a token is an added one: a control token or a marker."""
        return self._tokens[id] in self._added

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all ids together; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def stream(self) -> "Stream":
        return Stream(self)


class Stream:
    """Decodes token by token, in whole characters: the pieces joined are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is left of an unfinished character."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
