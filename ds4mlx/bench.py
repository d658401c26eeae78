"""Speed, with the machine, the command and the commit that the figures belong to."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from . import __version__
from .errors import Ds4Error, UsageError

PROMPT = "def fibonacci(n):\n"


def rows(
    model: str | None = None, *, tokens: int = 128, runs: int = 5, force: bool = False
) -> Iterator[str]:
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
    first, command = first_token_seconds(model, runs, force)
    yield _row("start to first token, s", first, 2, command)
    speeds = decode_speeds(model, tokens, runs, force)
    yield _row("decode, tokens/s", speeds, 1, " ".join(["ds4mlx bench", *_flag(model)]))


def conversion_rows(gigabytes: int, *, runs: int = 5) -> Iterator[str]:
    """Lines of a table: `ds4mlx convert` on so large a file, and how a converted model starts."""
    from . import conversion

    yield f"machine: {_machine()}"
    yield f"commit: {_commit()}, mlx {version('mlx')}"
    yield _cells(conversion.TITLES, False)
    yield _cells(["---"] * len(conversion.TITLES), False)
    for row in conversion.rows(gigabytes, runs):
        yield _cells(row, False)


def sweep_rows(
    model: str | None = None,
    *,
    mtp: str | None = None,
    synthetic: str | None = None,
    layers: int = 43,
    ctx_start: int = 2048,
    ctx_max: int | None = None,
    step_incr: int | None = None,
    step_mul: float = 2.0,
    gen_tokens: int = 64,
    fill: bool = False,
    chunk: int | None = None,
    csv: str | None = None,
    plot: str | None = None,
    force: bool = False,
) -> Iterator[str]:
    """Lines of a table: speed at contexts from `ctx_start` to `ctx_max`; see sweep.Sweep.

    `synthetic` names a recipe of synthetic.RECIPES in place of a model, `mtp` then makes a draft
    of random weights too. With `fill` no prompt is read, and states are drawn. Writes the figures
    to the files `csv` and `plot`.
    """
    from . import sweep

    if ctx_max is not None and ctx_max < ctx_start:
        raise UsageError(f"ctx_max is {ctx_max}, wanted at least ctx_start, {ctx_start}")
    if plot:  # before anything is measured
        if Path(plot).suffix not in (".png", ".svg"):
            raise UsageError(f"plot is {plot}, wanted a name that ends in .png or .svg")
        if not find_spec("matplotlib"):
            raise Ds4Error("plot needs matplotlib, which is not here: pip install 'ds4mlx[plot]'")
    most, contexts = max(ctx_start, ctx_max or 0), {"incr": step_incr or 0, "mul": step_mul}
    target, draft, loaded = _targets(model, mtp, synthetic, layers, most, force)
    bench = sweep.Sweep(target, draft, chunk=chunk or (loaded._chunk if loaded else 4096))
    yield f"machine: {_machine()}, copy {bench.bandwidth / 1e9:.0f} GB/s (read and written)"
    yield f"commit: {_commit()}, mlx {version('mlx')}"
    made = f"synthetic {synthetic}, {layers} layers"
    yield f"model: {made if synthetic else model or 'embedded'}"
    yield f"command: ds4mlx {' '.join(sys.argv[1:])}"
    yield _cells(sweep.TITLES, False)
    yield _cells(["---"] * len(sweep.TITLES), False)
    points = []
    for point in bench.points(ctx_start, most, tokens=gen_tokens, fill=fill, **contexts):
        points.append(point)
        yield _cells(point.cells(), False)
    if csv:
        rows = [sweep.TITLES, *(point.cells() for point in points)]
        with _saving(csv):
            Path(csv).write_text("".join(f"{_cells(row, True)}\n" for row in rows))
    if plot:
        with _saving(plot):
            sweep.plot(points, plot)


@contextmanager
def _saving(path: str):
    """What was measured is told already."""
    try:
        yield
    except OSError as error:
        raise Ds4Error(f"{path}: {error.strerror}; the figures stand above") from error


def launch_rows() -> Iterator[str]:
    """Lines of a table: launches of a decoded token of Flash by kernel, at growing contexts.

    A context is the mean of 128 tokens, some of which close windows.
    """
    from .launches import launches, mean_launches
    from .synthetic import flash

    target = flash(seed=None)
    layers = target.config.num_hidden_layers
    contexts = (128, 1024, 4096, 65536)
    yield f"commit: {_commit()}, mlx {version('mlx')}, V4 Flash of {layers} layers, q2, one row"
    yield _cells(("kernel", *(f"at {ctx}" for ctx in contexts)), False)
    yield _cells(["---"] * (1 + len(contexts)), False)
    counts = [launches(target, 1, ctx) for ctx in contexts]
    for name, _ in counts[-1].most_common():
        yield _cells((name[:40], *(str(count[name]) for count in counts)), False)
    means = [mean_launches(target, 1, ctx) / layers for ctx in contexts]
    yield _cells(("a layer and token, mean", *(f"{mean:.2f}" for mean in means)), False)


def _targets(model, mtp, synthetic: str | None, layers: int, ctx: int, force: bool):
    """A target, a draft or None, and what keeps them."""
    if synthetic:
        from .synthetic import evaluated, flash, flash_draft

        target = evaluated(flash(synthetic, layers))
        return target, evaluated(flash_draft(target)) if mtp else None, None
    from .api import load

    loaded = load(model, mtp=mtp, force=force, ctx=ctx)
    return loaded._target, loaded._draft, loaded


def dspark_rows(
    prompts=(),
    model: str | None = None,
    mtp: str = "embedded",
    *,
    tokens: int = 128,
    runs: int = 5,
    dspark_confidence: float = 0.7,
    dspark_schedule: bool = True,
    force: bool = False,
    csv: bool = False,
) -> Iterator[str]:
    """Lines of a table: decoding speed with drafts and without, alternately, prompt by prompt.

    Greedy, tokens per second of what was handed out, medians of `runs` after one of each that
    is not counted. Raises Ds4Error where the texts differ; failures raise: they have no row.
    """
    from .api import load
    from .check import PROMPTS

    names = ("prompt", "strict t/s", "drafted t/s", "ratio", "tokens/pass", "accepted", "verdict")
    if not csv:
        yield f"machine: {_machine()}"
        yield f"commit: {_commit()}, mlx {version('mlx')}"
        yield f"{tokens} tokens, confidence {dspark_confidence}, schedule {dspark_schedule}, "
        yield f"medians of {runs} alternating runs"
    yield _cells(names, csv)
    if not csv:
        yield _cells(["---"] * len(names), csv)
    settings = {"dspark_confidence": dspark_confidence, "dspark_schedule": dspark_schedule}
    with load(model, mtp=mtp, force=force) as loaded:
        for prompt in prompts or PROMPTS:
            strict, drafted = [], []
            for _ in range(runs + 1):
                strict.append(loaded.generate(prompt, tokens=tokens, dspark_strict=True)._finish())
                drafted.append(loaded.generate(prompt, tokens=tokens, **settings)._finish())
                if strict[-1].tokens != drafted[-1].tokens:
                    raise Ds4Error(f"{prompt!r:.40}: the drafted text is not the plain text")
            yield _cells(_compared(prompt, strict[1:], drafted[1:]), csv)


def _compared(prompt: str, strict: list, drafted: list) -> list[str]:
    """The row of one prompt, from its replies; the verdict is that of most pairs of runs too.

    What was drafted and accepted is told of the run with the (lower) median speed.
    """
    speeds = [
        [r.stats["generate_tokens_per_second"] or 0.0 for r in arm] for arm in (strict, drafted)
    ]
    a, b = map(median, speeds)
    middle = sorted(range(len(drafted)), key=speeds[1].__getitem__)[(len(drafted) - 1) // 2]
    told = drafted[middle].stats["dspark"]
    ratio = b / a if a else 0.0
    wins = [x < y for x, y in zip(*speeds, strict=True)]
    share = told["accepted_share"]
    faster = share is not None and ratio > 1.03 and 3 * sum(wins) >= 2 * len(wins)
    slower = ratio < 0.97 and 3 * sum(wins) <= len(wins)
    verdict = "faster" if faster else "slower" if slower else "no difference"
    return [
        repr(prompt)[:40],
        f"{a:.1f}",
        f"{b:.1f}",
        f"{ratio:.2f}",
        f"{told['tokens_per_pass'] or 0:.2f}",
        "none drafted" if share is None else f"{share:.0%} of {told['drafted']}",
        verdict,
    ]


def _cells(cells, csv: bool) -> str:
    if csv:
        return ",".join(f'"{c.replace(chr(34), chr(34) * 2)}"' for c in cells)
    return f"| {' | '.join(cells)} |"


def first_token_seconds(model: str | None, runs: int, force: bool) -> tuple[list[float], str]:
    """Seconds from starting a process to its first token, `runs` times, and its command."""
    forced = ["--force"] if force else []
    words = ["generate", *_flag(model), *forced, "-n", "1", f"--prompt={PROMPT}"]
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ds4mlx", *words], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return seconds[1:], " ".join(["ds4mlx", *words[:-1], repr(PROMPT)])


def decode_speeds(model: str | None, tokens: int, runs: int, force: bool) -> list[float]:
    """Tokens per second of greedy decoding, `runs` times after one that is not counted."""
    from .api import load

    with load(model, force=force) as loaded:
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
    return done.stdout.strip() if done.returncode == 0 else f"version {__version__}"
