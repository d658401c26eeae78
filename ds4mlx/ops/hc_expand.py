"""Write a sublayer's output back into the residual streams."""

import mlx.core as mx

from ..rows import each_row
from . import metal

_kernel = metal.Kernel(
    "hc_expand",
    inputs=["x", "y", "post", "comb"],
    outputs=["out"],
    call="hc_expand<HC>(x, y, post, comb, out, x_shape[2], thread_position_in_grid.xy);",
)


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
