"""What `ds4mlx selftest` runs: for every kernel and weight type, inputs at the model's shapes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from . import ops
from .cache import Ring
from .convert.blocks import LAYOUTS
from .ops import metal
from .ops.attention_shares import attention_shares
from .ops.experts_down import PLANES, experts_down
from .ops.experts_grouped import experts_grouped
from .ops.gather_rows import gather_rows
from .ops.index_weigh import index_weigh
from .packed import Matrix, Packed
from .rows import FEW
from .weights import as_matrix

EPS = 1e-6
_MIXTURE = dict(iterations=20, eps=EPS, norm_eps=EPS)
_HALVES = {mx.float16: "F16", mx.float32: "F32", mx.bfloat16: "BF16"}
_FLOATS = {name: dtype for dtype, name in _HALVES.items()}
_PACKED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q2_K", "IQ2_XXS")
_START = 4095  # of the rows: the first and the fifth close windows of 4, the first one of 128


@dataclass(frozen=True)
class Shapes:
    """A model's sizes (model 1)."""

    D: int
    HC: int
    H: int
    Dh: int
    R: int
    Rq: int  # q_lora_rank
    G: int  # o_groups
    Ro: int  # o_lora_rank
    F: int  # moe_intermediate_size
    E: int
    held: int  # of the E experts, so many stand in memory
    k: int
    V: int
    Rm: int  # dspark_markov_rank
    Hi: int
    Di: int
    topk: int
    window: int
    entries: int  # that the indexer scores


FLASH = Shapes(
    **dict(D=4096, HC=4, H=64, Dh=512, R=64, Rq=1024, G=8, Ro=1024, F=2048, E=256, held=16, k=6),
    **dict(V=129280, Rm=256, Hi=64, Di=128, topk=512, window=128, entries=8192),
)
QUICK = Shapes(
    **dict(D=512, HC=4, H=4, Dh=128, R=64, Rq=256, G=2, Ro=64, F=256, E=16, held=4, k=2),
    **dict(V=2080, Rm=64, Hi=8, Di=64, topk=16, window=16, entries=300),
)


