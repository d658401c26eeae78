"""The argument layer: words in, a verb and its checked options out; text stays as it was typed.

It stands in front of Fire, which would read `1e5`, `None` or `a,b` as Python values.
"""

import codecs
import difflib
import os
import re
import sys
import textwrap
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from .errors import UsageError

MOST = 1 << 28  # bytes of a prompt: the model's 2^20 positions, of 256 each
WAYS = "-- TEXT, --prompt=TEXT, --prompt-file FILE, or standard input"
STREAMS = (
    "The answer goes to standard output; the reasoning before it, progress and statistics go to "
    "standard error. Ctrl-C stops after the token at hand, a second one kills."
)


class Kind(NamedTuple):
    """How the text of a flag becomes its value; `read` raises ValueError for what is not wanted."""

    label: str
    wanted: str
    read: Callable[[str], object]


class Flag(NamedTuple):
    """One flag of a verb. Without a kind it is a switch that stands for `value`.

    Flags with the same key exclude each other; the key is the keyword of the Python API.
    """

    names: tuple[str, ...]
    key: str
    help: str
    kind: Kind | None = None
    value: object = True
    default: object = None  # as the Python API has it


class PromptFile(str):
    """Where a prompt is to be read from; `-` is standard input."""


class Verb(NamedTuple):
    """What may follow a verb; `free` is the key of its one free argument."""

    help: str
    usage: str
    flags: tuple[Flag, ...]
    free: str | None = None
    many: bool = False  # of the free argument


def _whole(low: int, high: int | None = None, wanted: str | None = None) -> Kind:
    def read(text: str) -> int:
        if not re.fullmatch("[+-]?[0-9]{1,30}", text):
            raise ValueError
        return _within(int(text), low, high)

    to = "" if high is None else f" to {high}"
    return Kind("N", wanted or f"a whole number from {low}{to}", read)


def _real(low: float, high: float) -> Kind:
    def read(text: str) -> float:
        if not re.fullmatch("[0-9.eE+-]+", text):
            raise ValueError
        return _within(float(text), low, high)

    return Kind("F", f"a number from {low} to {high}", read)


def _within(value, low, high):
    if value < low or (high is not None and value > high):
        raise ValueError
    return value


def _choice(*words: str) -> Kind:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return Kind("|".join(words), f"one of {', '.join(words)}", read)


def _text(text: str) -> str:
    text.encode()  # the bytes of an argument that are no UTF-8 arrive as lone surrogates
    return text


def _path(text: str) -> str:
    if not text:
        raise ValueError
    return text


ON_OFF = Kind("on|off", "on or off", lambda text: ("off", "on").index(text) == 1)
TEXT = Kind("TEXT", "UTF-8 text", _text)
FILE = Kind("FILE", "a path", _path)

MODEL = Flag(
    ("-m", "--model"),
    "model",
    "a GGUF file (any shard of a split one), or a folder with config.json and safetensors; "
    "without it the small embedded model runs, which completes Python",
    FILE,
)
RECIPE = _choice("q2", "q2-q4", "q4", "mxfp4")
LAYERS = _whole(3, 43)
CHUNK = "prompt tokens at a time (default: 4096, 2048 or 512, as memory allows)"
MTP = Flag(
    ("--mtp", "--mtp-model"),
    "mtp",
    "a DSpark draft: a GGUF, a folder that convert wrote or with draft*.safetensors, or "
    "`embedded`, the draft of the small model",
    FILE,
)
CONFIDENCE = Flag(
    ("--dspark-confidence",),
    "dspark_confidence",
    "what a draft needs to be verified; implies --dspark; 0 verifies whole blocks. With "
    "--dspark-schedule on, drafts below it may be verified unseen where that takes less time than "
    "to wait for confidences; the text is the same",
    _real(0, 1),
    default=0.7,
)
SCHEDULE = Flag(
    ("--dspark-schedule",),
    "dspark_schedule",
    "skip drafting while it does not pay",
    ON_OFF,
    default="on",
)
FORCE = Flag(("--force",), "force", "load a model that does not fit into memory all the same")
JSON = Flag(("--json",), "as_json", "print one JSON object")
DEBUG = Flag(("--debug",), "debug", "show the trace of an error")

