"""Byte-level BPE, rebuilt from a GGUF's own metadata; text can never become a control token."""

import codecs
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

from .convert.gguf import some
from .errors import FileError, UsageError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
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
# Options of a tokenizer.json's model that would change its merges; all must be off.
_PLAIN = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_PLAIN += ("byte_fallback", "ignore_merges")


class Control(str):
    """A control token that a renderer wrote; a plain str is always plain text."""


class Tokenizer:
    """Text to ids and back: byte-level BPE with the splits of DeepSeek V3 and V4 (chat 13).

    tokens: all texts by id, base ones in the GPT-2 byte alphabet, those in `added` (ids) as they
    are. merges: pairs of token texts in order of rank. Raises FileError for lists that do not
    make a whole tokenizer, or by which plain text could become an added token.

    >>> tokenizer.encode_parts([Control("<｜User｜>"), "What is a <｜User｜>?"])
    """

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[tuple[str, str]], added: Iterable[int]
    ):
        self._tokens, self._merges = tokens, merges
        self._ids = {text: i for i, text in enumerate(tokens)}
        self._added = {tokens[i]: i for i in added}
        if problems := list(self._problems()):
            raise FileError(f"the tokenizer does not fit together: {'; '.join(problems)}")
        self.vocab_size = len(tokens)
        self.bos, self.eos = self._added[BOS], self._added[EOS]

    @classmethod
    def from_gguf(cls, metadata: Mapping) -> "Tokenizer":
        """From the keys `tokenizer.ggml.*` (chat 13). Raises FileError for missing or odd ones."""
        names = [f"tokenizer.ggml.{n}" for n in ("model", "pre", "tokens", "token_type", "merges")]
        if absent := [name for name in names if name not in metadata]:
            raise FileError(f"the tokenizer lacks the metadata {', '.join(absent)}")
        model, pre, tokens, types, merges = (metadata[name] for name in names)
        texts = isinstance(model, str) and isinstance(pre, str)
        if not texts or model != "gpt2" or pre not in _PRE_NAMES:
            raise FileError(
                f"{names[0]} is {model!r:.60} and {names[1]} is {pre!r:.60}, wanted 'gpt2' and "
                f"one of {', '.join(_PRE_NAMES)}"
            )
        for name, texts in ((names[2], tokens), (names[4], merges)):
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise FileError(f"{name} is {texts!r:.60}, wanted a list of strings")
        count = len(types) if hasattr(types, "__len__") else "no"
        if count != len(tokens):
            raise FileError(f"{names[3]} has {count} entries, wanted {len(tokens)}, as {names[2]}")
        added = [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
        return cls(tokens, [tuple(line.split(" ", 1)) for line in merges], added)

    @classmethod
    def from_json(cls, path: str | Path) -> "Tokenizer":
        """From a Hugging Face tokenizer.json with the same splits. Raises FileError."""
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            model = data["model"]
            by_id = {i: text for text, i in model["vocab"].items()}
            added = {token["id"]: token["content"] for token in data["added_tokens"]}
            steps = data["pre_tokenizer"]["pretokenizers"]
            splits = [step["pattern"]["Regex"] for step in steps[:-1]]
            pairs = [tuple(m.split(" ", 1) if isinstance(m, str) else m) for m in model["merges"]]
            by_id |= added
            ids = sorted(map(operator.index, by_id))
            added = {operator.index(i): text for i, text in added.items()}
            "".join([*by_id.values(), *chain.from_iterable(pairs)]).encode()  # all are texts
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = f"not a byte-level BPE tokenizer.json ({error!r:.200})"
            raise FileError(f"{path}: {why}") from None
        odd = [k for k in _PLAIN if model.get(k)]
        changes = data.get("normalizer") not in (None, {"type": "Sequence", "normalizers": []})
        if changes or odd or splits != list(_SPLITS):
            raise FileError(
                f"{path}: wanted the three splits of DeepSeek V3, no normalizer and a plain BPE "
                f"model; found {len(splits)} splits, normalizer {data.get('normalizer')!r:.60} "
                f"and model options {', '.join(odd) or 'none'}"
            )
        if ids != list(range(len(by_id))):
            raise FileError(f"{path}: the token ids are not 0 to {len(by_id) - 1}")
        return cls([by_id[i] for i in range(len(by_id))], pairs, added)

    def to_json(self) -> dict:
        """What `from_json` reads, as a Hugging Face tokenizer.json has it."""
        plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
        # As in the official file, the tokens of roles and markup are not "special".
        added = [
            {"id": i, "content": text, **plain, "special": text in (BOS, EOS, PAD)}
            for text, i in sorted(self._added.items(), key=lambda item: item[1])
        ]
        splits = [
            {"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False}
            for s in _SPLITS
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps = [*splits, level | {"use_regex": False}]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": None,
            "decoder": level | {"use_regex": True},
            "model": {
                "type": "BPE",
                **dict.fromkeys(("dropout", "unk_token")),
                **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix")),
                **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
                "vocab": self._ids,  # with the added ones: other readers number anew what is absent
                "merges": [list(pair) for pair in self._merges],
            },
        }

    def _problems(self) -> Iterator[str]:
        if len(self._ids) < len(self._tokens):
            twice = [t for i, t in enumerate(self._tokens) if self._ids[t] != i]
            yield f"tokens that occur twice: {some(map(repr, twice), 5)}"
        if lost := [text for text in (BOS, EOS) if text not in self._added]:
            yield f"control tokens that are missing: {' '.join(lost)}"
        made = {"".join(pair) for pair in self._merges}
        if forged := self._added.keys() & (made | _BYTES.keys()):
            yield f"added tokens that plain text would become: {some(map(repr, sorted(forged)), 5)}"
        unknown = {*made, *chain.from_iterable(self._merges)} - self._ids.keys()
        if unknown or set(map(len, self._merges)) - {2}:
            odd = [p for p in self._merges if len(p) != 2 or {*p, "".join(p)} & unknown]
            lines = (repr(" ".join(pair)) for pair in odd)
            yield f"merges that are not two tokens making a third: {some(lines, 5)}"

    @cached_property
    def _bpe(self):
        from tokenizers import Regex, pre_tokenizers
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE

        # The library drops in silence what it has no token for.
        if lost := [f"{byte:#04x}" for char, byte in _BYTES.items() if char not in self._ids]:
            raise FileError(f"the tokenizer cannot encode text: no token for {some(lost, 5)}")
        backend = Backend(BPE(self._ids, self._merges))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
        return backend

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; a control token spelt out in it gives ordinary tokens.

        Raises UsageError for text that is not Unicode (half a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text has half a surrogate pair, {text[error.start]!r}, at character "
                f"{error.start}, wanted whole characters"
            ) from None
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
        try:
            return bytes(_BYTES[char] for char in text)
        except KeyError:  # a base token that no merge can make, kept as it is
            return text.encode()

    def is_added(self, id: int) -> bool:
        """Whether a token is an added one: a control token or a marker."""
        return self._tokens[id] in self._added

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """The text of all ids together; bytes that are no UTF-8 become U+FFFD.

        special=False leaves out the added tokens.
        """
        stream = self.stream(special=special)
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self, *, special: bool = True) -> "Stream":
        """A decoder for one token at a time."""
        return Stream(self, special)


class Stream:
    """Decodes token by token, in whole characters: the pieces joined are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, special: bool = True):
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this token completes."""
        if not self._special and self._tokenizer.is_added(id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is left of an unfinished character, once no more tokens come."""
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
