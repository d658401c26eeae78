"""Write a GGUF (version 3), one tensor in memory at a time."""

import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from gguf.constants import GGUFValueType

from .gguf import TYPES

_CODES = {name: (code, elements, size) for code, (name, elements, size) in TYPES.items()}
# Types of metadata values that are numbers -> struct's letter.
_LETTERS = {
    **dict(UINT8="B", INT8="b", UINT16="H", INT16="h", UINT32="I", INT32="i", UINT64="Q"),
    **dict(INT64="q", FLOAT32="f", FLOAT64="d", BOOL="?"),
}


def write_gguf(path, metadata: Mapping[str, tuple], tensors: Iterable[tuple]):
    """Write `path` under another name first, so that it is whole or not there.

    metadata: key -> (type name, value); `[UINT32]` and so on name the type of an array's items.
    tensors: (name, type, shape in NumPy order, data), written in the order given; data is uint8
    of any shape, or a function that returns it, called when its turn comes. Tensors start at
    multiples of `general.alignment`, 32 if the metadata has none.
    """
    path, tensors = Path(path), list(tensors)
    head, starts, size = header(metadata, [t[:3] for t in tensors])
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(head)
            for start, (name, type, shape, data) in zip(starts, tensors, strict=True):
                data = np.ascontiguousarray(data() if callable(data) else data)
                wanted = tensor_bytes(type, shape)
                assert data.dtype == np.uint8 and data.size == wanted, (name, data.size, wanted)
                file.write(bytes(start - file.tell()))
                file.write(data.data.cast("B") if data.size else b"")
            file.write(bytes(size - file.tell()))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def header(
    metadata: Mapping[str, tuple], tensors: list[tuple], shared: Mapping[str, str] | None = None
) -> tuple[bytes, list[int], int]:
    """The bytes before the tensors (name, type, shape), where each starts, and the file's size.

    shared: tensors -> the earlier one of the same type and shape that is their bytes too.
    """
    alignment = metadata.get("general.alignment", ("UINT32", 32))[1]
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, (kind, value) in metadata.items():
        parts += [_string(key), *_value(kind, value)]
    starts, at = {}, 0
    for name, type, shape in tensors:
        starts[name] = starts[shared[name]] if shared and name in shared else at
        parts += [_string(name), struct.pack("<I", len(shape))]
        parts += [struct.pack(f"<{len(shape)}Q", *reversed(shape))]
        parts += [struct.pack("<IQ", _CODES[type][0], starts[name])]
        at = max(at, starts[name] + _padded(tensor_bytes(type, shape), alignment))
    head = b"".join(parts)
    head += bytes(_padded(len(head), alignment) - len(head))
    return head, [len(head) + start for start in starts.values()], len(head) + at


def typed(metadata: Mapping) -> dict[str, tuple]:
    """Values as `open_gguf` gives them, with the types that `write_gguf` wants.

    A number alone has lost its width: it gets 32 bits if they hold it exactly, else 64.
    """
    return {key: (_kind(value), value) for key, value in metadata.items()}


def tensor_bytes(type: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; its rows must be whole blocks."""
    _, elements, size = _CODES[type]
    assert shape[-1] % elements == 0, (type, shape)
    return math.prod(shape) // elements * size


def _kind(value) -> str:
    if isinstance(value, np.ndarray):
        return f"[{value.dtype.name.upper()}]"
    if isinstance(value, list):
        return "[STRING]"
    if isinstance(value, str | bool):
        return "STRING" if isinstance(value, str) else "BOOL"
    if isinstance(value, float):
        return "FLOAT32" if value != value or float(np.float32(value)) == value else "FLOAT64"
    if value < 0:
        return "INT32" if value >= -(1 << 31) else "INT64"
    return "UINT32" if value < 1 << 32 else "UINT64"


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: str, value) -> list[bytes]:
    if not kind.startswith("["):
        return [struct.pack("<I", GGUFValueType[kind]), _items(kind, [value])]
    kind = kind[1:-1]
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, GGUFValueType[kind], len(value))
    return [head, _items(kind, value)]


def _items(kind: str, values) -> bytes:
    if kind == "STRING":
        return b"".join(map(_string, values))
    return struct.pack(f"<{len(values)}{_LETTERS[kind]}", *values)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
