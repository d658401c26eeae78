"""Read safetensors over a memory map: 8 bytes of length, a JSON header, then the tensors."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import FileError
from .gguf import some

# Item bytes of each dtype that a checkpoint may hold.
WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
_HEADER = 1 << 25  # bytes; the released checkpoint would have 10 MB, were it one file


class Entry(NamedTuple):
    """A tensor in a file: dtype by safetensors' name, shape, and bytes [rows, row bytes]."""

    dtype: str
    shape: tuple[int, ...]
    raw: np.ndarray

    def values(self) -> np.ndarray:
        """The values in their shape: F32, F16 and I32 as they are, BF16 as float32."""
        if self.dtype == "BF16":
            wide = self.raw.view("<u2").astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        kinds = {"F32": "<f4", "F16": "<f2", "I32": "<i4"}
        return self.raw.view(kinds[self.dtype]).reshape(self.shape)


def read_safetensors(path) -> dict[str, Entry]:
    """Every tensor of a file by name; its bytes stay on disk until they are used.

    Raises FileError for a header that is not whole, no JSON, or at odds with the file.
    """
    path = Path(path)
    size = path.stat().st_size
    if size < 8:
        raise FileError(f"{path}: {size} bytes are too few for a safetensors file")
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view("<u8")[0])
    if length > size - 8:
        raise FileError(f"{path}: header of {length} bytes, but the file has {size}")
    if length > _HEADER:
        raise FileError(f"{path}: header of {length} bytes, wanted at most {_HEADER}")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise FileError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    body = data[8 + length :]
    problems = [p for name, item in header.items() if (p := _problem(name, item, len(body)))]
    if problems := problems or _overlaps(header):
        raise FileError(f"{path}: {some(problems)}")
    return {name: _entry(item, body) for name, item in header.items()}


def _problem(name: str, item, size: int) -> str | None:
    """What keeps a header's item from being a tensor within `size` bytes."""
    try:
        dtype, shape, (begin, end) = item["dtype"], item["shape"], item["data_offsets"]
    except (KeyError, TypeError, ValueError):
        return f"tensor {name} needs dtype, shape and two data_offsets, found {item!r:.80}"
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        return f"tensor {name} has the unknown dtype {dtype!r:.80}"
    if not isinstance(shape, list) or len(shape) > 8:
        return f"tensor {name} has shape {shape!r:.80}, wanted a list of up to 8 integers"
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        found = f"shape {shape!r:.80} at {[begin, end]!r:.80}"
        return f"tensor {name} has {found}, wanted integers of 0 or more"
    if not begin <= end <= size:
        return (
            f"tensor {name} lies at {begin} to {end}, but the file has {size} bytes of tensors"
            " (an incomplete download?)"
        )
    wanted = math.prod(shape) * WIDTHS[dtype]
    if end - begin != wanted:
        return f"tensor {name} has {end - begin} bytes, {dtype} {shape} needs {wanted}"
    return None


def _overlaps(header: dict) -> list[str]:
    spans = sorted((*item["data_offsets"], name) for name, item in header.items())
    spans = [span for span in spans if span[0] < span[1]]
    return [
        f"tensors {first} and {second} overlap"
        for (_, end, first), (begin, _, second) in pairwise(spans)
        if begin < end
    ]


def _entry(item: dict, body: np.ndarray) -> Entry:
    shape, (begin, end) = tuple(item["shape"]), item["data_offsets"]
    row = (shape[-1] if shape else 1) * WIDTHS[item["dtype"]]
    return Entry(item["dtype"], shape, body[begin:end].reshape(-1 if row else 0, row))
