"""Messages to a prompt, as DeepSeek's own V4 encoder writes it (chat 3 to 9)."""

import json
import re
from collections.abc import Iterator, Sequence

from .errors import UsageError
from .tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER, Control

LEVELS = ("off", "low", "high", "max")
RELEASES = ("preview", "0731")
ROLES = ("system", "latest_reminder", "user", "assistant", "tool")
REMINDER = "<｜latest_reminder｜>"

_HIGH = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
_MAX = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

"""
_EFFORT = {("0731", "high"): _HIGH, ("0731", "max"): _MAX, ("preview", "max"): _HIGH}

_TOOLS = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_END = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_SCHEMA = """

## Response Format:

You MUST strictly adhere to the following schema to reply:
"""
_ANY_JSON = """

You are a helpful assistant designed to output JSON.
## Response Format:

Reply with JSON object ONLY."""


def render(
    messages: Sequence[dict],
    *,
    think: str = "high",
    release: str = "0731",
    tools: Sequence[dict] | None = None,
    tool_choice: str = "auto",
    response_format: dict | None = None,
    keep_reasoning: bool = False,
    continue_last: bool = False,
) -> list[str]:
    """The prompt as parts: each `Control` is a control token, every other stretch plain text.

    messages: dicts with `role` (system, latest_reminder, user, assistant, tool) and `content`
    (text, or a list of parts), as in OpenAI's API; assistants may have `reasoning_content` and
    `tool_calls`, tools have `tool_call_id`. At most one system message, at the start; the last
    message is a user's or a tool's, unless `continue_last` goes on with an assistant's.
    think: off, low, high or max (preview has no low); what high and max mean to the model depends
    on the checkpoint's release. tools: as in OpenAI's API; with tool_choice "none" they are left
    out, with "required" (only with thinking off) the prompt opens the call block.
    response_format: type json_schema or json_object. keep_reasoning: earlier reasoning stays in
    the prompt even without tools. Raises UsageError for what the official encoders refuse or
    disagree on.

    >>> prompt_text(render([{"role": "user", "content": "Hi"}], think="off"))
    '<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>'
    """
    messages = list(messages)
    _check_words(think, release, tool_choice)
    _check_messages(messages)
    _check_order(messages, continue_last)
    if tool_choice == "none":
        tools = ()
    if tool_choice == "required" and (think != "off" or not tools or continue_last):
        raise UsageError("a required call needs tools, thinking off, and a turn of its own")
    for i, tool in enumerate(tools or ()):
        _function(tool, f"tool {i}")
    parts: list[str] = [Control(BOS)]
    if think != "off":
        parts.append(_EFFORT.get((release, think), ""))
    system = messages.pop(0) if messages[0]["role"] == "system" else {}
    parts.append(_text(system))
    if tools:
        parts += ["\n\n", *_marked(_TOOLS), "\n".join(_json(t["function"]) for t in tools)]
        parts.append(_TOOLS_END)
    parts.append(_answer_format(response_format, [system, *messages]))
    if messages[0]["role"] == "latest_reminder":
        parts += [Control(REMINDER), _text(messages.pop(0))]

    last_user = max((i for i, m in enumerate(messages) if m["role"] != "assistant"), default=-1)
    calls: list[dict] = []
    for i, group in _turns(messages):
        if group[0]["role"] != "assistant":
            parts += [Control(USER), _user(group, calls), Control(ASSISTANT)]
            continue
        (message,) = group
        calls = message.get("tool_calls") or []
        shown = think != "off" and (bool(tools) or keep_reasoning or i > last_user)
        if shown:
            parts += [Control(THINK), message.get("reasoning_content") or ""]
        parts += [Control(END_THINK), _text(message), *_calls(calls)]
        if not (continue_last and i == len(messages) - 1):
            parts.append(Control(EOS))
    if not continue_last:
        parts.append(Control(END_THINK if think == "off" else THINK))
    if tool_choice == "required":
        parts += _marked("\n\n<｜DSML｜tool_calls>\n")
    return _merged(parts)


def prompt_text(parts: Sequence[str]) -> str:
    """The rendered prompt as one string, for people; encode the parts, not this."""
    return "".join(parts)


def _check_words(think: str, release: str, tool_choice: str):
    levels = LEVELS if release != "preview" else [level for level in LEVELS if level != "low"]
    allowed = {"release": RELEASES, "think": levels, "tool_choice": ("auto", "none", "required")}
    given = {"release": release, "think": think, "tool_choice": tool_choice}
    for name, words in allowed.items():
        if given[name] not in words:
            where = f" for release {release}" if name == "think" else ""
            raise UsageError(f"{name} is {given[name]!r}, wanted {' or '.join(words)}{where}")


def _check_messages(messages: list[dict]):
    """Refuses a message that is not in the form of OpenAI's API, or holds more than text."""
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            found = f"role {role!r}" if isinstance(message, dict) else repr(message)[:60]
            raise UsageError(f"message {i} has {found}, wanted one of {', '.join(ROLES)}")
        content = message.get("content")
        if not _readable(content, role):
            raise UsageError(
                f"message {i} ({role}) has content {content!r:.60}, wanted a text or a list of "
                "parts of type text"
            )
        if not isinstance(message.get("reasoning_content") or "", str):
            raise UsageError(f"message {i} has reasoning {message['reasoning_content']!r:.60}")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise UsageError(f"message {i} has calls {calls!r:.60}, wanted a list")
        for n, call in enumerate(calls):
            _function(call, f"call {n} of message {i}")


