"""Generated text into reasoning, answer and tool calls, as it streams (chat 11, 12)."""

import json
import re
from collections.abc import Iterator, Sequence

from .tokenizer import DSML, END_THINK, THINK

# Inside the parser a marker is one character that no text contains (a lone surrogate), so that
# its spelling in ordinary tokens stays text.
_OPEN, _CLOSE, _DSML = "\ud800", "\ud801", "\ud802"
_SPELT = {THINK: _OPEN, END_THINK: _CLOSE, DSML: _DSML}
_AS_TEXT = str.maketrans({mark: text for text, mark in _SPELT.items()})

_BLOCK = re.compile(f"\n*<{_DSML}(?:(?:tool_?calls|tool)>\n*|(?=invoke ))")
_PARTIAL_BLOCK = re.compile(f"\n*(?:<(?:{_DSML}(?:[a-z_]{{0,10}}))?)?\\Z")
_INVOKE = re.compile(f'\\s*<{_DSML}invoke name="([^"]*)">')
_PARAMETER = re.compile(f'\\s*<{_DSML}parameter name="([^"]*)"(?: string="(true|false)")?>')
_END_PARAMETER, _END_BLOCK = f"</{_DSML}parameter>", re.compile(f"\\s*</{_DSML}tool_?calls>")
_END_INVOKE = re.compile(f"\\s*</{_DSML}invoke>")

Part = tuple[str, bool]  # text, and whether it belongs to the reasoning


