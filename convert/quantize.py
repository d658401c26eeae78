"""A checkpoint as the GGUF that ds4 would have: which type each tensor gets, encoded as it is read.

The GGUF need not lie on a disk: an `Image` is its header and the recipe of every tensor, which
`write` makes a file of, and `convert` an MLX folder.
"""

import hashlib
import math
import os
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import FileError, UsageError
from .blocks import LAYOUTS, decode
from .checkpoint import Source
from .encode import encode
from .flow import Flow, check_room, new_file
from .gguf import GGUF, Metadata, Tensor, some
from .names import draft_name, gguf_name, target_name
from .write import header

Progress = Callable[[str, int, int], None]  # stage, done, total

# Types of the routed experts: gate and up, down.
EXPERTS = {
    "mxfp4": ("MXFP4", "MXFP4"),
    "q4_k": ("Q4_K", "Q4_K"),
    "iq2_xxs": ("IQ2_XXS", "Q2_K"),
}
BATCH = 1 << 20  # values that are encoded at once


@dataclass(frozen=True)
class Encoded(Tensor):
    """A tensor of an image: read means made from its sources."""

    sources: tuple[Source, ...] = ()  # one matrix, or those of the experts
    importance: np.ndarray | None = None  # [experts or 1, in]

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.nbytes // math.prod(self.shape[:-1])

    def batches(self) -> Iterator[tuple[int, int]]:
        """Rows (start, stop) that are made at once."""
        rows, step = math.prod(self.shape[:-1]), max(1, BATCH // self.shape[-1])
        return ((start, min(start + step, rows)) for start in range(0, rows, step))

    def make(self, start: int, stop: int, errors: Counter | None = None) -> np.ndarray:
        """Packed rows, uint8 [rows, row bytes], of all experts in sequence; `errors` counts.

        Raises FileError that names the tensor for values that its type cannot hold.
        """
        rows, out = math.prod(self.shape[:-1]) // len(self.sources), []
        while start < stop:
            index, first = divmod(start, rows)
            last = min(rows, first + stop - start)
            try:
                out.append(self._made(index, first, last, errors))
            except FileError as error:
                expert = f" expert {index}:" if len(self.shape) == 3 else ""
                raise FileError(f"{self.name}:{expert} {error}") from None
            start += last - first
        return out[0] if len(out) == 1 else np.concatenate(out)

    def read(self) -> np.ndarray:
        return self.make(0, math.prod(self.shape[:-1]))

    def span(self, first: int, last: int, errors: Counter | None = None) -> np.ndarray:
        """Its bytes from one to another; `errors` counts whole rows."""
        start, stop = first // self.row, -(-last // self.row)
        raw = self.make(start, stop, errors).reshape(-1)
        return raw[first - start * self.row : last - start * self.row]

    def _made(self, index: int, first: int, last: int, errors: Counter | None) -> np.ndarray:
        source = self.sources[index]
        if self.type == "MXFP4" and source.format == "FP4":
            return source.mxfp4(first, last)
        values = source.values(first, last)
        if self.importance is None:
            raw = encode(self.type, values)
        else:
            raw = encode(self.type, values, self.importance[index % len(self.importance)])
        if self.type == "MXFP4" and (decode(self.type, raw).view("u4") != values.view("u4")).any():
            raise FileError("values off the MXFP4 grid; --experts q4_k rounds them")
        if errors is not None and self.type not in ("F32", "I32"):
            made = decode(self.type, raw)
            errors["rounded"] += int((made != values).sum())
            errors["error"] += float(np.square(made - values, dtype=np.float64).sum())
            errors["energy"] += float(np.square(values, dtype=np.float64).sum())
        return raw


@dataclass(frozen=True, repr=False)
class Image(GGUF):
    """A GGUF that is not on a disk; `path` is the folder of its sources."""

    header: bytes

    @property
    def readers(self) -> int:
        return os.cpu_count() or 2  # reading is encoding

    @property
    def sizes(self) -> list[int]:
        return [self.nbytes]

    @property
    def stamps(self) -> list:
        sources = {s.file for t in self.tensors.values() for s in t.sources}
        stats = [(self.path / name).stat() for name in sorted(sources)]
        digest = hashlib.sha256()
        for t in self.tensors.values():
            digest.update(b"" if t.importance is None else t.importance.data)
        return [[s.st_size, s.st_mtime_ns] for s in stats] + [digest.hexdigest()]

    @contextmanager
    def reading(self, part: int) -> Iterator[Callable[..., np.ndarray]]:
        starts = [t.offset for t in self.tensors.values()]
        tensors = list(self.tensors.values())

        def read(start: int, size: int, errors: Counter | None = None) -> np.ndarray:
            out = np.zeros(size, np.uint8)  # as it is between tensors
            head = np.frombuffer(self.header, np.uint8)[start : start + size]
            out[: len(head)] = head
            for t in tensors[max(0, bisect(starts, start) - 1) : bisect(starts, start + size)]:
                first = max(start, t.offset) - t.offset
                last = min(start + size, t.offset + t.nbytes) - t.offset
                if first < last:
                    at = t.offset - start
                    out[at + first : at + last] = t.span(first, last, errors)
            return out

        yield read


def image(
    path: Path,
    metadata: dict[str, tuple],
    tensors: dict[str, tuple[Source, ...]],
    experts: str,
    importance: dict[str, np.ndarray] | None = None,
) -> Image:
    """The GGUF of tensors by official name, sorted by their names there.

    Raises FileError that names every tensor without a place in a GGUF, or whose rows its type
    cannot hold, and every importance that does not fit its tensor.
    """
    path = path.resolve()
    found, problems = {}, []
    for official, sources in tensors.items():
        name, first = gguf_name(official), sources[0]
        stacked = ".experts." in official
        type = _type(official, first, EXPERTS[experts])
        shape = (len(sources), *first.shape) if stacked else first.shape
        if official not in (target_name(name), draft_name(name, 0)):
            problems.append(f"{official} has no place in a GGUF")
        elif shape[-1] % LAYOUTS[type].elements:
            problems.append(
                f"{official} is {list(shape)}, {type} wants rows of whole blocks of "
                f"{LAYOUTS[type].elements}"
            )
        else:
            weights = (importance or {}).get(name)
            problems += _odd_importance(name, shape, weights)
            found[name] = (type, shape, sources, weights)
    if importance and not found.keys() & importance.keys():
        problems.append("the importance matrix names none of these tensors")
    if problems:
        raise FileError(f"{path}: tensors that cannot be converted: {some(problems)}")
    names = sorted(found, key=str.encode)
    head, starts, size = header(metadata, [(n, *found[n][:2]) for n in names])
    made = {}
    for name, start in zip(names, starts, strict=True):
        type, shape, sources, weights = found[name]
        layout = LAYOUTS[type]
        nbytes = math.prod(shape) // layout.elements * layout.bytes
        weights = None if weights is None else _balanced(weights.reshape(-1, shape[-1]))
        made[name] = Encoded(name, type, shape, path, start, nbytes, sources, weights)
    values = {key: _value(*value) for key, value in metadata.items()}
    return Image(path, path, Metadata(path, values), made, size, (path,), head)


def write(image: Image, path: Path, *, overwrite: bool = False, progress: Progress | None = None):
    """Write an image as `path`, whole or not there -> per tensor, what its encoding cost.

    Raises UsageError for a file that is there already (unless `overwrite`), FileError for values
    that cannot be encoded or a disk without room.
    """
    if path.exists() and (path.is_dir() or not overwrite):
        raise UsageError(f"{path} exists already; name another file, or --overwrite")
    costs, moved = {}, 0

    def done(size: int):
        nonlocal moved
        moved += size
        if progress:
            progress("convert", moved, image.nbytes)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_room(path.parent, image.nbytes)
        with new_file(path) as file, Flow(os.cpu_count()) as flow:
            file.write(image.header)
            for t in image.tensors.values():
                file.write(bytes(t.offset - file.tell()))
                costs[t.name] = _write_tensor(t, file, flow, done)
            file.write(bytes(image.nbytes - file.tell()))
    except OSError as error:
        raise FileError(f"{error.filename or path}: {error.strerror}") from error
    return costs


def _write_tensor(t: Encoded, file, flow: Flow, done: Callable) -> Counter:
    total = Counter()

    def work(rows: tuple[int, int]):
        errors = Counter()
        return t.make(*rows, errors), errors

    def after(made: tuple[np.ndarray, Counter]):
        raw, errors = made
        file.write(raw.reshape(-1).data)
        total.update(errors)

    batches = (((stop - start) * t.row, (start, stop)) for start, stop in t.batches())
    flow.run(batches, lambda _: None, work, after, done)
    return total


def _type(official: str, source: Source, experts: tuple[str, str]) -> str:
    """The type that ds4's own files give a tensor (the format's description, 1.5 and 2.2)."""
    if source.format in ("I32", "I64"):
        return "I32"
    if len(source.shape) == 1:
        return "F32"
    if ".ffn.experts." in official:
        return experts[official.endswith("w2.weight")]
    half = ("embed.weight", "hc_", ".compressor.", ".indexer.")
    router = official.startswith("layers.") and official.endswith("ffn.gate.weight")
    return "F16" if router or any(part in official for part in half) else "Q8_0"


def _odd_importance(name: str, shape: tuple[int, ...], weights) -> list[str]:
    wanted = {shape[-1], shape[-1] * (shape[0] if len(shape) == 3 else 1)}
    if weights is None or weights.size in wanted:
        return []
    sizes = " or ".join(map(str, sorted(wanted)))
    return [f"the importance of {name} has {weights.size} values, wanted {sizes}"]


def _balanced(importance: np.ndarray) -> np.ndarray:
    """Scaled to a mean of 1, and above 0: an input that was never seen still counts a little."""
    mean = importance.mean(axis=1, keepdims=True, dtype=np.float64)
    scaled = importance / np.where(mean > 0, mean, 1)
    return np.where(mean > 0, np.maximum(scaled, 1e-6), 1).astype(np.float32)


def _value(kind: str, value):
    """As `open_gguf` gives it."""
    if kind == "[STRING]" or not kind.startswith("["):
        return list(value) if kind == "[STRING]" else value
    return np.array(value, np.dtype(kind[1:-1].lower()))


def summary(image: Image, errors: dict[str, float]) -> Iterable[str]:
    """One line per type: what is exact, and the relative errors of what was rounded."""
    types = Counter(t.type for t in image.tensors.values())
    for type in sorted(types):
        own = [(e, n) for n, e in errors.items() if image.tensors[n].type == type]
        line = f"{type}: {types[type]} tensors, "
        worst, name = max(own, default=(0, ""))
        if not worst:
            yield line + "exact"
        else:
            yield f"{line}relative error {min(own)[0]:.3g} to {worst:.3g} ({name})"


def relative(cost: Counter) -> float:
    """The root of the squared errors' sum over the squares'."""
    return math.sqrt(cost["error"] / cost["energy"]) if cost["energy"] else 0.0
