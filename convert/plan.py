"""Where every byte of a GGUF goes in a converted folder, and which bytes of the folder it was.

A packed tensor NAME becomes its planes NAME.PLANE, as `repack` makes them; what no model reads
(the header, gaps, spare layers) is kept as bytes in `source.safetensors` for the way back.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from .blocks import LAYOUTS, PLAIN
from .gguf import GGUF
from .repack import repack, unpack
from .safetensors import WIDTHS

FILE_BYTES = 5_000_000_000  # of one safetensors file, but for a tensor that is larger
SOURCE = "source.safetensors"
_DTYPES = {"uint32": "U32", "int32": "I32", "float32": "F32", "float16": "F16"}
_DTYPES |= {"uint8": "U8", "int8": "I8", "uint16": "BF16"}


@dataclass(frozen=True)
class Plane:
    """An entry of a safetensors file that holds a tensor, or a plane of one."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


@dataclass(frozen=True)
class Item:
    """A tensor of the GGUF, or all bytes of one of its files that belong to none ("rest")."""

    name: str  # in the GGUF; "" for a rest
    type: str  # ggml's name; "" for a rest
    shape: tuple[int, ...]  # in the GGUF, outermost first
    part: int  # which file of the GGUF
    spans: tuple[tuple[int, int], ...]  # its bytes there, start and end
    file: str  # of the folder
    planes: dict[str, Plane]  # "data" if the bytes are the same

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def packed(self) -> bool:
        return "data" not in self.planes

    @property
    def how(self) -> str:
        """What became of the bytes: `moved`, `rearranged`, or `re-expressed` (equal values)."""
        if not self.packed:
            return "moved"
        return "re-expressed" if self.type == "Q8_0" else "rearranged"  # signed codes get + 128

    @property
    def block(self) -> int:
        """Bytes that can be taken by themselves."""
        return LAYOUTS[self.type].bytes if self.packed else 1

    def chunks(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Parts of up to `size` bytes in whole blocks: (place in the file, in the item, bytes)."""
        step, at = max(1, size // self.block) * self.block, 0
        for begin, end in self.spans:
            for start in range(begin, end, step):
                n = min(step, end - start)
                yield start, at, n
                at += n

    def slices(self, at: int, size: int) -> dict[str, slice]:
        """Where the bytes of a chunk are in every plane."""
        per = {n: p.nbytes * self.block // self.nbytes for n, p in self.planes.items()}
        first, last = at // self.block, (at + size) // self.block
        return {name: slice(first * n, last * n) for name, n in per.items()}

    def repack(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        """Whole blocks, uint8 [bytes] -> the bytes of every plane that they make."""
        if not self.packed:
            return {"data": raw}
        planes = repack(self.type, raw.reshape(-1, self.block))
        return {name: plane.reshape(-1).view(np.uint8) for name, plane in planes.items()}

    def unpack(self, planes: dict[str, np.ndarray]) -> np.ndarray:
        """The inverse of `repack`."""
        if not self.packed:
            return planes["data"]
        likes = repack(self.type, np.zeros((1, self.block), np.uint8))
        shaped = {
            name: planes[name].view(like.dtype).reshape(-1, *like.shape[1:])
            for name, like in likes.items()
        }
        return unpack(self.type, shaped).reshape(-1)


def make_plan(gguf: GGUF, official: dict[str, tuple[str, tuple[int, ...]]]) -> list[Item]:
    """Every byte of the files, in their order; `official`: name -> official name and shape.

    A tensor that has no official name is kept as bytes.
    """
    where = {Path(path).resolve(): i for i, path in enumerate(gguf.parts)}
    tensors = sorted(gguf.tensors.values(), key=lambda t: (where[t.path], t.offset, t.name))
    drafts, sizes = [], []
    for t in tensors:
        key, shape = official.get(t.name, (f"tensor.{t.name}", ()))
        planes = planes_of(t.type, key, shape) if shape else _bytes(key, t.nbytes)
        spans = ((t.offset, t.offset + t.nbytes),)
        drafts.append((t.name, t.type, t.shape, where[t.path], spans, planes))
        sizes.append(t.nbytes if shape else 0)
    files = _files(sizes)
    items = [Item(*d[:5], f, d[5]) for d, f in zip(drafts, files, strict=True)]
    for i in range(len(gguf.parts)):
        spans = gaps(gguf.sizes[i], [t.spans[0] for t in items if t.part == i])
        size = sum(end - start for start, end in spans)
        items.append(Item("", "", (size,), i, spans, SOURCE, _bytes(f"rest.{i + 1}", size)))
    return items


def planes_of(type: str, key: str, shape: tuple[int, ...]) -> dict[str, Plane]:
    """The entries that hold a tensor of a ggml type, by the names of `repack`."""
    layout = LAYOUTS[type]
    blocks, out = shape[-1] // layout.elements, {}
    for name, plane in repack(type, np.zeros((1, layout.bytes), np.uint8)).items():
        whole = key if type in PLAIN else f"{key}.{name}"
        _, width, *rest = plane.shape
        out[name] = Plane(whole, _DTYPES[plane.dtype.name], (*shape[:-1], blocks * width, *rest))
    return out


def gaps(size: int, spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """What `spans` leave over of `size` bytes."""
    ends, at = [(0, 0), *sorted(spans), (size, size)], 0
    out = []
    for (_, end), (start, _) in pairwise(ends):
        at = max(at, end)
        if start > at:
            out.append((at, start))
    return tuple(out)


def _bytes(key: str, size: int) -> dict[str, Plane]:
    return {"data": Plane(key, "U8", (size,))}


def _files(sizes: list[int]) -> Iterator[str]:
    """A file for each of the tensors; 0 stands for one that is kept as bytes."""
    numbers, number, held = [], 1, 0
    for size in sizes:
        if size and held and held + size > FILE_BYTES:
            number, held = number + 1, 0
        held += size
        numbers.append(number)
    return (
        f"model-{n:05d}-of-{number:05d}.safetensors" if size else SOURCE
        for n, size in zip(numbers, sizes, strict=True)
    )


# Files of the folder ------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """One safetensors file: its header, and where each entry starts."""

    header: bytes
    starts: dict[str, int]
    size: int


def layouts(items: list[Item]) -> dict[str, Layout]:
    """Every safetensors file of a plan, by name."""
    by_file = sorted(items, key=lambda item: item.file)
    return {
        file: layout([p for item in group for p in item.planes.values()])
        for file, group in groupby(by_file, key=lambda item: item.file)
    }


def layout(planes: Iterable[Plane]) -> Layout:
    """Wider dtypes first, so that every entry is aligned without gaps."""
    planes = sorted(planes, key=lambda p: -WIDTHS[p.dtype])
    head, at, starts = {"__metadata__": {"format": "mlx"}}, 0, {}
    for p in planes:
        offsets = [at, at + p.nbytes]
        head[p.key] = {"dtype": p.dtype, "shape": p.shape, "data_offsets": offsets}
        starts[p.key], at = at, at + p.nbytes
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {k: len(header) + n for k, n in starts.items()}, len(header) + at)
