"""The way back from the routed experts: each row adds what its own k give."""

import math
from functools import cache

import mlx.core as mx
import numpy as np

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .dequantize import NATIVE, dequantize, native

PLANES = {  # of the types that the kernels read, in the order of the structs of metal/experts.h
    "MXFP4": ("codes", "scales"),
    "Q8_0": ("codes", "scales"),
    "Q4_K": ("codes", "scales", "d"),
    "Q2_K": ("codes", "scales", "d"),
    "IQ2_XXS": ("grid", "signs", "d", "table"),
}
TABLE = """threadgroup uint2 magnitudes[256];
for (uint i = thread_index_in_threadgroup; i < 256; i += {threads}) {{
  magnitudes[i] = uint2(table[2 * i], table[2 * i + 1]);
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
"""


def experts_down(h: mx.array, ids: mx.array, w2: Matrix) -> mx.array:
    """h [N, K, F] float32, ids [N, K], w2 [E, D, F] -> sum_k w2[ids[n, k]] h[n, k], [N, D].

    The kernel takes up to 8 rows, K up to 8, the types of PLANES, and D a multiple of 4.
    """
    N, K, F = h.shape
    D = w2.shape[1]
    if not takes(ids, w2) or D % 4:
        return experts_down_reference(h, ids, w2)
    R, M = blocking(N)
    (out,) = _kernel(w2.type)(
        h,
        ids,
        *planes(w2),
        template={"D": D, "F": F, "K": K, "R": R, "M": M},
        grid=(D // R * 32 * K, 1, 1),
        group=(32 * K, 1, 1),
        shapes=[(N, D)],
        dtypes=[mx.float32],
    )
    return out


def experts_down_reference(h, ids, w2):
    return each_row(lambda h, ids: gather(h, w2, ids).sum(axis=1), h, ids)


def gather(x: mx.array, w: Matrix, ids: mx.array) -> mx.array:
    """x [N, K or 1, D], w [E, M, D], ids [N, K] -> x[n, k] w[ids[n, k]]^T, [N, K, M]."""
    x = x[:, :, None]
    if isinstance(w, Packed) and w.type in NATIVE:
        if w.type != "MXFP4" and ids.shape[0] == 1:
            # Scales are widened for the call: for the chosen experts, not for all.
            w, ids = w[ids[0]], mx.arange(ids.shape[1], dtype=mx.uint32)[None]
        codes, form = native(w)
        return mx.gather_qmm(x, codes, **form, rhs_indices=ids, transpose=True).squeeze(2)
    return (x @ dequantize(w[ids]).swapaxes(-1, -2)).squeeze(2)


def takes(ids: mx.array, w: Matrix) -> bool:
    """Whether the kernels are there for ids [N, K] and a matrix [E, M, columns]."""
    if not (metal.enabled() and isinstance(w, Packed) and w.type in PLANES):
        return False
    # The slots that share an expert are bits of a word, and an int counts 32-bit words.
    return ids.shape[0] <= FEW and ids.shape[1] <= 8 and math.prod(w.shape) < 1 << 33


def blocking(N: int) -> tuple[int, int]:
    """Rows of weights of a simdgroup, and rows of the block that share one pass over them."""
    return 4, min(N, 2)


def planes(w: Packed) -> list[mx.array]:
    """The arrays of PLANES."""
    return [magnitudes() if name == "table" else w.planes[name] for name in PLANES[w.type]]


@cache
def magnitudes() -> mx.array:
    """What IQ2_XXS's 256 grid codes stand for, uint32 [256, 2]: 8 bytes each."""
    from ..convert.blocks import iq2xxs_grid

    return mx.array(iq2xxs_grid().view(np.uint32))


@cache
def _kernel(type: str) -> metal.Kernel:
    table = TABLE.format(threads="32 * K") if type == "IQ2_XXS" else ""
    names = ", ".join(PLANES[type]).replace("table", "magnitudes")
    return metal.Kernel(
        "experts_down",
        inputs=["h", "ids", *PLANES[type]],
        outputs=["out"],
        call=f"""{table}{type} w2 = {{{names}}};
threadgroup float sums[{FEW} * K * R];
uint N = h_shape[0];
experts_down<D, F, K, R, M>(w2, h, ids, out, sums, N, threadgroup_position_in_grid.x * R,
    thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
    )
