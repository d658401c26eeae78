"""The routed experts: each row meets its own k, weighed by the router."""

from functools import cache

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .dequantize import NATIVE
from .experts_down import (
    PLANES,
    TABLE,
    blocking,
    experts_down,
    experts_down_reference,
    gather,
    planes,
    takes,
)
from .mlp import mlp, mlp_reference, swiglu

_SIMDGROUPS = 4


def experts(x, ids, weights, w1: Matrix, w3: Matrix, w2: Matrix, limit: float, shared=None):
    """x [N, D], ids [N, K] uint32, weights [N, K]; w1, w3 [E, F, D], w2 [E, D, F] -> [N, D].

    The weight is applied before w2 (model 12). Up to 8 rows and K of 8, the kernels take over:

    | launch              | kernel: MXFP4, Q8_0, Q4_K, Q2_K, IQ2_XXS | reference       |
    | w1 and w3           | both of one of these types               | any other types |
    | w2 (`experts_down`) | one of these types                       | any other type  |

    Where w1 and w3 take the reference, as they do where F is no multiple of 32, w2 does too.
    shared: w1, w3 [F, D] and w2 [D, F] of an expert that every row meets with weight 1.
    """
    if shared is not None:
        return experts(x, ids, weights, w1, w3, w2, limit) + mlp(x, *shared, limit)
    N, K = ids.shape
    F = w1.shape[1]
    one_type = isinstance(w1, Packed) and isinstance(w3, Packed) and w1.type == w3.type
    if not one_type or F % 32 or not takes(ids, w1):
        return experts_reference(x, ids, weights, w1, w3, w2, limit)
    R, M = blocking(N)
    (h,) = _kernel(w1.type)(
        x,
        ids,
        weights,
        mx.array(limit, mx.float32),
        *planes(w1),
        *planes(w3)[: len(w3.planes)],
        template={"D": x.shape[1], "F": F, "K": K, "R": R, "M": M},
        grid=(F // R * 32, N * K, 1),
        group=(32 * _SIMDGROUPS, 1, 1),
        shapes=[(N, K, F)],
        dtypes=[mx.float32],
    )
    return experts_down(h, ids, w2)


def experts_reference(x, ids, weights, w1, w3, w2, limit, shared=None):
    if shared is not None:
        routed = experts_reference(x, ids, weights, w1, w3, w2, limit)
        return routed + mlp_reference(x, *shared, limit)

    def gathered(x, ids, weights):
        up = swiglu(gather(x[:, None], w1, ids), gather(x[:, None], w3, ids), limit)
        return experts_down_reference(up * weights[..., None], ids, w2)

    if x.shape[0] <= FEW:
        return each_row(gathered, x, ids, weights)
    if all(isinstance(w, Packed) and w.type in NATIVE for w in (w1, w3, w2)):
        return gathered(x, ids, weights)
    # One expert after the other over all rows: each is widened once, and memory stays small.
    total = mx.zeros_like(x)
    for e in range(w1.shape[0]):
        share = mx.where(ids == e, weights, 0.0).sum(axis=1, keepdims=True)
        total = total + share * mlp(x, w1[e], w3[e], w2[e], limit)
    return total


@cache
def _kernel(type: str) -> metal.Kernel:
    gate, up = ([f"{w}_{p}" for p in PLANES[type] if p != "table"] for w in ("gate", "up"))
    table = ["table"] if type == "IQ2_XXS" else []
    shared = ", magnitudes" if table else ""
    return metal.Kernel(
        "experts",
        inputs=["x", "ids", "weights", "limit", *gate, *table, *up],
        outputs=["h"],
        call=f"""{TABLE.format(threads=32 * _SIMDGROUPS) if table else ""}
{type} gate = {{{", ".join(gate)}{shared}}};
{type} up = {{{", ".join(up)}{shared}}};
uint N = x_shape[0];
uint f = (threadgroup_position_in_grid.x * {_SIMDGROUPS} + simdgroup_index_in_threadgroup) * R;
experts<D, F, K, R, M>(gate, up, x, ids, weights, limit, h, N,
    threadgroup_position_in_grid.y, f, thread_index_in_simdgroup);""",
    )
