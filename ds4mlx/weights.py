"""Weights in memory: tensors of a GGUF or of a folder of safetensors, under their official names.

Each tensor is read once, repacked and handed to MLX; its staging copy is gone before the next.
Nothing stays lazy: MLX can evaluate a graph only in the thread that built it.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from .convert.folder import FolderTensor
from .convert.gguf import Tensor
from .convert.inventory import FLOATS, check_ids
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
    tensors: dict[str, Tensor | FolderTensor],
    experts: int,
    source: str = "weights",
    progress: Progress | None = None,
) -> Weights:
    """Read tensors, given by official name; those that share their bytes are loaded once.

    Raises FileError for a hash table that names an expert at or above `experts`.
    """
    total = sum(t.nbytes for t in tensors.values())
    loaded, shared, done = {}, {}, 0
    for name, t in tensors.items():
        if t.place not in shared:
            raw = t.read()
            if t.type == "I32":
                check_ids(t.name, raw.view(np.int32), experts)
            shared[t.place] = as_matrix(t.type, raw, t.shape)
        loaded[name] = shared[t.place]
        done += t.nbytes
        if progress:
            progress("load", done, total)
    return Weights(loaded, source)


def as_matrix(type: str, raw: np.ndarray, shape: tuple[int, ...]) -> Matrix:
    """Bytes of a tensor, uint8 [rows, row bytes] -> an array, or a packed matrix of `shape`.

    Vectors become float32; matrices keep their type, but for small ones on the CPU: MLX has no
    product of a float32 row with a half matrix there, and would widen it at every use.
    """
    if len(shape) == 1 and type not in (*FLOATS, "I32"):
        vector = dequantize(as_matrix(type, raw, (1, *shape)))[0]
        mx.eval(vector)
        return vector
    lead = shape[:-1]
    planes = {n: mx.array(p.reshape(*lead, *p.shape[1:])) for n, p in repack(type, raw).items()}
    if "data" not in planes:
        return Packed(type, tuple(shape), planes)
    data = planes["data"]
    if type == "BF16":
        data = data.view(mx.bfloat16)
    small = data.size < _SMALL and mx.default_device() == mx.cpu
    if type != "I32" and (len(shape) == 1 or small):
        data = data.astype(mx.float32)
    mx.eval(data)
    return data
