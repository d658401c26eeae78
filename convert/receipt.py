"""The receipt of a conversion: what became of every byte, checked and undone again."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .. import __version__
from ..errors import FileError, UsageError, file_errors
from .flow import CHUNK, Flow, check_room, new_file, read_at, write_at
from .gguf import GGUF, open_gguf, some
from .hub import path_text, to_json
from .plan import SOURCE, Item, Layout, Plane, gaps, layouts

RECEIPT = "receipt.json"
_NAME = re.compile(r"[\w.-]{1,100}")  # of a file in the folder
FORMAT = 1

Progress = Callable[[str, int, int], None]


def receipt(gguf: GGUF, items: list[Item], texts: dict[str, bytes], done: dict) -> dict:
    """What is written down: sources, tensors in their order there, small files of the folder.

    The SHA-256 values of a source's tensors and of its `rest` (header, gaps) cover all its bytes.
    """
    rests, tensors = {}, []
    for item in items:
        entry = done[item.name, item.part]
        line = _line(item, entry)
        if item.name:
            tensors.append(line)
        else:
            rests[item.part] = {"bytes": item.nbytes, "sha256": entry["sha256"]}
    sources = [
        {"path": path_text(path), "bytes": gguf.sizes[i], "rest": rests[i]}
        for i, path in enumerate(gguf.parts)
    ]
    texts = {name: {"bytes": len(t), "sha256": _sha(t)} for name, t in sorted(texts.items())}
    return signed(
        {
            "format": FORMAT,
            "tool": f"ds4mlx {__version__}",
            "sources": sources,
            "files": texts,
            "tensors": tensors,
        }
    )


def signed(receipt: dict) -> dict:
    """With the SHA-256 of all that it says, as it lies in a file, against accidents."""
    return receipt | {"sha256": _sha(to_json(receipt))}


def _line(item: Item, entry: dict) -> dict:
    (start, _), *_ = item.spans
    rounded = {"relative_error": entry["error"]} if entry.get("error") else {}
    return {
        "name": item.name,
        "how": item.how,
        "type": item.type,
        "shape": item.shape,
        "source": item.part + 1,
        "offset": start,
        "bytes": item.nbytes,
        "sha256": entry["sha256"],
        "file": item.file,
        "planes": {
            name: {"key": p.key, "dtype": p.dtype, "shape": p.shape, "sha256": digest}
            for (name, p), digest in zip(item.planes.items(), entry["planes"].values(), strict=True)
        },
        **rounded,
    }


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Read again ---------------------------------------------------------------------------------


class _Folder:
    """A converted folder with its receipt; raises FileError for one that is not whole."""

    def __init__(self, path):
        self.path = Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: wanted a folder that ds4mlx convert has written")
        for name in ("config.json", RECEIPT):
            if not (self.path / name).is_file():
                raise FileError(f"{self.path}: there is no {name}: not a finished conversion")
        file = self.path / RECEIPT
        try:
            self.receipt = json.loads(file.read_bytes())
            if self.receipt["format"] != FORMAT:
                raise FileError(
                    f"{file}: format {self.receipt['format']!r:.60}, wanted {FORMAT}; written by "
                    f"{self.receipt['tool']!r:.60}"
                )
            digest = self.receipt.pop("sha256")
            if signed(self.receipt)["sha256"] != digest:
                raise FileError(f"{file}: the receipt has changed since it was written")
            self.items = list(_items(self.receipt))
            self.hashes = _hashes(self.receipt)
            files = self.receipt["files"].items()
            self.files = {name: (file["bytes"], file["sha256"]) for name, file in files}
            if odd := [name for name in self.files if not _NAME.fullmatch(name)]:
                raise ValueError(f"files of other names: {odd}")
            self.layouts = layouts(self.items)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{file}: not a receipt of a conversion ({error!r:.200})") from None
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for file in self._files.values():
            file.close()

    def chunks(self, item: Item) -> Iterator[tuple[int, tuple]]:
        """(size, (place in the GGUF, bytes of the planes)) in whole blocks. Raises FileError."""
        path, layout = self.path / item.file, self.layouts[item.file]
        if item.file not in self._files:
            if problem := odd_header(path, layout):
                raise FileError(f"{path}: {problem}")
            self._files[item.file] = path.open("rb")
        file = self._files[item.file].fileno()
        starts = {name: layout.starts[plane.key] for name, plane in item.planes.items()}
        for start, at, size in item.chunks(CHUNK):
            planes = {
                name: read_at(file, starts[name] + part.start, part.stop - part.start, path)
                for name, part in item.slices(at, size).items()
            }
            yield size, (start, planes)


def odd_header(path: Path, layout: Layout) -> str | None:
    """What is wrong with a safetensors file, but for its tensors' bytes."""
    if not path.is_file():
        return "the file is missing"
    if path.stat().st_size != layout.size:
        return f"{path.stat().st_size} bytes, wanted {layout.size}"
    with path.open("rb") as file:
        same = file.read(len(layout.header)) == layout.header
    return None if same else "another header than was written"


