"""Speed, with the machine, the command and the commit that the figures belong to."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median

PROMPT = "def fibonacci(n):\n"


def rows(model: str | None = None, *, tokens: int = 128, runs: int = 5) -> Iterator[str]:
    """Lines of a table: time from start to first token, and decoding speed.

    The first token is timed from the start of a fresh process that runs `ds4mlx generate`, the
    files in the page cache (one run first, not counted). Decoding is greedy, in one process;
    the median of `runs`, with their range. Failures raise: a failed run has no row.
    """
    yield f"machine: {_machine()}"
    yield f"commit: {_commit()}, mlx {version('mlx')}"
    yield f"prompt: {PROMPT!r}, {tokens} tokens, median (range) of {runs} runs"
    yield "| figure | median | range | command |"
    yield "| --- | --- | --- | --- |"
    first, command = first_token_seconds(model, runs)
    yield _row("start to first token, s", first, 2, command)
    speeds = decode_speeds(model, tokens, runs)
    yield _row("decode, tokens/s", speeds, 1, " ".join(["ds4mlx bench", *_flag(model)]))


def first_token_seconds(model: str | None, runs: int) -> tuple[list[float], str]:
    """Seconds from starting a process to its first token, `runs` times, and its command."""
    words = ["generate", *_flag(model), "-n", "1", f"--prompt={PROMPT}"]
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ds4mlx", *words], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return seconds[1:], " ".join(["ds4mlx", *words[:-1], repr(PROMPT)])


def decode_speeds(model: str | None, tokens: int, runs: int) -> list[float]:
    """Tokens per second of greedy decoding, `runs` times after one that is not counted."""
    from .api import load

    with load(model) as loaded:
        replies = [loaded.generate(PROMPT, tokens=tokens) for _ in range(runs + 1)]
        counted = [(len(reply.tokens), reply.stats) for reply in replies][1:]
    return [n / stats["generate_seconds"] for n, stats in counted]


def _row(name: str, values: list[float], digits: int, command: str) -> str:
    low, mid, high = (f"{f(values):.{digits}f}" for f in (min, median, max))
    return f"| {name} | {mid} | {low} to {high} | `{command}` |"


def _flag(model: str | None) -> list[str]:
    return [] if model is None else ["-m", model]


def _machine() -> str:
    import mlx.core as mx

    name = mx.device_info().get("device_name") or platform.processor() or platform.machine()
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {name}"


def _commit() -> str:
    """The checkout's commit, or the version where the package is installed from a wheel."""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=9"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else f"version {version('ds4mlx')}"
