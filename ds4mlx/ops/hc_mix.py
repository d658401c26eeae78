"""Hyper-connection coefficients: how a sublayer reads the residual streams and writes them back."""

import mlx.core as mx

from ..packed import Packed
from ..rows import FEW, each_row
from . import metal
from .linear import linear

_CHUNK, _SIMDGROUPS = 256, 8  # of hc_mix.metal
_part = metal.Kernel(
    "hc_mix",
    inputs=["x", "fn"],
    outputs=["part"],
    call="""uint2 pos = uint2(simdgroup_index_in_threadgroup, threadgroup_position_in_grid.y);
hc_mix_part(x, fn, part, x_shape[0], fn_shape[0], fn_shape[1],
    uint2(simdgroups_per_threadgroup, threadgroups_per_grid.y), pos, thread_index_in_simdgroup);""",
)
_finish = metal.Kernel(
    "hc_mix",
    inputs=["part", "scale", "base", "eps", "norm_eps"],
    outputs=["pre", "post", "comb"],
    call="""threadgroup float sums[256];
hc_mix_finish<HC, ITERATIONS>(part, scale, base, pre, post, comb, sums, eps, norm_eps, K,
    part_shape[1], threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);""",
)


def hc_mix(x, fn, scale, base, *, iterations: int, eps: float, norm_eps: float):
    """Coefficients of one sublayer (model 4.1), all float32.

    x [N, HC, D]; fn [(2 + HC) * HC, HC * D]; scale [3]; base [(2 + HC) * HC]
    -> pre [N, HC], post [N, HC], comb [N, HC, HC] (first index: source stream). The kernel
    takes up to FEW rows, an fn that is not packed, and HC of 2 or 4.
    """
    N, HC, D = x.shape
    if not metal.enabled() or N > FEW or isinstance(fn, Packed) or HC not in (2, 4):
        return hc_mix_reference(
            x, fn, scale, base, iterations=iterations, eps=eps, norm_eps=norm_eps
        )
    chunks = -(-HC * D // _CHUNK)
    (part,) = _part(
        x,
        fn,
        template={},
        grid=(32 * _SIMDGROUPS, chunks, 1),
        group=(32 * _SIMDGROUPS, 1, 1),
        shapes=[(N, chunks, fn.shape[0] + 1)],
        dtypes=[mx.float32],
    )
    pre, post, comb = _finish(
        part,
        scale,
        base,
        mx.array(eps),
        mx.array(norm_eps),
        template={"HC": HC, "ITERATIONS": iterations, "K": HC * D},
        grid=(32 * _SIMDGROUPS, N, 1),
        group=(32 * _SIMDGROUPS, 1, 1),
        shapes=[(N, HC), (N, HC), (N, HC, HC)],
        dtypes=[mx.float32] * 3,
    )
    return pre, post, comb


def hc_mix_reference(x, fn, scale, base, *, iterations: int, eps: float, norm_eps: float):
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