VERBS = {
    "generate": Verb(
        "write the model's answer to a prompt",
        "[FLAGS] [PROMPT]",
        (
            MODEL,
            Flag(("-p", "--prompt"), "prompt", "the prompt, same as the free argument", TEXT),
            Flag(
                ("--prompt-file",),
                "prompt",
                "read the prompt from a file; - is standard input, which is also read when no "
                "prompt is given and it is not a terminal",
                Kind("FILE", "a path", lambda text: PromptFile(_path(text))),
            ),
            Flag(("-sys", "--system"), "system", "system text", TEXT),
            Flag(
                ("-n", "--tokens"),
                "tokens",
                "most tokens to generate (default: 50000; 256 for a model that only completes)",
                _whole(1),
            ),
            Flag(
                ("-c", "--ctx"),
                "ctx",
                "most tokens of prompt and answer together (default: 32768, or the model's limit)",
                _whole(1),
            ),
            Flag(("--temp",), "temp", "0 takes the likeliest token", _real(0, 100), default=0.0),
            Flag(("--top-p",), "top_p", "draw from this mass of tokens", _real(0, 1), default=1.0),
            Flag(
                ("--min-p",),
                "min_p",
                "draw from tokens at least this likely, compared with the likeliest",
                _real(0, 1),
                default=0.05,
            ),
            Flag(
                ("--seed",),
                "seed",
                "the same seed draws the same text (default: a new one each time)",
                _whole(0, 2**64 - 1, "a whole number from 0 to 2^64 - 1"),
            ),
            Flag(
                ("--think-level",),
                "think",
                "how much to reason before the answer",
                _choice("off", "low", "high", "max"),
                default="high",
            ),
            Flag(("--think",), "think", "same as --think-level high", value="high"),
            Flag(("--think-max",), "think", "same as --think-level max", value="max"),
            Flag(("--nothink",), "think", "same as --think-level off", value="off"),
            Flag(
                ("--release",),
                "release",
                "release of the weights, where the file does not tell",
                _choice("preview", "0731"),
            ),
            Flag(("--raw", "--raw-prompt"), "raw", "complete the text as it is: no chat roles"),
            Flag(
                ("--prefill-chunk",),
                "prefill_chunk",
                CHUNK,
                _whole(1),
            ),
            MTP,
            Flag(("--dspark",), "dspark", "decode with the draft of --mtp: the text is the same"),
            CONFIDENCE,
            Flag(
                ("--dspark-strict",),
                "dspark_strict",
                "load the draft but decode without it: the baseline",
            ),
            SCHEDULE,
            Flag(
                ("--exact-sampling",),
                "exact_sampling",
                "allow drafts with --temp above 0: the text is that of the seed without them",
            ),
            FORCE,
            Flag(("--stats",), "stats", "write the statistics as JSON", FILE),
            JSON,
            DEBUG,
        ),
        "prompt",
    ),
    "inspect": Verb(
        "say what a model file holds and what would be used of it",
        "[FLAGS] FILE",
        (
            MODEL._replace(help="the file, same as the free argument"),
            Flag(("--draft",), "draft", "a DSpark file: does it belong to the model?", FILE),
            JSON,
            DEBUG,
        ),
        "model",
    ),
    "bench": Verb(
        "measure the time to the first token and the speed of decoding here",
        "[FLAGS]",
        (
            MODEL,
            Flag(("-n", "--tokens"), "tokens", "tokens to generate", _whole(1), default=128),
            Flag(("--runs",), "runs", "repetitions of each figure", _whole(1), default=5),
            MTP,
            Flag(
                ("--ctx-max",),
                "ctx_max",
                "measure prefill and decode, and with --mtp drafts, at contexts up to N instead",
                _whole(1),
            ),
            Flag(("--ctx-start",), "ctx_start", "the first context", _whole(1), default=2048),
            Flag(("--step-incr",), "step_incr", "contexts grow by N tokens", _whole(1)),
            Flag(("--step-mul",), "step_mul", "contexts grow F times", _real(1, 100), default=2.0),
            Flag(("--gen-tokens",), "gen_tokens", "tokens at each context", _whole(8), default=64),
            Flag(("--fill",), "fill", "fill contexts with random states, read no prompts"),
            Flag(("--prefill-chunk",), "chunk", CHUNK, _whole(1)),
            Flag(
                ("--synthetic",),
                "synthetic",
                "a model of Flash's shapes with random weights, made in memory; with --mtp "
                "embedded a draft for it",
                RECIPE,
            ),
            Flag(("--layers",), "layers", "of the synthetic model", LAYERS, default=43),
            Flag(
                ("--launches",),
                "launches",
                "count the launches of a token of V4 Flash by kernel, here and without weights",
            ),
            Flag(
                ("--convert",),
                "convert",
                "measure the conversion of a made file of N GB, and how a converted model starts, "
                "instead",
                _whole(1),
            ),
            Flag(("--csv",), "csv", "write the contexts' figures as CSV", FILE),
            Flag(("--plot",), "plot", "draw them, as PNG or SVG (needs matplotlib)", FILE),
            FORCE,
            DEBUG,
        ),
    ),
    "check": Verb(
        "prove that drafted greedy text is the plain text, tokens and caches bit for bit",
        "[FLAGS] [PROMPT ...]",
        (
            MODEL,
            MTP._replace(help="the draft (default: `embedded`, which fits the small model)"),
            Flag(("-n", "--tokens"), "tokens", "tokens to generate", _whole(1), default=64),
            CONFIDENCE._replace(help="what a draft needs to be verified", default=0.0),
            FORCE,
            Flag(
                ("--receipt",),
                "receipt",
                "where all that was compared is written as JSON",
                FILE,
                default="ds4mlx-check.json",
            ),
            DEBUG,
        ),
        "prompts",
        many=True,
    ),
    "bench-dspark": Verb(
        "measure decoding with drafts and without, alternately on the same prompts",
        "[FLAGS] [PROMPT ...]",
        (
            MODEL,
            MTP._replace(help="the draft (default: `embedded`, which fits the small model)"),
            Flag(("-n", "--tokens"), "tokens", "tokens to generate", _whole(1), default=128),
            Flag(("--runs",), "runs", "repetitions of each prompt", _whole(1), default=5),
            CONFIDENCE._replace(help="what a draft needs to be verified"),
            SCHEDULE,
            FORCE,
            Flag(("--csv",), "csv", "print comma-separated values"),
            DEBUG,
        ),
        "prompts",
        many=True,
    ),
    "convert": Verb(
        "write a GGUF, or the released checkpoint, as an MLX folder with a receipt, check such a "
        "folder, or make the GGUF again",
        "IN.gguf OUT/ | HF_DIR/ [OUT] [FLAGS] | --verify OUT/ [IN.gguf] | --reverse OUT/ OUT.gguf",
        (
            Flag(
                ("--experts",),
                "experts",
                "of a checkpoint: what its FP4 experts become (iq2_xxs: with q2_k for down)",
                _choice("mxfp4", "q4_k", "iq2_xxs"),
                default="mxfp4",
            ),
            Flag(
                ("--imatrix",),
                "imatrix",
                "of a checkpoint: which inputs matter, the .dat file that ds4 --imatrix-out writes",
                FILE,
            ),
            Flag(
                ("--gguf",),
                "gguf",
                "of a checkpoint: write GGUF files as ds4 has them instead of MLX folders",
            ),
            Flag(
                ("--dspark-support",),
                "dspark_support",
                "of a checkpoint: where its DSpark draft goes; without OUT nothing else is written",
                FILE,
            ),
            Flag(
                ("--dspark-manifest",),
                "dspark_manifest",
                "of a checkpoint: list as JSON what the draft was made of, and its errors",
                FILE,
            ),
            Flag(
                ("--verify",),
                "action",
                "compare a folder, and the GGUF if it is given, with the receipt",
                value="verify",
            ),
            Flag(
                ("--reverse",),
                "action",
                "write the GGUF that a folder was made of, byte for byte",
                value="reverse",
            ),
            Flag(("--overwrite",), "overwrite", "replace a model or a file that is there"),
            DEBUG,
        ),
        "paths",
        many=True,
    ),
    "synthesize": Verb(
        "write the model of bench --synthetic, random weights in V4 Flash's shapes, as a GGUF",
        "[FLAGS] OUT.gguf",
        (
            Flag(("--recipe",), "recipe", "types of the routed experts", RECIPE, default="q2"),
            Flag(("--layers",), "layers", "the first N of Flash's layers", LAYERS, default=43),
            Flag(("--mtp",), "mtp", "where a DSpark draft for it goes", FILE),
            Flag(
                ("--alias",),
                "alias",
                "let all layers have the first one's routed experts, stored once: an eighth of the "
                "disk and of the memory (q2), the same work",
            ),
            Flag(("--overwrite",), "overwrite", "replace a file that is there"),
            DEBUG,
        ),
        "path",
    ),
    "download": Verb(
        "fetch an official model file, whole and checked (Hugging Face's HF_* variables apply)",
        "TARGET [--dir DIR] | --list | --check FILE",
        (
            Flag(("--list",), "listed", "list the targets with sizes and the memory they need"),
            Flag(
                ("--dir",), "folder", "where the file goes", FILE._replace(label="DIR"), "", "gguf"
            ),
            Flag(
                ("--check",),
                "file",
                "compare a file that came from elsewhere with the official one of its name or size",
                FILE,
            ),
            DEBUG,
        ),
        "target",
    ),
    "selftest": Verb(
        "try every kernel on this machine: run it first, and put its output into a bug report",
        "[FLAGS]",
        (
            Flag(("--quick",), "quick", "small shapes, and no measuring"),
            Flag(
                ("--op",),
                "op",
                "try one op only, or `model`, the embedded model",
                TEXT._replace(label="NAME"),
            ),
            DEBUG,
        ),
    ),
    "doctor": Verb(
        "say what this machine has, and whether models would fit, without loading them",
        "[FLAGS] [FILE ...]",
        (DEBUG,),
        "files",
        many=True,
    ),
}