def _items(receipt: dict) -> Iterator[Item]:
    sizes = [source["bytes"] for source in receipt["sources"]]
    spans = [[] for _ in sizes]
    for t in receipt["tensors"]:
        span = (t["offset"], t["offset"] + t["bytes"])
        planes = {n: Plane(p["key"], p["dtype"], tuple(p["shape"])) for n, p in t["planes"].items()}
        part = t["source"] - 1
        spans[part].append(span)
        item = Item(t["name"], t["type"], tuple(t["shape"]), part, (span,), t["file"], planes)
        _check_item(item, sizes[part])
        if t["how"] != item.how:
            raise ValueError(f"{item.name} was {t['how']!r:.20}, wanted {item.how}")
        yield item
    for i, size in enumerate(sizes):
        n = receipt["sources"][i]["rest"]["bytes"]
        planes = {"data": Plane(f"rest.{i + 1}", "U8", (n,))}
        item = Item("", "", (n,), i, gaps(size, spans[i]), SOURCE, planes)
        if item.nbytes != n:
            raise ValueError(f"rest {i + 1} has {n} bytes, wanted {item.nbytes}")
        yield item


def _check_item(item: Item, size: int):
    """Raises ValueError for what no conversion has written."""
    (start, end), *_ = item.spans
    if not 0 <= start < end <= size or not _NAME.fullmatch(item.file):
        raise ValueError(f"{item.name} at {start} to {end} of {size} in {item.file!r}")
    wanted = {n: part.stop for n, part in item.slices(0, item.nbytes).items()}
    made = item.repack(np.zeros(item.block, np.uint8))
    blocks = item.nbytes // item.block
    if {name: plane.nbytes * blocks for name, plane in made.items()} != wanted or any(
        plane.nbytes != wanted[name] for name, plane in item.planes.items()
    ):
        raise ValueError(f"{item.name}: planes of other sizes than {item.type} has")


# Verify -------------------------------------------------------------------------------------


@file_errors()
def verify(out, source=None, *, progress: Progress | None = None) -> str:
    """Compare a converted folder, and the GGUF it was made of, with its receipt; a summary.

    Every plane is hashed, and every tensor put together again and hashed as in the GGUF. With
    the GGUF, the summary ends in the SHA-256 of its files, which the receipt does without: what
    it has of the tensors and of the rest covers all bytes.
    Raises UsageError for what is no such folder, FileError that names all that differs.
    """
    folder = _Folder(out)
    gguf = open_gguf(source) if source is not None else None
    problems = list(_odd_files(folder))
    total = sum(item.nbytes for item in folder.items) * (2 if gguf else 1)
    moved, digests = 0, []

    def tick(size: int):
        nonlocal moved
        moved += size
        if progress:
            progress("verify", moved, total)

    with Flow() as flow, folder:
        for item in folder.items:
            problems += _odd_item(flow, folder, item, tick)
        if gguf:
            odd, digests = _against_source(flow, gguf, folder, tick)
            problems += odd
    if problems:
        raise FileError(f"{folder.path}: {len(problems)} differences: {some(problems)}")
    ways = [t["how"] for t in folder.receipt["tensors"]]
    counts = ", ".join(f"{ways.count(way)} {way}" for way in sorted(set(ways)))
    against = f" and {gguf.path.name}" if gguf else ""
    said = f"{folder.path}{against}: as the receipt says, {len(ways)} tensors ({counts})"
    return "; ".join([said, *(f"SHA-256 of {path.name} {digest}" for path, digest in digests)])


def _hashes(receipt: dict) -> dict[tuple[str, int], tuple[str, dict[str, str]]]:
    """SHA-256 of the source and of the planes, by name and part."""
    rests = enumerate(source["rest"]["sha256"] for source in receipt["sources"])
    out = {("", i): (digest, {"data": digest}) for i, digest in rests}
    for t in receipt["tensors"]:
        if (t["name"], t["source"] - 1) in out:
            raise ValueError(f"{t['name']!r:.60} occurs twice, or has no name")
        planes = {name: plane["sha256"] for name, plane in t["planes"].items()}
        out[t["name"], t["source"] - 1] = (t["sha256"], planes)
    return out


def _odd_files(folder: _Folder) -> Iterator[str]:
    for name, layout in folder.layouts.items():
        if problem := odd_header(folder.path / name, layout):
            yield f"{name}: {problem}"
    for name, (size, digest) in folder.files.items():
        path = folder.path / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes, wanted {size}"
        elif _sha(path.read_bytes()) != digest:
            yield f"{name} has changed"


