import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4mlx.chat import render
from ds4mlx.parse import OutputParser
from ds4mlx.tokenizer import Control
from tests.real_tokenizer import tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "chat_golden.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["parse"]}

OPEN, END = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"
INVOKE, END_INVOKE = '<｜DSML｜invoke name="f">\n', "</｜DSML｜invoke>\n"
END_VALUE = "</｜DSML｜parameter>\n"


def value(text: str, string: str = "true", name: str = "a") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{string}">{text}{END_VALUE}'


A = value("x")
CALL = f"{INVOKE}{A}{END_INVOKE}"
BLOCK = f"\n\n{OPEN}{CALL}{END}"
F = {"name": "f", "arguments": {"a": "x"}}


def parse(pieces, *, thinking=False, tools=True, reason="stop", control=None, **options) -> dict:
    """Everything that a parser gives for `pieces`."""
    parser = OutputParser(thinking, tools, **options)
    parts = [part for piece in pieces for part in parser.push(piece, control)]
    parts += parser.finish(reason)
    return {
        "reasoning": "".join(text for text, reasoning in parts if reasoning),
        "content": "".join(text for text, reasoning in parts if not reasoning),
        "tool_calls": parser.calls,
        "broken": parser.broken,
        "finish_reason": parser.finish_reason,
    }


def everywhere(text: str, **options) -> dict:
    """The result, which must be the same for the whole, every cut in two, and by character."""
    whole = parse([text], **options)
    for i in range(len(text) + 1):
        assert parse([text[:i], text[i:]], **options) == whole, f"cut at {i}"
    assert parse(text, **options) == whole
    return whole


def by_ids(ids, *, thinking, tools) -> dict:
    """Parsed with the tokenizer's stream, where only a marker's own id counts."""
    parser, stream, parts = OutputParser(thinking, tools), tokenizer().stream(), []
    for id in ids:
        if tokenizer().is_added(id):
            parts += parser.push(stream.flush(), False)
        parts += parser.push(stream.push(id), tokenizer().is_added(id))
    parts += [*parser.push(stream.flush(), False), *parser.finish("stop")]
    return {
        "reasoning": "".join(text for text, reasoning in parts if reasoning),
        "content": "".join(text for text, reasoning in parts if not reasoning),
        "tool_calls": parser.calls,
    }


# Golden outputs -----------------------------------------------------------------------------


@pytest.mark.parametrize("id", CASES)
def test_golden_outputs_are_split_the_same_at_every_cut(id):
    case = CASES[id]
    got = everywhere(
        case["text"],
        thinking=case["thinking"],
        tools=case["tools_offered"],
        reason=case["finish"],
    )
    accepted = [case["expect"], *case.get("accept", [])]
    fields = ("reasoning", "content", "tool_calls")
    assert {f: got[f] for f in fields} in [{f: a[f] for f in fields} for a in accepted]
    cut = case["expect"].get("incomplete")
    if cut:
        (broken,) = got["broken"]
        assert cut == {"name": broken.name, "parameter": broken.parameter, "text": broken.text}


def test_golden_ids_with_typed_tags_are_split_at_the_markers_only():
    (case,) = GOLDEN["parse_ids"]
    assert by_ids(case["token_ids"][:-1], thinking=True, tools=()) == case["expect"]


# Text ---------------------------------------------------------------------------------------


def test_text_that_cannot_be_a_marker_is_given_at_once():
    parser = OutputParser(thinking=True, tools=True)
    assert parser.push("abc") == [("abc", True)]
    assert parser.push("a\n</thi") == [("a", True)]
    assert parser.push("x") == [("\n</thix", True)]
    assert parser.push("</think>b") == [("b", False)]


def test_newlines_stay_without_tools():
    got = everywhere("\nr\n</think>\n\na\n", thinking=True, tools=())
    assert (got["reasoning"], got["content"]) == ("\nr\n", "\n\na\n")


@pytest.mark.parametrize("reason", ["length", "context", "interrupted"])
def test_reasoning_that_never_ends_leaves_the_answer_empty(reason):
    got = parse(["going on and on"], thinking=True, reason=reason)
    assert (got["content"], got["finish_reason"]) == ("", reason)
    assert got["reasoning"] == "going on and on"


