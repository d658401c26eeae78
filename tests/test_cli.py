"""The command line: text arrives as typed, mistakes cost nothing, streams are clean."""

import builtins
import inspect
import io
import json
import os
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

import ds4mlx
from ds4mlx import arguments, cli
from ds4mlx.errors import FileError, UsageError
from tests.stub import Piece, StubModel, StubReply, Thought

ROOT = Path(__file__).parent.parent
NANO = str(files("ds4mlx") / "data" / "nano.gguf")

# Texts that a parser of Python values, of flags or of shells would change.
WORDS = [
    *("1e5", "None", "True", "0x10", "1_000", "1,000", "a,b", "[1,2]", "{x}", '{"a": null}', "()"),
    *("...", '"quoted"', "'quoted'", "5 # comment", "", " ", "\n", "a\r\nb\n", "a=b", "$HOME", "~"),
    *("grüße 你好 😀", "\ufeffmark", "generate"),
]
DASHES = ["--help me", "-x", "--x=1", "---", "-", "--", "-- hello", "-5", "--help", "-h", "--debug"]


@pytest.fixture
def model(monkeypatch):
    """A scripted model in place of `ds4mlx.load`."""
    stub = StubModel()
    monkeypatch.setitem(vars(ds4mlx), "load", stub.load)
    return stub


@pytest.fixture
def run(capsys):
    """Runs a command line in this process -> (status, standard output, standard error)."""

    def run(*words):
        status = cli.main(list(words))
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def stdin(monkeypatch):
    """Puts bytes on standard input; with `terminal`, there is somebody typing."""

    def put(data: bytes, terminal=False):
        stream = io.TextIOWrapper(io.BytesIO(data))
        monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "stdin", stream)

    put(b"", terminal=True)
    return put


def child(*words, **options):
    """A command line in a process of its own."""
    options = {"capture_output": True, "cwd": ROOT, "timeout": 60} | options
    return subprocess.run([sys.executable, "-m", *words], text=True, **options)


