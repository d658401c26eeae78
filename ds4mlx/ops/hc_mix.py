"""Hyper-connections before a sublayer: mix the streams, and read its row of them."""

from functools import cache

import mlx.core as mx

from ..packed import Packed
from ..rows import FEW, each_row
from . import metal
from .hc_collapse import hc_collapse
from .linear import linear
from .rms_norm import rms_norm

_CHUNK, _SIMDGROUPS = 256, 16  # of hc_mix.metal; of its second launch
_part = metal.Kernel(
    "hc_mix",
    inputs=["x", "fn"],
    outputs=["part"],
    call="""hc_mix_part<HC, ROWS>(x, fn, part, x_shape[0], x_shape[2],
    uint2(threadgroup_position_in_grid.x, threadgroups_per_grid.x),
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
)


def hc_mix(
    x: mx.array,
    part: mx.array | None,
    fn,
    scale: mx.array,
    base: mx.array,
    norm: mx.array,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """What a sublayer reads of the streams (model 4.1 to 4.3), all float32.

    x [N, HC, D]; fn [(2 + HC) * HC, HC * D]; scale [3]; base [(2 + HC) * HC]; norm [D]; part:
    None, or what the op that wrote x back gave for this fn (see `Back`)
    -> the normed row y [N, D], and post [N, HC] and comb [N, HC, HC] (first index: source
    stream) with which the sublayer is to be written back.
    The kernel, of one launch or without a part of two, takes an fn that is not packed, and HC of
    2 or 4. The part of more rows than FEW is MLX's product.
    """
    N, HC, D = x.shape
    settings = dict(iterations=iterations, eps=eps, norm_eps=norm_eps)
    if not metal.enabled() or isinstance(fn, Packed) or HC not in (2, 4):
        return hc_mix_reference(x, fn, scale, base, norm, **settings)
    if part is None and N > FEW:
        flat = x.flatten(1)
        squares = mx.square(flat).sum(axis=1, keepdims=True)
        part = mx.concatenate([linear(flat, fn), squares], axis=1).reshape(N, 1, -1)
    elif part is None:
        chunks = -(-HC * D // _CHUNK)
        (part,) = _part(
            x,
            fn,
            template={"HC": HC, "ROWS": N if N == 1 else metal.round_up(N, 2)},
            grid=(_CHUNK * chunks, 1, 1),
            group=(_CHUNK, 1, 1),
            shapes=[(N, chunks, fn.shape[0] + 1)],
            dtypes=[mx.float32],
        )
    y, post, comb = _finish(eps, norm_eps)(
        x,
        part,
        scale,
        base,
        norm,
        template={
            "HC": HC,
            "ITERATIONS": iterations,
            "SIMDGROUPS": _SIMDGROUPS,
            "AHEAD": -(-D // (32 * _SIMDGROUPS)),
        },
        grid=(32 * _SIMDGROUPS, N, 2),
        group=(32 * _SIMDGROUPS, 1, 1),
        shapes=[(N, D), (N, HC), (N, HC, HC)],
        dtypes=[mx.float32] * 3,
    )
    return y, post, comb


@cache
def _finish(eps: float, norm_eps: float) -> metal.Kernel:
    return metal.Kernel(
        "hc_mix",
        inputs=["x", "part", "scale", "base", "norm"],
        outputs=["y", "post", "comb"],
        call=f"""threadgroup float sums[32 * SIMDGROUPS];
threadgroup float weights[HC];
hc_mix_finish<HC, ITERATIONS, SIMDGROUPS, AHEAD>(x, part, scale, base, norm, y, post, comb, sums,
    weights, {metal.literal(eps)}, {metal.literal(norm_eps)}, x_shape[2], part_shape[1],
    threadgroup_position_in_grid.y, threadgroup_position_in_grid.z == 0,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
    )


def hc_mix_reference(x, fn, scale, base, norm, *, iterations, eps, norm_eps):
    pre, post, comb = coefficients(
        x, fn, scale, base, iterations=iterations, eps=eps, norm_eps=norm_eps
    )
    return rms_norm(hc_collapse(x, pre), norm, norm_eps), post, comb


def coefficients(x, fn, scale, base, *, iterations: int, eps: float, norm_eps: float):
    """x [N, HC, D] -> pre [N, HC], post [N, HC], comb [N, HC, HC] (model 4.1)."""
    HC = x.shape[1]
    scales = mx.concatenate([mx.repeat(scale[:2], HC), mx.repeat(scale[2:], HC * HC)])

    def one(x):
        m = normed_product(x, fn, norm_eps) * scales + base
        gates = mx.sigmoid(m[:, : 2 * HC])
        comb = sinkhorn(m[:, 2 * HC :].reshape(-1, HC, HC), iterations, eps)
        return gates[:, :HC] + eps, 2 * gates[:, HC:], comb

    return each_row(one, x)


def normed_product(x: mx.array, fn, norm_eps: float) -> mx.array:
    """x [N, HC, D] flattened, divided by its root mean square, times fn^T."""
    flat = x.flatten(1)
    return linear(mx.fast.rms_norm(flat, None, norm_eps), fn)


def sinkhorn(a: mx.array, iterations: int, eps: float) -> mx.array:
    """a [N, HC, HC] logits -> softmax over the last axis, then column and row divisions."""
    a = mx.softmax(a, axis=-1) + eps
    if a.shape[0] == 1 and mx.default_device() == mx.cpu:
        return _sinkhorn_one(a[0], iterations, eps)[None]
    a = a / (a.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        a = a / (a.sum(axis=-1, keepdims=True) + eps)
        a = a / (a.sum(axis=-2, keepdims=True) + eps)
    return a


def _sinkhorn_one(a: mx.array, iterations: int, eps: float) -> mx.array:
    """The divisions of one row, sums and eps in one product: a third fewer calls, and on the CPU
    the calls are what decoding waits for. (A GPU's products may round their inputs.)"""
    ones, floor = mx.ones_like(a), mx.full(a.shape, eps)
    a = a / mx.addmm(floor, ones, a)
    for _ in range(iterations - 1):
        a = a / mx.addmm(floor, a, ones)
        a = a / mx.addmm(floor, ones, a)
    return a
