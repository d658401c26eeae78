"""GGUF to an MLX folder: every byte kept, in bounded memory, and resumed after a kill.

A journal in the folder lists the tensors that are safely on disk; `config.json` is written last,
and the journal removed after it, so a folder with `config.json` is complete.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from .. import __version__
from ..errors import FileError, UsageError
from .flow import CHUNK, Flow, check_room, write_at
from .gguf import GGUF, open_gguf
from .hub import describe, to_json
from .plan import SOURCE, Item, Layout, layouts, make_plan
from .quantize import relative
from .receipt import RECEIPT, receipt

Progress = Callable[[str, int, int], None]  # stage, done, total

JOURNAL = "convert.journal"
COMMIT = 1 << 29  # bytes between two entries of the journal: what a kill can cost
_OWN = re.compile(
    r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json|source\.safetensors|"
    r"(config|generation_config|tokenizer|tokenizer_config|receipt)\.json(\.part)?"
)
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def convert(source, out, *, overwrite: bool = False, progress: Progress | None = None) -> Path:
    """Write the target or DSpark draft of a GGUF (any shard of a set) as a folder; its path.

    `source` may be a GGUF that is open already, and need not lie on a disk.

    The folder holds `config.json`, `model-0000N-of-0000M.safetensors` with their index, the
    tokenizer's files, and `receipt.json`; `receipt.reverse` makes the GGUF of it again. Ended at
    any moment, the same call goes on where it stopped, with the same result.

    Raises UsageError for a folder that is in use, or holds anything else (unless `overwrite`),
    and FileError for a damaged file or a disk without room; both before a tensor is read.
    """
    gguf = source if isinstance(source, GGUF) else open_gguf(source)
    files, official = describe(gguf)
    items = make_plan(gguf, official)
    outputs = layouts(items)
    out = Path(os.path.abspath(os.path.expandvars(os.path.expanduser(out))))
    try:
        if out.is_symlink() and not out.exists():
            raise UsageError(f"{out}: a link to what is not there, wanted a folder to write into")
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out}: a file, wanted a folder to write into")
        out.mkdir(parents=True, exist_ok=True)
        held = [path.stat() for path in out.iterdir() if _OWN.fullmatch(path.name)]
        size = sum(layout.size for layout in outputs.values())
        check_room(out, size - sum(stat.st_blocks * 512 for stat in held))
        with _journal(out, _identity(gguf, items, outputs), items, overwrite) as (journal, done):
            if not (out / "config.json").exists():  # or only the journal was left to remove
                _write_tensors(gguf, out, items, outputs, (journal, done), progress)
                _finish(out, gguf, items, files, done)
    except OSError as error:
        raise FileError(_stopped(out, error)) from error
    return out


def _stopped(out: Path, error: OSError) -> str:
    if error.errno not in _FULL:
        return f"{error.filename or out}: {error.strerror}"
    free = shutil.disk_usage(out).free
    return (
        f"{out}: {error.strerror} ({free / 1e9:.2f} GB are free here); make room and run the "
        "same command again, it goes on where it stopped"
    )


# Starting -----------------------------------------------------------------------------------


def _identity(gguf: GGUF, items: list[Item], outputs: dict[str, Layout]) -> dict:
    """What must be the same for a conversion to go on."""
    digest = hashlib.sha256()
    for i, path in enumerate(gguf.parts):
        starts = [t.offset for t in gguf.tensors.values() if t.path == path.resolve()]
        with gguf.reading(i) as read:
            digest.update(read(0, min([*starts, gguf.sizes[i], 1 << 26])))  # no header is longer
    for layout in outputs.values():
        digest.update(layout.header)
    return {
        "version": __version__,
        "headers": digest.hexdigest(),
        "sources": gguf.stamps,
    }


@contextmanager
def _journal(out: Path, identity: dict, items: list[Item], overwrite: bool) -> Iterator[tuple]:
    """The journal, open and locked, and its entries by tensor; removed if all went well."""
    path = out / JOURNAL
    others = sorted(p.name for p in out.iterdir() if p.name[0] != "." and p.name != JOURNAL)
    if others and not path.exists() and not overwrite:
        raise UsageError(_taken(out, others))
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{out}: another run is converting into this folder") from None
        file.seek(0)
        data = file.read()
        first, *lines, size = _entries(data, identity, items)
        if first != identity:
            if first is not None and not overwrite:
                raise UsageError(
                    f"{out}: an unfinished conversion of another file lies here, or the file has "
                    "changed since; --overwrite begins anew"
                )
            begun = _line(identity).startswith(data)  # a kill may have cut the first line off
            if first is None and (others or not begun) and not overwrite:
                raise UsageError(_taken(out, others or [JOURNAL]))
            _clear(out)
            lines = []
            file.truncate(0)
            file.write(_line(identity))
        else:
            file.truncate(size)
        _sync(file)
        done = {(e["name"], e["part"]): None if "lost" in e else e for e in lines}
        yield file, done
        path.unlink()


def _taken(out: Path, others: list[str]) -> str:
    what = "a model" if "config.json" in others else f"other files ({', '.join(others[:3])})"
    return f"{out}: holds {what} already; name another folder, or --overwrite"


def _entries(data: bytes, identity: dict, items: list[Item]) -> list:
    """The journal's lines, the first None if one is damaged, and the bytes that are whole."""
    size = data.rfind(b"\n") + 1  # the last line may have been cut off
    planes = {(item.name, item.part): list(item.planes) for item in items}
    try:
        first, *lines = map(json.loads, data[:size].splitlines() or [b"null"])
        if first != identity or all(_is_entry(line, planes) for line in lines):
            return [first, *lines, size]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    return [None, 0]