def refused(result, *parts):
    """The run ended with status 2 and one line on standard error that holds `parts`."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("ds4mlx: ") and err.count("\n") == 1
    for part in parts:
        assert part in err
    return True


# Text stays text (CL-01, CL-02, CL-09) --------------------------------------------------------


@pytest.mark.parametrize("text", WORDS)
def test_a_prompt_as_an_argument_arrives_as_typed(run, model, text):
    assert run("generate", text)[0] == 0
    assert model.prompts == [text]


@pytest.mark.parametrize("text", WORDS + DASHES)
@pytest.mark.parametrize("form", ["--prompt={}", "-p={}"])
def test_a_prompt_as_the_value_of_a_flag_arrives_as_typed(run, model, text, form):
    assert run("generate", form.format(text))[0] == 0
    assert model.prompts == [text]


@pytest.mark.parametrize("text", WORDS + DASHES)
def test_a_prompt_behind_two_dashes_arrives_as_typed(run, model, text):
    assert run("generate", "-n", "3", "--", text)[0] == 0
    assert model.prompts == [text]


@pytest.mark.parametrize("text", [*WORDS, "--help me", "-x", "---", "-", "-5"])
def test_a_prompt_in_the_word_behind_its_flag_arrives_as_typed(run, model, text):
    assert run("generate", "--prompt", text)[0] == 0
    assert model.prompts == [text]


@pytest.mark.parametrize("text", [w for w in WORDS + DASHES if w != "\ufeffmark"])
def test_a_prompt_from_a_file_or_standard_input_arrives_as_written(
    run, model, stdin, tmp_path, text
):
    (tmp_path / "prompt").write_bytes(text.encode())
    assert run("generate", "--prompt-file", str(tmp_path / "prompt"))[0] == 0
    for words in (["--prompt-file", "-"], []):
        stdin(text.encode())
        assert run("generate", *words)[0] == 0
    assert model.prompts == [text] * 3


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_takes_no_value(run, model, flag):
    assert refused(run("generate", f"{flag}=1", "hi"), f"{flag} takes no value, found '1'")


def test_a_prompt_without_an_end_is_refused_before_it_fills_the_memory(
    run, model, stdin, tmp_path, monkeypatch
):
    monkeypatch.setattr(arguments, "MOST", 1000)
    path = tmp_path / "prompt"
    for n in (1000, 1001):
        path.write_bytes(b"a" * n)
        stdin(b"a" * n)
        results = run("generate", "--prompt-file", str(path)), run("generate")
        if n > 1000:
            for result, name in zip(results, (str(path), "standard input"), strict=True):
                assert refused(result, f"{name}: more than 1,000 bytes, which no context holds")
    assert model.prompts == ["a" * 1000] * 2


@pytest.mark.parametrize("text", WORDS + DASHES)
def test_a_system_text_arrives_as_typed(run, model, text):
    run("generate", f"--system={text}", "hi")
    run("generate", f"-sys={text}", "hi")
    assert [o["system"] for o in model.options] == [text, text]


@pytest.mark.parametrize("text", [d for d in DASHES if d not in ("--", "--help", "-h", "--debug")])
def test_a_prompt_that_begins_with_a_dash_is_refused_with_the_ways_that_work(run, model, text):
    ways = ("-- TEXT", "--prompt=TEXT", "--prompt-file FILE", "standard input")
    assert refused(run("generate", text), *ways)
    assert model.loads == []


def test_a_byte_order_mark_goes_and_all_other_bytes_stay(run, model, stdin):
    stdin(b"\xef\xbb\xbfa\r\n\x00b\rc\n\n")
    run("generate")
    assert model.prompts == ["a\r\n\0b\rc\n\n"]


@pytest.mark.parametrize("data, byte", [(b"caf\xe9 au lait", 3), (b"\xef\xbb\xbfab\xff", 5)])
def test_a_prompt_that_is_not_utf8_is_refused_with_the_byte(run, model, tmp_path, data, byte):
    path = tmp_path / "latin"
    path.write_bytes(data)
    assert refused(run("generate", "--prompt-file", str(path)), str(path), f"byte {byte} ")
    assert model.loads == []


def test_standard_input_that_is_not_utf8_is_refused_with_the_byte(run, model, stdin):
    stdin(b"ab\xff")
    assert refused(run("generate"), "standard input", "byte 2 (0xff)")


def test_an_argument_that_is_not_utf8_is_refused(run, model):
    assert refused(run("generate", os.fsdecode(b"caf\xe9")), "wanted UTF-8")


def test_a_prompt_of_a_megabyte_arrives_whole(run, model, tmp_path):
    (tmp_path / "long").write_text("word " * 200_000)
    run("generate", "--prompt-file", str(tmp_path / "long"))
    assert model.prompts == ["word " * 200_000]


def test_without_a_prompt_a_terminal_is_not_read(run, model, stdin):
    stdin(b"typed", terminal=True)
    assert refused(run("generate"), "no prompt is given")


def test_with_a_prompt_standard_input_is_not_read(run, model, stdin):
    stdin(b"\xff")
    run("generate", "hi")
    assert model.prompts == ["hi"]


@pytest.mark.parametrize(
    "words, named",
    [
        (["--prompt", "a", "b"], ["--prompt", "'b'"]),
        (["--prompt-file", "f", "b"], ["--prompt-file", "'b'"]),
        (["-p", "a", "--prompt-file", "f"], ["-p", "--prompt-file"]),
        (["--prompt=a", "--", "b"], ["--prompt", "'b'"]),
    ],
)
def test_more_than_one_prompt_is_refused(run, model, words, named):
    assert refused(run("generate", *words), *named)


@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_a_path_with_spaces_and_other_letters_is_found(run, tmp_path, verb):
    folder = tmp_path / "mein Ordner für 模型"
    folder.mkdir()
    (folder / "a b.gguf").symlink_to(NANO)
    words = ["-n", "1", "x"] if verb == "generate" else []
    assert run(verb, "-m", str(folder / "a b.gguf"), *words)[0] == 0


# Mistakes cost nothing (CL-04, CL-08, CL-11) --------------------------------------------------


@pytest.mark.parametrize("words", ["what is this", "hi 5", "hi extra upper"])
def test_forgotten_quotes_are_refused_with_a_hint(run, model, words):
    assert refused(run("generate", *words.split()), "put it in quotes", f'"{words}"')
    assert refused(run("generate", "--", *words.split()), "put it in quotes")
    assert model.loads == []


@pytest.mark.parametrize(
    "typed, near",
    [
        ("--temprature=0", "--temp"),
        ("--modle", "--model"),
        ("--no-think", "--nothink"),
        ("--prompt_fil", "--prompt-file"),
        ("--tokens-n", "--tokens"),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_nearest_before_any_file(run, model, typed, near):
    result = run("generate", "--prompt-file", "missing", "-m", "missing", typed)
    assert refused(result, f"unknown flag {typed.partition('=')[0]}, the nearest is {near} ")
    assert model.loads == []


def test_a_flag_of_another_verb_is_refused(run):
    assert refused(run("inspect", NANO, "--temp", "0"), "unknown flag --temp")


@pytest.mark.parametrize("verb", ["genrate", "Generate", "generat", "hello", "", "--verison"])
def test_a_word_that_is_no_verb_is_refused_with_the_verbs(run, verb):
    assert refused(run(verb, "hi"), repr(verb), "generate, inspect, bench")


def test_a_command_without_a_verb_is_refused(run):
    assert refused(run(), "no verb", "--help")


@pytest.mark.parametrize(
    "words",
    [
        *(["--temp", "0", "--temp", "0"], ["-n", "3", "--tokens=3"], ["--json", "--json"]),
        *(["--top_p", "1", "--top-p", "1"], ["--think", "--think"]),
    ],
)
def test_a_flag_given_twice_is_refused(run, model, words):
    assert refused(run("generate", "hi", *words), "given twice")


@pytest.mark.parametrize("flag", ["-n", "--temp", "--model", "--prompt", "--prompt-file", "--seed"])
def test_a_flag_without_its_value_is_refused(run, model, flag):
    assert refused(run("generate", flag), f"{flag} needs a value")
    assert refused(run("generate", flag, "--"), f"{flag} needs a value")
    assert refused(run("generate", flag, "--top_p=1"), f"{flag} needs a value", f"{flag}=--top_p=1")


@pytest.mark.parametrize("flag", ["--json", "--raw", "--think", "--nothink", "--debug"])
def test_a_switch_with_a_value_is_refused(run, model, flag):
    assert refused(run("generate", "hi", f"{flag}=yes"), f"{flag} takes no value", "'yes'")


@pytest.mark.parametrize(
    "flag, values, wanted",
    [
        ("--tokens", ["0", "-1", "1.5", "1e3", "1_0", "many", "", "٣", "9" * 5000], "from 1"),
        ("--ctx", ["0", "-5", "x"], "from 1"),
        ("--prefill-chunk", ["0", "x"], "from 1"),
        ("--temp", ["-0.1", "100.5", "nan", "inf", "-inf", "hot", "", "1_0"], "from 0 to 100"),
        ("--top-p", ["-0.1", "1.01", "nan", "x"], "from 0 to 1"),
        ("--min-p", ["-0.1", "1.01", "nan", "x"], "from 0 to 1"),
        ("--seed", ["-1", str(2**64), "1.0", "x"], "from 0 to 2^64 - 1"),
        ("--think-level", ["none", "High", ""], "off, low, high, max"),
        ("--release", ["731", ""], "preview, 0731"),
        ("--model", [""], "a path"),
        ("--prompt-file", [""], "a path"),
    ],
)
def test_a_value_out_of_range_is_refused_with_flag_value_and_range(
    run, model, flag, values, wanted
):
    for value in values:
        words = [] if flag == "--prompt-file" else ["hi"]
        result = run("generate", *words, f"{flag}={value}")
        assert refused(result, f"{flag} is ", repr(value)[:50], wanted)
    assert model.loads == []


@pytest.mark.parametrize("flag, value", [("--temp", "100"), ("--seed", str(2**64 - 1))])
def test_the_ends_of_a_range_belong_to_it(run, model, flag, value):
    assert run("generate", "hi", flag, value)[0] == 0
    assert run("generate", "hi", flag, "0")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        *(["--think", "--nothink"], ["--think-max", "--think"]),
        *(["--think-level", "low", "--think"], ["--nothink", "--think-level=off"]),
    ],
)
def test_thinking_flags_that_exclude_each_other_are_refused(run, model, words):
    assert refused(run("generate", "hi", *words), "exclude each other", words[0])


@pytest.mark.parametrize("verb", ["generate", "inspect"])
@pytest.mark.parametrize(
    "path, named",
    [
        ("missing.gguf", "missing.gguf: No such file"),
        ("~/m.gguf", "m.gguf: No such file"),
        ("$HOME/m.gguf", "m.gguf: No such file"),
        ("a b/ü.gguf", "a b/ü.gguf: No such file"),
        ("folder", "folder without .gguf files"),
    ],
)
def test_a_path_that_cannot_be_meant_is_one_line_with_the_resolved_path(
    run, tmp_path, monkeypatch, verb, path, named
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    words = ["hi"] if verb == "generate" else []
    assert refused(run(verb, f"--model={path}", *words), str(tmp_path.resolve()), named)


@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_an_unreadable_model_is_one_line(run, tmp_path, monkeypatch, verb):
    path = tmp_path / "locked.gguf"
    path.touch()
    _lock(monkeypatch, path)
    words = ["hi"] if verb == "generate" else []
    assert refused(run(verb, "-m", str(path), *words), f"{path}: Permission denied")


@pytest.mark.parametrize("name, why", [("missing", "No such file"), ("folder", "directory")])
def test_a_prompt_file_that_cannot_be_read_is_one_line(run, model, tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    assert refused(run("generate", "--prompt-file", str(tmp_path / name)), str(tmp_path), why)


def test_an_unreadable_prompt_file_is_one_line(run, model, tmp_path, monkeypatch):
    _lock(monkeypatch, tmp_path / "locked")
    path = str(tmp_path / "locked")
    assert refused(run("generate", "--prompt-file", path), f"{path}: Permission denied")


def test_a_home_folder_is_expanded_in_the_path_of_a_prompt(run, model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompt").write_text("hi")
    run("generate", "--prompt-file=~/prompt")
    assert model.prompts == ["hi"]


def test_a_folder_of_several_models_is_refused_with_their_sizes_and_dates(run, tmp_path):
    for name in ("flash-preview.gguf", "flash-0731.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        os.utime(tmp_path / name, (1.79e9, 1.79e9))
    result = run("generate", "-m", str(tmp_path), "hi")
    assert refused(result, "flash-preview.gguf", "flash-0731.gguf", "GB", "2026-09-2")


def test_a_failed_run_has_status_1_and_one_line(run, monkeypatch):
    monkeypatch.setitem(vars(ds4mlx), "load", _raising(FileError("m.gguf: tensor x is missing")))
    assert run("generate", "hi") == (1, "", "ds4mlx: m.gguf: tensor x is missing\n")


def test_bad_usage_in_the_api_has_status_2(run, monkeypatch):
    monkeypatch.setitem(vars(ds4mlx), "load", _raising(UsageError("no such thing")))
    assert run("generate", "hi") == (2, "", "ds4mlx: no such thing\n")


@pytest.mark.parametrize("error", [RuntimeError("out of\nmemory"), MemoryError(), KeyError("x")])
def test_an_error_of_another_kind_is_one_line_too(run, monkeypatch, error):
    monkeypatch.setitem(vars(ds4mlx), "load", _raising(error))
    status, out, err = run("generate", "hi")
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert err.startswith(f"ds4mlx: {type(error).__name__}: ") and "--debug" in err


@pytest.mark.parametrize("error", [FileError("m.gguf: bad"), RuntimeError("out of memory")])
def test_debug_shows_the_trace(run, monkeypatch, error):
    monkeypatch.setitem(vars(ds4mlx), "load", _raising(error))
    status, _, err = run("generate", "hi", "--debug")
    assert status == 1 and "Traceback" in err and str(error) in err


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(run):
    assert refused(run("generate", "-c", "4", "import os\nimport sys\n"), "tokens", "context of 4")


# Options arrive (AP-03) -----------------------------------------------------------------------

EXAMPLES = {  # of every option: the words, and what arrives
    "system": (["-sys", "be brief"], "be brief"),
    "tokens": (["-n", "3"], 3),
    "ctx": (["--ctx=99"], 99),
    "temp": (["--temp", "0.7"], 0.7),
    "top_p": (["--top_p", "0.9"], 0.9),
    "min_p": (["--min-p=0.1"], 0.1),
    "seed": (["--seed", "18446744073709551615"], 2**64 - 1),
    "think": (["--think-level", "low"], "low"),
    "release": (["--release", "preview"], "preview"),
    "raw": (["--raw"], True),
    "prefill_chunk": (["--prefill_chunk=64"], 64),
}
DSPARK = {  # of the options that need a draft
    "dspark": (["--dspark"], True),
    "dspark_confidence": (["--dspark-confidence", "0.5"], 0.5),
    "dspark_strict": (["--dspark-strict"], True),
    "dspark_schedule": (["--dspark-schedule", "off"], False),
    "exact_sampling": (["--exact-sampling"], True),
}
NOT_PASSED_ON = {"model", "prompt", "as_json", "debug", "mtp", "stats", "force"}


def test_every_option_of_generate_has_an_example_here():
    flags = arguments.VERBS["generate"].flags
    assert {f.key for f in flags} - NOT_PASSED_ON == set(EXAMPLES) | set(DSPARK)


def test_every_option_of_the_api_is_a_flag_and_has_the_default_that_help_states():
    from ds4mlx.api import Model

    parameters = inspect.signature(Model.generate).parameters
    flags = {f.key: f for f in reversed(arguments.VERBS["generate"].flags)}
    assert set(parameters) - {"self", "progress"} == set(flags) - NOT_PASSED_ON | {"prompt"}
    defaults = {k: parameters[k].default for k in EXAMPLES}
    assert defaults == {k: flags[k].default for k in EXAMPLES}


def test_every_option_of_bench_is_one_of_its_rows():
    from ds4mlx.bench import rows, sweep_rows

    parameters = {**inspect.signature(sweep_rows).parameters, **inspect.signature(rows).parameters}
    flags = [
        f for f in arguments.VERBS["bench"].flags if f.key not in ("debug", "launches", "convert")
    ]
    flags = {f.key: f.default if f.kind else False for f in flags}
    assert flags == {k: p.default for k, p in parameters.items()}


@pytest.mark.parametrize("key", DSPARK)
def test_an_option_about_drafts_arrives(run, model, key):
    words, value = DSPARK[key]
    assert run("generate", "hi", "--mtp-model", "d.gguf", *words)[0] == 0
    assert (model.drafts, model.options) == (["d.gguf"], [{key: value}])


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["--dspark"], "dspark needs a draft, wanted --mtp FILE"),
        (["--dspark-strict"], "dspark needs a draft, wanted --mtp FILE"),
        (["--dspark-confidence", "0"], "DeepSeek-V4-Flash-DSpark-support-0731.gguf"),
        (["--mtp", "d", "--dspark-confidence", "nan"], "is 'nan', wanted a number from 0 to 1"),
        (["--mtp", "d", "--dspark-confidence", "-0.1"], "is '-0.1', wanted a number from 0 to 1"),
        (["--mtp", "d", "--dspark-confidence", "1.01"], "is '1.01', wanted a number from 0 to 1"),
        (["--mtp", "d", "--dspark-confidence", "high"], "is 'high', wanted a number from 0 to 1"),
        (["--mtp", "d", "--dspark-schedule", "no"], "is 'no', wanted on or off"),
        (["--mtp", "d", "--dspark", "--temp", "0.7"], "wanted --temp 0, or --exact-sampling"),
    ],
)
def test_what_drafts_cannot_do_is_refused_before_anything_loads(run, model, words, wanted):
    status, out, err = run("generate", "hi", *words)
    assert (status, out, model.loads) == (2, "", [])
    assert wanted in err


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({}, "drafts: 8 cycles, 1.50 accepted a cycle, 60% of 20 accepted"),
        ({"cycles": 0, "accepted_per_cycle": None, "accepted_share": None}, "drafts: 0 cycles\n"),
        ({"warning": "nothing was drafted"}, "\nds4mlx: warning: nothing was drafted\n"),
    ],
)
def test_the_end_of_a_drafted_run_tells_what_the_drafts_did(run, model, changes, wanted):
    told = {"cycles": 8, "accepted_per_cycle": 1.5, "accepted_share": 0.6, "drafted": 20}

    class Drafted(StubReply):
        stats = StubReply([]).stats | {"dspark": told | changes}

    model.reply = Drafted([Piece("a")])
    assert wanted in run("generate", "hi", "--mtp", "d", "--dspark")[2]


def test_statistics_are_written_as_json(run, model, tmp_path):
    run("generate", "hi", "--stats", str(tmp_path / "s.json"))
    assert json.loads((tmp_path / "s.json").read_text()) == model.reply.stats


FILES = [
    (("generate", "hi", "-m", "m.gguf"), "--stats", "m.gguf"),
    (("generate", "hi", "--mtp", "m.gguf", "--dspark"), "--stats", "./m.gguf"),
    (("generate", "--prompt-file", "q.txt"), "--stats", "q.txt"),
    (("generate", "hi", "-m", "folder"), "--stats", "folder/config.json"),
    (("generate", "hi"), "--stats", "m.gguf"),
    (("check", "x", "-m", "m.gguf"), "--receipt", "m.gguf"),
    (("check", "x", "-m", "link.gguf"), "--receipt", "m.gguf"),
    (("check", "x", "-m", "s.bin"), "--receipt", "hard.bin"),
    (("bench", "-m", "m.gguf", "--ctx-max", "9"), "--csv", "m.gguf"),
    (("bench", "-m", "m.gguf", "--ctx-max", "9"), "--plot", "m.gguf"),
    (("bench", "-m", "s.bin", "--ctx-max", "9", "--csv", "x.svg"), "--plot", "x.svg"),
]


@pytest.mark.parametrize("words, flag, path", FILES)
def test_a_file_that_is_read_or_holds_weights_is_not_written_over(
    words, flag, path, run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "m.gguf")
    kept = [tmp_path / name for name in ("m.gguf", "q.txt", "s.bin", "folder/config.json")]
    for file in kept:
        file.write_text("mine")
    (tmp_path / "hard.bin").hardlink_to(tmp_path / "s.bin")
    status, out, error = run(*words, flag, path)
    assert (status, out) == (2, "") and flag in error and path in error and "wanted" in error
    assert [file.read_text() for file in kept] == ["mine"] * 4


def test_statistics_that_could_not_be_written_are_refused_before_the_model_runs(run, tmp_path):
    for path in (tmp_path / "a" / "s.json", tmp_path):
        status, out, error = run("generate", "hi", "--stats", str(path))
        assert (status, out) == (2, "")
        assert error == f"ds4mlx: --stats {path}: wanted a file in a folder that can be written\n"


@pytest.mark.parametrize("key", EXAMPLES)
def test_an_option_arrives(run, model, key):
    words, value = EXAMPLES[key]
    assert run("generate", "hi", *words)[0] == 0
    assert model.options == [{key: value}]


def test_options_arrive_together_and_before_or_after_the_prompt(run, model):
    words = [w for words, _ in EXAMPLES.values() for w in words]
    run("generate", *words, "hi")
    run("generate", "hi", *words)
    assert model.options == [{key: value for key, (_, value) in EXAMPLES.items()}] * 2


def test_what_is_not_given_is_left_to_the_api(run, model):
    run("generate", "hi")
    assert (model.loads, model.options) == ([None], [{}])


@pytest.mark.parametrize(
    "word, level", [("--think", "high"), ("--think-max", "max"), ("--nothink", "off")]
)
def test_the_short_forms_of_thinking_arrive_as_levels(run, model, word, level):
    run("generate", "hi", word)
    assert model.options == [{"think": level}]


def test_force_and_the_context_arrive_before_anything_is_loaded(run, model):
    run("generate", "--force", "-c", "99", "hi")
    run("generate", "hi")
    assert model.limits == [(99, True), (None, False)]


def test_the_model_arrives_as_typed(run, model):
    run("generate", "hi", "-m", "~/m 1.gguf")
    assert model.loads == ["~/m 1.gguf"]


# Help (CL-06) ---------------------------------------------------------------------------------

HELP = """
import sys
from ds4mlx.cli import main
status = main({words})
late = [m for m in ("mlx", "numpy", "fire", "tokenizers", "tqdm") if m in sys.modules]
sys.exit(f"imported {{late}}" if late else status)
"""


@pytest.mark.parametrize(
    "words, shown",
    [
        (["--help"], "inspect "),
        (["-h"], "inspect "),
        (["generate", "--help"], "--prompt-file FILE"),
        (["generate", "-h"], "--prompt-file FILE"),
        (["generate", "hi", "--temp", "0", "-h"], "--prompt-file FILE"),
        (["inspect", "--help"], "--draft FILE"),
        (["bench", "--help"], "--runs N"),
        (["--version"], f"ds4mlx {ds4mlx.__version__}\n"),
    ],
)
def test_help_goes_to_standard_output_without_a_pager_and_without_mlx(words, shown):
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(words=words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PAGER": "false"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout


def test_importing_the_package_does_not_import_mlx():
    code = "import sys, ds4mlx; sys.exit('mlx' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_of_a_verb_names_every_flag(run):
    for name, verb in arguments.VERBS.items():
        out = run(name, "--help")[1]
        assert all(n in out for flag in verb.flags for n in flag.names)


def test_the_package_lists_its_public_names():
    assert {"load", "Model", "Reply", "Session", "Ds4Error"} <= set(dir(ds4mlx))
    assert all(getattr(ds4mlx, name) for name in ds4mlx.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        _ = ds4mlx.Modle


# Streams (CL-07, SP-05, CO-13) ----------------------------------------------------------------


def test_standard_output_holds_the_answer_once_and_ends_with_a_newline(run, model):
    status, out, err = run("generate", "hi")
    assert (status, out) == (0, "Hello, world\n")
    assert "Hello" not in err


def test_an_answer_that_ends_with_a_newline_gets_no_second_one(run, model):
    model.reply = StubReply([Piece("a\n")])
    assert run("generate", "hi")[1] == "a\n"


def test_the_closing_line_counts_prompt_answer_first_token_and_memory(run, model):
    err = run("generate", "hi")[2]
    assert err == (
        "ds4mlx: prompt 7 tokens, 70.0 t/s; first token 0.10 s; "
        "generated 2 tokens, 20.0 t/s; peak 2.00 GB\n"
    )


@pytest.mark.parametrize("reason, flag", [("length", "-n"), ("context", "-c")])
def test_the_closing_line_says_which_limit_ended_the_answer(run, model, reason, flag):
    model.reply = StubReply([Thought("hm"), Piece("a")], reason)
    assert run("generate", "hi")[2].endswith(f"limit ({flag})\n")


def test_the_closing_line_says_that_the_budget_ended_inside_the_reasoning(run, model):
    model.reply = StubReply([Thought("so"), Thought(" so")], "length")
    status, out, err = run("generate", "hi")
    assert (status, out) == (0, "\n")
    assert err.endswith("ended by the token limit (-n) inside the reasoning\n")


def test_reasoning_goes_to_standard_error_and_ends_with_a_newline(run, model):
    model.reply = StubReply([Thought("let"), Thought(" me"), Piece("Blue"), Piece(".")])
    _, out, err = run("generate", "hi")
    assert out == "Blue.\n"
    assert err.startswith("let me\nds4mlx: ")


def test_reasoning_is_grey_on_a_terminal(run, model, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model.reply = StubReply([Thought("let"), Piece("Blue")])
    assert run("generate", "hi")[2].startswith("\033[2mlet\033[0m\n")


def test_json_is_one_object_with_the_whole_reply(run, model):
    model.reply = StubReply([Thought("hm"), Piece("grüß"), Piece(' "a"\n')])
    status, out, err = run("generate", "hi", "--json")
    assert status == 0 and out.count("\n") == 1
    reply = json.loads(out)
    assert (reply["text"], reply["reasoning"]) == ('grüß "a"\n', "hm")
    assert (reply["tokens"], reply["finish_reason"]) == ([0, 1, 2], "stop")
    assert reply["stats"]["generated_tokens"] == 3
    assert err.startswith("ds4mlx: prompt ")


def test_notes_of_a_reply_go_to_standard_error(run, model):
    model.reply.notes = ["0731 is assumed"]
    _, out, err = run("generate", "hi")
    assert out == "Hello, world\n" and err.startswith("ds4mlx: 0731 is assumed\n")


def test_progress_is_shown_by_stage_on_a_terminal_and_gone_before_the_answer(
    run, model, monkeypatch
):
    bars = _spy_on_bars(run, model, monkeypatch, terminal=True)
    assert bars == ["load 2/4", "load 4/4", "closed", "prefill 3/3", "closed", "answer"]


def test_progress_is_not_shown_elsewhere(run, model, monkeypatch):
    assert _spy_on_bars(run, model, monkeypatch, terminal=False) == ["answer"]


def test_the_answer_is_utf8_in_any_locale():
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = child("tests.stub", "hanzi", "generate", "hi", env=env)
    assert (done.returncode, done.stdout) == (0, "你好\n")


def test_a_variable_that_nobody_reads_is_named_once_with_the_closest_flag(run, model, monkeypatch):
    monkeypatch.setenv("DS4MLX_TEMPERATURE", "0.7")
    monkeypatch.setenv("DS4MLX_TOP_P", "1")
    status, out, err = run("generate", "hi")
    assert (status, out) == (0, "Hello, world\n")
    warning, _closing = err.splitlines()
    assert "DS4MLX_TEMPERATURE (see --temp), DS4MLX_TOP_P (see --top-p)" in warning
    assert model.options == [{}]


@pytest.mark.parametrize(
    "name, flag",
    [("DS4MLX_TEMPERATURE", "--temp"), ("DS4MLX_FOO", None), ("DS4MLX_", None), ("DS4MLX_S", None)],
)
def test_no_flag_is_named_for_a_variable_that_has_little_in_common_with_any(name, flag):
    assert arguments.closest_flag(name) == flag


# Processes (CL-07, CL-10, CO-21) --------------------------------------------------------------


def start(*words, sign="stdout"):
    """A command line with a scripted model, and the first line that it wrote to `sign`."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.stub", *words], stdout=pipe, stderr=pipe, text=True, cwd=ROOT
    )
    return process, getattr(process, sign).readline()


