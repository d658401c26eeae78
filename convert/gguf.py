"""Opens GGUF files: a header in which every number is checked before it is trusted, tensors unread.

Tensor bytes are read on demand and never through the map, so that no second copy stays resident.
"""

import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import FileError, UsageError
from .flow import read_at

# ggml type code -> (name, elements of a block, bytes of a block)
TYPES = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}

# Bounds that keep a hostile header below a second. V4 Flash has a header of 5.4 MB with
# 257,021 strings and 1,328 tensors.
_HEADER = 1 << 26  # bytes
_TEXT = 1 << 20  # bytes of one string value
_NAME = 1 << 10  # bytes of a key or of a tensor's name
_ITEMS = 1 << 16  # metadata keys; tensors
_STRINGS = 1 << 21  # strings in all arrays together


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, not yet read."""

    name: str
    type: str  # ggml's name: "F16", "Q8_0", "IQ2_XXS", ..
    shape: tuple[int, ...]  # NumPy order, outermost first
    path: Path
    offset: int  # in the file
    nbytes: int

    @property
    def place(self) -> tuple[Path, int]:
        """Tensors at the same place are the same bytes."""
        return self.path, self.offset

    def read(self) -> np.ndarray:
        """The packed bytes, uint8 [rows, row bytes], in one read. Raises FileError."""
        rows = math.prod(self.shape[:-1])
        out = np.empty((rows, self.nbytes // rows), np.uint8)
        view, done = memoryview(out).cast("B"), 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                while done < self.nbytes and (n := file.readinto(view[done:])):
                    done += n
        except OSError as error:
            raise FileError(f"{self.path}: tensor {self.name}: {error.strerror}") from error
        if done < self.nbytes:
            raise FileError(
                f"{self.path}: tensor {self.name} has {done} bytes, wanted {self.nbytes}: "
                "the file has become shorter since it was opened"
            )
        return out


class Metadata(Mapping):
    """Values by key: int, float, bool, str, a NumPy array, or a list of str.

    A list of str is decoded when it is first asked for (a vocabulary takes a while).
    """

    def __init__(self, path: Path, values: dict):
        self._path, self._values = path, values

    def __getitem__(self, key: str):
        value = self._values[key]
        if isinstance(value, _Strings):
            value = self._values[key] = self._decoded(key, value.count)
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def expect(self, key: str, kind: type, default=None):
        """The value of `key`, or `default`; raises FileError if it is not of type `kind`."""
        value = self.get(key, default)
        if value is not default and type(value) is not kind:
            raise FileError(f"{self._path}: {key} is {value!r:.60}, wanted {kind.__name__}")
        return value

    def length(self, key: str) -> int | None:
        """How many elements an array has; None for any other value."""
        value = self._values.get(key)
        if isinstance(value, _Strings):
            return value.count
        return len(value) if isinstance(value, (list, np.ndarray)) else None

    def first(self, key: str, limit: int) -> list:
        """The first elements of an array; no others are decoded."""
        value = self._values[key]
        return self._decoded(key, limit) if isinstance(value, _Strings) else list(value[:limit])

    def _decoded(self, key: str, limit: int) -> list[str]:
        try:
            return self._values[key].decode(limit)
        except UnicodeDecodeError:
            raise FileError(f"{self._path}: {key} holds a string that is not UTF-8") from None


@dataclass(frozen=True, repr=False)
class GGUF:
    """A GGUF file, or a split set of them taken as one."""

    path: Path  # links resolved; of the first shard
    given: Path  # as it was named
    metadata: Metadata
    tensors: dict[str, Tensor]
    nbytes: int  # of all files together
    parts: tuple[Path, ...]  # the files, as they were named or found

    @property
    def shards(self) -> int:
        return len(self.parts)

    @property
    def readers(self) -> int:
        """Threads that reading is worth: the bytes only have to come from the disk."""
        return 1

    @property
    def sizes(self) -> list[int]:
        """Bytes of each of the files."""
        return [path.stat().st_size for path in self.parts]

    @property
    def stamps(self) -> list:
        """What changes when the files do."""
        stats = [path.stat() for path in self.parts]
        return [[s.st_size, s.st_mtime_ns] for s in stats]

    @contextmanager
    def reading(self, part: int) -> Iterator[Callable[..., np.ndarray]]:
        """A function (start, size) -> the bytes of one of the files, uint8.

        It takes a Counter too, as what is not on a disk counts what its encoding costs.
        """
        path = self.parts[part]
        with path.open("rb") as file:
            yield lambda start, size, _=None: read_at(file.fileno(), start, size, path)

    def __repr__(self) -> str:
        return f"GGUF({self.path.name[-80:]!r}, {len(self.tensors)} tensors, {self.nbytes} bytes)"


def open_gguf(path: str | os.PathLike) -> GGUF:
    """The header of a GGUF file; given one shard of a split set, of the whole set.

    `~` and `$VARIABLES` in the path are expanded.

    Raises UsageError for what is no GGUF file at all, and FileError for one that is damaged,
    incomplete or inconsistent.
    """
    one = _open_one(Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path)))))
    paths = _shard_paths(one)
    return _joined(one.given, [_open_one(p) for p in paths]) if paths else one


def some(items: Iterable[str], limit: int = 20) -> str:
    """Items in one line, the tail of a long list as a count."""
    items = list(items)
    more = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


# Split sets ---------------------------------------------------------------------------------

_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


def _shard_paths(one: GGUF) -> list[Path]:
    """Where the shards of the set lie that `one` belongs to; empty for a file of its own."""
    count = one.metadata.expect("split.count", int, 1)
    # In a hub's cache the name that tells the set is that of the link.
    named = [(p, m) for p in (one.given, one.path) if (m := _SHARD.fullmatch(p.name))]
    if count in (0, 1) and (not named or int(named[0][1][3]) <= 1):
        return []
    if not named:
        raise FileError(
            f"{one.path}: one of {count} shards, but its name does not end in "
            "-00001-of-0000N.gguf, so the others cannot be found; restore the names"
        )
    path, match = named[0]
    if count != int(match[3]):
        raise FileError(
            f"{one.path}: the name says {int(match[3])} shards, split.count says {count}"
        )
    paths = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    if missing := [p.name for p in paths if not os.path.exists(p)]:
        raise FileError(f"{path.parent}: shards are missing from the set: {some(missing)}")
    return paths


def _joined(given: Path, shards: list[GGUF]) -> GGUF:
    first, tensors, problems = shards[0], {}, []
    same = {"split.count": int, "split.tensors.count": int, "general.architecture": str}
    for i, shard in enumerate(shards):
        name, expect = shard.given.name, shard.metadata.expect
        if (number := expect("split.no", int)) != i:
            problems.append(f"{name} holds split.no {number}, wanted {i}")
        for key, kind in same.items():
            wanted = first.metadata.expect(key, kind)
            # Shards after the first need not repeat what does not concern the split.
            if (found := expect(key, kind, wanted if kind is str else None)) != wanted:
                problems.append(f"{name} says {key} {found}, {first.given.name} says {wanted}")
        problems += [f"{name} repeats tensor {t}" for t in shard.tensors if t in tensors]
        tensors |= shard.tensors
    wanted = first.metadata.expect("split.tensors.count", int)
    if len(tensors) != wanted:
        problems.append(f"{len(tensors)} tensors in all, split.tensors.count says {wanted}")
    if problems:
        raise FileError(f"{given.parent}: the shards do not make a set: {some(problems)}")
    nbytes = sum(s.nbytes for s in shards)
    parts = tuple(s.given for s in shards)
    return GGUF(first.path, given, first.metadata, tensors, nbytes, parts)


# One file -----------------------------------------------------------------------------------


def _open_one(given: Path) -> GGUF:
    if "\0" in str(given):
        raise UsageError(f"{str(given)!r}: a path cannot hold a zero byte")
    path = Path(os.path.realpath(given))
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(_folder(path))
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            if (head := file.read(512))[:4] != b"GGUF":
                raise UsageError(f"{path}: {foreign(head)}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(given, path, data)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error


def _folder(path: Path) -> str:
    """A folder is no model file; say which ones it holds."""
    files = [(p, p.stat()) for p in sorted(path.glob("*.gguf")) if p.is_file()]
    if not files:
        return f"{path}: a folder without .gguf files; name a model file"
    listed = some(
        f"{p.name} ({s.st_size / 1e9:.2f} GB, {date.fromtimestamp(s.st_mtime)})" for p, s in files
    )
    return f"{path}: a folder; name one of its files: {listed}"


def foreign(head: bytes) -> str:
    """What a file that is no GGUF is, and what to do."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return "an empty file; download it again"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")) or b"<html" in text:
        return "a web page, not a model; download the file itself, logged in if the site wants it"
    if text.startswith(b"version https://git-lfs"):
        return 'a git-LFS pointer, not the model; run "git lfs pull", or download the file itself'
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file; name a GGUF file, or the folder with its config.json"
    return f"not a GGUF file: it begins with {head[:16]!r}; name a .gguf model file"


