"""Tensors of a folder of safetensors under the official names, the experts of a layer stacked."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import FileError
from .safetensors import Entry, read_safetensors


@dataclass(frozen=True)
class FolderTensor:
    """One tensor, not yet read: like `gguf.Tensor`, but perhaps of several parts (experts)."""

    name: str
    type: str  # ggml's name of the dtype: "F32", "F16", "BF16", "I32", ..
    shape: tuple[int, ...]
    parts: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.raw.nbytes for part in self.parts)

    @property
    def place(self) -> str:
        """Tensors at the same place are the same bytes."""
        return self.name

    def read(self) -> np.ndarray:
        """The bytes, uint8 [rows, row bytes]."""
        raws = [part.raw for part in self.parts]
        return np.concatenate(raws) if len(raws) > 1 else np.array(raws[0])


def folder_tensors(paths: Iterable[Path]) -> dict[str, FolderTensor]:
    """Every tensor of the files; `..experts.0.w1.weight`, `..1..` become `..experts.w1.weight`.

    Raises FileError for a damaged file, a name that occurs twice, or experts that differ.
    """
    entries: dict[str, Entry] = {}
    for path in paths:
        found = read_safetensors(path)
        if twice := sorted(found.keys() & entries.keys()):
            raise FileError(f"{path}: tensors that another file has too: {', '.join(twice)}")
        entries |= found
    stacked: dict[str, list[Entry]] = {}
    for name, entry in sorted(entries.items(), key=lambda item: _expert(item[0])):
        before, mark, after = name.partition(".experts.")
        if mark and (rest := after.partition("."))[0].isdigit():
            name = before + mark + rest[2]
        stacked.setdefault(name, []).append(entry)
    return {name: _tensor(name, parts, ".experts." in name) for name, parts in stacked.items()}


def _tensor(name: str, parts: list[Entry], stack: bool) -> FolderTensor:
    first = parts[0]
    if odd := next((p for p in parts if (p.dtype, p.shape) != (first.dtype, first.shape)), None):
        raise FileError(
            f"{name}: expert 0 is {first.dtype} {list(first.shape)}, another is "
            f"{odd.dtype} {list(odd.shape)}"
        )
    shape = (len(parts), *first.shape) if stack else first.shape
    return FolderTensor(name, first.dtype, shape, tuple(parts))


def _expert(name: str) -> int:
    """The number of the expert in a name, -1 without one."""
    number = name.partition(".experts.")[2].partition(".")[0]
    return int(number) if number.isdigit() else -1
