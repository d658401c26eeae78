"""Run the package's Metal kernels on this machine's CPU, and judge what they do.

    with executed("check"):
        out = hc_expand(x, y, post, comb)

Inside, every `ds4mlx.ops.metal.Kernel` is compiled as C++ and run by runtime.cpp. `guard` is
quick and stops at the first access past a buffer; `check` judges every load and store.
"""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np

import ds4mlx.msl
from ds4mlx.msl.call import function, shaped
from ds4mlx.msl.rewrite import CPU
from ds4mlx.ops import metal

HERE = Path(__file__).parent
MSL = Path(ds4mlx.msl.__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"ds4mlx-kernels-{os.getuid()}"


class CompileError(AssertionError):
    """The compiler's messages, with the kernel's file and line."""


class KernelFault(AssertionError):
    """What `check` or `guard` found, one line each."""


@contextmanager
def executed(mode: str = "guard") -> Iterator[None]:
    """Run kernels on the CPU executor; `mode` is "guard" or "check".

    Raises CompileError, KernelFault.
    """
    assert mode in ("guard", "check"), mode

    def launch(kernel, inputs, template, grid, group, shapes, dtypes):
        return _launch(mode, kernel, inputs, template, grid, group, shapes, dtypes)

    with patch.object(metal, "backend", lambda: "cpu"), patch.object(metal, "launch", launch):
        yield
        # A patch that outlives this block would put the executor back when it is undone.
        assert metal.launch is launch, "metal.launch was replaced in executed() and not restored"


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    ]


def _launch(mode, kernel, inputs, template, grid, group, shapes, dtypes) -> list[mx.array]:
    mx.eval(*inputs)
    arrays = [_numpy(x) for x in inputs]
    named = dict(zip(kernel.inputs, inputs, strict=True))
    sizes = [np.array(named[n].shape, np.int32) for n in shaped(kernel, inputs)]
    results = [np.array(_numpy(mx.zeros(s, d))) for s, d in zip(shapes, dtypes, strict=True)]
    for r in results:
        r.reshape(-1).view(np.uint8)[...] = 0xFF  # a NaN where the kernel writes nothing
    buffers = [*arrays, *sizes, *results]
    assert len(buffers) <= 31, "Metal passes at most 31 buffers"
    table = (_Buffer * len(buffers))(*(_Buffer(b.ctypes.data, b.nbytes, 0, 0) for b in buffers))
    for b in table[len(buffers) - len(results) :]:
        b.writable = 2 if kernel.partial else 1
    library = _library(_source(kernel, inputs, template, dtypes), mode)
    three = ctypes.c_uint32 * 3
    groups = three(*(n // g for n, g in zip(grid, group, strict=True)))
    n = len(buffers)
    if library.msl_dispatch(library.msl_entry, table, n, groups, three(*group), mode == "check"):
        findings = ctypes.string_at(library.msl_findings()).decode()
        shapes = [f"{n}_shape" for n in shaped(kernel, inputs)]
        names = [*kernel.inputs, *shapes, *kernel.outputs]
        raise KernelFault(_readable(findings, library._name, names))
    return [
        mx.array(r).view(d) if d == mx.bfloat16 else mx.array(r)
        for r, d in zip(results, dtypes, strict=True)
    ]


def _numpy(x: mx.array) -> np.ndarray:
    """x as a row-contiguous array; bfloat16 as its bits."""
    x = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x
    return np.ascontiguousarray(np.array(x, copy=False)).reshape(x.shape)


def _source(kernel, inputs, template, dtypes) -> str:
    n = len(inputs) + len(shaped(kernel, inputs)) + len(dtypes)
    arguments = ", ".join(f"buffers[{i}]" for i in range(n))
    text = function(
        kernel,
        inputs,
        template,
        dtypes,
        dialect=CPU,
        attribute="msl_at->{}".format,
        last=("const msl::Builtins* msl_at",),
    )
    return (
        f'#include "cpu.h"\n{text}'
        + '#line 1 "entry"\n'
        + 'extern "C" __attribute__((visibility("default")))\n'
        + "void msl_entry(void** buffers, const msl::Builtins* at) {\n"
        + f"  metal::{kernel.name}_call({arguments}, at);\n}}\n"
    )


@functools.cache
def compiler() -> str:
    """The C++ compiler: clang (as for Metal) where there is one that knows _Float16, else g++."""
    names = ["clang++", *(f"clang++-{n}" for n in range(22, 14, -1)), "g++"]
    for name in filter(shutil.which, names):
        probe = [name, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
        if not subprocess.run(
            probe, input="_Float16 x;", text=True, capture_output=True
        ).returncode:
            return name
    raise CompileError(
        "no C++ compiler with _Float16: install clang 15 or later, or g++ 12 or later"
    )


def _flags(mode: str) -> list[str]:
    flags = ["-std=c++17", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fvisibility=hidden"]
    flags += ["-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno"]
    flags += ["-fno-trapping-math", "-fno-strict-aliasing", "-fwrapv", "-fsigned-char", "-g1"]
    clang = "clang" in compiler()
    if not clang:
        flags += ["-fexcess-precision=16"]
    if mode == "guard":
        return [*flags, "-O2", "-march=native"]
    flags += ["-O1", "-fsanitize=thread,bounds,alignment,shift,integer-divide-by-zero"]
    if clang:
        for option in ("func-entry-exit=0", "read-before-write=1"):
            flags += ["-mllvm", f"-tsan-instrument-{option}"]
    return flags


@functools.cache
def _library(source: str, mode: str) -> ctypes.CDLL:
    """The compiled kernel, from the cache if text, shim, compiler and flags are as they were."""
    command = [compiler(), *_flags(mode), f"-I{HERE}", f"-I{MSL}"]
    shim = [p.read_text() for p in (MSL / "core.h", HERE / "cpu.h", HERE / "runtime.cpp")]
    path = CACHE / f"{_digest(source, *command, *shim)}.so"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        runtime = [compiler(), "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden"]
        runtime += ["-U_FORTIFY_SOURCE", "-c", str(HERE / "runtime.cpp")]
        part = CACHE / f"{_digest(*runtime, *shim)}.o"
        if not part.exists():
            _compile([*runtime, "-o"], part)
        kernel = path.with_suffix(".o")
        path.with_suffix(".cpp").write_text(source)
        _compile([*command, "-c", str(path.with_suffix(".cpp")), "-o"], kernel)
        link = [compiler(), "-shared", str(kernel), str(part), "-pthread", "-ldl", "-lm", "-o"]
        _compile(link, path)
    library = ctypes.CDLL(str(path))
    library.msl_findings.restype = ctypes.c_void_p
    return library


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _compile(command: list[str], result: Path):
    part = result.with_suffix(f".{os.getpid()}{result.suffix}")
    done = subprocess.run([*command, str(part)], text=True, capture_output=True)
    if done.returncode:
        raise CompileError(done.stderr[:4000])
    part.replace(result)  # whole, should another process look for it


def _readable(findings: str, library: str, names: list[str]) -> str:
    """Addresses become the kernel's file and line, numbers of buffers their names."""

    def line(m):
        command = ["addr2line", "-i", "-e", library, m[1]]
        frames = subprocess.run(command, text=True, capture_output=True).stdout.splitlines()
        inner = [f for f in frames if not re.search(r"/(core|cpu)\.h:|\?\?", f)]
        return "at " + re.sub(r"^.*/| \(disc.*", "", inner[0]) if inner else "at ?"

    findings = re.sub(r"@([0-9a-f]+)", line, findings)
    return re.sub(r"buffer (\d+)", lambda m: names[int(m[1])], findings).strip()