def _odd_item(flow: Flow, folder: _Folder, item: Item, tick) -> list[str]:
    source, planes = folder.hashes[item.name, item.part]
    name = item.name or f"rest.{item.part + 1}"
    whole, parts = hashlib.sha256(), {plane: hashlib.sha256() for plane in item.planes}

    def before(chunk):
        for plane, data in chunk[1].items():
            parts[plane].update(data)

    try:
        chunks = folder.chunks(item)
        flow.run(chunks, before, lambda chunk: item.unpack(chunk[1]), whole.update, tick)
    except FileError as error:
        return [f"{name}: {error}"]
    odd = [item.planes[p].key for p, digest in parts.items() if digest.hexdigest() != planes[p]]
    if odd:
        return [f"{name}: changed in {item.file}: {', '.join(odd)}"]
    if whole.hexdigest() != source:
        return [f"{name}: does not give back the bytes of the source"]
    return []


def _against_source(flow: Flow, gguf: GGUF, folder: _Folder, tick) -> tuple[list[str], list]:
    """What differs in the GGUF, and its files with their SHA-256."""
    sizes = [path.stat().st_size for path in gguf.parts]
    wanted = [source["bytes"] for source in folder.receipt["sources"]]
    if sizes != wanted:
        return [f"{gguf.path} has files of {sizes} bytes, the source had {wanted}"], []
    problems, digests = [], []
    for part, path in enumerate(gguf.parts):
        items = [item for item in folder.items if item.part == part]
        whole, found = _hashed(flow, path, items, tick)
        digests.append((path, whole))
        for item, digest in zip(items, found, strict=True):
            if digest != folder.hashes[item.name, part][0]:
                what = f"tensor {item.name}" if item.name else "the header, or a gap"
                problems.append(f"{path.name}: {what} is not what was converted")
    return problems, digests


def _hashed(flow: Flow, path: Path, items: list[Item], tick) -> tuple[str, list[str]]:
    """SHA-256 of a GGUF, and of each item in it, in one pass."""
    whole, at, parts = hashlib.sha256(), 0, [hashlib.sha256() for _ in items]
    places = sorted((s, n, i) for i, item in enumerate(items) for s, _, n in item.chunks(CHUNK))

    def in_order(chunk):
        nonlocal at
        start, data, _ = chunk
        if start == at:  # tied tensors have the same bytes
            whole.update(data)
            at += len(data)

    with path.open("rb") as file:
        chunks = ((n, (s, read_at(file.fileno(), s, n, path), i)) for s, n, i in places)
        flow.run(chunks, lambda c: parts[c[2]].update(c[1]), lambda c: c, in_order, tick)
    return whole.hexdigest(), [part.hexdigest() for part in parts]


# Reverse ------------------------------------------------------------------------------------


@file_errors()
def reverse(
    out, target, *, overwrite: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Write the GGUF that a folder was converted from, byte for byte; the paths.

    A set of several files gets `target`'s name with -0000N-of-0000M. Raises UsageError for a
    file that exists (unless `overwrite`), FileError for a folder that differs from its receipt;
    then nothing stays under the final name.
    """
    folder = _Folder(out)
    target = Path(os.path.abspath(os.path.expandvars(os.path.expanduser(target))))
    paths = _targets(target, len(folder.receipt["sources"]))
    if folders := [str(path) for path in paths if path.is_dir()]:
        raise UsageError(f"{some(folders)}: a folder, wanted a file to write")
    there = [path.name for path in paths if path.exists()]
    if there and not overwrite:
        raise UsageError(f"{target.parent}: {some(there)} exists; --overwrite replaces files")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: there is no such folder to write into")
    try:
        check_room(target.parent, sum(s["bytes"] for s in folder.receipt["sources"]))
        _put_together(folder, paths, progress)
    except OSError as error:  # of a full disk, which names no file
        raise FileError(f"{error.filename or target}: {error.strerror}") from error
    return paths


def _targets(target: Path, count: int) -> list[Path]:
    if count == 1:
        return [target]
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", target.name)
    return [target.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


def _put_together(folder: _Folder, paths: list[Path], progress: Progress | None):
    total, moved = sum(item.nbytes for item in folder.items), 0

    def tick(size: int):
        nonlocal moved
        moved += size
        if progress:
            progress("reverse", moved, total)

    with ExitStack() as stack:
        stack.enter_context(folder)
        files = [stack.enter_context(new_file(path)) for path in paths]
        flow = stack.enter_context(Flow())
        for item in folder.items:
            digest, file = hashlib.sha256(), files[item.part].fileno()

            def work(chunk, item=item, file=file):
                start, planes = chunk
                raw = item.unpack(planes)
                write_at(file, start, raw)
                return raw

            flow.run(folder.chunks(item), lambda _: None, work, digest.update, tick)
            if digest.hexdigest() != folder.hashes[item.name, item.part][0]:
                name = item.name or "the header"
                raise FileError(f"{folder.path}: {name} differs from its receipt; try --verify")
