"""Encode float32 rows as ggml blocks: plain searches, vectorised, the same bytes every time."""

from functools import cache, partial

import numpy as np

from ..errors import FileError
from .blocks import E2M1, LAYOUTS, gather, half_scale, iq2xxs_grid, pack_k_scales

CHUNK = 1 << 16  # elements encoded at once, so that a search's temporaries stay in cache


def encode(type: str, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """x float32 [rows, in] (int32 for I32) -> packed rows, uint8 [rows, row bytes].

    importance [in] or [rows, in], 0 or more, weighs squared errors where an encoder searches.
    Raises FileError if a value is beyond the type's range: infinities and NaN are, except for
    F32 and BF16.
    """
    layout = LAYOUTS[type]
    assert x.ndim == 2 and x.shape[1] % layout.elements == 0, (type, x.shape)
    if type == "I32":
        assert x.dtype == np.int32, x.dtype
        return np.ascontiguousarray(x).view(np.uint8)
    x = np.ascontiguousarray(x, np.float32)
    if type == "F32":
        return x.view(np.uint8)
    if type == "BF16":
        return _bfloat16(x).view(np.uint8)
    if not np.isfinite(x).all():
        raise FileError(f"a value is not finite and cannot be encoded as {type}")
    if type == "F16":
        return _half(x).view(np.uint8)
    weights = np.broadcast_to(np.float32(1) if importance is None else importance, x.shape)
    out = np.empty((x.shape[0], x.shape[1] // layout.elements), layout.block)
    step = max(1, CHUNK // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        shape = (*out[rows].shape, layout.elements)
        _ENCODERS[type](x[rows].reshape(shape), weights[rows].reshape(shape), out[rows])
    return out.view(np.uint8)


def _half(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        y = x.astype(np.float16)
    if not np.isfinite(y).all():
        raise FileError(f"{np.abs(x).max():g} is beyond the range of float16")
    return y


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Nearest, ties to even; a NaN stays one."""
    bits = x.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, nearest).astype(np.uint16)


def _inverse(d: np.ndarray) -> np.ndarray:
    """1 / d; 0 where that is infinite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _q8_0(x, _, out):
    d = np.abs(x).max(axis=-1) / np.float32(127)
    # Half away from zero, as ggml's reference rounds.
    sizes = np.floor(np.abs(x * _inverse(d)[..., None]) + np.float32(0.5))
    out["scales"] = _half(d)
    out["codes"] = np.copysign(sizes, x).astype(np.int8).view(np.uint8)


def _mxfp4(x, weights, out):
    """The best of three scales; no other power of two can be better.

    With the middle one the largest magnitude falls in [4, 8) before rounding to at most 6, so
    values that are MXFP4 already come back exactly.
    """
    top = np.frexp(np.abs(x).max(axis=-1))[1] + 124  # floor(log2) - 2 + 127
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    best = np.full(x.shape[:-1], np.inf, np.float32)
    codes = np.zeros(x.shape, np.uint8)
    for step in (0, 1, -1):
        scale = np.clip(top + step, 0, 254)
        scaled = np.abs(x) / half_scale(scale)[..., None]
        code = np.searchsorted(middles, scaled).astype(np.uint8)
        error = ((E2M1[code] - scaled) ** 2 * weights).sum(axis=-1)
        error = np.ldexp(error, 2 * (scale - top))
        better = error < best
        best[better], codes[better] = error[better], code[better]
        out["scales"][better] = scale[better]
    out["codes"] = gather("MXFP4", codes | (np.signbit(x) << np.uint8(3)))


def _affine(type: str, x, weights, out, *, sub: int, levels: int, steps: int):
    """Q2_K and Q4_K: d * scale * code - dmin * min, one scale and one min per `sub` elements.

    Codes go up to `levels`, scales and minima up to `steps`. Rounded codes have other least
    squares, for d and dmin and for the scales; these are rounded anew, and the best kept.
    """
    x, weights = (a.reshape(*out.shape, -1, sub) for a in (x, weights))
    scales, mins = _fit(x, weights, levels)
    wide = np.stack([scales.max(axis=-1), mins.max(axis=-1)], axis=-1) / np.float32(steps)
    best, kept = np.full(out.shape, np.inf, np.float32), None
    for _ in range(6):
        d = _half(wide)
        wide = d.astype(np.float32)
        scale_codes, min_codes = (
            np.clip(np.rint(a * _inverse(wide[..., i : i + 1])), 0, steps)
            for i, a in enumerate((scales, mins))
        )
        scale, least = wide[..., 0:1] * scale_codes, wide[..., 1:2] * min_codes
        codes = np.rint((x + least[..., None]) * _inverse(scale)[..., None])
        codes = np.clip(codes, 0, levels)
        error = weights * (scale[..., None] * codes - least[..., None] - x) ** 2
        error = error.sum(axis=(-1, -2))
        better, best = error < best, np.minimum(error, best)
        found = d, scale_codes, min_codes, codes
        kept = kept or found
        for old, new in zip(kept, found, strict=True):
            old[better] = new[better]
        whole = scale_codes[..., None] * codes, min_codes[..., None]
        wide = _least_squares(*whole, x, weights, (-1, -2))
        scales, mins = np.moveaxis(_least_squares(codes, np.float32(1), x, weights, -1), -1, 0)
    out["d"] = kept[0]
    scale_codes, min_codes, codes = (a.astype(np.uint8) for a in kept[1:])
    out["codes"] = gather(type, codes.reshape(*out.shape, -1))
    packed = pack_k_scales if type == "Q4_K" else lambda low, high: low | (high << 4)
    out["scales"] = packed(scale_codes, min_codes)


def _least_squares(a, b, x, w, every) -> np.ndarray:
    """(d, e) of 0 or more with x near d * a - e * b, over the axes `every` -> [..., 2]."""
    wa, wb = w * a, w * b
    aa, ab, bb = ((p * q).sum(axis=every) for p, q in ((wa, a), (wa, b), (wb, b)))
    ax, bx = (wa * x).sum(axis=every), (wb * x).sum(axis=every)
    inverse = _inverse(aa * bb - ab * ab)
    d, e = (ax * bb - bx * ab) * inverse, (ax * ab - bx * aa) * inverse
    alone = (bb == 0) | (e < 0)  # no minima, or none that help
    pair = np.where(alone, ax * _inverse(aa), d), np.where(alone, 0, e)
    return np.stack(pair, axis=-1).clip(0, np.finfo(np.float16).max)


def _fit(x, w, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima [...] with x [..., n] near scale * code - min, both at least 0.

    Codes for a range of step widths, for each the least squares; the best of them.
    """
    low = np.minimum(x.min(axis=-1), 0)
    inverse = _inverse(x.max(axis=-1) - low)
    best = np.full(low.shape, np.inf, np.float32)
    scales, mins = np.zeros_like(low), -low
    sum_w, sum_x = w.sum(axis=-1), (w * x).sum(axis=-1)
    for width in np.linspace(levels - 1, levels + 1, 11, dtype=np.float32):
        code = np.rint((x - low[..., None]) * (width * inverse)[..., None])
        code = np.clip(code, 0, levels)
        wq = w * code
        sum_q, sum_qq, sum_qx = wq.sum(axis=-1), (wq * code).sum(axis=-1), (wq * x).sum(axis=-1)
        inverse_det = _inverse(sum_w * sum_qq - sum_q * sum_q)
        scale = (sum_w * sum_qx - sum_q * sum_x) * inverse_det
        least = (sum_q * sum_qx - sum_qq * sum_x) * inverse_det
        scale = np.where(least < 0, sum_qx * _inverse(sum_qq), scale)
        scale, least = np.maximum(scale, 0), np.maximum(least, 0)
        error = (scale[..., None] * code - least[..., None] - x) ** 2
        error = (error * w).sum(axis=-1)
        better = error < best
        for kept, new in ((best, error), (scales, scale), (mins, least)):
            kept[better] = new[better]
    return scales, mins


def _iq2_xxs(x, weights, out):
    """Signs first, then the best scale of each 32, then the best grid row of each 8."""
    x, w = (a.reshape(*out.shape, 8, 4, 8) for a in (x, weights))
    negative = np.signbit(x)
    # The file holds seven signs of eight: the count of negative ones must be even. Where it is
    # odd, the element that matters least takes the wrong sign.
    least = np.argmin(w * x * x, axis=-1)[..., None]
    flipped = np.take_along_axis(negative, least, -1) ^ (negative.sum(-1, keepdims=True) % 2 == 1)
    np.put_along_axis(negative, least, flipped, -1)
    x = np.where(negative, -x, x)
    scales = _iq2_scales(x, w)
    d = scales.max(axis=-1) * np.float32(8 / 31)
    steps = np.clip(np.rint(scales * (4 * _inverse(d))[..., None] - 0.5), 0, 15).astype(np.uint32)
    relative = (steps * np.float32(2) + 1) / 8
    index = _iq2_nearest(x, w, relative * d[..., None])
    grid = iq2xxs_grid()[index] * relative[..., None, None]
    wg = w * grid
    every = (-3, -2, -1)
    out["d"] = _half((wg * x).sum(axis=every) * _inverse((wg * grid).sum(axis=every)))
    signs = np.packbits(negative, axis=-1, bitorder="little")[..., 0].astype(np.uint32) & 127
    signs = np.bitwise_or.reduce(signs << np.arange(0, 28, 7, dtype=np.uint32), axis=-1)
    out["groups"]["grid"] = index
    out["groups"]["signs"] = signs | (steps << 28)


def _iq2_scales(x, w) -> np.ndarray:
    """The scale of each group of 32, x [..., 4, 8] -> [...]: least squares on rounded codes."""
    top = np.abs(x).max(axis=(-2, -1)) / np.float32(43)
    best, scales = np.full(top.shape, -1, np.float32), np.zeros_like(top)
    places = 3 ** np.arange(8)
    for factor in np.linspace(0.5, 1.4, 19, dtype=np.float32):
        scaled = x * _inverse(top * factor)[..., None, None]
        levels = (scaled > 16.5).astype(np.int16) + (scaled > 34)
        grid = iq2xxs_grid()[_iq2_rows()[levels @ places]]
        wg = w * grid
        dot = (wg * x).sum(axis=(-2, -1))
        scale = dot * _inverse((wg * grid).sum(axis=(-2, -1)))
        better = dot * scale > best  # how much smaller the squared error becomes
        best[better], scales[better] = (dot * scale)[better], scale[better]
    return scales


def _iq2_nearest(x, w, scales) -> np.ndarray:
    """The row of the grid, times its group's scale, nearest to each 8 of x [..., 4, 8]."""
    grid = iq2xxs_grid().astype(np.float32).T
    scales = scales[..., None, None]
    gain = (w * x) @ grid
    gain *= 2 * scales
    gain -= (w @ (grid * grid)) * (scales * scales)
    return gain.argmax(axis=-1).astype(np.uint8)


@cache
def _iq2_rows() -> np.ndarray:
    """The grid row nearest to each of the 3 ** 8 vectors of its three levels."""
    digits = np.arange(3**8)[:, None] // 3 ** np.arange(8) % 3
    points = np.array([8, 25, 43], np.float32)[digits]
    grid = iq2xxs_grid().astype(np.float32)
    return (2 * points @ grid.T - (grid * grid).sum(axis=1)).argmax(axis=1).astype(np.uint8)


_ENCODERS = {
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": partial(_affine, "Q2_K", sub=16, levels=3, steps=15),
    "Q4_K": partial(_affine, "Q4_K", sub=32, levels=15, steps=63),
    "IQ2_XXS": _iq2_xxs,
}