def parse(words: list[str]) -> tuple[str, dict]:
    """Words of a command line -> the verb and its options, only those that were given.

    No file is opened: a prompt that comes from one is a PromptFile. Raises UsageError, one
    sentence that names the word, for everything that cannot be meant.
    """
    verbs = ", ".join(VERBS)
    if not words:
        raise UsageError(f"no verb is given, wanted one of {verbs}; ds4mlx --help tells more")
    if words[0] not in VERBS:
        near = _nearest(words[0], [*VERBS, "--help", "--version"])
        raise UsageError(f"{words[0]!r:.60} is no verb{near}; the first word is one of {verbs}")
    name, verb = words[0], VERBS[words[0]]
    flags = {n: flag for flag in verb.flags for n in flag.names}
    options, sources, free = {}, {}, []
    rest = iter(words[1:])
    for word in rest:
        if word == "--":
            free += rest
        elif not word.startswith("-"):
            free.append(word)
        else:
            typed, flag, value = _flag(word, rest, flags, verb)
            if flag.key in options:
                raise UsageError(_twice(sources[flag.key], typed, flags))
            options[flag.key], sources[flag.key] = value, typed
    if free:
        if verb.free is None or (len(free) > 1 and not verb.many):
            raise UsageError(_extra(name, verb, free))
        if verb.free in options:
            what = f"both {sources[verb.free]} and the argument {free[0]!r:.60} are given"
            raise UsageError(f"{what}, wanted one {verb.free}")
        kind = FILE if verb.free in ("model", "path", "paths", "files") else TEXT
        values = [_value(f"the {verb.free.removesuffix('s')}", kind, text) for text in free]
        options[verb.free] = values if verb.many else values[0]
    options.pop("debug", None)
    return name, options