def test_ctrl_c_ends_with_what_was_produced_the_statistics_and_status_130():
    process, first = start("endless", "generate", "hi")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert set((first + out).splitlines()) == {"word"}
    closing, last = err.splitlines()
    words = (first + out).count("word")
    assert f"generated {words} tokens" in closing and last == "ds4mlx: interrupted"


def test_ctrl_c_leaves_one_json_object():
    process, _ = start("announced", "generate", "hi", "--json", sign="stderr")
    process.send_signal(signal.SIGINT)
    out, _err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["text"].startswith("word\n")


def test_ctrl_c_while_loading_ends_with_status_130():
    process, _ = start("loading", "generate", "hi")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "ds4mlx: interrupted\n")
    assert process.returncode == 130


def test_a_second_ctrl_c_kills():
    process, _ = start("stuck", "generate", "hi", sign="stderr")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_while_reading_standard_input_has_status_130(run, model, monkeypatch):
    typing = SimpleNamespace(
        isatty=lambda: False, buffer=SimpleNamespace(read=_raising(KeyboardInterrupt()))
    )
    monkeypatch.setattr(sys, "stdin", typing)
    assert run("generate") == (130, "", "ds4mlx: interrupted\n")


def test_after_a_run_ctrl_c_is_as_it_was_before(run, model):
    before = signal.getsignal(signal.SIGINT)
    run("generate", "hi")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_pipe_ends_the_run_without_a_word():
    process, _ = start("endless", "generate", "hi")
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""


