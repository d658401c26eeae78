"""The one place that reads metal/ and calls mx.fast.metal_kernel and mx.fast.cuda_kernel.

MLX compiles a kernel when its result is evaluated, not when it is launched. A fault in a
launch is a Ds4Error at once; a kernel that its compiler refuses, or that dies, is an error of
the `mx.eval` that needs it, unless the launch stands in `eager`. Nothing falls back.
"""

import atexit
import hashlib
import math
import os
import re
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from ..errors import Ds4Error
from ..msl import cuda

# On CUDA, MLX submits its graph after 400 MB of arrays that launches touch, and counts all experts
# of a matrix: after nearly each launch. Its own variables are the only way to tell it otherwise.
# Longer CUDA graphs would save the host nothing, and the device idles until the first is full.
if sys.platform == "linux":
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "100000")
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "25")

_SOURCES = files("ds4mlx") / "metal"
_HAS_GPU = mx.metal.is_available() or mx.cuda.is_available()  # asked 200 times a token
_reference = ContextVar("reference", default=False)
_wait: ContextVar[Callable | None] = ContextVar("wait", default=None)
_verbose = ContextVar("verbose", default=False)
_making, _made = threading.Lock(), {}  # the folder of sources, by process
_traced: ContextVar[Counter | None] = ContextVar("traced", default=None)