def _flag(word: str, rest, flags: dict[str, Flag], verb: Verb) -> tuple[str, Flag, object]:
    """The flag that `word` names, as typed, and its value, for which `rest` may be needed."""
    typed, equals, text = word.partition("=")
    flag = flags.get(typed.replace("_", "-"))
    if flag is None:
        raise UsageError(_unknown(word, typed, flags, verb))
    if flag.kind is None:
        if equals:
            raise UsageError(f"{typed} takes no value, found {text!r:.60}")
        return typed, flag, flag.value
    if not equals:
        text = next(rest, None)
        # What looks like a flag is more likely one than the value of a flag left empty.
        if text is None or text == "--" or text.partition("=")[0].replace("_", "-") in flags:
            found = "" if text is None else f", found {text!r:.60} (if that is it: {typed}={text})"
            raise UsageError(f"{typed} needs a value{found}, wanted {flag.kind.wanted}")
    return typed, flag, _value(typed, flag.kind, text)


def _value(what: str, kind: Kind, text: str):
    try:
        return kind.read(text)
    except ValueError:  # of which a text that cannot be encoded is one
        raise UsageError(f"{what} is {text!r:.60}, wanted {kind.wanted}") from None


def _twice(before: str, now: str, flags: dict[str, Flag]) -> str:
    if flags[before.replace("_", "-")] is flags[now.replace("_", "-")]:
        return f"{now} is given twice"
    return f"{before} and {now} exclude each other, wanted one of them"