class OutputParser:
    """Takes what the model generated piece by piece; the end token is left away by the caller.

    `push` and `finish` give the parts that are sure. Afterwards `calls` holds the complete calls
    (name, arguments), `incomplete` the call that was cut off (name, parameter, text), and
    `malformed` a block that could not be read, verbatim. `tools` are the schemas that were
    offered; without any, quoted markup is text.
    """

    def __init__(self, thinking: bool, tools: Sequence[dict] = ()):
        self.reasoning, self.answer = "", ""
        self.calls: list[dict] = []
        self.incomplete: dict | None = None
        self.malformed: str | None = None
        self.finish_reason: str | None = None
        self._schemas = {t["function"]["name"]: t["function"] for t in tools}
        self._thinking = thinking
        self._state = "reasoning" if thinking else "answer"
        self._text = ""  # not yet sure: may be the start of a marker
        self._spelling = ""  # likewise, before markers are recognised by their text

    def push(self, text: str, control: bool | None = None) -> list[Part]:
        """More text. `control` tells whether it is a marker's own token; None: unknown, so that
        markers count by their spelling."""
        if control is None:
            text = self._by_spelling(self._spelling + text)
        elif control:
            text = _SPELT.get(text, text)
        self._text += text
        return self._advance(final=False)

    def finish(self, reason: str) -> list[Part]:
        """No more text comes; `reason` is why ("stop", "length", ..)."""
        self._text += self._spelling
        self._spelling = ""
        parts = self._advance(final=True)
        if self._state == "calls":
            self._read_block()
        self.finish_reason = "tool_calls" if self.calls else reason
        return parts

    def _by_spelling(self, text: str) -> str:
        for spelt, mark in _SPELT.items():
            text = text.replace(spelt, mark)
        # A tail that may become a marker waits; the longest such tail counts.
        waits = max(
            n
            for spelt in _SPELT
            for n in range(len(spelt))
            if text.endswith(spelt[:n])
        )
        self._spelling = text[len(text) - waits :]
        return text[: len(text) - waits]

    def _advance(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._state in ("reasoning", "answer"):
            state = self._state
            sure, self._text, moved = self._scan(self._text, final)
            if part := self._kept(state, sure.translate(_AS_TEXT)):
                parts.append((part, state == "reasoning"))
            if not moved:
                break
        if self._state == "calls" and self._closed():
            self._read_block()
            self._state = "done"
        if self._state == "done":
            self._text = ""
        return parts

    def _kept(self, state: str, text: str) -> str:
        """Adds `text` to its field, without newlines at the very start of a thinking reply."""
        have = getattr(self, state)
        if self._thinking and not have:
            text = text.lstrip("\n")
        setattr(self, state, have + text)
        return text

    def _scan(self, text: str, final: bool) -> tuple[str, str, bool]:
        """(sure text, rest, whether a marker was passed) of the text in this state."""
        thinking = self._state == "reasoning"
        marks = f"\n*{_CLOSE}|{_OPEN}" if thinking else f"{_CLOSE}|{_OPEN if self._thinking else _CLOSE}"
        mark = re.search(marks, text)
        block = _BLOCK.search(text) if self._schemas else None
        if block and (not mark or block.start() <= mark.start()):
            self._state = "calls"
            return text[: block.start()], text[block.end() :], True
        if mark:
            if thinking and mark[0].endswith(_CLOSE):
                self._state = "answer"
            return text[: mark.start()], text[mark.end() :], True
        return *self._split_tail(text, final), False

    def _split_tail(self, text: str, final: bool) -> tuple[str, str]:
        """Text that no later piece can change, and the tail that may be a marker's start."""
        if self._schemas:
            at = _PARTIAL_BLOCK.search(text).start()
            if not final:
                return text[:at], text[at:]
            return (text[:at], "") if _DSML in text[at:] else (text, "")
        newlines = len(text) - len(text.rstrip("\n")) if self._state == "reasoning" else 0
        at = len(text) if final else len(text) - newlines
        return text[:at], text[at:]

    def _closed(self) -> bool:
        return any(kind == "end" for kind, *_ in self._read(self._text))

    def _read_block(self):
        opened: dict | None = None
        for kind, *found in self._read(self._text):
            if kind == "invoke":
                opened = {"name": found[0], "arguments": {}}
            elif kind == "parameter":
                name, string, value = found
                opened["arguments"][name] = _value(value.translate(_AS_TEXT), string)
            elif kind == "call":
                self.calls.append(self._unwrapped(opened))
                opened = None
            elif kind == "cut":
                parameter, text = found
                name = opened and opened["name"]
                self.incomplete = {"name": name, "parameter": parameter, "text": text}
            elif kind == "malformed":
                self.malformed = self._text.translate(_AS_TEXT)
        self._text = ""

    def _read(self, text: str) -> Iterator[tuple]:
        """The tags of a block in order; inside a value only its own end counts."""
        at, inside = 0, False
        while True:
            if not inside and (end := _END_BLOCK.match(text, at)):
                yield ("end",)
                return
            if not text[at:].strip():
                if inside:
                    yield "cut", None, ""
                return
            if inside and (end := _END_INVOKE.match(text, at)):
                inside, at = False, end.end()
                yield ("call",)
            elif not inside and (tag := _INVOKE.match(text, at)):
                inside, at = True, tag.end()
                yield "invoke", tag[1]
            elif inside and (tag := _PARAMETER.match(text, at)):
                stop = text.find(_END_PARAMETER, tag.end())
                if stop < 0:
                    yield "cut", tag[1], text[tag.end() :].translate(_AS_TEXT)
                    return
                yield "parameter", tag[1], tag[2], text[tag.end() : stop]
                at = stop + len(_END_PARAMETER)
            elif ">" not in text[at:]:  # a tag that was cut off
                yield "cut", None, text[at:].translate(_AS_TEXT)
                return
            else:
                yield ("malformed",)
                return

    def _unwrapped(self, call: dict) -> dict:
        """Models nest their call in `arguments` or `input` at times; that is undone (chat 12)."""
        schema = self._schemas.get(call["name"], {}).get("parameters", {}).get("properties", {})
        for wrapper in ("arguments", "input"):
            inner = call["arguments"].get(wrapper)
            if len(call["arguments"]) == 1 and isinstance(inner, dict) and wrapper not in schema:
                return {"name": call["name"], "arguments": inner}
        return call


def _value(text: str, string: str | None):
    """The flag decides: "true" is the text itself, else JSON, else the text."""
    if string == "true":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
