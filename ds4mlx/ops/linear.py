"""Products with a weight matrix, packed or not; the rows of a small block stay exact."""

from collections.abc import Sequence

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .dequantize import NATIVE, dequantize, native

_TILE = 1 << 26  # elements of a matrix that prefill widens at a time (256 MB of float32)
_OUTPUTS = 4  # of a threadgroup: TILE of linear.metal

# What a matrix is for the kernel: the struct of dequantize.h, and its planes in order.
_FLOAT = ("dense<T>", ("data",))
_STRUCTS = {
    mx.float32: _FLOAT,
    mx.float16: _FLOAT,
    mx.bfloat16: _FLOAT,
    "Q8_0": ("q8_0", ("codes", "scales")),
    "Q4_0": ("q4_0", ("codes", "scales")),
    "MXFP4": ("mxfp4", ("codes", "scales")),
    "Q4_K": ("q4_k", ("codes", "scales", "d")),
    "Q5_K": ("q5_k", ("codes", "high", "scales", "d")),
    "Q6_K": ("q6_k", ("codes", "high", "scales", "d")),
    "Q2_K": ("q2_k", ("codes", "scales", "d")),
    "IQ2_XXS": ("iq2_xxs", ("grid", "signs", "d")),
}


def _kernel(struct: str, planes: tuple[str, ...]) -> metal.Kernel:
    return metal.Kernel(
        "linear",
        inputs=["x", *planes],
        outputs=["out"],
        call=f"""threadgroup float part[32 * 8];
{struct} w = {{{", ".join(planes)}}};
uint G = threadgroups_per_grid.y;
linear<ROWS, TILE>(x, w, out, part, x_shape[0], {planes[0]}_shape[0] / G, x_shape[2],
    uint2(G, threadgroup_position_in_grid.y), threadgroup_position_in_grid.x,
    uint2(simdgroups_per_threadgroup, simdgroup_index_in_threadgroup),
    thread_index_in_simdgroup);""",
    )


_KERNELS = {struct: _kernel(*struct) for struct in _STRUCTS.values()}


def linear(x: mx.array, w: Matrix) -> mx.array:
    """x [N, K] float32, w [M, K] -> x w^T, [N, M] float32.

    The kernel takes up to FEW rows, and every type; K is a multiple of 32, and w has 2048
    elements or more.
    """
    groups = x[:, None]
    return product(groups, w) if takes(groups, w) else linear_reference(x, w)


def linears(x: mx.array, ws: Sequence[Matrix]) -> list[mx.array]:
    """x [N, K] float32, each w [M, K] -> [linear(x, w) for w in ws], bit for bit."""
    return [linear(x, w) for w in ws]


def takes(x: mx.array, w: Matrix) -> bool:
    """Whether `product` is there for x [N, G, K] and w [G * R, K]."""
    # From 2048 elements on no plane has fewer than 8, which Metal gets in another space.
    size = w.shape[0] * w.shape[1]
    return metal.enabled() and x.shape[0] <= FEW and x.shape[2] % 32 == 0 and size >= 2048


def product(x: mx.array, w: Matrix) -> mx.array:
    """The kernel: x [N, G, K], w [G * R, K] -> [N, G * R], block g of w times x[:, g]."""
    N, G, K = x.shape
    M = w.shape[0]
    assert M % G == 0 and w.shape[1] == K and x.dtype == mx.float32, (x.shape, w.shape, x.dtype)
    planes, template = (w.planes, {}) if isinstance(w, Packed) else ({"data": w}, {"T": w.dtype})
    struct = _STRUCTS[w.type if isinstance(w, Packed) else w.dtype]
    # As many as fill a GPU; they order a row's sum, so they may depend on M, never on N.
    simdgroups = 2 if M >= 16384 else 4 if M >= 4096 else 8
    (out,) = _KERNELS[struct](
        x,
        *(planes[name] for name in struct[1]),
        template={**template, "ROWS": N if N == 1 else metal.round_up(N, 2), "TILE": _OUTPUTS},
        grid=(32 * simdgroups * -(-(M // G) // _OUTPUTS), G, 1),
        group=(32 * simdgroups, 1, 1),
        shapes=[(N, M)],
        dtypes=[mx.float32],
    )
    return out


def linear_reference(x: mx.array, w: Matrix) -> mx.array:
    if x.shape[0] <= FEW:
        return each_row(lambda row: _few(row, w), x)
    M, K = w.shape
    tile = max(1, _TILE // K)
    if tile >= M:
        return x @ dequantize(w).T
    parts = [x @ dequantize(w[i : min(i + tile, M)]).T for i in range(0, M, tile)]
    return mx.concatenate(parts, axis=1)


def _few(x: mx.array, w: Matrix) -> mx.array:
    if isinstance(w, Packed) and w.type in NATIVE:
        codes, form = native(w)
        return mx.quantized_matmul(x, codes, **form, transpose=True)
    return x @ dequantize(w).T