def _is_entry(entry: dict, planes: dict) -> bool:
    """Whether a line tells of a tensor of this conversion, and all that the receipt needs."""
    wanted = planes[entry["name"], entry["part"]]
    if "lost" in entry:
        return True
    digests = [entry["sha256"], *entry["planes"].values()]
    return (
        list(entry["planes"]) == wanted
        and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
        and type(entry["error"]) in (int, float)
    )


def _line(value: dict) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _clear(out: Path):
    """Removes an earlier model, `config.json` before all."""
    (out / "config.json").unlink(missing_ok=True)
    for path in out.iterdir():
        if _OWN.fullmatch(path.name):
            path.unlink()


# Tensors ------------------------------------------------------------------------------------


def _write_tensors(gguf, out, items, outputs, journal, progress: Progress | None):
    """Write what `journal` (the file, and its entries by tensor, which are added to) lacks."""
    file, done = journal
    _forget(out, items, outputs, journal)
    total, moved, fresh, held = gguf.nbytes, 0, [], 0
    with ExitStack() as stack:
        sources = [stack.enter_context(gguf.reading(i)) for i in range(len(gguf.parts))]
        readers = stack.enter_context(ThreadPoolExecutor(gguf.readers))
        targets = {
            name: stack.enter_context(_opened(out / name, layout))
            for name, layout in outputs.items()
        }
        flow = stack.enter_context(Flow())
        committer, pending = stack.enter_context(ThreadPoolExecutor(1)), []

        def tick(size: int):
            nonlocal moved
            moved += size
            if progress:
                progress("convert", moved, total)

        def commit(entries: list[dict]):
            for target in targets.values():
                _sync(target)
            file.write(b"".join(map(_line, entries)))
            _sync(file)
            done.update({(entry["name"], entry["part"]): entry for entry in entries})

        for item in items:
            if done.get((item.name, item.part)):
                tick(item.nbytes)
                continue
            target, starts = targets[item.file].fileno(), outputs[item.file].starts
            chunks = _chunks(item, readers, sources[item.part])
            fresh.append(_write_item(flow, item, chunks, target, starts, tick))
            held += item.nbytes
            if held >= COMMIT:  # while the disk is waited for, the work goes on
                for commits in pending:
                    commits.result()
                pending, fresh, held = [committer.submit(commit, fresh)], [], 0
        for commits in pending:
            commits.result()
        commit(fresh)


def _forget(out: Path, items: list[Item], outputs: dict[str, Layout], journal):
    """Strikes out what lay in files that are gone or have become shorter."""
    file, done = journal
    lost = {n for n, layout in outputs.items() if _size(out / n) != layout.size}
    names = [(item.name, item.part) for item in items if item.file in lost]
    if names := [name for name in names if done.get(name)]:
        done.update(dict.fromkeys(names))
        file.write(b"".join(_line({"name": n, "part": p, "lost": True}) for n, p in names))
        _sync(file)


def _write_item(flow: Flow, item: Item, chunks, target: int, starts: dict, tick) -> dict:
    """Write the planes of a tensor -> its entry of the journal."""
    before, cost = hashlib.sha256(), Counter()
    after = {name: hashlib.sha256() for name in item.planes}

    def hashed_before(chunk):
        _, raw, errors = chunk
        before.update(raw.result())
        cost.update(errors)

    def work(chunk):
        places, raw, _ = chunk
        planes = item.repack(raw.result())
        for name, plane in planes.items():
            write_at(target, starts[item.planes[name].key] + places[name].start, plane)
        return planes

    def hashed(planes):
        for name, plane in planes.items():
            after[name].update(plane)

    flow.run(chunks, hashed_before, work, hashed, tick)
    results = {name: digest.hexdigest() for name, digest in after.items()}
    entry = {"name": item.name, "part": item.part, "sha256": before.hexdigest()}
    return entry | {"planes": results, "error": relative(cost)}


def _chunks(item: Item, readers: ThreadPoolExecutor, read) -> Iterator[tuple[int, tuple]]:
    for start, at, size in item.chunks(CHUNK):
        errors = Counter()
        raw = readers.submit(read, start, size, errors)
        yield size, (item.slices(at, size), raw, errors)


@contextmanager
def _opened(path: Path, layout: Layout):
    """A safetensors file of its full size, with its header."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        os.ftruncate(file.fileno(), layout.size)
        write_at(file.fileno(), 0, np.frombuffer(layout.header, np.uint8))
        yield file


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _sync(file):
    file.flush()
    os.fsync(file.fileno())


# Finishing ----------------------------------------------------------------------------------


def _finish(out: Path, gguf: GGUF, items: list[Item], files: dict, done: dict):
    """The small files, each whole or not there, `config.json` last."""
    weights = {p.key: item.file for item in items for p in item.planes.values()}
    weights = {key: file for key, file in sorted(weights.items()) if file != SOURCE}
    size = sum(item.nbytes for item in items if item.file != SOURCE)
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    files = {"model.safetensors.index.json": index} | files
    texts = {name: to_json(value) for name, value in files.items()}
    config = texts.pop("config.json")
    texts[RECEIPT] = to_json(receipt(gguf, items, texts | {"config.json": config}, done))
    for name, text in texts.items():
        _write_whole(out / name, text)
    _sync_folder(out)
    _write_whole(out / "config.json", config)
    _sync_folder(out)


def _write_whole(path: Path, text: bytes):
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(text)
        _sync(file)
    part.replace(path)


def _sync_folder(path: Path):
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
