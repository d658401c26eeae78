"""The command line: `arguments` decides what was meant, Fire calls the verb, this module prints.

A verb is a generator of text for standard output, which holds the answer and nothing else;
it has not run when Fire hands it back. MLX is imported late: help must not wait for it.
"""

import json
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from inspect import signature

from . import __version__, arguments, dspark
from .errors import Ds4Error, UsageError


def main(words: list[str] | None = None) -> int:
    """Run one command line -> its exit status.

    0; 1 a file or a run failed; 2 bad usage; 130 after Ctrl-C; 141 when the pipe was closed.
    """
    words = sys.argv[1:] if words is None else words
    flags = words[: words.index("--")] if "--" in words else words
    closed = sys.stdout is None
    # The number of a closed one is free for the next file.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    # In any locale; a path whose bytes are no UTF-8 goes out as it came in.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        if closed:
            raise UsageError("standard output is closed, wanted an open one for the answer")
        _check_here()
        _run(words, flags)
        return 0
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        # Nobody reads on; the interpreter's own last flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # the outermost place: a fault of ours ends in one line too
        if "--debug" in flags:
            traceback.print_exc()
        known = isinstance(error, Ds4Error)
        text = " ".join(str(error).split())
        _say(text if known else f"{type(error).__name__}: {text} (--debug shows where)")
        return error.status if known else 1


def _check_here():
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder is gone, wanted to run in one that exists") from None


def _run(words: list[str], flags: list[str]):
    if "--help" in flags or "-h" in flags:
        _tell(f"{arguments.help_text(words[0] if words[0] in VERBS else None)}\n")
    elif words == ["--version"]:
        _tell(f"ds4mlx {__version__}\n")
    else:
        verb, options = arguments.parse(words)
        _warn_of_variables()
        import fire

        # Fire gets a verb whose options are settled: there is no text left for it to read.
        call = {verb: lambda: VERBS[verb](**options)}
        fire.Fire(call, command=[verb], name="ds4mlx", serialize=_show)


def _show(texts: Iterator[str]):
    with closing(texts):
        for text in texts:
            _tell(text)


def _tell(text: str):
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Ds4Error(f"standard output: {error.strerror}") from error


def generate(
    prompt=None, model=None, mtp=None, stats=None, force=False, as_json=False, **options
) -> Iterator[str]:
    """Load a model and answer `prompt`; `options` are those of `Model.generate`."""
    asked = ("dspark", "dspark_confidence", "dspark_strict", "exact_sampling", "temp")
    dspark.confidence(mtp is not None, **{n: options[n] for n in asked if n in options})
    source = prompt if isinstance(prompt, arguments.PromptFile) else None
    _check_writable("--stats", stats, model, mtp, source)
    prompt = arguments.read_prompt(prompt)
    from . import load

    with _Watch() as watch:
        limits = {"ctx": options.get("ctx"), "force": force}
        loaded = load(model, mtp=mtp, progress=watch.progress, **limits)
        reply = loaded.generate(prompt, progress=watch.progress, **options)
        for note in reply.notes:
            _say(note)
        with closing(reply):
            if as_json:
                deque(_pieces(reply, watch), 0)
            else:
                yield from _streamed(_pieces(reply, watch))
        if as_json:
            names = ("text", "reasoning", "tokens", "finish_reason", "stats")
            yield _json({name: getattr(reply, name) for name in names})
        if stats is not None:
            _written("--stats", stats, reply.stats)
        _say(_closing_line(reply))
        if warning := reply.stats.get("dspark", {}).get("warning"):
            _say(f"warning: {warning}")
        if watch.stopped:
            raise KeyboardInterrupt


def inspect(model=None, draft=None, as_json=False) -> Iterator[str]:
    """What a file holds, as lines or as JSON."""
    if model is None:
        raise UsageError("no file is given, wanted ds4mlx inspect FILE")
    from .convert.inspect import lines, report

    found = report(model, draft)
    yield from [_json(found)] if as_json else (f"{line}\n" for line in lines(found))


def bench(model=None, **options) -> Iterator[str]:
    """Measure; `options` are those of `bench.rows`, or from `ctx_max` on of `sweep_rows`."""
    from .bench import conversion_rows, launch_rows, rows, sweep_rows

    if (size := options.pop("convert", None)) is not None:
        if model or options.keys() - {"runs"}:
            raise UsageError(f"{next(iter(options), 'model')} does not go with convert")
        yield from (f"{line}\n" for line in conversion_rows(size, **options))
        return
    if options.pop("launches", False):
        if model or options:
            raise UsageError(f"{next(iter(options), 'model')} does not go with launches")
        yield from (f"{line}\n" for line in launch_rows())
        return
    swept = next((k for k in ("ctx_max", "synthetic") if k in options), None)
    own = signature(sweep_rows).parameters.keys() - {"force"}
    for key in options.keys() - own - {"force"} if swept else options.keys() & own:
        what = f"does not go with {swept}" if swept else "needs ctx_max or synthetic"
        raise UsageError(f"{key} {what}")
    csv, plot = (options.get(flag) for flag in ("csv", "plot"))
    _check_writable("--csv", csv, model, options.get("mtp"))
    _check_writable("--plot", plot, model, options.get("mtp"))
    if csv and plot and os.path.realpath(csv) == os.path.realpath(plot):
        raise UsageError(f"--csv and --plot are both {csv}, wanted two files")
    measure = sweep_rows if swept else rows
    for line in measure(model, **options):
        yield f"{line}\n"


