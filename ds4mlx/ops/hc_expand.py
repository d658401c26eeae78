"""Write a sublayer's output back into the residual streams."""

from dataclasses import dataclass

import mlx.core as mx

from ..packed import Matrix
from ..rows import each_row
from . import metal

_kernel = metal.Kernel(
    "hc_expand",
    inputs=["x", "y", "post", "comb"],
    outputs=["out"],
    call="hc_expand<HC>(x, y, post, comb, out, x_shape[2], thread_position_in_grid.xy);",
)

Streams = tuple[mx.array, mx.array | None]  # x [N, HC, D], and part: see Back


@dataclass(frozen=True)
class Back:
    """How the output y [N, D] of a sublayer is written back: as `hc_expand`, float32.

    fn [(2 + HC) * HC, HC * D]: the matrix of the mixture that follows, if one does. An op that
    takes a Back gives the streams after the sublayer, and perhaps a part of that mixture, for
    `hc_mix`: part [N, P, (2 + HC) * HC + 1] float32, in P shares the products of a row with fn
    and its sum of squares. Else None.
    """

    x: mx.array  # [N, HC, D], before the sublayer
    post: mx.array  # [N, HC]
    comb: mx.array  # [N, HC, HC]
    fn: Matrix | None = None

    @property
    def mixes(self) -> bool:
        """Whether metal/streams.h is there for it: a dense fn, and HC of 2 or 4."""
        return isinstance(self.fn, mx.array) and self.x.shape[1] in (2, 4)

    @property
    def arrays(self) -> list[mx.array]:
        return [self.x, self.post, self.comb, self.fn]

    def shapes(self, channels: int) -> list[tuple[int, ...]]:
        """Of the streams and of their part, with a share for so many channels."""
        N, _, D = self.x.shape
        return [self.x.shape, (N, -(-D // channels), self.fn.shape[0] + 1)]


def written(y: mx.array, back: Back | None) -> mx.array | Streams:
    """y as it is if there is no `back`, else the streams after it."""
    return y if back is None else (hc_expand(back.x, y, back.post, back.comb), None)


def hc_expand(x: mx.array, y: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """x [N, HC, D], y [N, D], post [N, HC], comb [N, HC, HC] -> [N, HC, D] (model 4.3).

    out_k = post_k y + sum_j comb[j, k] x_j: the sum runs over the first index of comb. All
    float32.
    """
    if not metal.enabled():
        return hc_expand_reference(x, y, post, comb)
    N, HC, D = x.shape
    group = min(256, metal.round_up(D, 32))
    (out,) = _kernel(
        x,
        y,
        post,
        comb,
        template={"HC": HC},
        grid=(metal.round_up(D, group), N, 1),
        group=(group, 1, 1),
        shapes=[x.shape],
        dtypes=[mx.float32],
    )
    return out


def hc_expand_reference(x, y, post, comb):
    def one(x, y, post, comb):
        return post[..., None] * y[:, None] + comb.swapaxes(1, 2) @ x

    return each_row(one, x, y, post, comb)
