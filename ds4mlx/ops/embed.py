"""Rows of the token embedding."""

from functools import cache

import mlx.core as mx

from ..packed import Matrix
from . import metal
from .dequantize import arrays, dequantize, kind, readers

_KINDS = (mx.float32, mx.float16, mx.bfloat16, "Q8_0")


@cache
def _kernel(kind: str | mx.Dtype) -> metal.Kernel:
    inputs, reader = readers({"w": kind})
    return metal.Kernel(
        "embed",
        inputs=["ids", *inputs],
        outputs=["out"],
        call=f"{reader}embed(w, ids, out, D, thread_position_in_grid.xy);",
    )


def embed(ids: mx.array, w: Matrix) -> mx.array:
    """ids [N] int32, w [V, D] -> float32 [N, D], no scaling (model 3).

    The kernel takes F32, F16, BF16 and Q8_0; D is a multiple of 32, and w has 2048 elements or
    more.
    """
    if not takes(w):
        return embed_reference(ids, w)
    D = w.shape[1]
    group = min(256, metal.round_up(D // 8, 32))
    (out,) = _kernel(kind(w))(
        ids,
        *arrays(w),
        template={"D": D},
        grid=(metal.round_up(D // 8, group), ids.shape[0], 1),
        group=(group, 1, 1),
        shapes=[(ids.shape[0], D)],
        dtypes=[mx.float32],
    )
    return out


def takes(w: Matrix) -> bool:
    """Whether a kernel can read rows of w."""
    # From 2048 elements on no plane has fewer than 8, which Metal gets in another space.
    large = w.shape[0] * w.shape[1] >= 2048
    return metal.enabled() and kind(w) in _KINDS and w.shape[1] % 32 == 0 and large


def embed_reference(ids: mx.array, w: Matrix) -> mx.array:
    return dequantize(w[ids])