class _Strings:
    """An array of strings as it lies in the file."""

    def __init__(self, data: bytes, count: int):
        self.data, self.count = data, count

    def decode(self, limit: int) -> list[str]:
        data, out, at = self.data, [], 0
        for _ in range(min(limit, self.count)):
            stop = at + 8 + int.from_bytes(data[at : at + 8], "little")
            out.append(data[at + 8 : stop].decode())
            at = stop
        return out


# Value type code of a number -> its format, for struct and for NumPy alike.
_CODES = (0, 1, 2, 3, 4, 5, 6, 10, 11, 12)
_NUMBERS = {code: f"<{letter}" for code, letter in zip(_CODES, "BbHhIifQqd", strict=True)}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class _Reader:
    """Walks a header and never past its end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 4
        self.end = min(len(data), _HEADER)
        self.strings_left = _STRINGS

    def fail(self, message: str):
        raise FileError(f"{self.path}: {message}")

    def skip(self, n: int, what: str) -> int:
        """Where `n` bytes start that are now behind."""
        start = self.at
        if n > self.end - start:
            if self.end < len(self.data):
                self.fail(f"{what} needs {n} bytes at {start}, beyond the {_HEADER} of a header")
            self.fail(
                f"{what} needs {n} bytes at {start}, but the file ends at {self.end}: "
                "an incomplete download, or a damaged header"
            )
        self.at += n
        return start

    def number(self, format: str, what: str):
        return struct.unpack_from(format, self.data, self.skip(struct.calcsize(format), what))[0]

    def name(self, what: str) -> str:
        name = self.text(what, _NAME)
        if not name.isprintable():  # or it could not be named in a message
            self.fail(f"{what} is {name!r}, wanted printable characters")
        return name

    def text(self, what: str, limit: int = _TEXT) -> str:
        n = self.number("<Q", what)
        start = self.skip(n, what)
        if n > limit:
            self.fail(f"{what} has {n} bytes, wanted at most {limit}")
        try:
            return self.data[start : start + n].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def count(self, what: str, least: int) -> int:
        """How many `what` follow, of at least `least` bytes each."""
        n = self.number("<Q", f"the number of {what}")
        if n > _ITEMS:
            self.fail(f"{n} {what}, wanted at most {_ITEMS}")
        if n * least > self.end - self.at:
            self.fail(
                f"{n} {what} do not fit into {self.end} bytes: an incomplete download, "
                "or a damaged header"
            )
        return n

    def value(self, what: str):
        code = self.number("<I", what)
        if code == _STRING:
            return self.text(what)
        if code == _ARRAY:
            return self.array(what)
        if code == _BOOL:
            return bool(self.bools(np.array([self.number("<B", what)]), what)[0])
        if code not in _NUMBERS:
            self.fail(f"{what} has the unknown value type {code}")
        return self.number(_NUMBERS[code], what)

    def array(self, what: str):
        code, n = self.number("<I", what), self.number("<Q", what)
        if code == _STRING:
            return self.strings(n, what)
        if code == _BOOL:
            return self.bools(self.numbers("<B", n, what), what)
        if code not in _NUMBERS:
            self.fail(f"{what} is an array of value type {code}, wanted numbers, bools or strings")
        return self.numbers(_NUMBERS[code], n, what)

    def numbers(self, format: str, n: int, what: str) -> np.ndarray:
        start = self.skip(n * struct.calcsize(format), what)
        return np.frombuffer(self.data[start : self.at], np.dtype(format))

    def bools(self, values: np.ndarray, what: str) -> np.ndarray:
        if (values > 1).any():
            self.fail(f"{what} is a bool of {values.max()}, wanted 0 or 1")
        return values.astype(bool)

    def strings(self, n: int, what: str) -> _Strings:
        self.strings_left -= n
        if self.strings_left < 0:
            self.fail(f"{what} has {n} strings, more than the {_STRINGS} of a header")
        start = at = self.at
        data, last, length = self.data, self.end - 8, struct.Struct("<Q").unpack_from
        for _ in range(n):
            if at > last:
                break
            at += 8 + length(data, at)[0]
        else:
            self.skip(at - start, what)
            return _Strings(data[start:at], n)
        self.skip(at + 8 - start, what)  # fails: the next string begins past the end


def _parse(given: Path, path: Path, data: mmap.mmap) -> GGUF:
    read = _Reader(path, data)
    version = read.number("<I", "the version")
    if 0 < version >> 24 < 16 and not version & 0xFFFFFF:
        read.fail("a big-endian file; this package reads little-endian ones, as PCs and Macs use")
    if version not in (2, 3):
        read.fail(f"GGUF version {version}, wanted 3 (or 2)")
    n_tensors = read.count("tensors", 8 + 1 + 4 + 8 + 4 + 8)
    n_keys = read.count("metadata keys", 8 + 4 + 1)
    values, twice = {}, []
    for i in range(n_keys):
        key = read.name(f"the name of metadata key {i}")
        if key in values:
            twice.append(key)
        values[key] = read.value(f"metadata key {key}")
    if twice:
        read.fail(f"metadata keys that occur twice: {some(twice)}")
    infos = [_tensor_info(read, i) for i in range(n_tensors)]
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        read.fail(f"general.alignment is {alignment!r:.60}, wanted a power of two")
    tensors = _tensors(path, infos, alignment, read.at + -read.at % alignment)
    _check_extent(path, tensors, alignment, read.at, len(data))
    return GGUF(path, given, Metadata(path, values), tensors, len(data), (given,))


def _tensor_info(read: _Reader, i: int) -> tuple[str, tuple[int, ...], int, int]:
    name = read.name(f"the name of tensor {i}")
    n_dims = read.number("<I", f"tensor {name}")
    if not 1 <= n_dims <= 4:
        read.fail(f"tensor {name} has {n_dims} dimensions, wanted 1 to 4")
    dims = tuple(read.number("<Q", f"tensor {name}") for _ in range(n_dims))
    return name, dims, read.number("<I", f"tensor {name}"), read.number("<Q", f"tensor {name}")


def _tensors(path: Path, infos: list, alignment: int, start: int) -> dict[str, Tensor]:
    """Tensors by name; raises FileError that names every one that cannot be."""
    tensors, problems = {}, []
    for name, dims, code, offset in infos:
        size = math.prod(dims)
        kind, block, block_bytes = TYPES.get(code, ("", 1, 0))
        if name in tensors:
            problems.append(f"tensor {name} occurs twice")
        elif not kind:
            problems.append(f"tensor {name} has the unknown type code {code}")
        elif not 0 < size < 1 << 63:
            problems.append(f"tensor {name} has the dimensions {dims}, wanted 1 to 2^63 elements")
        elif dims[0] % block:
            problems.append(f"tensor {name} has rows of {dims[0]}, no multiple of {kind}'s {block}")
        elif offset % alignment:
            problems.append(
                f"tensor {name} is at {offset}, no multiple of the alignment {alignment}"
            )
        else:
            nbytes = size // block * block_bytes
            tensors[name] = Tensor(name, kind, dims[::-1], path, start + offset, nbytes)
    problems += _overlaps(tensors)
    if problems:
        raise FileError(f"{path}: {some(problems)}")
    return tensors


def _overlaps(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Pairs that share some of their bytes; tied weights may share all of them."""
    last = None
    for t in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if last and t.offset < last.offset + last.nbytes and replace(t, name=last.name) != last:
            yield f"tensors {last.name} and {t.name} overlap"
        if not last or t.offset + t.nbytes > last.offset + last.nbytes:
            last = t


def _check_extent(path: Path, tensors: dict, alignment: int, header_end: int, size: int):
    """The file ends where its last tensor does, but for padding."""
    tail = sorted(tensors.values(), key=lambda t: t.offset + t.nbytes)
    end = tail[-1].offset + tail[-1].nbytes if tail else header_end
    if end > size:
        first = next(t for t in tail if t.offset + t.nbytes > size)
        raise FileError(
            f"{path}: incomplete download: the file has {size} bytes, wanted {end}; "
            f"the first tensor that is missing is {first.name}"
        )
    if size > (padded := end + -end % alignment):
        raise FileError(
            f"{path}: {size - padded} bytes too many: {size}, wanted {padded}; "
            "a resumed download may have appended to the file; download it again"
        )