def bench_dspark(prompts=(), model=None, mtp="embedded", **options) -> Iterator[str]:
    """Measure drafts; `options` are those of `bench.dspark_rows`."""
    from .bench import dspark_rows

    for line in dspark_rows(prompts, model, mtp, **options):
        yield f"{line}\n"


def check(
    prompts=(),
    model=None,
    mtp="embedded",
    tokens=64,
    dspark_confidence=0.0,
    force=False,
    receipt="ds4mlx-check.json",
) -> Iterator[str]:
    """Compare drafted and plain decoding; a difference is a failure of the command."""
    _check_writable("--receipt", receipt, model, mtp)
    from . import load
    from .check import Check, hashes

    with load(model, mtp=mtp, force=force) as loaded:
        run = Check(loaded, prompts, tokens=tokens, confidence=dspark_confidence)
        for line in run:
            yield f"{line}\n"
    _written("--receipt", receipt, run.receipt | {"files": hashes(model, mtp)})
    yield f"receipt: {receipt}\n"
    if run.failures:
        raise Ds4Error(f"{run.failures} of {len(run.prompts)} prompts differ with drafts")


def convert(paths=(), action="convert", overwrite=False, **released) -> Iterator[str]:
    """Convert a GGUF or a checkpoint, or check or undo a conversion."""
    if action == "convert" and paths and os.path.isdir(os.path.expanduser(paths[0])):
        yield from _convert_released(paths, overwrite=overwrite, **released)
        return
    wanted = {"convert": "IN.gguf OUT/", "verify": "OUT/ [IN.gguf]", "reverse": "OUT/ OUT.gguf"}
    if not (2 - (action == "verify") <= len(paths) <= 2):
        raise UsageError(f"{len(paths)} paths are given, wanted {wanted[action]}")
    if action == "verify" and overwrite:
        raise UsageError("--verify writes nothing, --overwrite does not belong to it")
    if released:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in released)
        raise UsageError(f"{flags}: only for the folder of a checkpoint, found {paths[0]}")
    from .convert.convert import convert
    from .convert.receipt import reverse, verify

    with _Watch() as watch:
        if action == "verify":
            yield f"{verify(*paths, progress=watch.progress)}\n"
        elif action == "reverse":
            for path in reverse(*paths, overwrite=overwrite, progress=watch.progress):
                yield f"{path}\n"
        else:
            yield f"{convert(*paths, overwrite=overwrite, progress=watch.progress)}\n"


def _convert_released(paths, **options) -> Iterator[str]:
    from .convert.released import convert_released

    if len(paths) > 2:
        raise UsageError(f"{len(paths)} paths are given, wanted HF_DIR/ [OUT]")
    with _Watch() as watch:
        for line in convert_released(*paths, progress=watch.progress, **options):
            watch.clear()
            yield f"{line}\n"


def synthesize(path=None, **options) -> Iterator[str]:
    """Write a model of random weights; `options` are those of `synthesize.synthesize`."""
    if path is None:
        raise UsageError("no file is given, wanted ds4mlx synthesize OUT.gguf")
    from .synthesize import synthesize

    with _Watch() as watch:
        for place in synthesize(path, progress=watch.progress, **options):
            watch.clear()
            yield f"{place}\n"


def download(target=None, folder="gguf", file=None, listed=False) -> Iterator[str]:
    """Fetch an official file, check one that came from elsewhere, or list the targets."""
    if (target is not None) + (file is not None) + listed != 1:
        raise UsageError("download does one thing, wanted a target, --list or --check FILE")
    from .download import check, fetch, lines

    if listed:
        yield from (f"{line}\n" for line in lines())
        return
    with _Watch() as watch:
        if target is None:
            found = check(file, watch.progress)
        else:
            found = fetch(target, folder, watch.progress)
    yield f"{found}\n"


def doctor(files=()) -> Iterator[str]:
    """This machine, and whether files would fit on it; a file of no use is a failure."""
    from .doctor import Doctor

    run = Doctor(files)
    yield from (f"{line}\n" for line in run)
    if run.ill:
        raise Ds4Error(f"{run.ill} of {len(run.paths)} files are of no use")


def selftest(quick=False, op=None) -> Iterator[str]:
    """Try every kernel on this machine; one that fails is a failure of the command."""
    from .selftest import Selftest

    run = Selftest(quick, op)
    yield from run
    if run.failures:
        raise Ds4Error(f"the self-test found {len(run.failures)} failures")


VERBS = {
    "generate": generate,
    "inspect": inspect,
    "bench": bench,
    "bench-dspark": bench_dspark,
    "check": check,
    "convert": convert,
    "synthesize": synthesize,
    "download": download,
    "selftest": selftest,
    "doctor": doctor,
}


