"""Generated text into reasoning, answer and tool calls, piece by piece (chat 11 and 12)."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .tokenizer import DSML, END_THINK, THINK

# Inside the parser a marker is one character that no decoded text holds (a lone surrogate), so
# that the same spelling in ordinary tokens stays text.
_OPEN, _CLOSE, _DSML = "\ud800", "\ud801", "\ud802"
_MARKS = {THINK: _OPEN, END_THINK: _CLOSE, DSML: _DSML}
_SPELT = str.maketrans({mark: text for text, mark in _MARKS.items()})

# What low bit widths do to tags: bars doubled, underscores lost, quotes escaped or typographic.
_BAR, _QUOTE = "[｜|]?", r"\\?[\"'“”‘’]"
_BLOCK = ("tool_calls", "toolcalls", "tool")
_KINDS = (*_BLOCK, "invoke", "parameter")
_TAG = re.compile(rf"<(/?){_BAR}{_DSML}{_BAR}(\w{{0,20}})([^<>\n{_OPEN}-{_DSML}]{{0,1000}})(>?)")
_TAG_START = re.compile(rf"</?{_BAR}{_DSML}")
_TAG_TAIL = re.compile(rf"(?:</?{_BAR})?")
_TEXT_STOP = re.compile(rf"[{_OPEN}{_CLOSE}]|<{_BAR}(?={_DSML})")
_TEXT_TAIL = re.compile(rf"(?:<{_BAR})?\Z")
_NAME = re.compile(rf"\bname\s*=\s*{_QUOTE}(.*?){_QUOTE}\s*(?=string\s*=|/?$)")
_STRING = re.compile(rf"\bstring\s*=\s*(?:{_QUOTE})?(true|false)\b", re.I)
_VALUE_END = re.compile(rf"</{_BAR}{_DSML}{_BAR}parameter ?>")
_CUT_END = re.compile(rf"</{_BAR}{_DSML}{_BAR}\w*\Z")
_BLOCK_END = re.compile(rf"</{_BAR}{_DSML}{_BAR}(?:{'|'.join(_BLOCK)}) ?>")
_END_LENGTH = 17  # of the longest of these two
_SPACE, _GAP = re.compile(r"\s*"), re.compile(r"\s{0,100}")

Part = tuple[str, bool]  # text, and whether it belongs to the reasoning


@dataclass(frozen=True)
class BrokenCall:
    """A call or a block of calls that could not be read: what was wrong, and all of its text."""

    problem: str
    raw: str
    name: str | None = None  # of the tool, where it was read
    parameter: str | None = None  # whose value was cut off
    text: str = ""  # what came of that value


class OutputParser:
    """Takes what was generated after the prompt, without the end token, in pieces of any size.

    thinking: whether the prompt ended with `<think>`. tools: the tools that were offered, or True
    for any; without, quoted markup is text. in_block: the prompt has opened the call block (a
    required call).

    `push` and `finish` give the parts of text that are sure by then. `calls` are the complete
    calls so far (dicts with name and arguments), `broken` those that could not be read. After
    `finish`, `finish_reason` is "tool_calls" if there is a call, else the reason given.

    >>> parser = OutputParser(thinking=True)
    >>> [*parser.push("Two and two.</think>Fo"), *parser.push("ur."), *parser.finish("stop")]
    [('Two and two.', True), ('Fo', False), ('ur.', False)]
    """

    def __init__(
        self, thinking: bool, tools: Sequence[dict] | bool = (), *, in_block: bool = False
    ):
        self.calls: list[dict] = []
        self.broken: list[BrokenCall] = []
        self.finish_reason: str | None = None
        self._offered = bool(tools)
        functions = [] if isinstance(tools, bool) else [tool["function"] for tool in tools]
        self._schemas = {f["name"]: f.get("parameters") or {} for f in functions}
        self._state = "reasoning" if thinking else "answer"
        self._parts: list[Part] = []
        self._spelling = ""  # may become a marker's spelling
        self._rest = ""  # not yet read; in a block, all of it
        self._newlines = 0  # before `_rest`: they may belong to a block
        self._parameter: _Tag | None = None  # whose value is open
        self._late: list[str] = []  # after `_rest`: cannot end that value
        self._may_end = False
        self._final = self._cut = False
        self._half = 0  # characters at the end that are half of a marker's spelling
        if in_block:
            self._enter_block(at=0, opener=True)

    @property
    def done(self) -> bool:
        """The call block is closed: later text is dropped, generation may end."""
        return self._state == "done"

    def push(self, text: str, control: bool | None = None) -> list[Part]:
        """More text. control: whether it is one added token; None: not known, and then markers
        count by their spelling."""
        if control is None:
            text = self._by_spelling(self._spelling + text)
        elif control:
            text = self._marked(text)
        self._late.append(text)
        self._may_end = self._may_end or _DSML in text
        ends = (self._may_end and ">" in text) or _CLOSE in text
        if (self._parameter or self._state == "broken") and not ends:
            return []  # to join a long text piece by piece would be quadratic
        return self._advance()

    def finish(self, reason: str) -> list[Part]:
        """No more comes; `reason` is "stop", or why it was cut ("length", ..)."""
        self._late.append(self._spelling)
        self._half = len(self._spelling)
        self._final, self._cut = True, reason != "stop"
        parts = self._advance()
        self.finish_reason = "tool_calls" if self.calls else reason
        return parts

    def _marked(self, text: str) -> str:
        """A marker's character; without tools, markup is text."""
        return text if text == DSML and not self._offered else _MARKS.get(text, text)

    def _by_spelling(self, text: str) -> str:
        for spelt in _MARKS:
            text = text.replace(spelt, self._marked(spelt))
        starts = (spelt[:n] for spelt in _MARKS for n in range(1, len(spelt)))
        waits = max((len(start) for start in starts if text.endswith(start)), default=0)
        self._spelling = text[len(text) - waits :]
        return text[: len(text) - waits]

    def _advance(self) -> list[Part]:
        self._rest += "".join(self._late)
        self._late.clear()
        steps = {"block": self._read_block, "broken": self._read_broken}
        while self._state != "done" and steps.get(self._state, self._read_text)():
            pass
        if self._state == "done":
            self._rest = ""
        parts, self._parts = self._parts, []
        return parts

    def _say(self, text: str):
        if text:
            self._parts.append((text.translate(_SPELT), self._state == "reasoning"))

    def _read_text(self) -> bool:
        """Text up to the next marker, and the marker. True: read on."""
        if self._offered and not self._final and not self._rest.strip("\n"):
            self._newlines += len(self._rest)
            self._rest = ""
            return False
        text = self._rest = "\n" * self._newlines + self._rest
        self._newlines = 0
        stop = _TEXT_STOP.search(text)
        if not stop:
            at = len(text)
            if self._offered and not self._final:  # newlines before a block belong to it
                at = _TEXT_TAIL.search(text, max(0, len(text) - 2)).start()
                at = len(text[:at].rstrip("\n"))
            self._say(text[:at])
            self._rest = text[at:]
            return False
        at = stop.start()
        if stop[0] in (_OPEN, _CLOSE):
            shown = stop[0] == _OPEN and self._state == "answer"
            self._say(text[: stop.end() if shown else at])
            self._rest = text[stop.end() :]
            if stop[0] == _CLOSE:
                self._state = "answer"
            return True
        return self._read_opener(len(text[:at].rstrip("\n")), at)

    def _read_opener(self, start: int, at: int) -> bool:
        """The tag at `at`, with newlines from `start`, opens a block or is text."""
        text, tag = self._rest, _tag(self._rest, at)
        opens = self._opens(tag)
        if opens is False or (opens is None and self._final and not self._cut):
            self._say(text[: at + 1])
            self._rest = text[at + 1 :]
            return True
        self._say(text[:start])
        self._rest = text[start:]
        if opens:
            block = tag.kind == "block"
            self._enter_block((tag.end if block else at) - start, opener=block)
        elif self._cut:
            self._break("is cut off in its opening tag", self._rest)
            self._rest = ""
        return bool(opens)

    def _opens(self, tag: "_Tag | bool | None") -> bool | None:
        """Whether calls begin with this tag; None if later text tells."""
        if not tag:
            return tag
        if tag.closes or tag.kind != "block":
            return tag.kind == "invoke" and not tag.closes and bool(tag.name)
        after = _GAP.match(self._rest, tag.end).end()
        if _TAG_START.match(self._rest, after):
            return True
        waits = _TAG_TAIL.fullmatch(self._rest, after, len(self._rest) - self._half)
        return None if waits else False

    def _enter_block(self, at: int, opener: bool):
        self._before, self._state = self._state, "block"
        self._sure = opener  # a call without the block's opener may still be quoted text
        self._from, self._at = 0, at  # in `_rest`: end of the last complete call; read so far
        self._name, self._arguments = None, {}  # of the call that is open
        self._parameter = None

    def _read_block(self) -> bool:
        """Calls, tag by tag. True: the block has ended in one way or another."""
        while self._state == "block":
            if self._parameter:
                if not self._read_value():
                    return self._final and self._fail("ends inside a value", len(self._rest))
                continue
            self._at = _SPACE.match(self._rest, self._at).end()
            tag = _tag(self._rest, self._at)
            if tag:
                if not self._take(tag):
                    return self._fail(f"has a misplaced {self._rest[self._at : tag.end]}")
            elif tag is None and not self._final:
                return False
            elif self._from and self._name is None:  # text after a call is dropped
                after = self._rest.find("<", self._at + 1)
                self._at = after if after > 0 else len(self._rest)
                if self._final and after < 0:
                    self._state = "done"
            else:
                problem = "is not closed" if tag is None else "has text where a tag is wanted"
                return self._fail(problem)
        return True

    def _take(self, tag: "_Tag") -> bool:
        """Whether the tag fits here. The block's end and the next call close an open call too."""
        inside = self._name is not None
        if tag.kind == "parameter":
            fits = inside and not tag.closes and tag.name is not None
            self._parameter = tag if fits else None
        elif tag.closes:
            fits = inside or self._from > 0
        else:
            fits = tag.kind == "invoke" and bool(tag.name)
        if not fits:
            return False
        if inside and tag.kind != "parameter":
            self._complete()
            self._from = tag.end if tag.closes else self._at
        self._at = tag.end
        if tag.kind == "block":
            self._state = "done"
        elif tag.kind == "invoke" and not tag.closes:
            self._name, self._arguments = tag.name, {}
        return True

    def _read_value(self) -> bool:
        """The value that is open, if its end is there: nothing else counts inside."""
        tag, text = self._parameter, self._rest
        end = _VALUE_END.search(text, self._at)
        if not end:
            self._at = max(tag.end, len(text) - _END_LENGTH)
            self._may_end = _DSML in text[self._at :]
            return False
        value = text[tag.end : end.start()].translate(_SPELT)
        self._arguments[tag.name] = _value(value, tag.string)
        self._parameter, self._at = None, end.end()
        return True

    def _complete(self):
        self.calls.append({"name": self._name, "arguments": self._unwrapped()})
        self._name = None

    def _unwrapped(self) -> dict:
        """Some calls come nested in one parameter that their schema does not have (chat 12)."""
        known = self._schemas.get(self._name, {}).get("properties")
        if known is not None and len(self._arguments) == 1:
            ((name, value),) = self._arguments.items()
            inner = _value(value, None) if isinstance(value, str) else value
            if name in ("arguments", "input") and name not in known and isinstance(inner, dict):
                return inner
        return self._arguments

    def _fail(self, problem: str, at: int | None = None) -> bool:
        if not self._sure and not self._from and not self._cut:  # it was only quoted
            at = self._rest.index("<") + 1
            self._state = self._before
            self._say(self._rest[:at])
            self._rest = self._rest[at:]
        else:
            self._problem, self._state = problem, "broken"
            self._at = self._at if at is None else at
        return True

    def _read_broken(self) -> bool:
        """The rest of a block that cannot be read, up to its end or the reasoning's."""
        end = _BLOCK_END.search(self._rest, self._at)
        close = self._rest.find(_CLOSE, self._at) if self._before == "reasoning" else -1
        if not end and close < 0 and not self._final:
            self._at = max(self._at, len(self._rest) - _END_LENGTH)
            self._may_end = _DSML in self._rest[self._at :]
            return False
        stop = min(end.end() if end else len(self._rest), close if close >= 0 else len(self._rest))
        value = self._rest[self._parameter.end :] if self._parameter else ""
        self._break(
            self._problem,
            self._rest[self._from : stop],
            name=self._name,
            parameter=self._parameter and self._parameter.name,
            text=_CUT_END.sub("", value).translate(_SPELT),
        )
        self._rest = self._rest[stop:]
        self._state = "done" if self._from else self._before
        return bool(self._rest)

    def _break(self, problem: str, raw: str, **where):
        what = "the call block" if where.get("name") is None else f"the call of {where['name']}"
        problem = f"{what} {problem}".translate(_SPELT)
        self.broken.append(BrokenCall(problem, raw.translate(_SPELT), **where))


class _Tag(NamedTuple):
    kind: str  # block, invoke or parameter
    closes: bool
    end: int
    name: str | None
    string: str | None  # "true" or "false", where the flag is there


def _tag(text: str, at: int) -> _Tag | bool | None:
    """The tag at `at`; None if more text may make it one, False if not."""
    found = _TAG.match(text, at)
    if not found:
        return None if _TAG_TAIL.fullmatch(text, at) else False
    slash, kind, attributes, closed = found.groups()
    if not closed:
        begun = found.end() == len(text) and any(k.startswith(kind) for k in _KINDS)
        return None if begun else False
    if kind not in _KINDS:
        return False
    name = _NAME.search(attributes)
    others = attributes[: name.start()] + attributes[name.end() :] if name else attributes
    string = _STRING.search(others)
    return _Tag(
        kind="block" if kind in _BLOCK else kind,
        closes=bool(slash),
        end=found.end(),
        name=name and name[1].translate(_SPELT),
        string=string and string[1].lower(),
    )


def _value(text: str, string: str | None):
    """The flag decides: "true" is the text itself, else it is JSON, else the text after all."""
    if string == "true":
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str):
    raise ValueError(f"{constant} is not JSON")
