"""Speed of conversion on a large file of random bytes, and what a converted model's start takes."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from .bench import first_token_seconds
from .convert.gguf import open_gguf
from .convert.write import tensor_bytes, typed, write_gguf
from .loading import EMBEDDED, EMBEDDED_DRAFT, find, load_files

TITLES = ("figure", "value", "peak, MB", "command")
_SHAPE = (2048, 4096)  # of a matrix of Flash's experts
_TYPES = (("IQ2_XXS", "Q2_K"), ("MXFP4", "MXFP4"), ("Q8_0", "Q8_0"))  # gate and up, down; by stage
# Small, as Linux counts what the parent holds as the child's own peak.
_PARENT = """
import resource, subprocess, sys, time
start = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
seconds = time.perf_counter() - start
print(seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


class Run(NamedTuple):
    """A command in a process of its own."""

    command: str
    seconds: float
    peak: int  # bytes of the process that were resident at once, the page cache apart


def rows(gigabytes: int, runs: int = 5) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a table with `TITLES`; all files lie in a temporary folder that goes afterwards.

    The large file is a draft whose experts are random bytes of the types that ds4's files have.
    Each command is run once, its file in the page cache as far as that holds it. The starts are
    the embedded model's, medians of `runs`. Raises Ds4Error or CalledProcessError.
    """
    with tempfile.TemporaryDirectory(prefix="ds4mlx-") as name:
        folder = Path(name)
        large, out, back = folder / "large.gguf", folder / "large", folder / "back.gguf"
        size = made(large, gigabytes * 10**9)
        yield "copy and flush, to compare", _speed(size, _copied(large, back)), "", ""
        for what, *paths in (("convert", large, out), ("--verify", out), ("--reverse", out, back)):
            run = _run("convert", *([what] * (what != "convert")), *map(str, paths))
            command = run.command.replace(f"{name}/", "")
            yield what.lstrip("-"), _speed(size, run.seconds), f"{run.peak / 1e6:.0f}", command
        yield from _starts(folder, runs)


def _speed(size: int, seconds: float) -> str:
    return f"{size / 1e9:.2f} GB in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s"


def _copied(path: Path, to: Path) -> float:
    """Seconds that a plain copy takes until it is on the disk; it is removed again."""
    start = time.perf_counter()
    with path.open("rb") as source, to.open("wb") as copy:
        while chunk := source.read(1 << 22):
            copy.write(chunk)
        os.fsync(copy.fileno())
    seconds = time.perf_counter() - start
    to.unlink()
    return seconds


def _starts(folder: Path, runs: int) -> Iterator[tuple[str, str, str, str]]:
    source = files(__package__) / "data" / EMBEDDED
    _run("convert", str(source), str(folder / "small"))
    for what, path in (("GGUF", Path(str(source))), ("folder", folder / "small")):
        for name, act in (("open", find), ("open and load", load_files)):
            seconds = [_seconds(act, path) for _ in range(runs + 1)][1:]
            yield f"{name}, {what}", f"{1e3 * median(seconds):.0f} ms", "", ""
        seconds, _ = first_token_seconds(str(path), runs, force=False)
        command = f"ds4mlx generate -m {path.name} -n 1 .."
        yield f"start to first token, {what}", f"{median(seconds):.2f} s", "", command


def _seconds(act, path: Path) -> float:
    start = time.perf_counter()
    act(path)
    return time.perf_counter() - start


def _run(*words: str) -> Run:
    command = [sys.executable, "-m", "ds4mlx", *words]
    done = subprocess.run(
        [sys.executable, "-c", _PARENT, *command], check=True, capture_output=True, text=True
    )
    seconds, peak = map(float, done.stdout.split())
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(" ".join(["ds4mlx", *words]), seconds, int(peak * unit))


def made(path: Path, wanted: int) -> int:
    """A DSpark draft of about `wanted` bytes -> its size."""
    draft = open_gguf(files(__package__) / "data" / EMBEDDED_DRAFT)
    experts = {n: _type(n) for n in draft.tensors if "_exps." in n}
    each = sum(tensor_bytes(type, _SHAPE) for type in experts.values())
    shape, rng = (max(1, round(wanted / each)), *_SHAPE), np.random.default_rng(0)

    def random(type: str):
        return lambda: np.frombuffer(rng.bytes(tensor_bytes(type, shape)), np.uint8)

    tensors = [
        (n, experts[n], shape, random(experts[n])) if n in experts else (n, t.type, t.shape, t.read)
        for n, t in draft.tensors.items()
    ]
    write_gguf(path, typed(draft.metadata), tensors)
    return path.stat().st_size


def _type(name: str) -> str:
    stage = int(name.split(".")[1])
    return _TYPES[stage % len(_TYPES)]["_down_" in name]
