"""Root mean square normalisation over the last axis."""

from functools import cache

import mlx.core as mx

from ..rows import each_row
from . import metal


@cache
def _kernel(eps: float) -> metal.Kernel:
    return metal.Kernel(
        "rms_norm",
        inputs=["x", "w"],
        outputs=["out"],
        call=f"""threadgroup float sums[32];
rms_norm<WEIGHTED>(x, w, out, sums, {metal.literal(eps)}, D, threadgroup_position_in_grid.x,
    thread_index_in_threadgroup, threads_per_threadgroup.x);""",
    )


def rms_norm(x: mx.array, w: mx.array | None, eps: float) -> mx.array:
    """x [N, ..., D] float32, w [D] or None -> w x / sqrt(mean(x^2) + eps) (model 2)."""
    if not metal.enabled():
        return rms_norm_reference(x, w, eps)
    D = x.shape[-1]
    group = min(1024, metal.round_up(-(-D // 4), 32))
    (out,) = _kernel(eps)(
        x,
        x if w is None else w,
        template={"WEIGHTED": w is not None, "D": D},
        grid=(group * (x.size // D), 1, 1),
        group=(group, 1, 1),
        shapes=[x.shape],
        dtypes=[mx.float32],
    )
    return out


def rms_norm_reference(x: mx.array, w: mx.array | None, eps: float) -> mx.array:
    return each_row(lambda row: mx.fast.rms_norm(row, w, eps), x)