def _unknown(word: str, typed: str, flags: dict[str, Flag], verb: Verb) -> str:
    if typed in ("--help", "-h"):  # the bare word was found before
        return f"{typed} takes no value, found {word.partition('=')[2]!r:.60}"
    ways = f" (a prompt that begins with a dash: {WAYS})" if verb.free == "prompt" else ""
    if re.fullmatch("--?[A-Za-z][A-Za-z_-]*", typed):
        return f"unknown flag {typed}{_nearest(typed.replace('_', '-'), flags)}{ways}"
    return f"{word!r:.60} is no flag{ways}"


def _nearest(word: str, names) -> str:
    near = difflib.get_close_matches(word, names, 1)
    return f", the nearest is {near[0]}" if near else ""


def _extra(name: str, verb: Verb, free: list[str]) -> str:
    listed = " ".join(free)
    if verb.free is None:
        return f"{name} takes no argument, found {listed!r:.60}"
    what = f"{len(free)} arguments are given ({listed!r:.60}), wanted one {verb.free}"
    return f'{what}: put it in quotes, as in "{listed:.60}"' if verb.free == "prompt" else what


def read_prompt(given: str | None) -> str:
    """The text of a prompt: as given, from a PromptFile, or from standard input (None).

    A UTF-8 byte order mark goes, all other bytes stay. Raises UsageError.
    """
    if given is not None and not isinstance(given, PromptFile):
        return given
    if given is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(f"no prompt is given, wanted a text in quotes, {WAYS}")
    if given is None or given == "-":
        if sys.stdin is None:
            raise UsageError("--prompt-file -: standard input is closed")
        return _decoded(sys.stdin.buffer, "standard input")
    path = os.path.abspath(os.path.expandvars(os.path.expanduser(given)))
    try:
        with open(path, "rb") as file:
            return _decoded(file, path)
    except OSError as error:
        raise UsageError(f"--prompt-file {path}: {error.strerror}") from error


def _decoded(file: BinaryIO, source: str) -> str:
    data = file.read(MOST + 1)
    if len(data) > MOST:
        raise UsageError(f"{source}: more than {MOST:,} bytes, which no context holds")
    try:
        return data.decode().removeprefix(codecs.BOM_UTF8.decode())
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} (0x{data[error.start]:02x})"
        raise UsageError(f"{source}: {byte} is not UTF-8, wanted UTF-8 text") from None


def closest_flag(variable: str) -> str | None:
    """The flag whose name is nearest to that of an environment variable DS4MLX_..."""
    word = variable.removeprefix("DS4MLX_").lower().replace("_", "-")
    flags = [n for verb in VERBS.values() for flag in verb.flags for n in flag.names]
    names = [n.removeprefix("--") for n in flags if n.startswith("--")]
    begun = [n for n in names if word.startswith(n)]
    found = begun or difflib.get_close_matches(word, names, 1)
    return f"--{found[0]}" if found else None


def help_text(name: str | None = None) -> str:
    """What --help prints, of one verb or of the whole command."""
    if name is None:
        verbs = "\n".join(f"  {n:<14}{verb.help}" for n, verb in VERBS.items())
        return (
            "ds4mlx: DeepSeek V4 Flash on MLX\n\n"
            f"  ds4mlx VERB [FLAGS] ...\n\n{verbs}\n\n"
            "ds4mlx VERB --help lists the flags of a verb; ds4mlx --version tells the version.\n"
            "Exit status: 0, 1 a file or a run failed, 2 bad usage, 130 Ctrl-C, 141 closed pipe.\n"
            "No environment variable is read, but for Hugging Face's own by download."
        )
    verb = VERBS[name]
    lines = [f"ds4mlx {name}: {verb.help}", "", f"  ds4mlx {name} {verb.usage}", ""]
    for flag in verb.flags:
        label = f" {flag.kind.label}" if flag.kind else ""
        default = "" if flag.default is None else f" (default: {flag.default})"
        lines += [f"  {', '.join(flag.names)}{label}", *_wrapped(flag.help + default, "      ")]
    if verb.free == "prompt":
        lines += ["", f"A prompt that begins with a dash: {WAYS}.", *_wrapped(STREAMS)]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 96, initial_indent=indent, subsequent_indent=indent)
