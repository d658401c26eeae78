"""Products with a weight matrix, packed or not; the rows of a small block stay exact."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .columns import Columns, source, whole
from .dequantize import NATIVE, STRUCTS, arrays, bounds, dequantize, kind, native, readers
from .hc_expand import Back, Streams, written

WIDENED = 1 << 26  # elements of a matrix that prefill widens at a time (256 MB of float32)
_SIMDGROUPS = 8  # of a threadgroup of linear.metal
# SETS of linear.metal of these types, so that a lane reads 8 or 16 bytes of a row: faster from so
# many outputs on.
_SETS, _WIDE, _ENOUGH = 4, ("Q8_0", "Q4_K"), 4096
_BUFFERS = 31  # that a Metal kernel takes


class Gated(NamedTuple):
    """Two matrices of one type, [M, K] each, of which a row x makes swiglu(gate x, up x), [M]."""

    gate: Matrix
    up: Matrix
    limit: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.gate.shape


def swiglu(gate: mx.array, up: mx.array, limit: float) -> mx.array:
    """silu(gate) up: the gate is limited from above only, the up branch on both sides."""
    gate = mx.minimum(gate, limit)
    return gate * mx.sigmoid(gate) * mx.clip(up, -limit, limit)


@cache
def _kernel(products: tuple[tuple, ...]) -> metal.Kernel:
    """products: each a kind, and of gated ones a limit. All write columns of one, from AT on."""
    kinds, branches = {}, []
    for i, (kind_, *limit) in enumerate(products):
        name, op = f"w{i}", "linear_gated" if limit else "linear"
        kinds |= {name: kind_} | ({f"{name}_up": kind_} if limit else {})
        shape = f"{name}_{STRUCTS[kind_][1][0]}_shape[0]"
        ws = f"{name}, {name}_up" if limit else name
        end = metal.literal(*limit) if limit else "threadgroup_position_in_grid.y"
        branches.append(f"""if (place < {name}_SIZE) {{
  {op}<ROWS, {name}_TILE, {name}_SETS, {name}_SPLIT, K, X_STRIDE, STRIDE>(x + X_AT, {ws},
      out + {name}_AT, part, x_shape[0], {shape} / G, {end}, place,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
  return;
}}
place -= {name}_SIZE;
""")
    inputs, readers_ = readers(kinds)
    return metal.Kernel(
        "linear",
        inputs=["x", *inputs],
        outputs=["out"],
        call=f"""threadgroup float part[PART];
{readers_}uint place = threadgroup_position_in_grid.x;
{"".join(branches)}""",
    )


@cache
def _kernel_back(kind_: str | mx.Dtype) -> metal.Kernel:
    inputs, readers_ = readers({"w": kind_})
    return metal.Kernel(
        "linear",
        inputs=["x", *inputs, "from", "post", "comb", "fn"],
        outputs=["streams", "mixed"],
        call=f"""threadgroup float part[PART];
threadgroup float y[ROWS * SETS * TILE];
threadgroup float chunk[ROWS * HC * SETS * TILE];
{readers_}linear_back<ROWS, TILE, SETS, K, HC, C>(x, w, from, post, comb, fn, streams, mixed, part,
    y, chunk, from_shape[0], from_shape[2], threadgroup_position_in_grid.x,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
    )


def linear(x: mx.array | Columns, w: Matrix, back: Back | None = None) -> mx.array | Streams:
    """x [N, K] float32, w [M, K] -> x w^T, [N, M] float32, or that written back.

    The kernel takes up to FEW rows, and every type; K is a multiple of 32, and w has 2048
    elements or more. With `back` it is one launch too, where 8 simdgroups share an output
    (`split`); else the product and `hc_expand`.
    """
    if back and takes(x, w) and back.mixes and w.shape[0] >= 4 and split(w) == _SIMDGROUPS:
        return _launch_back(whole(x), w, back)
    return written(linears(x, [w])[0], back)


def linears(x: mx.array | Columns, ws: Sequence[Matrix | Gated]) -> list[mx.array]:
    """x [N, K] float32, each w [M, K] -> [linear(x, w) for w in ws], bit for bit; also gated ones.

    One launch for all that the kernel takes, but for what is beyond Metal's 31 buffers.
    """
    return [whole(product) for product in beside(x, ws)]


def beside(x: mx.array | Columns, ws: Sequence[Matrix | Gated]) -> list[mx.array | Columns]:
    """The same; the kernel's products lie side by side."""
    taken = [w for w in ws if takes(x, w)]
    products_ = iter(products(x, taken))
    return [next(products_) if takes(x, w) else _reference(whole(x), w) for w in ws]


def takes(x: mx.array | Columns, w: Matrix | Gated) -> bool:
    """Whether `products` is there for rows x [N, .] and w [., K]."""
    M, K = w.shape
    alike = len({(kind(m), m.shape) for m in _matrices(w)}) == 1
    # From 2048 elements on no plane has fewer than 8, which Metal gets in another space.
    return metal.enabled() and alike and x.shape[0] <= FEW and K % 32 == 0 and M * K >= 2048


def products(
    x: mx.array | Columns, ws: Sequence[Matrix | Gated], G: int = 1
) -> list[mx.array | Columns]:
    """The kernel: x [N, G, K], each w [G * R, K] -> [N, G * R], block g of w times x[:, g].

    x may have any axes after the first: a view is time that a step waits for the host.
    """
    first = 0
    out = []
    while first < len(ws):
        last = first + 1
        while last < len(ws) and _buffers(ws[first : last + 1]) <= _BUFFERS:
            last += 1
        out += _launch(x, ws[first:last], G)
        first = last
    return out


def _matrices(*ws: Matrix | Gated) -> list[Matrix]:
    return [m for w in ws for m in ((w.gate, w.up) if isinstance(w, Gated) else (w,))]


def _buffers(ws: Sequence[Matrix | Gated]) -> int:
    """Of a launch: x and its shape, and the product; of each its planes and their shape."""
    return 3 + len(arrays(*_matrices(*ws))) + len(ws)


def _launch(
    x: mx.array | Columns, ws: Sequence[Matrix | Gated], G: int
) -> list[mx.array | Columns]:
    N, K = x.shape[0], ws[0].shape[1]
    assert not isinstance(x, Columns) or x.shape == (N, G * K), (x.shape, K, G)
    x, at, stride = source(x) if isinstance(x, Columns) else (x, 0, G * K)
    for w in ws:
        assert w.shape[0] % G == 0 and w.shape[1] == K, (w.shape, G)
        assert not (isinstance(w, Gated) and G > 1)
    assert x.dtype == mx.float32 and x.size == N * stride, (x.dtype, x.shape, K, G)
    rows, total = padded_rows(N), sum(w.shape[0] for w in ws)
    template = {"ROWS": rows, "K": K, "G": G, "PART": 0, "STRIDE": total}
    template |= {"X_AT": at, "X_STRIDE": stride}
    threadgroups, firsts, kinds = 0, [], []
    for i, w in enumerate(ws):
        matrix, *up = _matrices(w)
        shares, sets, tile, size = blocking(matrix, rows, G, simdgroups=_SIMDGROUPS >> len(up))
        firsts.append(sum(w.shape[0] for w in ws[:i]))
        kinds.append((kind(matrix), w.limit) if up else (kind(matrix),))
        template |= {f"w{i}_SETS": sets, f"w{i}_TILE": tile, f"w{i}_SIZE": size}
        template |= {f"w{i}_SPLIT": shares.bit_length() - 1, f"w{i}_AT": firsts[-1]}
        template["PART"] = max(template["PART"], part_size(rows, tile, sets))
        threadgroups += size
    if rows > 2:
        gated = [m for w in ws if isinstance(w, Gated) for m in _matrices(w)]
        template |= bounds(32 * _SIMDGROUPS, *gated, registers=128) if gated else {}
    (out,) = _kernel(tuple(kinds))(
        x,
        *arrays(*_matrices(*ws)),
        template=template,
        grid=(32 * _SIMDGROUPS * threadgroups, G, 1),
        group=(32 * _SIMDGROUPS, 1, 1),
        shapes=[(N, total)],
        dtypes=[mx.float32],
    )
    if len(ws) == 1:
        return [out]
    return [Columns(out, first, w.shape[0]) for first, w in zip(firsts, ws, strict=True)]


def _launch_back(x: mx.array, w: Matrix, back: Back) -> Streams:
    N, K = x.shape
    D, rows = w.shape[0], padded_rows(N)
    assert w.shape[1] == K and x.dtype == mx.float32, (x.dtype, x.shape, w.shape)
    assert back.x.shape[2] == D and back.fn.shape[1] == back.x[0].size, (D, back.fn.shape)
    _, sets, tile, size = blocking(w, rows, 1)
    channels = sets * (4 if sets == 1 else 2)  # of a part: of the least tile
    streams, part = _kernel_back(kind(w))(
        x,
        *arrays(w),
        *back.arrays,
        template={
            **{"ROWS": rows, "TILE": tile, "SETS": sets, "K": K},
            **{"HC": back.x.shape[1], "C": channels, "PART": part_size(rows, tile, sets)},
        },
        grid=(32 * _SIMDGROUPS * size, 1, 1),
        group=(32 * _SIMDGROUPS, 1, 1),
        shapes=back.shapes(channels),
        dtypes=[mx.float32] * 2,
    )
    return streams, part


def padded_rows(N: int) -> int:
    """ROWS of metal/products.h for N rows."""
    return N if N == 1 else metal.round_up(N, 2)


def part_size(rows: int, tile: int, sets: int, simdgroups: int = _SIMDGROUPS) -> int:
    """Floats of a threadgroup's sums in metal/products.h."""
    return simdgroups * metal.round_up(rows * tile * sets, 32)


def split(w: Matrix) -> int:
    """How many simdgroups share an output: enough to fill a GPU, but with columns enough each."""
    M, K = w.shape
    columns = 2048 if M >= 16384 else 1024 if M >= 4096 else 1
    return next(n for n in (1, 2, 4, 8) if n == 8 or 2 * n * columns > K)


def blocking(w: Matrix, rows: int, G: int = 1, simdgroups: int = _SIMDGROUPS):
    """2^SPLIT, SETS and TILE of metal/products.h; how many threadgroups a group of w takes.

    simdgroups: of a threadgroup, that meet w. TILE may depend on the rows; SETS and the split
    order sums, and may not.
    """
    M = w.shape[0]
    shares = next(n for n in (8, 4, 2, 1) if n <= split(w) and simdgroups % n == 0)
    sets = _SETS if kind(w) in _WIDE and M >= _ENOUGH else 1
    tile = 2 if sets > 1 and rows <= 2 else 4
    tile = tile if tile <= M // G else 1
    return shares, sets, tile, -(-(M // G) // (tile * sets * simdgroups // shares))


def _reference(x: mx.array, w: Matrix | Gated) -> mx.array:
    if isinstance(w, Gated):
        return swiglu(linear_reference(x, w.gate), linear_reference(x, w.up), w.limit)
    return linear_reference(x, w)


def linear_reference(x: mx.array, w: Matrix) -> mx.array:
    if x.shape[0] <= FEW:
        return each_row(lambda row: _few(row, w), x)
    M, K = w.shape
    tile = max(1, WIDENED // K)
    if tile >= M:
        return x @ dequantize(w).T
    parts = [x @ dequantize(w[i : min(i + tile, M)]).T for i in range(0, M, tile)]
    return mx.concatenate(parts, axis=1)


def _few(x: mx.array, w: Matrix) -> mx.array:
    if isinstance(w, Packed) and w.type in NATIVE:
        codes, form = native(w)
        return mx.quantized_matmul(x, codes, **form, transpose=True)
    return x @ dequantize(w).T
