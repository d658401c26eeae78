"""The read-out collapse before the output head."""

from functools import cache

import mlx.core as mx

from ..packed import Packed
from ..rows import FEW, each_row
from . import metal
from .hc_collapse import hc_collapse
from .hc_mix import normed_product

_CHUNK = 256  # of hc_head.metal
_part = metal.Kernel(
    "hc_head",
    inputs=["x", "fn"],
    outputs=["part"],
    call="""hc_head_part<HC>(x, fn, part, x_shape[0], fn_shape[1], threadgroups_per_grid.y,
    threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
)


@cache
def _finish(eps: float, norm_eps: float) -> metal.Kernel:
    return metal.Kernel(
        "hc_head",
        inputs=["x", "part", "scale", "base"],
        outputs=["out"],
        call=f"""threadgroup float sums[HC + 1];
hc_head_finish<HC>(x, part, scale, base, out, sums, {metal.literal(eps)},
    {metal.literal(norm_eps)}, x_shape[2], part_shape[2], thread_position_in_grid.xy,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
    )


def hc_head(x, fn, scale, base, *, eps: float, norm_eps: float) -> mx.array:
    """x [N, HC, D], fn [HC, HC * D], scale [1], base [HC] -> [N, D] float32 (model 4.4).

    The kernel takes up to FEW rows, an fn that is not packed, and HC of 2 to 7.
    """
    N, HC, D = x.shape
    if not metal.enabled() or N > FEW or isinstance(fn, Packed) or not 2 <= HC < 8:
        return hc_head_reference(x, fn, scale, base, eps=eps, norm_eps=norm_eps)
    chunks = -(-HC * D // _CHUNK)
    (part,) = _part(
        x,
        fn,
        template={"HC": HC},
        grid=(32 * (HC + 1), chunks, 1),
        group=(32 * (HC + 1), 1, 1),
        shapes=[(N, HC + 1, chunks)],
        dtypes=[mx.float32],
    )
    (out,) = _finish(eps, norm_eps)(
        x,
        part,
        scale,
        base,
        template={"HC": HC},
        grid=(metal.round_up(D, 256), N, 1),
        group=(256, 1, 1),
        shapes=[(N, D)],
        dtypes=[mx.float32],
    )
    return out


def hc_head_reference(x, fn, scale, base, *, eps: float, norm_eps: float) -> mx.array:
    def one(x):
        pre = mx.sigmoid(normed_product(x, fn, norm_eps) * scale + base) + eps
        return hc_collapse(x, pre)

    return each_row(one, x)
