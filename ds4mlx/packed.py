"""A quantised matrix as it lies in memory: the planes that `convert.repack` makes of its blocks."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Packed:
    """A matrix [..., M, K] of one ggml type, still packed.

    `planes` holds arrays whose leading axes are those of `shape[:-1]`; their names and
    dtypes are those of `convert.repack`. Indexing works on the leading axes.
    """

    type: str
    shape: tuple[int, ...]
    planes: dict[str, mx.array]

    def __getitem__(self, index) -> "Packed":
        planes = {name: plane[index] for name, plane in self.planes.items()}
        first = next(iter(planes.values()))
        lost = self.planes[next(iter(planes))].ndim - len(self.shape)
        lead = first.shape[: first.ndim - 1 - lost]
        return Packed(self.type, (*lead, self.shape[-1]), planes)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())


Matrix = mx.array | Packed  # what an op that multiplies by a weight takes
