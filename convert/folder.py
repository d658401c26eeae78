"""Tensors of a folder of safetensors under the official names, the experts of a layer stacked."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import FileError
from .blocks import LAYOUTS
from .gguf import some
from .plan import Plane, planes_of
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


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a converted folder, not yet read: its planes, as `repack` makes them."""

    name: str
    type: str  # ggml's name
    shape: tuple[int, ...]
    paths: dict[str, Path]  # of each plane

    @property
    def nbytes(self) -> int:
        layout = LAYOUTS[self.type]
        return math.prod(self.shape) // layout.elements * layout.bytes

    @property
    def place(self) -> str:
        """Tensors at the same place are the same bytes."""
        return self.name


def stored_tensors(folder: Path, described: dict) -> dict[str, StoredTensor]:
    """The tensors of a folder that `convert` has written, by official name; `described` is
    their part of `config.json`: name -> {"type": ggml's, "shape": outermost first}.

    Raises FileError for damaged files and for every plane that is missing or of another shape.
    """
    entries = {}
    for path in sorted(folder.glob("model*.safetensors")):
        entries |= {key: (path, entry) for key, entry in read_safetensors(path).items()}
    tensors, problems = {}, []
    for name, given in described.items():
        planes = _described(name, given)
        if planes is None:
            problems.append(f"{name} cannot be {given!r:.80}")
            continue
        found = [entries.pop(p.key, None) for p in planes.values()]
        for plane, there in zip(planes.values(), found, strict=True):
            kind, shape = there[1][:2] if there else ("missing", ())
            if (kind, shape) != (plane.dtype, plane.shape):
                problems.append(
                    f"{plane.key} is {kind} {list(shape)}, wanted {plane.dtype} {list(plane.shape)}"
                )
        paths = {plane: there[0] for plane, there in zip(planes, found, strict=True) if there}
        tensors[name] = StoredTensor(name, given["type"], tuple(given["shape"]), paths)
    problems += [f"{path.name} holds {key}, unexpected" for key, (path, _) in entries.items()]
    if problems:
        raise FileError(f"{folder}: {len(problems)} problems with its tensors: {some(problems)}")
    return tensors


def _described(name: str, given) -> dict[str, Plane] | None:
    """The planes of a tensor as config.json describes it; None if it can be none."""
    if not isinstance(given, dict) or given.get("type") not in list(LAYOUTS):
        return None
    shape = given.get("shape")
    if not (isinstance(shape, list) and shape and all(type(n) is int and n > 0 for n in shape)):
        return None
    if shape[-1] % LAYOUTS[given["type"]].elements:
        return None
    return planes_of(given["type"], name, tuple(shape))


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
