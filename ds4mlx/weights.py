"""Weights in memory: tensors of a GGUF or of a folder of safetensors, under their official names.

Each tensor is read once, repacked and handed to MLX; its staging copy is gone before the next.
MLX itself reads what `convert` has repacked, without any copy.
Nothing stays lazy: MLX can evaluate a graph only in the thread that built it.
"""

import math
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from .convert.folder import FolderTensor, StoredTensor
from .convert.gguf import Tensor
from .convert.inventory import FLOATS, check_ids
from .convert.plan import planes_of
from .convert.repack import repack
from .errors import FileError
from .ops import dequantize
from .packed import Matrix, Packed

Progress = Callable[[str, int, int], None]  # stage, done, total


_SMALL = 1 << 20  # elements


class Weights:
    """Tensors by official name; a module takes each of its own exactly once."""

    def __init__(self, tensors: dict[str, Matrix], source: str = "weights", prefix: str = ""):
        self._tensors, self._source, self._prefix = tensors, source, prefix

    def at(self, name: str) -> "Weights":
        """The tensors below `name`."""
        return Weights(self._tensors, self._source, f"{self._prefix}{name}.")

    def __getitem__(self, name: str) -> Matrix:
        name = self._prefix + name
        if name not in self._tensors:
            raise FileError(f"{self._source}: tensor {name} is missing")
        return self._tensors.pop(name)

    def finish(self):
        """Raises FileError that names every tensor nobody took."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors))
            raise FileError(f"{self._source}: tensors that no module reads: {names}")


def load_weights(
    tensors: dict[str, Tensor | FolderTensor | StoredTensor],
    experts: int,
    source: str = "weights",
    progress: Progress | None = None,
) -> Weights:
    """Read tensors, given by official name; those that share their bytes are loaded once.

    Raises FileError for a hash table that names an expert at or above `experts`.
    """
    total = sum(t.nbytes for t in tensors.values())
    loaded, shared, done, files = {}, {}, 0, {}
    for name, t in tensors.items():
        if t.place not in shared:
            stored = isinstance(t, StoredTensor)
            planes = _stored(t, files) if stored else _planes(t.type, t.read(), t.shape)
            if t.type == "I32":
                check_ids(t.name, np.array(planes["data"]), experts)
            shared[t.place] = _matrix(t.type, planes, t.shape)
        loaded[name] = shared[t.place]
        done += t.nbytes
        if progress:
            progress("load", done, total)
    return Weights(loaded, source)


def loaded_bytes(tensors: dict[str, Tensor | FolderTensor | StoredTensor]) -> int:
    """What `load_weights` will hold of these tensors; none is read."""
    places = {t.place: t for t in tensors.values()}
    return sum(
        4 * math.prod(t.shape) if _widens(t.type, t.shape) else t.nbytes for t in places.values()
    )


def _widens(type: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor becomes float32: a vector, or a small matrix of floats on the CPU."""
    small = math.prod(shape) < _SMALL and mx.default_device() == mx.cpu
    return type != "I32" and (len(shape) == 1 or (small and type in FLOATS))


def as_matrix(type: str, raw: np.ndarray, shape: tuple[int, ...]) -> Matrix:
    """Bytes of a tensor, uint8 [rows, row bytes] -> an array, or a packed matrix of `shape`.

    Vectors become float32; matrices keep their type, but for small ones on the CPU: MLX has no
    product of a float32 row with a half matrix there, and would widen it at every use.
    """
    return _matrix(type, _planes(type, raw, shape), shape)


def _planes(type: str, raw: np.ndarray, shape: tuple[int, ...]) -> dict[str, mx.array]:
    lead = shape[:-1]
    return {n: mx.array(p.reshape(*lead, *p.shape[1:])) for n, p in repack(type, raw).items()}


def _stored(t: StoredTensor, files: dict[Path, dict]) -> dict[str, mx.array]:
    """The planes of a converted folder; `files` holds those of each file that nobody took."""
    planes = {}
    for name, wanted in planes_of(t.type, t.name, t.shape).items():
        path = t.paths[name]
        if path not in files:
            files[path] = mx.load(str(path))
        planes[name] = files[path].pop(wanted.key).reshape(wanted.shape)
    mx.eval(planes)
    return planes


def _matrix(type: str, planes: dict[str, mx.array], shape: tuple[int, ...]) -> Matrix:
    if "data" not in planes:
        packed = Packed(type, tuple(shape), planes)
        if len(shape) > 1:
            return packed
        vector = dequantize(packed[None])[0]
        mx.eval(vector)
        return vector
    data = planes["data"]
    if type == "BF16":
        data = data.view(mx.bfloat16)
    if _widens(type, shape):
        data = data.astype(mx.float32)
    mx.eval(data)
    return data
