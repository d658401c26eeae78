"""The released checkpoint: a folder of safetensors, its FP8 and FP4 matrices read exactly.

Layouts of the format's description, 1.7: FP8 e4m3 with a power of two per 128 x 128, FP4 e2m1
(the even column in the low nibble) with one per 32 columns, all else plain.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ..errors import FileError, UsageError, file_errors
from .blocks import E2M1, LAYOUTS
from .gguf import some
from .hub import QUANT_METHOD
from .safetensors import Entry, read_safetensors

SQUARE = 128  # rows and columns that share a scale of FP8
GROUP = 32  # columns that share a scale of FP4
_PLAIN = ("F32", "F16", "BF16", "I32", "I64")
_PACKED = ("I8", "U8")  # two FP4 codes a byte
_EXPERT = re.compile(r"(.+\.experts\.)([0-9]+)\.(.+)")


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, or the matrix of one expert, not yet read."""

    name: str
    entry: Entry
    scale: Entry | None = None
    file: str = ""

    @property
    def format(self) -> str:
        """ "FP8", "FP4", or the dtype."""
        if self.scale is None:
            return self.entry.dtype
        return "FP4" if self.entry.dtype in _PACKED else "FP8"

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, width = self.entry.shape or (1,)
        return (*lead, 2 * width if self.format == "FP4" else width)

    def values(self, start: int, stop: int) -> np.ndarray:
        """Rows as float32 (ids: int32), exactly. Raises FileError for a scale that is NaN."""
        raw = self.entry.raw[start:stop]
        if self.entry.dtype == "I64":
            wide = raw.view("<i8")
            if (wide != wide.astype(np.int32)).any():
                raise FileError(f"{self.name}: ids beyond 32 bits")
            return wide.astype(np.int32)
        if self.scale is None:
            part = self.entry._replace(shape=(len(raw), -1), raw=raw)
            values = part.values()
            return values if self.entry.dtype == "I32" else values.astype(np.float32)
        if self.format == "FP4":
            scales = np.repeat(self._scales(start, stop), GROUP, axis=1)
            return _E2M1.take(_nibbles(raw)) * scales
        scales = self._scales(start // SQUARE, -(-stop // SQUARE))
        rows = np.arange(start, stop) // SQUARE - start // SQUARE
        scales = np.repeat(scales, SQUARE, axis=1)[rows, : raw.shape[1]]
        with np.errstate(over="ignore"):  # an encoder refuses what is not finite
            return _e4m3().take(raw) * scales

    def mxfp4(self, start: int, stop: int) -> np.ndarray:
        """Rows of an FP4 matrix as ggml's blocks: the same codes and scales in another order."""
        raw = self.entry.raw[start:stop]
        blocks = np.empty((len(raw), 2 * raw.shape[1] // GROUP), LAYOUTS["MXFP4"].block)
        blocks["scales"] = self._exponents(start, stop)
        # The two halves of a group share its bytes; here every byte has neighbours.
        first, last = np.moveaxis(raw.reshape(*blocks.shape, 2, GROUP // 4), 2, 0)
        blocks["codes"][..., 0::2] = (first & 15) | (last << 4)
        blocks["codes"][..., 1::2] = (first >> 4) | (last & 0xF0)
        return blocks.view(np.uint8)

    def _scales(self, start: int, stop: int) -> np.ndarray:
        return np.ldexp(np.float32(1), self._exponents(start, stop).astype(np.int32) - 127)

    def _exponents(self, start: int, stop: int) -> np.ndarray:
        exponents = self.scale.raw[start:stop]
        if (exponents == 255).any():
            raise FileError(f"{self.name}: a scale is NaN (e8m0 255)")
        return exponents


@dataclass(frozen=True)
class Checkpoint:
    """A folder that holds the released checkpoint, its tensors not yet read."""

    path: Path
    config: dict
    tokenizer: dict
    tensors: dict[str, tuple[Source, ...]]  # by official name; those of experts stacked

    @property
    def stages(self) -> int:
        """DSpark stages: `mtp.0.` to `mtp.<stages - 1>.`."""
        numbers = (name.split(".")[1] for name in self.tensors if name.startswith("mtp."))
        return 1 + max((int(n) for n in numbers if n.isdigit()), default=-1)


@file_errors()
def open_checkpoint(path: str | os.PathLike, wanted: Callable[[str], bool]) -> Checkpoint:
    """A folder with config.json, tokenizer.json and the shards that hold the tensors wanted.

    Raises UsageError for a folder that is none, FileError that names every shard that is missing
    and every tensor whose dtype or scale is not the released one.
    """
    path = Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))
    if lost := [n for n in ("config.json", "tokenizer.json") if not (path / n).is_file()]:
        raise UsageError(
            f"{path}: there is no {' and no '.join(lost)}; wanted the folder of a checkpoint"
        )
    config, tokenizer = (read_json(path / name) for name in ("config.json", "tokenizer.json"))
    method = config.get("quantization_config")
    if isinstance(method, dict) and method.get("quant_method") == QUANT_METHOD:
        raise UsageError(f"{path}: is converted already; --reverse makes the GGUF of it")
    found = sources(_shards(path, wanted))
    return Checkpoint(path, config, tokenizer, {n: s for n, s in found.items() if wanted(n)})


def read_json(path: Path) -> dict:
    """Raises FileError unless the file is a JSON object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}") from None
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    if not isinstance(value, dict):
        raise FileError(f"{path} is not a JSON object")
    return value


def _shards(path: Path, wanted: Callable[[str], bool]) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        if not (shards := sorted(path.glob("*.safetensors"))):
            raise FileError(f"{path}: there is no .safetensors file beside config.json")
        return shards
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise FileError(f"{index}: no weight_map from tensors to files")
    there = {p.name for p in path.iterdir() if p.is_file()}
    shards = sorted({f for n, f in names.items() if wanted(n)})
    if lost := [name for name in shards if name not in there]:
        raise FileError(
            f"{path}: {len(lost)} of {len(shards)} shards are missing: "
            f"{some(f'{name:.100}' for name in lost)}; the download is not complete"
        )
    return [path / name for name in shards]


def sources(shards: Iterable[Path]) -> dict[str, tuple[Source, ...]]:
    """The tensors of files by official name, those of the experts of a layer stacked.

    Raises FileError that names every tensor given twice, or of a dtype or scale that is unknown.
    """
    found: dict[str, Source] = {}
    problems = []
    for path in shards:
        for name, entry in read_safetensors(path).items():
            if name in found:
                problems.append(f"{path.name} and {found[name].file} both hold {name}")
            found[name] = Source(name, entry, None, path.name)
    scales = {n: s for n, s in found.items() if n.endswith(".scale")}
    stacks: dict[str, dict[int, Source]] = {}
    for name, source in found.items():
        if name.endswith(".scale"):
            continue
        scale = scales.pop(name.removesuffix(".weight") + ".scale", None)
        if problem := _problem(source, scale):
            problems.append(problem)
            continue
        match = _EXPERT.fullmatch(name)
        stacked, index = (match[1] + match[3], int(match[2])) if match else (name, 0)
        source = Source(name, source.entry, scale and scale.entry, source.file)
        stacks.setdefault(stacked, {})[index] = source
    problems += [f"{name} belongs to no matrix" for name in scales]
    tensors = {}
    for name, parts in stacks.items():
        ordered = [parts[i] for i in sorted(parts)]
        if sorted(parts) != list(range(len(parts))):
            problems.append(f"{name} has experts {str(sorted(parts)):.60}, wanted 0, 1, ..")
        if len({(s.format, s.shape) for s in ordered}) > 1:
            problems.append(f"{name}: experts of several formats or shapes")
        tensors[name] = tuple(ordered)
    if problems:
        raise FileError(f"tensors that cannot be read: {some(problems)}")
    return tensors


def _problem(source: Source, scale: Source | None) -> str | None:
    """What keeps a tensor and its scale from being of the released formats."""
    dtype, shape = source.entry.dtype, source.entry.shape
    name = f"{source.name} is {dtype} {list(shape)}"
    if len(shape) > 2 or 0 in shape:
        return f"{name}, wanted a matrix or a vector"
    if dtype in _PLAIN:
        return f"{name}, but has a scale" if scale else None
    if dtype not in ("F8_E4M3", *_PACKED) or len(shape) != 2:
        return f"{name}, wanted a matrix of FP8 or FP4, or one of {', '.join(_PLAIN)}"
    if scale is None:
        return f"{name}, without its {source.name.removesuffix('.weight')}.scale"
    rows, columns = shape
    if dtype in _PACKED:
        wanted, blocks = (rows, 2 * columns // GROUP), f"one per {GROUP} columns"
        if 2 * columns % GROUP:
            return f"{name}, wanted rows of whole groups of {GROUP} values"
    else:
        wanted, blocks = (-(-rows // SQUARE), -(-columns // SQUARE)), f"{SQUARE}x{SQUARE} blocks"
    if (scale.entry.dtype, scale.entry.shape) != ("F8_E8M0", wanted):
        return (
            f"{scale.name} is {scale.entry.dtype} {list(scale.entry.shape)}, wanted F8_E8M0 "
            f"{list(wanted)} ({blocks})"
        )
    return None


_E2M1 = np.concatenate([E2M1, -E2M1]) / 2  # by code; code 8 is -0


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Two codes a byte, the low one first: uint8 [rows, n] -> uint8 [rows, 2 * n]."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)


@cache
def _e4m3() -> np.ndarray:
    """The values of the 256 codes of FP8 e4m3 (its one NaN in 127 and 255), float32."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, fraction / 512, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[127::128] = np.nan
    return np.where(code > 127, -size, size).astype(np.float32)