@contextmanager
def _set(variable: ContextVar, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def reference():
    """Run every op as its pure-MLX reference: in tests, or to find a wrong kernel."""
    return _set(_reference, True)


def eager(wait: Callable):
    """Await each launch with `wait` (mx.eval): a kernel that fails is named. For self-tests."""
    return _set(_wait, wait)


def verbose():
    """Print the source that MLX generates at each launch."""
    return _set(_verbose, True)


def traced(kernels: Counter):
    """Build graphs of launches that never run, on any machine; they are counted in `kernels`."""
    return _set(_traced, kernels)


def backend() -> str | None:
    """`metal`, `cuda`, or None where the default device is a CPU."""
    if not _HAS_GPU or mx.default_device() != mx.gpu:
        return None
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


def enabled() -> bool:
    return not _reference.get() and (_traced.get() is not None or backend() is not None)


def compiles() -> bool:
    """Whether launches may be part of a graph that mx.compile keeps."""
    real = backend() in ("metal", "cuda") and _wait.get() is None
    return enabled() and (_traced.get() is not None or real)


def placed(position: int | mx.array) -> mx.array:
    """[4] int32 of an int, or of what a compiled graph knows as an array: what kernels read.

    Of 8 bytes or fewer MLX keeps arrays on CUDA in the host's memory, where each threadgroup's
    look takes microseconds. What is placed stays as it is.
    """
    if isinstance(position, int):
        return mx.array([position] * 4)
    return position if position.ndim else mx.full(4, position)


def literal(value: float) -> str:
    """A float in a kernel's text; see `placed` for why it is no input."""
    return f"{float(value)!r}f" if math.isfinite(value) else f"{value}".replace("inf", "INFINITY")


def read_source(name: str) -> str:
    """The text of metal/<name>, each `#include "..."` replaced by that file, lines marked."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate((_SOURCES / name).read_text().splitlines(), 2):
        included = re.fullmatch(r'#include "(.+)"', line)
        lines += [read_source(included[1]), f'#line {number} "{name}"'] if included else [line]
    return "\n".join(lines) + "\n"


class Kernel:
    """The METAL_FUNC <name> of metal/<name>.metal, run by the kernel body `call`."""

    def __init__(
        self, name: str, *, inputs: list[str], outputs: list[str], call: str, partial: bool = False
    ):
        """partial: parts of the outputs stay unwritten, which whoever reads them must know."""
        self.name, self.inputs, self.outputs, self.call = name, inputs, outputs, call
        self.partial = partial
        self._built: dict[tuple, Callable] = {}

    @property
    def header(self) -> str:
        return read_source(f"{self.name}.metal")

    def __call__(
        self, *inputs: mx.array, template: dict, grid, group, shapes, dtypes
    ) -> list[mx.array]:
        """Launch on `grid` threads in threadgroups of `group`.

        template: names in `call` -> dtype, bool or int. shapes, dtypes: of the outputs.
        Raises Ds4Error: see the top of this file.
        """
        # A partial simdgroup would make every simd operation undefined.
        whole = not any(n % g for n, g in zip(grid, group, strict=True))
        if not whole or math.prod(group) % 32 or math.prod(group) > 1024 or not all(grid):
            raise self.error(inputs, template, f"grid {grid} of groups {group} is not whole")
        if max(grid[1] // group[1], grid[2] // group[2]) > 65535:  # CUDA's limit
            raise self.error(inputs, template, f"grid {grid} has too many threadgroups in y or z")
        if len(inputs) != len(self.inputs):
            raise self.error(inputs, template, f"takes {len(self.inputs)} inputs")
        try:
            results = launch(self, inputs, template, grid, group, shapes, dtypes)
            if wait := _wait.get():
                wait(results)
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise self.error(inputs, template, str(error)) from error
        return results

    def error(self, inputs, template: dict, reason: str) -> Ds4Error:
        shown = ", ".join(
            f"{name} {x.dtype} {list(x.shape)}"
            for name, x in zip(self.inputs, inputs, strict=False)
        )
        return Ds4Error(f"kernel {self.name} ({shown}; {template}) on {backend()}: {reason}")

    def built(self, inputs, template: dict, dtypes) -> Callable:
        """The function that MLX made of this kernel, for these types of arguments."""
        target = backend()
        kinds = tuple((x.dtype, x.ndim > 0) for x in inputs)
        key = (target, kinds, tuple(template.items()), tuple(dtypes))
        if key not in self._built:
            header, source = self.header, f'#line 1 "{self.name} (call)"\n{self.call}'
            make, ends = mx.fast.metal_kernel, ""
            if target == "cuda":
                make, ends = mx.fast.cuda_kernel, "_p"
                header, source = cuda.translate(self, inputs, template, dtypes)
            # MLX keeps a kernel by its name: with another text it must have another name.
            digest = hashlib.sha256("\0".join((str(key), header, source)).encode()).hexdigest()
            name = f"{self.name}_{digest[:12]}"
            if target == "cuda":
                header = included(name, header)
            self._built[key] = make(
                name=name,
                input_names=[n + ends for n in self.inputs],
                output_names=[n + ends for n in self.outputs],
                header=header,
                source=source,
            )
        return self._built[key]


def included(name: str, text: str) -> str:
    """What includes `text`: on CUDA, MLX hashes all of a kernel's source at every launch."""
    path = _directory() / f"{name}.h"
    path.write_text(text)
    return f'#include "{path}"\n'


def _directory() -> Path:
    """Of this process, which removes it when it ends; a child that was forked has its own."""
    with _making:
        if os.getpid() not in _made:
            path = Path(tempfile.mkdtemp(prefix="ds4mlx-"))
            if '"' in str(path):
                raise ValueError(f"{path}: CUDA cannot include from a folder with a quote in it")
            _made[os.getpid()] = path
            atexit.register(_remove, os.getpid(), path)
        return _made[os.getpid()]


def _remove(process: int, path: Path):
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


def launch(kernel: Kernel, inputs, template: dict, grid, group, shapes, dtypes):
    """Hand one launch to MLX. The tests' CPU executor stands in for this function."""
    if (kernels := _traced.get()) is not None:
        kernels[kernel.name] += 1
        nothing = [mx.broadcast_to(mx.array(0, d), s) for s, d in zip(shapes, dtypes, strict=True)]
        return mx.depends(nothing, list(inputs))
    return kernel.built(inputs, template, dtypes)(
        inputs=list(inputs),
        template=[] if backend() == "cuda" else list(template.items()),
        grid=grid,
        threadgroup=group,
        output_shapes=shapes,
        output_dtypes=dtypes,
        verbose=_verbose.get(),
    )


def round_up(n: int, to: int) -> int:
    """The least multiple of `to` that is n or more: the grid is whole threadgroups."""
    return -(-n // to) * to
