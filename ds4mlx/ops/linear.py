"""Products with a weight matrix, packed or not; the rows of a small block stay exact."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .dequantize import NATIVE, STRUCTS, arrays, dequantize, kind, native, readers

WIDENED = 1 << 26  # elements of a matrix that prefill widens at a time (256 MB of float32)
_SIMDGROUPS = 8  # of a threadgroup of linear.metal
# SETS of linear.metal, so that a lane reads 16 bytes of a row: faster from so many outputs on.
_SETS, _ENOUGH = {"Q8_0": 4, "Q4_K": 8}, 4096
_BUFFERS = 31  # that a Metal kernel takes


@cache
def _kernel(kinds: tuple) -> metal.Kernel:
    names = [f"w{i}" for i in range(len(kinds))]
    inputs, readers_ = readers(dict(zip(names, kinds, strict=True)))
    branches = []
    for name, kind_ in zip(names, kinds, strict=True):
        shape = f"{name}_{STRUCTS[kind_][1][0]}_shape[0]"
        branches.append(f"""if (place < {name}_SIZE) {{
  linear<ROWS, {name}WIDENED, {name}_SETS, K, G>(x, {name}, {name}_out, part, x_shape[0],
      {shape} / G, threadgroup_position_in_grid.y, place, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  return;
}}
place -= {name}_SIZE;
""")
    return metal.Kernel(
        "linear",
        inputs=["x", *inputs],
        outputs=[f"{name}_out" for name in names],
        call=f"""threadgroup float part[PART];
{readers_}uint place = threadgroup_position_in_grid.x;
{"".join(branches)}""",
    )


def linear(x: mx.array, w: Matrix) -> mx.array:
    """x [N, K] float32, w [M, K] -> x w^T, [N, M] float32.

    The kernel takes up to FEW rows, and every type; K is a multiple of 32, and w has 2048
    elements or more.
    """
    return linears(x, [w])[0]


def linears(x: mx.array, ws: Sequence[Matrix]) -> list[mx.array]:
    """x [N, K] float32, each w [M, K] -> [linear(x, w) for w in ws], bit for bit.

    One launch for all that the kernel takes, but for what is beyond Metal's 31 buffers.
    """
    taken = [w for w in ws if takes(x, w)]
    products_ = iter(products(x, taken))
    return [next(products_) if takes(x, w) else linear_reference(x, w) for w in ws]


def takes(x: mx.array, w: Matrix) -> bool:
    """Whether `products` is there for rows x [N, .] and w [., K]."""
    M, K = w.shape
    # From 2048 elements on no plane has fewer than 8, which Metal gets in another space.
    return metal.enabled() and x.shape[0] <= FEW and K % 32 == 0 and M * K >= 2048


def products(x: mx.array, ws: Sequence[Matrix], G: int = 1) -> list[mx.array]:
    """The kernel: x [N, G, K], each w [G * R, K] -> [N, G * R], block g of w times x[:, g].

    With G = 1 x is [N, K]: a view for each product is time that a step waits for the host.
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


def _buffers(ws: Sequence[Matrix]) -> int:
    """Of a launch: x and its shape; of each matrix its planes, their shape and the product."""
    return 2 + len(arrays(*ws)) + 2 * len(ws)


def _launch(x: mx.array, ws: Sequence[Matrix], G: int) -> list[mx.array]:
    N, *groups, K = x.shape
    assert groups == ([G] if G > 1 else []), (x.shape, G)
    for w in ws:
        assert w.shape[0] % G == 0 and w.shape[1] == K and x.dtype == mx.float32, (x, w.shape)
    rows = N if N == 1 else metal.round_up(N, 2)
    template = {"ROWS": rows, "K": K, "G": G, "PART": 0}
    threadgroups = 0
    for i, w in enumerate(ws):
        sets, tile, size = _blocking(w, rows, G)
        template |= {f"w{i}_SETS": sets, f"w{i}WIDENED": tile, f"w{i}_SIZE": size}
        part = _SIMDGROUPS * metal.round_up(rows * tile * sets, 32)
        template["PART"] = max(template["PART"], part)
        threadgroups += size
    return _kernel(tuple(kind(w) for w in ws))(
        x,
        *arrays(*ws),
        template=template,
        grid=(32 * _SIMDGROUPS * threadgroups, G, 1),
        group=(32 * _SIMDGROUPS, 1, 1),
        shapes=[(N, w.shape[0]) for w in ws],
        dtypes=[mx.float32] * len(ws),
    )


def _blocking(w: Matrix, rows: int, G: int) -> tuple[int, int, int]:
    """SETS and TILE of linear.metal, and how many threadgroups a group of w takes.

    TILE may depend on the rows; SETS and the split order sums, and may not.
    """
    M, K = w.shape
    sets = _SETS.get(kind(w), 1) if M >= _ENOUGH else 1
    tile = 2 if sets == 8 or (sets > 1 and rows <= 2) else 4
    tile = tile if tile <= M // G else 1
    columns = 2048 if M >= 16384 else 1024 if M >= 4096 else 1  # as linear_split of linear.metal
    split = next(n for n in (1, 2, 4, 8) if n == 8 or 2 * n * columns > K)
    return sets, tile, -(-(M // G) // (tile * sets * _SIMDGROUPS // split))


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
