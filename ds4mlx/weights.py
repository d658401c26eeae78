"""Weights in memory: tensors of a GGUF or of a folder of safetensors, under their official names.

Each tensor is read once, repacked and handed to MLX; the staging copy is gone before the next.
"""

from collections.abc import Iterable, Iterator

import mlx.core as mx
import numpy as np

from .convert.repack import repack
from .errors import FileError
from .packed import Matrix, Packed


class Weights:
    """Tensors by official name; a module takes each of its own exactly once."""

    def __init__(self, tensors: dict[str, Matrix], prefix: str = "", source: str = "weights"):
        self._tensors, self._prefix, self._source = tensors, prefix, source

    def at(self, name: str) -> "Weights":
        """The tensors below `name`."""
        return Weights(self._tensors, f"{self._prefix}{name}.", self._source)

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


def as_matrix(type: str, raw: np.ndarray, shape: tuple[int, ...]) -> Matrix:
    """Bytes of a tensor, uint8 [rows, row bytes] -> an array, or a packed matrix of `shape`.

    Vectors become float32; matrices keep their type.
    """
    planes = {name: mx.array(plane) for name, plane in repack(type, raw).items()}
    if "data" in planes:
        (data,) = planes.values()
        if type == "BF16":
            data = data.view(mx.bfloat16)
        data = data.reshape(shape)
        return data.astype(mx.float32) if len(shape) == 1 and type != "I32" else data
    lead = shape[:-1]
    planes = {name: plane.reshape(*lead, *plane.shape[1:]) for name, plane in planes.items()}
    return Packed(type, tuple(shape), planes)