def test_an_opening_tag_in_the_answer_stays():
    for thinking in (False, True):
        got = everywhere("r</think>a <think> b", thinking=thinking)
        assert got["content"].endswith("a <think> b")


# Calls with defects -------------------------------------------------------------------------

SMART = CALL.replace('"', "”")
READ = {
    "as trained": (BLOCK, [F]),
    "two calls": (f"\n\n{OPEN}{CALL}{CALL}{END}", [F, F]),
    "block never closed": (f"\n\n{OPEN}{CALL}", [F]),
    "block never opened": (f"\n\n{CALL}{END}", [F]),
    "call alone": (CALL, [F]),
    "opener without underscore": (BLOCK.replace("tool_calls", "toolcalls"), [F]),
    "opener cut short": (BLOCK.replace("tool_calls", "tool"), [F]),
    "opener and closer spelt differently": (f"<｜DSML｜tool>{CALL}{END}", [F]),
    "bars doubled": (BLOCK.replace("｜DSML｜", "｜｜DSML｜｜"), [F]),
    "ASCII bars added": (BLOCK.replace("｜DSML｜", "|｜DSML｜|"), [F]),
    "typographic quotes": (f"{OPEN}{SMART}{END}", [F]),
    "single quotes": (BLOCK.replace('"', "'"), [F]),
    "escaped quotes": (BLOCK.replace('"', '\\"'), [F]),
    "spaces in tags": (BLOCK.replace("=", " = ").replace(">", " >"), [F]),
    "no line breaks": (BLOCK.replace("\n", ""), [F]),
    "Windows line breaks": (BLOCK.replace("\n", "\r\n").lstrip(), [F]),
    "tags indented": (f"{OPEN}  {CALL}".replace("\n<", "\n  <"), [F]),
    "call never closed, block closed": (f"{OPEN}{INVOKE}{A}{END}", [F]),
    "call never closed, next call": (f"{OPEN}{INVOKE}{A}{CALL}{END}", [F, F]),
    "call closed twice": (f"{OPEN}{CALL}{END_INVOKE}{CALL}{END}", [F, F]),
    "text between calls": (f"{OPEN}{CALL}and\n{CALL}{END}", [F, F]),
    "text after the calls": (f"{OPEN}{CALL}I < wait.", [F]),
    "text after the block": (f"{BLOCK}\n\nI wait. {BLOCK}", [F]),
}


@pytest.mark.parametrize("defect", READ)
def test_a_call_is_read_in_spite_of(defect):
    text, calls = READ[defect]
    got = everywhere(f"Look.{text}")
    assert got == {
        "reasoning": "",
        "content": "Look.",
        "tool_calls": calls,
        "broken": [],
        "finish_reason": "tool_calls",
    }


