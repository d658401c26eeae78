"""The way back from the routed experts: each row adds what its own k give."""

import math
from functools import cache

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .dequantize import NATIVE, STRUCTS, arrays, bounds, dequantize, kind, native, readers
from .hc_expand import Back, Streams, written

_SIMDGROUPS = 14  # of a threadgroup, at most: each has 2 KB of its memory, which is 32 KB
PLANES = tuple(type for type in STRUCTS if isinstance(type, str))  # packed, and in a kernel


def experts_down(
    h: mx.array,
    ids: mx.array,
    w2: Matrix,
    shared: mx.array | None = None,
    back: Back | None = None,
) -> mx.array | Streams:
    """h [N, K, F] float32, ids [N, K], w2 [E, D, F] -> sum_k w2[ids[n, k]] h[n, k], [N, D].

    shared [N, D]: what a shared expert gives, which is added last. back: the sum is written back.
    The kernel takes what `takes` says, and then all is one launch.
    """
    N, K, F = h.shape
    D = w2.shape[1]
    if not takes(ids.shape, w2):
        return written(experts_down_reference(h, ids, w2, shared), back)
    if back and not back.mixes:
        return written(experts_down(h, ids, w2, shared), back)
    tile = tiling(D, N)
    # The blocks of a row in simdgroups of their own, or one after the other.
    split = blocks(F) if K * blocks(F) <= _SIMDGROUPS else 1
    threads = 32 * K * split
    template = {"D": D, "F": F, "K": K, "SPLIT": split, "T": tile, "SHARED": shared is not None}
    template |= bounds(threads, w2) if N > 1 else {}
    if back:
        channels = 4 if D % 16 else 16  # of a part: of the least tile
        template |= {"HC": back.x.shape[1], "C": channels}
    results = _kernel(back is not None, shared is not None, kind(w2))(
        h,
        ids,
        *([] if shared is None else [shared]),
        *arrays(w2),
        *(back.arrays if back else []),
        template=template,
        grid=(D // tile * threads, N, 1),
        group=(threads, 1, 1),
        shapes=back.shapes(channels) if back else [(N, D)],
        dtypes=[mx.float32] * (2 if back else 1),
    )
    return tuple(results) if back else results[0]


def experts_down_reference(h, ids, w2, shared=None):
    out = each_row(lambda h, ids: gather(h, w2, ids).sum(axis=1), h, ids)
    return out if shared is None else out + shared


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


def takes(places: tuple[int, int], *ws: Matrix) -> bool:
    """Whether the kernels are there for N and K and matrices [E, M, columns] or [M, columns].

    They are for these up to 8, M a multiple of 4, columns a multiple of 32 up to 8192, 2048
    elements or more, and 2^32 or fewer.
    """
    return (
        metal.enabled()
        and max(places) <= FEW
        and all(w.shape[-2] % 4 == 0 and w.shape[-1] % 32 == 0 for w in ws)
        and all(w.shape[-1] <= 8192 for w in ws)  # of threadgroup memory there are 32 KB
        # An index counts elements; no plane has fewer than 8, which Metal gets in another space.
        and all(2048 <= math.prod(w.shape) <= 1 << 32 for w in ws)
    )


def blocks(columns: int) -> int:
    """How many simdgroups share a row of weights: `blocks` of metal/experts.h."""
    return -(-columns // 1024)


def tiling(rows: int, N: int = 1) -> int:
    """How many rows of weights a threadgroup takes: more where there are many threadgroups."""
    return 4 if rows % 16 else 16 if N == 1 or rows % 32 else 32


@cache
def _kernel(back: bool, shared: bool, kind_: str | mx.Dtype) -> metal.Kernel:
    inputs, readers_ = readers({"w2": kind_})
    inputs = ["shared", *inputs] if shared else inputs
    outputs = ["out"]
    name, to = "experts_down<D, F, K, SPLIT, T, SHARED>", "out + row * D, stage, sums"
    if back:
        inputs += ["x", "post", "comb", "fn"]
        outputs = ["streams", "part"]
        name = "experts_down_back<D, F, K, SPLIT, T, SHARED, HC, C>"
        to = """x + row * HC * D, post + row * HC, comb + row * HC * HC, fn,
    streams + row * HC * D, part + row * ((D + C - 1) / C) * ((2 + HC) * HC + 1), stage, sums"""
    return metal.Kernel(
        "experts_down",
        inputs=["h", "ids", *inputs],
        outputs=outputs,
        call=f"""threadgroup float4 stage[K * SPLIT * 128];
threadgroup float sums[K * ((F + 1023) / 1024) * T];
{readers_}uint row = threadgroup_position_in_grid.y;
{name}(w2, h + row * K * F, ids + row * K, {"shared + row * D" if shared else "h"},
    {to}, threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);""",
    )
