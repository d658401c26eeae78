"""Rows of the token embedding."""

from functools import cache

import mlx.core as mx

from ..packed import Matrix, Packed
from . import metal
from .dequantize import dequantize

# What a table is for a kernel: its struct in dequantize.h, and its planes in order.
_STRUCTS = {
    mx.float32: ("dense<float>", ("data",)),
    mx.float16: ("dense<half>", ("data",)),
    mx.bfloat16: ("dense<bfloat>", ("data",)),
    "Q8_0": ("q8_0", ("codes", "scales")),
}


@cache
def _kernel(struct: str, planes: tuple[str, ...]) -> metal.Kernel:
    return metal.Kernel(
        "embed",
        inputs=["ids", *planes],
        outputs=["out"],
        call=f"""{struct} w = {{{", ".join(planes)}}};
embed(w, ids, out, D, thread_position_in_grid.xy);""",
    )


def embed(ids: mx.array, w: Matrix) -> mx.array:
    """ids [N] int32, w [V, D] -> float32 [N, D], no scaling (model 3).

    The kernel takes F32, F16, BF16 and Q8_0; D is a multiple of 32, and w has 2048 elements or
    more.
    """
    if not takes(w):
        return embed_reference(ids, w)
    struct, planes, arrays = table(w)
    D = w.shape[1]
    group = min(256, metal.round_up(D // 8, 32))
    (out,) = _kernel(struct, planes)(
        ids,
        *arrays,
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
    kind = w.type if isinstance(w, Packed) else w.dtype
    large = w.shape[0] * w.shape[1] >= 2048
    return metal.enabled() and kind in _STRUCTS and w.shape[1] % 32 == 0 and large


def table(w: Matrix, prefix: str = "") -> tuple[str, tuple[str, ...], list[mx.array]]:
    """The struct of w in dequantize.h; its planes in order, by name and as arrays."""
    if isinstance(w, Packed):
        struct, planes = _STRUCTS[w.type]
        return struct, tuple(prefix + p for p in planes), [w.planes[p] for p in planes]
    struct, planes = _STRUCTS[w.dtype]
    return struct, tuple(prefix + p for p in planes), [w]


def embed_reference(ids: mx.array, w: Matrix) -> mx.array:
    return dequantize(w[ids])