@dataclass(frozen=True)
class Work:
    """Inputs of a case. run(weights, i, n) evaluates rows i .. i+n-1 -> an array, or several.

    reference: the same for the reference, where that has a quicker way.
    """

    run: Callable
    weights: list[Matrix]
    read: int  # bytes of weights and inputs that one row reads
    reference: Callable | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table: `op` at `shape`; its kernel is metal/<op>.metal.

    allowed: error against the reference, as a share of the reference's greatest element. step:
    where values are rounded, one element in 1000 may go to the other side, by this share of it.
    """

    op: str
    shape: str
    make: Callable[[], Work]
    allowed: float
    step: float = 0.0
    rows: int = FEW
    alone: bool = True  # whether a row may be evaluated without the others of its block


def cases(s: Shapes) -> list[Case]:
    """Every kernel at the shapes of `s`; nothing is made before `Case.make` is called."""
    return [*_products(s), *_experts(s), *_streams(s), *_attention(s), *_rounding(s), *_choices(s)]


def _products(s: Shapes):
    shapes = [(t, s.F, s.D) for t in (*_FLOATS, *_PACKED)]
    shapes += [("Q8_0", s.H * s.Dh, s.Rq), ("Q8_0", s.D, s.G * s.Ro), ("Q8_0", s.V, s.D)]
    for t, M, K in shapes:
        make = partial(_product, lambda w, x: ops.linear(x, *w), [(t, M, K)], K)
        yield Case("linear", f"{t} {K} to {M}", make, 1e-5)
    halves = [("F16", 2 * width, s.D) for width in (s.Dh, s.Dh, s.Di, s.Di)]
    inputs = [("Q8_0", s.Rq, s.D), ("Q8_0", s.Dh, s.D), *halves]
    make = partial(_product, lambda w, x: tuple(ops.linears(x, w)), inputs, s.D)
    yield Case("linear", f"CSA's inputs, {len(inputs)} of {s.D}", make, 1e-5)
    # Products are of some hundreds: at a lower limit errors of those below it would count for more.
    gated = lambda w, x: tuple(ops.linears(x, [w[0], ops.Gated(*w[1:], 100.0)]))  # noqa: E731
    inputs = [("F16", s.E, s.D), *[("Q8_0", s.F, s.D)] * 2]
    make = partial(_product, gated, inputs, s.D)
    yield Case("linear", f"the router's and a gated one, {s.D} to {s.E} and {s.F}", make, 3e-5)
    K = s.H * s.Dh // s.G
    blocks = [("Q8_0", s.G * s.Ro, K)]
    make = partial(_product, lambda w, x: ops.grouped_linear(x, *w, s.G), blocks, s.G, K)
    yield Case("linear", f"Q8_0 {s.G} groups, {K} to {s.Ro}", make, 1e-5)
    inputs = lambda: [_normal(FEW, s.G * s.Ro)]  # noqa: E731
    make = partial(_back, s, ops.linear, [("Q8_0", s.D, s.G * s.Ro)], inputs)
    yield Case("linear", f"Q8_0 {s.G * s.Ro} to {s.D}, into {s.HC} streams", make, 3e-5)
    for t in (*_FLOATS, "Q8_0"):
        yield Case("embed", f"{t} {s.D} wide", partial(_embed, t, 4096, s.D), 0.0)
    for t in _PACKED:
        make = partial(_widened, t, s.F, s.D)
        yield Case("dequantize", f"{t} {s.F} x {s.D}", make, 0.0)


def _experts(s: Shapes):
    for up in PLANES:
        down = "Q2_K" if up == "IQ2_XXS" else up
        make = partial(_routed, s, up, down)
        yield Case("experts", f"{up}, {down}, {s.k} of {s.held}, a shared one", make, 1e-5)
    make = partial(_routed, s, "IQ2_XXS", "Q2_K", ops.SORTED // FEW)
    yield Case("dequantize", f"experts of {ops.SORTED} rows, float16", make, 3e-3, alone=False)
    make = partial(_grouped, s, "IQ2_XXS", "Q2_K")
    yield Case("experts_grouped", f"{FEW} rows, float16", make, 3e-3, alone=False)
    for t in PLANES:
        make = partial(_routed_down, s, t)
        yield Case("experts_down", f"{t} {s.k} of {s.held}, {s.F} to {s.D}", make, 1e-5)
    inputs = lambda: [_normal(FEW, s.k, s.F), _chosen(s.held, s.k), _normal(FEW, s.D)]  # noqa: E731
    down = lambda h, ids, shared, w, back: experts_down(h, ids, w, shared, back)  # noqa: E731
    for t in ("Q2_K", "MXFP4"):
        make = partial(_back, s, down, [(t, s.held, s.D, s.F)], inputs)
        yield Case("experts_down", f"{t} and a shared one, into {s.HC} streams", make, 3e-5)


def _streams(s: Shapes):
    shape = f"{s.HC} x {s.D}"
    for dtype, name in _HALVES.items():
        yield Case("hc_mix", f"{name} {shape}", partial(_hc_mix, s, dtype), 3e-5)
        yield Case("hc_head", f"{name} {shape}", partial(_hc_head, s, dtype), 1e-5)
    make = partial(_plain, lambda w, *a: ops.hc_collapse(*a), (s.HC, s.D), (s.HC,))
    yield Case("hc_collapse", shape, make, 2e-6)
    shapes = ((s.HC, s.D), (s.D,), (s.HC,), (s.HC, s.HC))
    yield Case("hc_expand", shape, partial(_plain, lambda w, *a: ops.hc_expand(*a), *shapes), 2e-6)
    make = partial(_plain, lambda w, x: ops.rms_norm(x, *w, EPS), (s.D,), weights=((s.D,),))
    yield Case("rms_norm", f"{s.D}", make, 4e-6)
    make = partial(_plain, lambda w, x: ops.rms_norm(x, None, EPS), (s.H, s.Dh))
    yield Case("rms_norm", f"{s.H} x {s.Dh}", make, 4e-6)


def _attention(s: Shapes):
    for ratio, rounded in ((0, True), (4, True), (4, False), (128, True)):
        name = {0: "window", 4: "CSA", 128: "HCA"}[ratio] + (", rounded" if rounded else "")
        make = partial(_latents, s, ratio, rounded)
        yield Case("latents", f"{name}, {s.Rq} and {s.Dh}", make, 4e-6, 0.14 * rounded)
    shape = f"{s.H} x {s.Dh}"
    for ratio, topk in ((0, 0), (4, s.topk), (128, 0)):
        name = {0: "window", 4: f"CSA {topk}", 128: "HCA"}[ratio]
        yield Case("attention", f"{name}, {shape}", partial(_attend, s, ratio, topk), 2e-5)
    make = partial(_attend, s, 0, 0, False)
    yield Case("attention", f"a draft's, {shape}", make, 2e-5, rows=5, alone=False)
    for ratio in (0, 4, 128):
        name = {0: "window", 4: f"CSA {s.topk}", 128: "HCA"}[ratio]
        make = partial(_shares, s, ratio)
        yield Case("attention_shares", f"{name}, {s.H} heads", make, 2e-6, alone=False)
    make = partial(_gathered, s.entries, s.Dh, s.topk)
    yield Case("gather_rows", f"{s.topk} of {s.entries} x {s.Dh}", make, 0.0)
    for inverse in (False, True):
        make = partial(_rope, (s.H, s.Dh), s.R, inverse)
        yield Case("rope", f"{shape}{', back' if inverse else ''}", make, 2e-6)


def _rounding(s: Shapes):
    yield Case("round_index", f"{s.Hi} x {s.Di}", partial(_round_index, s), 0.0)
    make = partial(_plain, lambda w, x: ops.round_kv(x, s.R), (s.Dh,))
    yield Case("round_kv", f"{s.Dh}", make, 0.0)
    make = partial(_plain, lambda w, *a: index_weigh(*a), (s.Hi, s.entries), (s.Hi,))
    yield Case("index_weigh", f"{s.Hi} heads, {s.entries} entries", make, 1e-5)
    for rounded in (True, False):
        shape = f"{s.Hi} x {s.Di}, {s.entries} entries{', rounded' if rounded else ''}"
        yield Case("index_scores", shape, partial(_index_scores, s, rounded), 2e-5)


def _choices(s: Shapes):
    shape = f"{s.k} of {s.E}, {s.D} wide"
    yield Case("route", f"F32 {shape}", partial(_route, s, "F32", False), 1e-5)
    yield Case("route", f"F16 {shape}, listed", partial(_route, s, "F16", True), 1e-5)
    make = partial(_index_best, s)
    yield Case("index_best", f"{s.topk} of {s.entries}", make, 0.0)
    yield Case("argmax", f"{s.V}", partial(_plain, lambda w, x: ops.argmax(x), (s.V,)), 0.0)
    for t in ("F16", "Q8_0"):
        yield Case("markov", f"{t} {s.V} x {s.Rm}", partial(_markov, s, t), 1e-5)


# Inputs -----------------------------------------------------------------------------------------


def matrix(type: str, *shape: int, seed: int = 0) -> Matrix:
    """A random matrix [..., M, K]: any code in packed blocks, scales of about 1/64."""
    rng = np.random.default_rng([seed, *shape])
    if type in _FLOATS:
        values = rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
        return mx.array(values).astype(_FLOATS[type])
    layout, rows = LAYOUTS[type], math.prod(shape[:-1])
    size = (rows, shape[-1] // layout.elements)
    raw = rng.integers(0, 256, (*size, layout.bytes), dtype=np.uint8)
    blocks = raw.view(layout.block)[..., 0]
    for field in ("scales", "d"):
        part = blocks[field] if field in layout.block.names else None
        if part is not None and part.dtype == np.float16:
            blocks[field] = rng.standard_normal(part.shape, dtype=np.float32) / 64
        elif type == "MXFP4" and part is not None:
            blocks[field] = rng.integers(118, 130, part.shape, dtype=np.uint8)
    return as_matrix(type, raw.reshape(rows, -1), shape)


def _normal(*shape: int, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32))


def _work(
    op: Callable, weights: list, *arrays: mx.array, read: int | None = None, reference=None
) -> Work:
    """op(weights, *rows), and so `reference`; arrays have the rows as their first axis."""
    read = sum(w.nbytes for w in weights) if read is None else read
    rowed = lambda op: lambda weights, i, n: op(weights, *(a[i : i + n] for a in arrays))  # noqa: E731
    read += sum(a.nbytes for a in arrays) // FEW
    return Work(rowed(op), weights, read, reference and rowed(reference))


def _again(op: Callable, times: int = 2) -> Callable:
    """`op` of rows that stand there `times` times; what comes out of the last.

    Of more rows than FEW the reference of the experts widens each expert once for all.
    """
    return lambda w, *rows: op(w, *(mx.tile(r, (times, 1)) for r in rows))[-len(rows[0]) :]


def _plain(op, *shapes: tuple, weights: tuple = ()) -> Work:
    inputs = [_normal(FEW, *shape, seed=i) for i, shape in enumerate(shapes)]
    return _work(op, [_normal(*w) for w in weights], *inputs)


def _product(op, weights: list[tuple], *shape: int) -> Work:
    ws = [matrix(*w, seed=i) for i, w in enumerate(weights)]
    return _work(op, ws, _normal(FEW, *shape))


def _embed(type: str, V: int, D: int) -> Work:
    w = matrix(type, V, D)
    ids = mx.array([V - 1, 0, 7, 7, 1, 2, V - 2, 3], mx.int32)
    return _work(lambda w, ids: ops.embed(ids, *w), [w], ids, read=w.nbytes // V)


def _widened(type: str, M: int, K: int) -> Work:
    """The whole matrix, of which 8 parts stand for rows."""
    w, parts = matrix(type, M, K), mx.arange(FEW)
    op = lambda w, i: ops.dequantize(*w).reshape(FEW, -1)[i]  # noqa: E731
    return _work(op, [w], parts)


def _chosen(E: int, k: int) -> mx.array:
    rng = np.random.default_rng(E)
    return mx.array(np.stack([rng.permutation(E)[:k] for _ in range(FEW)]), mx.uint32)


def _held(s: Shapes, up: str, down: str) -> tuple[list[Packed], tuple, int]:
    """w1, w3 and w2 of the experts in memory; x, ids and weights of rows; bytes that one reads."""
    ws = [matrix(up, s.held, s.F, s.D, seed=i) for i in range(2)]
    ws += [matrix(down, s.held, s.D, s.F)]
    rows = (_normal(FEW, s.D) / 8, _chosen(s.held, s.k), mx.abs(_normal(FEW, s.k)))
    return ws, rows, sum(w.nbytes for w in ws) * s.k // s.held


def _routed(s: Shapes, up: str, down: str, times: int = 1) -> Work:
    """times: as in `_again`."""
    routed, rows, read = _held(s, up, down)
    shapes = ((s.F, s.D), (s.F, s.D), (s.D, s.F))
    shared = [matrix("Q8_0", *shape, seed=i) for i, shape in enumerate(shapes)]
    read += sum(w.nbytes for w in shared)

    def op(w, x, *rows):
        (h,) = ops.linears(x, [ops.Gated(*w[3:5], 10.0)])
        return ops.experts(x, *rows, *w[:3], 10.0, ops.Shared(h, w[5]))

    return _work(_again(op, times), routed + shared, *rows, read=read, reference=_again(op))


def _grouped(s: Shapes, up: str, down: str) -> Work:
    routed, rows, read = _held(s, up, down)

    def op(w, *rows):
        way = experts_grouped if metal.enabled() else ops.experts
        return way(*rows, *w, 10.0)

    return _work(op, routed, *rows, read=read, reference=_again(op))


def _routed_down(s: Shapes, type: str) -> Work:
    w = matrix(type, s.held, s.D, s.F)
    inputs = (_normal(FEW, s.k, s.F), _chosen(s.held, s.k))
    op = lambda w, h, ids: experts_down(h, ids, *w)  # noqa: E731
    return _work(op, [w], *inputs, read=w.nbytes * s.k // s.held)


def _mixture(s: Shapes, dtype) -> list[Matrix]:
    M, K = (2 + s.HC) * s.HC, s.HC * s.D
    fn = matrix(_HALVES[dtype], M, K)
    return [fn, mx.array([0.5, 2.0, 1.5]), _normal(M), _normal(s.D)]


def _hc_mix(s: Shapes, dtype) -> Work:
    op = lambda w, x: ops.hc_mix(x, None, *w, **_MIXTURE)  # noqa: E731
    return _work(op, _mixture(s, dtype), _normal(FEW, s.HC, s.D))


def _back(s: Shapes, product: Callable, weights: list[tuple], inputs: Callable) -> Work:
    """A product that is written back into the streams, and the mixture that follows."""
    ws = [matrix(*w) for w in weights] + _mixture(s, mx.float16)
    read = sum(w.nbytes * s.k // s.held if len(w.shape) == 3 else w.nbytes for w in ws)

    def op(w, *rows):
        back = ops.Back(*rows[-3:], w[-4])
        x, part = product(*rows[:-3], *w[:-4], back)
        return x, *ops.hc_mix(x, part, *w[-4:], **_MIXTURE)

    shapes = [(s.HC, s.D), (s.HC,), (s.HC, s.HC)]
    return _work(op, ws, *inputs(), *(_normal(FEW, *shape) for shape in shapes), read=read)


def _hc_head(s: Shapes, dtype) -> Work:
    weights = [matrix(_HALVES[dtype], s.HC, s.HC * s.D), mx.array([1.5]), _normal(s.HC)]
    op = lambda w, x: ops.hc_head(x, *w, eps=EPS, norm_eps=EPS)  # noqa: E731
    return _work(op, weights, _normal(FEW, s.HC, s.D))


def _turns(first: int, n: int, R: int, every: int = 1) -> mx.array:
    return ops.rotation(first + every * mx.arange(n), 10000.0 ** (-2 / R * mx.arange(R // 2)))


def _shares(s: Shapes, ratio: int) -> Work:
    """Rows of prefill, of the scores of a window, and of entries where `ratio` is not 0."""
    scores, sink = 4 * _normal(FEW, s.H, s.window + FEW), _normal(s.H)
    others = 4 * _normal(FEW, s.H, s.topk if ratio == 4 else s.entries // 128)
    ready = [max(0, others.shape[2] - FEW + i) for i in range(FEW)]
    ids = mx.broadcast_to(mx.arange(others.shape[2], dtype=mx.uint32), (FEW, others.shape[2]))

    def op(w, scores, others):
        entries = (others, ready, ids if ratio == 4 else None) if ratio else ()
        found = attention_shares(scores, sink, s.window, s.window, 0.5, *entries)
        return tuple(a for a in found if a is not None)

    return _work(op, [], scores, others)


def _gathered(entries: int, Dh: int, topk: int) -> Work:
    x, rng = _normal(entries, Dh), np.random.default_rng(Dh)
    ids = mx.array(rng.integers(0, entries, (FEW, topk)), mx.uint32)
    op = lambda w, ids: gather_rows(w[0], ids)  # noqa: E731
    return _work(op, [x], ids, read=4 * topk * Dh)


def _rope(shape: tuple, R: int, inverse: bool) -> Work:
    turns = _turns(_START, FEW, R)
    return _work(lambda w, x, t: ops.rope(x, t, inverse), [], _normal(FEW, *shape), turns)


def _ring(rows: mx.array) -> Ring:
    return Ring(0, 0).holding(rows)


def _latents(s: Shapes, ratio: int, rounded: bool) -> Work:
    dims = {0: (), 4: (s.Dh, s.Di), 128: (s.Dh,)}[ratio]
    widths = [d * (2 if ratio == 4 else 1) for d in dims]
    norms = [_normal(s.Rq), _normal(s.Dh)]
    ring = _normal(max(s.window, 2 * ratio) + FEW, s.Dh + 2 * sum(widths))
    tables = [a for d, w in zip(dims, widths, strict=True) for a in (_normal(ratio, w), _normal(d))]
    q, kv = _normal(FEW, s.Rq), _normal(FEW, s.Dh)
    products = [[_normal(FEW, w, seed=i) for i in range(2)] for w in widths]
    turns, opened = _turns(_START, FEW, s.R), _START // ratio if ratio else 0
    closing = _turns(opened * ratio, FEW, s.R, ratio)

    def made(weights, ring, i, n):
        q_norm, kv_norm, *tables = weights
        first, last = ((_START + at) // ratio - opened if ratio else 0 for at in (i, i + n))
        turn = closing[first:last] if last > first else None
        part = slice(i, i + n)
        pools = [
            ops.Pool(c[part], p[part], ape, norm, turn, ratio, rounded and d == s.Dh)
            for (c, p), ape, norm, d in zip(products, tables[::2], tables[1::2], dims, strict=True)
        ]
        where = (turns[part], pools, ring, _START + i)
        return ops.latents(q[part], kv[part], q_norm, kv_norm, *where, rounded=rounded, eps=EPS)

    def run(weights, i, n):
        ring = _ring(weights[0])
        ring = ring.holding(made(weights[1:], ring, 0, i)[1]) if i else ring
        qr, held, entries = made(weights[1:], ring, i, n)
        rows = ring.holding(held).read(_START + i, _START + i + n)
        # An entry stands in the row that closes its window, zeros in the others.
        closes = [(_START + at + 1) % ratio == 0 for at in range(i, i + n)] if ratio else []
        spread = []
        for d, some in zip(dims, entries or [mx.zeros((1, d)) for d in dims], strict=True):
            parts = iter(some[k : k + 1] for k in range(sum(closes)))
            spread += [mx.concatenate([next(parts) if c else mx.zeros((1, d)) for c in closes])]
        return qr, rows, *spread

    pooled = sum(8 * w * min(2 * ratio, 128) for w in widths)
    return Work(run, [ring, *norms, *tables], pooled + ring.nbytes + q.nbytes // FEW)


def _attend(s: Shapes, ratio: int, topk: int, causal: bool = True) -> Work:
    q, rows = _normal(FEW, s.H * s.Dh), _normal(FEW, s.Dh)
    ring, ready = _normal(s.window + FEW, s.Dh), (_START + FEW) // ratio if ratio else 1
    entries, sink = _normal(ready + 1, s.Dh), _normal(s.H)
    settings = dict(window=s.window, eps=EPS, ratio=ratio, causal=causal)
    rng = np.random.default_rng(3)
    picks = [np.sort(rng.permutation(ready - 3)[:topk]) for _ in range(FEW)]
    picks = mx.array(np.stack(picks), mx.uint32) if topk else None
    turns = _turns(_START, FEW, s.R)

    def run(weights, i, n):
        ring, entries, sink = weights
        ring, part = _ring(ring), slice(i, i + n)
        more = {"entries": entries} if ratio else {}
        more |= {"selected": picks[part]} if topk else {}
        where = (ring.written(_START, rows[: i + n]), ring, sink, turns[part], _START + i)
        return ops.attention(q[part], *where, **settings, **more)

    seen = s.window + (topk or ready * bool(ratio))
    return Work(run, [ring, entries, sink], 4 * s.Dh * seen + q.nbytes // FEW)


def _round_index(s: Shapes) -> Work:
    # Small integers: sums are exact, so that no order of summation moves a value over a step.
    return _work(lambda w, x: ops.round_index(x), [], mx.round(9 * _normal(FEW, s.Hi, s.Di)))


def _index_scores(s: Shapes, rounded: bool) -> Work:
    q = _normal(FEW, s.Hi * s.Di)
    turns = _turns(_START, FEW, s.R)
    if rounded:  # integers in quarter turns: exact, see _round_index
        quarters = np.random.default_rng(2).choice(np.array([1, 1j, -1, -1j]), turns.shape)
        q, turns = mx.round(9 * q), mx.array(quarters.astype(np.complex64))
    keys, w = _normal(s.entries, s.Di) * s.Di**-0.5, _normal(FEW, s.Hi) * s.Hi**-0.5
    op = lambda k, q, t, w, ready: ops.index_scores(q, t, w, *k, ready, rounded=rounded)  # noqa: E731
    return _work(op, [keys], q, turns, w, _ready(s))


def _ready(s: Shapes) -> mx.array:
    C, k = s.entries, s.topk
    return mx.array([C, k - 1, k, k + 1, 2 * k, C // 2, C - 1, 1], mx.int32)


def _index_best(s: Shapes) -> Work:
    scores = mx.round(300 * _normal(FEW, s.entries)) / 7  # with ties
    op = lambda w, scores, ready: ops.index_best(scores, ready, s.topk)  # noqa: E731
    return _work(op, [], scores, _ready(s))


def _route(s: Shapes, type: str, listed: bool) -> Work:
    weights, x = [matrix(type, s.E, s.D), _normal(s.E)], _normal(FEW, s.D)

    def op(w, x, *chosen):
        choice = {"chosen": chosen[0]} if listed else {"bias": w[1]}
        return ops.route(x, w[0], k=s.k, scale=1.5, **choice)

    return _work(op, weights, x, *([_chosen(s.E, s.k)] if listed else []))


def _markov(s: Shapes, type: str) -> Work:
    weights = [matrix(type, s.V, s.Rm, seed=i) for i in range(2)]
    u, anchor = 3 * _normal(FEW, s.V), mx.array([s.V - 1], mx.int32)

    def run(weights, i, n):
        before = ops.markov(u[:i], anchor, *weights)[0][-1:] if i else anchor
        return ops.markov(u[i : i + n], before, *weights)

    return Work(run, weights, weights[1].nbytes + u.nbytes // FEW)


def copied(w: Matrix) -> Matrix:
    """The same matrix in other memory."""
    if isinstance(w, Packed):
        return Packed(w.type, w.shape, {name: plane * 1 for name, plane in w.planes.items()})
    return w * 1