def test_a_closed_pipe_of_help_has_no_trace():
    command = f'"{sys.executable}" -m ds4mlx generate --help | true'
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has that device")


def shelled(command):
    """A command line of the scripted model in a shell, for its redirections."""
    command = f'"{sys.executable}" -m tests.stub hanzi {command}'
    return subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("words", ["generate hi", "--help", "--version"])
def test_a_closed_standard_output_is_refused_with_a_sentence(words):
    done = shelled(f"{words} >&-")
    wanted = "ds4mlx: standard output is closed, wanted an open one for the answer\n"
    assert (done.returncode, done.stderr) == (2, wanted)


@FULL
@pytest.mark.parametrize("words", ["generate hi", "--help", "--version"])
def test_a_full_disk_for_standard_output_is_named(words):
    done = shelled(f"{words} > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "ds4mlx: standard output: No space left on device\n"


@pytest.mark.parametrize("where", ["&-", pytest.param(" /dev/full", marks=FULL)])
def test_what_standard_error_cannot_take_costs_no_answer(where):
    done = shelled(f"generate hi 2>{where}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "你好\n", "")


def test_the_embedded_model_answers_and_the_streams_are_apart():
    done = child("ds4mlx", "generate", "def fibonacci(n):", "-n", "8")
    assert done.returncode == 0
    assert done.stdout.endswith("\n") and done.stdout.strip()
    assert done.stderr.startswith("ds4mlx: prompt ") and done.stderr.count("\n") == 1
    assert "generated 8 tokens" in done.stderr


def test_ctrl_c_stops_the_embedded_model():
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ds4mlx", "generate", "import os\n", "-n", "20000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.endswith("\n")
    assert err.startswith("ds4mlx: prompt ") and err.endswith("ds4mlx: interrupted\n")


def test_stream_json_and_api_agree_and_a_seed_holds_in_a_fresh_process(run):
    options = ["--temp", "1", "--seed", "7", "-n", "12"]
    streamed = child("ds4mlx", "generate", "import os\n", *options)
    told = json.loads(run("generate", "import os\n", *options, "--json")[1])
    reply = ds4mlx.load().generate("import os\n", temp=1.0, seed=7, tokens=12)
    assert streamed.stdout.removesuffix("\n") == told["text"].removesuffix("\n")
    assert (told["text"], told["tokens"]) == (reply.text, reply.tokens)
    assert told["finish_reason"] == reply.finish_reason == "length"


def test_inspect_prints_lines_or_one_object(run):
    status, out, err = run("inspect", NANO)
    assert (status, err) == (0, "") and "nano.gguf" in out
    status, out, err = run("inspect", NANO, "--json")
    assert (status, err) == (0, "") and json.loads(out)["types"]


def test_inspect_says_whether_a_draft_belongs_to_the_model(run):
    draft = str(files("ds4mlx") / "data" / "nano-dspark.gguf")
    status, out, _ = run("inspect", NANO, "--draft", draft)
    assert status == 0 and "pair" in out


def test_inspect_without_a_file_is_refused(run):
    assert refused(run("inspect"), "ds4mlx inspect FILE")


def test_bench_prints_its_lines(run, monkeypatch):
    monkeypatch.setattr("ds4mlx.bench.rows", lambda model, **options: [f"{model} {options}"])
    assert run("bench", "-n", "3")[1] == "None {'tokens': 3}\n"
    assert refused(run("bench", "fast"), "bench takes no argument")
    assert refused(run("bench", "--ctx-max", "9", "--runs", "2"), "runs does not go with ctx_max")
    assert refused(run("bench", "--csv", "x.csv"), "csv needs ctx_max or synthetic")
    assert refused(run("bench", "--launches", "-n", "3"), "tokens does not go with launches")


@pytest.mark.parametrize("flag, name", [("--csv", "no/x.csv"), ("--plot", "no/x.png")])
def test_a_figure_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    run, tmp_path, flag, name
):
    status, out, err = run(
        "bench", "--ctx-max", "9", "--ctx-start", "9", flag, str(tmp_path / name)
    )
    assert status in (1, 2) and not out and flag in err and "Errno" not in err


def test_a_sweep_that_cannot_be_meant_is_refused(run, monkeypatch):
    assert refused(run("bench", "--ctx-max", "5"), "ctx_max is 5, wanted at least ctx_start, 2048")
    assert refused(run("bench", "--ctx-max", "4096", "--plot", "x.gif"), "ends in .png or .svg")
    monkeypatch.setattr("ds4mlx.bench.find_spec", lambda name: None)
    status, _, err = run("bench", "--ctx-max", "4096", "--plot", "x.png")
    assert status == 1 and "plot needs matplotlib" in err and "ds4mlx[plot]" in err


def test_bench_counts_launches_without_weights(run):
    status, out, _ = run("bench", "--launches")
    assert status == 0
    means = [float(cell) for cell in out.splitlines()[-1].split("|")[2:-1]]
    assert len(means) == 4 and all(12 < mean <= 14 for mean in means[:3])
    assert means[3] <= 14.5  # beyond 16,384 entries the best are chosen in two launches


# Helpers --------------------------------------------------------------------------------------


def _raising(error):
    def raising(*_, **__):
        raise error

    return raising


def _lock(monkeypatch, locked):
    """Opening `locked` is not permitted, whoever asks."""
    opened = builtins.open

    def refusing(path, *args, **kwargs):
        if str(path) == str(locked):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refusing)


