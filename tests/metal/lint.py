"""What MLX makes of a kernel, and whether a Metal compiler would take its address spaces.

MLX prints the text that it generates also where there is no Metal. Clang, told to read it as
C++ for OpenCL, knows address spaces as Metal does; it is no Metal compiler.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from unittest.mock import patch

import mlx.core as mx

from ds4mlx.msl.rewrite import OPENCL, rewrite
from ds4mlx.ops import metal

from .bench import HERE, CompileError, compiler

_FORBIDDEN = {
    "double": "Metal has no double",
    "std": "Metal has no std::",
    "new": "Metal has no new",
    "printf": "Metal has no printf",
    "atomic": "kernels use no atomics",
}
_BYTES = {"float": 4, "uint": 4, "int": 4, "half": 2, "ushort": 2, "uchar": 1}
_PARAMETER = re.compile(r"^ +(?:const )?(?:(device|constant) )?([\w ]+?)([*&]?) (\w+) \[\[", re.M)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the kernel function that MLX generates."""

    space: str  # device, constant, or nothing for an attribute
    type: str
    mark: str  # *, & or nothing


def generated(op, *arrays: mx.array) -> list[str]:
    """The Metal source of every kernel that `op(*arrays)` launches."""
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/printed", "w+") as printed:
        before = os.dup(1)  # MLX prints past sys.stdout
        os.dup2(printed.fileno(), 1)
        try:
            with patch.object(metal, "backend", lambda: "metal"), metal.verbose():
                mx.export_function(f"{folder}/op.mlxfn", op, *arrays)
        finally:
            os.dup2(before, 1)
            os.close(before)
        printed.seek(0)
        return re.findall(r"Generated source code for .*?\n```\n(.*?)\n```", printed.read(), re.S)


def signature(source: str) -> dict[str, Parameter]:
    """The parameters of the kernel function in `source`, by name, in order."""
    head = source[source.index("[[kernel]]") :]
    found = _PARAMETER.findall(head[: head.index(") {")] + " [[")
    return {
        name: Parameter(space, kind.removeprefix("constant "), mark)
        for space, kind, mark, name in found
    }


def lint(source: str) -> list[str]:
    """What is wrong with a generated source; a template is judged with its arguments."""
    return _forbidden(source) + _typed(source) + _crowded(source)


def _forbidden(source: str) -> list[str]:
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.S)
    found = {w for w in re.findall(r"[A-Za-z]+", code)} & set(_FORBIDDEN)
    kind = r"(?:float|half|bfloat|u?int|u?char|u?short|u?long|T)[234]?"
    bare = rf"[;{{}}(,]\s*(?:const\s+)?{kind}\s*[*&]\s*\w+\s*[=;,)]"
    return [_FORBIDDEN[w] for w in sorted(found)] + [
        f"pointer without an address space: {m.strip()}" for m in re.findall(bare, code, re.M)
    ]


def threadgroup_bytes(source: str) -> int:
    """The threadgroup memory that the kernel function declares, with its template arguments."""
    values = dict(re.findall(r"constexpr \w+ (\w+) = (\d+);", source))
    if use := re.search(r"template \[\[host_name.*?decltype\(\w+<(.*?)>\)", source, re.S):
        names = re.findall(r"\w+ (\w+)[,>]", re.findall(r"template <(.*?>)", source)[-1])
        values |= zip(names, use[1].split(", "), strict=True)
    body = source[source.index("[[kernel]]") :]
    total = 0
    for kind, count, length in re.findall(r"threadgroup (\w+?)([234]?) \w+\[(.*?)\];", body):
        length = re.sub(r"[A-Za-z_]\w*", lambda m: values[m[0]], length).replace("/", "//")
        total += _BYTES[kind] * int(count or 1) * eval(length)
    return total


def _crowded(source: str) -> list[str]:
    used = threadgroup_bytes(source)
    return [f"{used} bytes of threadgroup memory, of 32768"] if used > 32768 else []


def _typed(source: str) -> list[str]:
    if "clang" not in compiler():
        raise CompileError("the check of address spaces needs clang++ 15 or later")
    source = re.sub(r"\bmetal::|\b(?:fast|precise)::", "", source)
    use = re.search(r"template \[\[host_name.*?decltype\((\w+)(<.*?>)\)", source, re.S)
    if use:
        source = source[: use.start()] + f"template decltype({use[1]}{use[2]}) {use[1]}{use[2]};\n"
    command = [
        compiler(),
        "-x",
        "clcpp",
        "-cl-std=clc++2021",
        "-Xclang",
        "-finclude-default-header",
    ]
    command += ["-fsyntax-only", "-w", f"-I{HERE}", "-"]
    text = '#include "opencl.h"\n' + rewrite(source, OPENCL, body=True)
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    return [line for line in done.stderr.splitlines() if "error:" in line]