VALUES = {
    "flag decides for text": (value("5"), "5"),
    "flag decides for JSON": (value("5", "false"), 5),
    "flag capitalised": (value("5", "False"), 5),
    "flag without quotes": (value("5").replace('"true"', "true"), "5"),
    "flag before the name": (f'<｜DSML｜parameter string="true" name="a">5{END_VALUE}', "5"),
    "no flag, JSON": (f'<｜DSML｜parameter name="a">[1]{END_VALUE}', [1]),
    "no flag, text": (f'<｜DSML｜parameter name="a">notes{END_VALUE}', "notes"),
    "odd flag": (value("5", "yes"), 5),
    "JSON flag, text": (value("notes", "false"), "notes"),
    "JSON flag, not in JSON": (value("NaN", "false"), "NaN"),
    "JSON flag, endless nesting": (value("[" * 2000, "false"), "[" * 2000),
    "JSON on several lines": (value('\n{"k":\n1}\n', "false"), {"k": 1}),
    "empty": (value(""), ""),
    "markup and quotes": (value('a > b </x> "q" &amp; \\n'), 'a > b </x> "q" &amp; \\n'),
    "line breaks and spaces": (value("\n\r\n x \n"), "\n\r\n x \n"),
    "reasoning tags": (value("<think></think>"), "<think></think>"),
    "a quoted call": (value(INVOKE + END_INVOKE + END), INVOKE + END_INVOKE + END),
    "the same parameter twice": (value("1") + value("2"), "2"),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_is_exact_for(case):
    parameters, wanted = VALUES[case]
    got = everywhere(f"{OPEN}{INVOKE}{parameters}{END_INVOKE}{END}")
    assert got["tool_calls"] == [{"name": "f", "arguments": {"a": wanted}}]
    assert (got["content"], got["broken"]) == ("", [])


NAMELESS = f"<｜DSML｜parameter>x{END_VALUE}"
BROKEN = {
    "text inside a call": (f"{OPEN}{INVOKE}please\n{END_INVOKE}{END}", "f", None, ""),
    "a wrong closer": (f"{OPEN}{INVOKE}{A}</｜DSML｜function>\n{END}", "f", None, ""),
    "a stray value end": (f"{OPEN}{INVOKE}{A}{END_VALUE}{END_INVOKE}{END}", "f", None, ""),
    "a call without name": (f"{OPEN}<｜DSML｜invoke>\n{A}{END_INVOKE}{END}", None, None, ""),
    "a parameter without name": (f"{OPEN}{INVOKE}{NAMELESS}{END}", "f", None, ""),
    "a parameter outside": (f"{OPEN}{A}{END}", None, None, ""),
    "no call at all": (f"{OPEN}{END}", None, None, ""),
    "two openers": (f"{OPEN}{OPEN}{CALL}{END}", None, None, ""),
    "an opener closed as a call": (f"{OPEN}{END_INVOKE}{END}", None, None, ""),
    "a value without end": (
        f'{OPEN}{INVOKE}<｜DSML｜parameter name="a" string="true">x{END_INVOKE}{END}',
        "f",
        "a",
        f"x{END_INVOKE}",
    ),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_block_is_given_back_whole_with_a_reason_for(defect):
    raw, name, parameter, text = BROKEN[defect]
    got = everywhere(f"Look.{raw}")
    (broken,) = got["broken"]
    assert (broken.raw, broken.name, broken.parameter) == (raw, name, parameter)
    assert broken.problem.startswith("the call of f " if name else "the call block ")
    assert broken.text.startswith(text)
    assert (got["content"], got["tool_calls"], got["finish_reason"]) == ("Look.", [], "stop")


def test_the_answer_goes_on_after_a_block_that_could_not_be_read():
    got = everywhere(f"One.{OPEN}{END} Two.{BLOCK}")
    assert (got["content"], got["tool_calls"]) == ("One. Two.", [F])
    assert [broken.raw for broken in got["broken"]] == [f"{OPEN}{END}"]


def test_complete_calls_before_a_broken_one_are_kept():
    got = everywhere(f"{OPEN}{CALL}{INVOKE}oops{END_INVOKE}{END}")
    assert got["tool_calls"] == [F]
    assert [broken.raw for broken in got["broken"]] == [f"\n{INVOKE}oops{END_INVOKE}{END}"]


QUOTED = [
    f"Write {OPEN}",
    f"A block opens with `{OPEN.strip()}` and ends with `{END}`.",
    f"Write {INVOKE} and so on",
    f"A tag: {INVOKE}...\n{END_INVOKE}",
    "Write <｜DSML｜invoke> or <｜DSML｜",
    f"{END}, {END_INVOKE} and {END_VALUE} close.",
    f"A value alone: {A}",
    BLOCK.replace("<｜DSML｜", "<DSML｜"),
    "｜DSML｜ < ｜ <｜ </｜DSML｜\n\n<",
]


@pytest.mark.parametrize("text", QUOTED)
def test_quoted_markup_stays_text_in_answer_and_reasoning(text):
    got = everywhere(f"{text}</think>{text}", thinking=True)
    assert (got["reasoning"], got["content"]) == (text, text)
    assert (got["tool_calls"], got["broken"]) == ([], [])


@pytest.mark.parametrize("text", [BLOCK, *QUOTED])
def test_markup_is_text_when_no_tools_were_offered(text):
    got = everywhere(f"{text}</think>{text}", thinking=True, tools=[])
    assert (got["reasoning"], got["content"], got["tool_calls"]) == (text, text, [])


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_before_the_end_of_reasoning_is_a_call(reason):
    got = everywhere(f"Hm.{BLOCK}", thinking=True, reason=reason)
    assert (got["reasoning"], got["content"], got["tool_calls"]) == ("Hm.", "", [F])
    assert got["finish_reason"] == "tool_calls"


def test_a_broken_block_in_the_reasoning_leaves_the_answer():
    got = everywhere(f"Hm.{OPEN}{INVOKE}...</think>So.", thinking=True)
    assert (got["reasoning"], got["content"]) == ("Hm.", "So.")
    assert [broken.raw for broken in got["broken"]] == [f"{OPEN}{INVOKE}..."]


def test_an_output_cut_anywhere_gives_complete_calls_only():
    text = f"Look.\n\n{OPEN}{CALL}{CALL}{END}"
    for i in range(len(text)):
        got = parse([text[:i]], reason="length")
        assert got["tool_calls"] == [F] * text[:i].count(END_INVOKE.strip())
        raws = [broken.raw for broken in got["broken"]]
        assert len(raws) <= 1 and text[:i].endswith("".join(raws))
        if "｜DSML｜" in text[:i]:
            assert got["content"] == "Look."
        else:
            assert got["content"] == text[:i]


def test_a_call_cut_after_its_name_is_reported_by_name():
    got = parse([f"{INVOKE}{A}"], reason="length")
    (broken,) = got["broken"]
    assert (broken.name, broken.raw, got["tool_calls"]) == ("f", f"{INVOKE}{A}", [])


def test_a_partial_value_leaves_out_the_beginning_of_its_end():
    got = parse([f"{OPEN}{INVOKE}{A}"[: -len("meter>\n")]], reason="length")
    assert [broken.text for broken in got["broken"]] == ["x"]


def test_generation_may_end_once_the_block_is_closed():
    parser = OutputParser(thinking=False, tools=True)
    parser.push(BLOCK[:-1])
    assert not parser.done
    parser.push(BLOCK[-1])
    assert parser.done and parser.calls == [F]


def test_a_required_call_starts_inside_the_block():
    assert everywhere(f"{CALL}{END}", in_block=True)["tool_calls"] == [F]


# Wrapped arguments --------------------------------------------------------------------------


def schema(*names) -> list[dict]:
    properties = {"properties": {name: {} for name in names}}
    return [{"type": "function", "function": {"name": "f", "parameters": properties}}]


@pytest.mark.parametrize("wrapper", ["arguments", "input"])
@pytest.mark.parametrize("string", ["true", "false"])
def test_wrapped_arguments_are_unwrapped(wrapper, string):
    inner = value('{"a": "x"}', string, wrapper)
    text = f"{OPEN}{INVOKE}{inner}{END_INVOKE}{END}"
    assert everywhere(text, tools=schema("a"))["tool_calls"] == [F]


@pytest.mark.parametrize(
    "tools, parameters",
    [
        (schema("input"), value('{"a": "x"}', "false", "input")),
        (schema("a"), value('{"a": "x"}', "false", "input") + A),
        (schema("a"), value('["x"]', "false", "input")),
        (True, value('{"a": "x"}', "false", "input")),
    ],
    ids=["in the schema", "not alone", "no object", "schema unknown"],
)
def test_a_parameter_called_input_is_kept_when(tools, parameters):
    (call,) = parse([f"{OPEN}{INVOKE}{parameters}{END_INVOKE}{END}"], tools=tools)["tool_calls"]
    assert "input" in call["arguments"]


# Any text -----------------------------------------------------------------------------------

FRAGMENTS = ["<think>", "</think>", OPEN, END, INVOKE, END_INVOKE, A, END_VALUE, "<｜DSML｜", "｜"]
FRAGMENTS += ["\n", " ", "<", ">", "</", "x", '"', "invoke", "tool", value("1", "false", "b")]
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@settings(max_examples=400, deadline=None)
@given(outputs, st.booleans(), st.booleans(), st.sampled_from(["stop", "length"]))
def test_pieces_of_any_size_give_what_the_whole_gives(text, thinking, tools, reason):
    options = {"thinking": thinking, "tools": tools, "reason": reason}
    whole = parse([text], **options)
    assert parse(text, **options) == whole
    assert parse([text[i : i + 3] for i in range(0, len(text), 3)], **options) == whole


@settings(max_examples=200, deadline=None)
@given(outputs, st.booleans())
def test_without_tools_only_reasoning_tags_are_taken_away(text, thinking):
    got = parse(text, thinking=thinking, tools=())
    kept = (got["reasoning"] + got["content"]).replace("<think>", "").replace("</think>", "")
    assert kept == text.replace("<think>", "").replace("</think>", "")


@settings(max_examples=200, deadline=None)
@given(outputs)
def test_text_whose_ids_are_no_markers_is_all_answer(text):
    got = parse(text, control=False)
    assert (got["content"], got["tool_calls"], got["broken"]) == (text, [], [])


words = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=5).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(
    words,
    words.filter(lambda text: not text.endswith("\n")),
    st.dictionaries(st.from_regex(r"[A-Za-z_][\w.-]{0,8}", fullmatch=True), words | json_values),
)
def test_a_rendered_turn_is_parsed_back_by_its_ids(reasoning, content, arguments):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "reasoning_content": reasoning, "content": content}
    messages = [{"role": "user", "content": "?"}, turn | {"tool_calls": [call]}]
    parts = render(messages, think="low", continue_last=True)
    begins = parts.index(Control("<think>")) + 1
    got = by_ids(tokenizer().encode_parts(parts[begins:]), thinking=True, tools=True)
    assert got == {
        "reasoning": reasoning,
        "content": content,
        "tool_calls": [{"name": "f", "arguments": arguments}],
    }