def _readable(content, role: str) -> bool:
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        return all(
            isinstance(part.get("text"), str) if kind == "text" else kind and role == "tool"
            for kind, part in zip(kinds, content, strict=True)
        )
    return isinstance(content, str) or (content is None and role == "assistant")


def _function(holder: dict, what: str) -> dict:
    function = holder.get("function") if isinstance(holder, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{what} is {holder!r:.60}, wanted a function with a name")
    return function


def _check_order(messages: list[dict], continue_last: bool):
    """Refuses lists on which the official encoders disagree or that make no turn (chat 3)."""
    before = None
    for i, message in enumerate(messages):
        role = message["role"]
        starts = {"system": (None,), "latest_reminder": (None, "system")}
        if role in starts and before not in starts[role]:
            raise UsageError(f"message {i} is a {role} message, which may only stand at the start")
        if role == "assistant" and before not in ("user", "tool"):
            raise UsageError(f"message {i} is an assistant's, but no user's or tool's precedes it")
        before = role
    if before != "assistant" if continue_last else before not in ("user", "tool"):
        wanted = "an assistant's to go on with" if continue_last else "a user's or a tool's"
        raise UsageError(f"the last message is {before or 'missing'}, wanted {wanted}")


def _turns(messages: list[dict]) -> Iterator[tuple[int, list[dict]]]:
    """(index of the last message, messages) of each turn; users and tools share one."""
    group: list[dict] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            yield i, [message]
            continue
        group.append(message)
        if i + 1 == len(messages) or messages[i + 1]["role"] == "assistant":
            yield i, group
            group = []


def _user(group: list[dict], calls: list[dict]) -> str:
    """User texts in their places; tool results in the order of the calls."""
    order = {call["id"]: i for i, call in enumerate(calls) if isinstance(call.get("id"), str)}
    results = [m for m in group if m["role"] == "tool"]
    ids = [m.get("tool_call_id") for m in results]
    unknown = [id for id in ids if not isinstance(id, str) or id not in order]
    if unknown:
        raise UsageError(
            f"a tool result names call {unknown[0]!r}, wanted one of the last assistant's calls: "
            f"{', '.join(map(repr, order)) or 'there are none'}"
        )
    ordered = iter(sorted(results, key=lambda m: order[m["tool_call_id"]]))
    texts = (
        f"<tool_result>{_text(next(ordered))}</tool_result>" if m["role"] == "tool" else _text(m)
        for m in group
    )
    return "\n\n".join(texts)


def _calls(calls: list[dict]) -> list[str]:
    """The call block of an assistant's turn (chat 7): only the tags' DSML is a token."""
    if not calls:
        return []
    parts = _marked("\n\n<｜DSML｜tool_calls>\n")
    for call in calls:
        function = call["function"]
        parts += [*_marked("<｜DSML｜invoke name="), f'"{function["name"]}">\n']
        lines = list(_arguments(function.get("arguments")))
        for name, value, string in lines:
            parts += [*_marked("<｜DSML｜parameter name="), f'"{name}" string="{string}">', value]
            parts += _marked("</｜DSML｜parameter>\n")
        if not lines:
            parts.append("\n")
        parts += _marked("</｜DSML｜invoke>\n")
    return parts + _marked("</｜DSML｜tool_calls>")


def _arguments(arguments: str | dict | None) -> Iterator[tuple[str, str, str]]:
    """(name, text, "true" for a string) of each argument; text that is no object stays whole."""
    values = {} if arguments is None else arguments
    if isinstance(arguments, str):
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            values = None
    if not isinstance(values, dict):
        whole = arguments if isinstance(arguments, str) else _json(arguments)
        yield "arguments", whole, "true"
        return
    for name, value in values.items():
        text = isinstance(value, str)
        yield name, value if text else _json(value), "true" if text else "false"


def _answer_format(response_format: dict | None, messages: list[dict]) -> str:
    match response_format:
        case None | {"type": "text"}:
            return ""
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _SCHEMA + _json(schema)
        case {"type": "json_object"}:
            if any("json" in _text(message).lower() for message in messages):
                return _ANY_JSON
            raise UsageError("response_format json_object needs the word json in some message")
    raise UsageError(
        f"response_format is {response_format!r:.60}, wanted type text, json_object, or "
        "json_schema with a schema"
    )


def _text(message: dict) -> str:
    """The content as text: parts are joined by a blank line."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n\n".join(
        part["text"] if part["type"] == "text" else f"[Unsupported {part['type']}]"
        for part in content
    )


def _marked(template: str) -> list[str]:
    """One of our own templates, with the markers in it as control tokens."""
    found = re.split(f"({DSML}|{THINK}|{END_THINK})", template)
    return [Control(t) if i % 2 else t for i, t in enumerate(found)]


def _merged(parts: list[str]) -> list[str]:
    """Neighbouring stretches of text as one, so that they are encoded together."""
    merged: list[str] = []
    for part in parts:
        if not isinstance(part, Control) and merged and not isinstance(merged[-1], Control):
            merged[-1] += part
        elif part:
            merged.append(part)
    return merged


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)
