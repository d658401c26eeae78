"""Weigh a token's residual streams into the one row that a sublayer reads."""

import mlx.core as mx

from ..rows import each_row
from . import metal

_kernel = metal.Kernel(
    "hc_collapse",
    inputs=["x", "pre"],
    outputs=["out"],
    call="hc_collapse<HC>(x, pre, out, x_shape[2], thread_position_in_grid.xy);",
)


def hc_collapse(x: mx.array, pre: mx.array) -> mx.array:
    """x [N, HC, D], pre [N, HC] -> sum_j pre_j x_j, [N, D] (model 4.2)."""
    if not metal.enabled():
        return hc_collapse_reference(x, pre)
    N, HC, D = x.shape
    group = min(256, metal.round_up(D, 32))
    (out,) = _kernel(
        x,
        pre,
        template={"HC": HC},
        grid=(metal.round_up(D, group), N, 1),
        group=(group, 1, 1),
        shapes=[(N, D)],
        dtypes=[mx.float32],
    )
    return out


def hc_collapse_reference(x: mx.array, pre: mx.array) -> mx.array:
    return each_row(lambda x, pre: (pre[:, None] @ x).squeeze(1), x, pre)