def _pieces(reply, watch: "_Watch") -> Iterator[str]:
    """The pieces of a reply until Ctrl-C."""
    try:
        for piece in reply:
            watch.clear()
            yield piece
            if watch.stopped:
                return
    except KeyboardInterrupt:  # raised by `progress`, before the first token
        pass


def _streamed(pieces: Iterator[str]) -> Iterator[str]:
    """The answer, ending in a newline; the reasoning goes to standard error, as ds4 shows it."""
    grey, plain = ("\033[2m", "\033[0m") if sys.stderr.isatty() else ("", "")
    answer, thought = "", "\n"
    for piece in pieces:
        if piece.reasoning:
            _error(f"{grey}{piece}{plain}")
            thought = piece or thought
        else:
            thought = _ended(thought)
            yield piece
            answer = piece or answer
    _ended(thought)
    if not answer.endswith("\n"):
        yield "\n"


def _ended(thought: str) -> str:
    """The end of the reasoning forces a newline."""
    if not thought.endswith("\n"):
        _error("\n")
    return "\n"


def _closing_line(reply) -> str:
    stats = reply.stats
    parts = [f"prompt {_counted(stats['prompt_tokens'], stats['prompt_tokens_per_second'])}"]
    if stats["first_token_seconds"] is not None:
        parts.append(f"first token {stats['first_token_seconds']:.2f} s")
    parts += [
        f"generated {_counted(stats['generated_tokens'], stats['generate_tokens_per_second'])}",
        f"peak {stats['peak_bytes'] / 1e9:.2f} GB",
    ]
    if drafts := stats.get("dspark"):
        parts.append(_drafted(drafts))
    limits = {"length": "token limit (-n)", "context": "context limit (-c)"}
    if reply.finish_reason in limits:
        inside = " inside the reasoning" if reply.reasoning and not reply.text else ""
        parts.append(f"ended by the {limits[reply.finish_reason]}{inside}")
    return "; ".join(parts)


def _drafted(stats: dict) -> str:
    per, share = stats["accepted_per_cycle"], stats["accepted_share"]
    parts = [f"drafts: {stats['cycles']} cycles"]
    parts += [f"{per:.2f} accepted a cycle"] if per is not None else []
    parts += [f"{share:.0%} of {stats['drafted']} accepted"] if share is not None else []
    return ", ".join(parts)


def _check_writable(flag: str, path: str | None, *read: str | None):
    """Refuses, before anything is loaded, a file that could not be written afterwards.

    And one that holds weights, or is among those that are read or in a folder of them.
    """
    if path is None:
        return
    target, weights = os.path.realpath(path), path.lower().endswith((".gguf", ".safetensors"))
    for name in filter(None, read):
        other = os.path.realpath(os.path.expandvars(os.path.expanduser(name)))
        both = os.path.exists(target) and os.path.exists(other)
        same = os.path.samefile(target, other) if both else target == other
        if same or target.startswith(os.path.join(other, "")):
            raise UsageError(f"{flag} {path}: {name} is read, wanted a file beside it")
    if weights and os.path.exists(path):
        raise UsageError(f"{flag} {path}: a file of weights, wanted another name")
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"{flag} {path}: wanted a file in a folder that can be written")


def _written(flag: str, path: str, values: dict):
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(_json(values))
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from error


def _counted(tokens: int, per_second: float | None) -> str:
    return f"{tokens} tokens" + (f", {per_second:.1f} t/s" if per_second else "")


class _Watch:
    """Looks after a run from outside: Ctrl-C, and progress where standard error is a terminal."""

    def __init__(self):
        self.stopped = False
        self._bar = self._stage = None

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *_):
        self.clear()
        signal.signal(signal.SIGINT, self._before)

    def _stop(self, *_):
        """The first Ctrl-C asks the run to end at the next token, the second kills."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.stopped = True

    def progress(self, stage: str, done: int, total: int):
        if self.stopped:
            raise KeyboardInterrupt
        if not sys.stderr.isatty():
            return
        if self._bar is None or self._stage != stage:
            from tqdm import tqdm

            self.clear()
            self._stage = stage
            unit = " tokens" if stage == "prefill" else "B"
            looks = dict(delay=0.5, leave=False, unit_scale=True, unit=unit)
            self._bar = tqdm(desc=stage, total=total, **looks)
        self._bar.update(done - self._bar.n)

    def clear(self):
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _warn_of_variables():
    """Names from other programs' habits change nothing here, and a run must not pretend so."""
    names = sorted(name for name in os.environ if name.startswith("DS4MLX_"))
    if names:
        flags = {name: arguments.closest_flag(name) for name in names}
        listed = ", ".join(f"{n} (see {f})" if f else n for n, f in flags.items())
        _say(f"warning: no environment variable is read, found {listed}")


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def _say(line: str):
    _error(f"ds4mlx: {line}\n")


def _error(text: str):
    """What cannot be told here costs no answer."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        pass