def _spy_on_bars(run, model, monkeypatch, terminal):
    events = []

    class Bar:
        def __init__(self, desc, total, **_):
            self.desc, self.total, self.n = desc, total, 0

        def update(self, n):
            self.n += n
            events.append(f"{self.desc} {self.n}/{self.total}")

        def close(self):
            events.append("closed")

    def load(path, mtp, progress, **limits):
        progress("load", 2, 4)
        progress("load", 4, 4)
        return model

    def generate(prompt, progress):
        def pieces():
            progress("prefill", 3, 3)
            yield Piece("a")
            events.append("answer")

        return StubReply(pieces())

    monkeypatch.setattr("tqdm.tqdm", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setitem(vars(ds4mlx), "load", load)
    monkeypatch.setattr(model, "generate", generate)
    assert run("generate", "hi")[1] == "a\n"
    return events


def test_a_path_that_is_no_utf8_comes_out_as_it_went_in(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.gguf"
    os.symlink(NANO, name)
    for words, stream in ((["inspect", name], "stdout"), (["inspect", name + b"x"], "stderr")):
        done = subprocess.run([sys.executable, "-m", "ds4mlx", *words], capture_output=True)
        assert (b"\xff" if stream == "stdout" else b"\\udcff") in getattr(done, stream)
        assert b"Error:" not in done.stderr


def test_a_current_folder_that_is_gone_is_one_sentence(tmp_path):
    code = "import os, sys; os.mkdir('x'); os.chdir('x'); os.rmdir('../x'); sys.path.pop(0)\n"
    code += f"sys.path.append({str(ROOT)!r})\n"
    code += "from ds4mlx.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert done.returncode == 2 and b"the current folder is gone" in done.stderr


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\u202e", "\ud800"])
def test_a_message_is_one_line_that_a_terminal_can_show(text):
    assert str(FileError(f"tensor {text} is odd")) == f"tensor {ascii(text)[1:-1]} is odd"


def test_only_runs_go_with_a_bench_of_conversion(run):
    status, _, error = run("bench", "--convert", "1", "--csv", "x")
    assert status == 2 and "csv does not go with convert" in error