# Long outputs -------------------------------------------------------------------------------

TAGS = ["<", "｜DSML｜", "tool_calls>\n<", "｜DSML｜", 'invoke name="f">\n<', "｜DSML｜"]
LONG = {
    "newlines": ([], "\n"),
    "spaces after the opener": (TAGS[:2] + ["tool_calls>"], " "),
    "a tag that never ends": (TAGS[:4], 'invoke name="'),
    "a value": ([*TAGS, 'parameter name="a" string="true">'], "word 👍 a -> b\n"),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_token_costs_the_same_after_many_others_in(kind, monkeypatch):
    """The text that is looked at for one token, counted where it is read, stays short."""
    read, advance = [], OutputParser._advance

    def counted(self):
        read.append(len(self._rest))
        return advance(self)

    monkeypatch.setattr(OutputParser, "_advance", counted)
    begin, token = LONG[kind]
    parser = OutputParser(thinking=False, tools=True)
    for text in begin:
        parser.push(text, text == "｜DSML｜")
    for _ in range(3000):
        parser.push(token, False)
    assert max(read) < 1200


def test_a_long_value_is_whole_in_the_call_and_in_a_broken_one():
    begin = f'{OPEN}{INVOKE}<｜DSML｜parameter name="a" string="true">'
    text = "a > b ｜DSML｜ > </｜DSML｜para> 👍" * 20
    got = parse(f"{begin}{text}{END_VALUE}{END_INVOKE}{END}")
    assert got["tool_calls"] == [{"name": "f", "arguments": {"a": text}}]
    (broken,) = parse(f"{begin}{text}", reason="length")["broken"]
    assert (broken.raw, broken.text) == (f"{begin}{text}", text)


@pytest.mark.parametrize("tail", [f"{END}abc", f"{END} a longer tail of text", "</think>abc"])
def test_in_a_value_without_end_nothing_else_counts(tail):
    raw = f'{OPEN}{INVOKE}<｜DSML｜parameter name="a" string="true">x{tail}'
    got = everywhere(f"r{raw}", thinking=True)
    (broken,) = got["broken"]
    assert (got["reasoning"], got["content"]) == ("r", "")
    assert (broken.raw, broken.text) == (raw, f"x{tail}")
