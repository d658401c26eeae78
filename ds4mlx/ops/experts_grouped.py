"""The routed experts of many rows by batched products, of padded groups of rows of one expert."""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from ..packed import Matrix
from . import metal
from .dequantize import dequantize_listed
from .gather_rows import EMPTY, gather_rows

GROUP = 192  # rows of a group: of 64, 128, 192 and 256 the fastest on an H200
PIECE = 1 << 29  # elements of a matrix that are widened at a time (1 GB)
_sum = metal.Kernel(
    "experts_grouped",
    inputs=["y", "slots"],
    outputs=["out"],
    call="experts_grouped_sum<D, K>(y, slots, out, slots_shape[0], thread_position_in_grid.x);",
)


def experts_grouped(
    x, ids, weights, w1: Matrix, w3: Matrix, w2: Matrix, limit: float, pace: Callable | None = None
) -> mx.array:
    """`experts` without a shared one, where kernels are enabled: [N, D] float32.

    The rows of an expert fill groups of GROUP rows, the last of an expert in part; there are as
    many groups as any routing may need (`groups`). Those of PIECE elements are widened and
    multiplied at a time. Products are of float16 on a GPU, summed in float32: of as many bits as
    MLX's of float32 on CUDA. D and F are multiples of 8, x is float32. pace: called with what
    each piece leaves, to be evaluated, so that not all are held at once.
    """
    N, K = ids.shape
    E, F, D = w1.shape
    half = mx.float16 if mx.default_device() == mx.gpu else mx.float32  # MLX has no other there
    experts, source, slots = places(ids, E)
    piece = max(1, PIECE // (F * D))
    parts = []
    for at in range(0, experts.shape[0], piece):
        chosen = experts[at : at + piece]
        filled = source[at * GROUP : (at + piece) * GROUP]

        def product(rows, w, chosen=chosen):
            rows = rows.reshape(chosen.shape[0], GROUP, -1)
            return rows @ dequantize_listed(w, chosen, half).swapaxes(1, 2)

        rows = gather_rows(x, filled, half, K)
        gate, up = product(rows, w1), product(rows, w3)
        shape = (len(filled), F)
        up = _launch(_gated(limit), gate, up, filled, weights, shape=shape, dtype=half, F=F)
        parts.append(product(up, w2))
        if pace:
            pace(parts[-1], within=True)
    y = mx.concatenate(parts) if len(parts) > 1 else parts[0]
    return _launch(_sum, y, slots, shape=(N, D), dtype=mx.float32, D=D, K=K)


def groups(E: int, places: int) -> int:
    """How many groups E experts may need for that many rows: each may have a last, partial one."""
    return (places + min(E, places) * (GROUP - 1)) // GROUP


def held(E: int, F: int, D: int, places: int, paced: bool = True) -> int:
    """The elements of float16 that `experts_grouped` holds at most: with `pace` two pieces."""
    B = groups(E, places)
    at_once = min(B, 2 * max(1, PIECE // (F * D))) if paced else B
    return at_once * (3 * F * D + GROUP * (3 * F + D)) + 2 * B * GROUP * D


def places(ids: mx.array, E: int) -> tuple[mx.array, mx.array, mx.array]:
    """ids [N, K] -> the expert of each group, E where it stays empty, uint32 [B]; which place
    n K + k each slot holds, uint32 [B * GROUP]; and the slot of each place, uint32 [N, K]."""
    chosen = ids.flatten().astype(mx.int32)
    B = groups(E, chosen.shape[0])
    order = mx.argsort(chosen)
    counts = (chosen[None] == mx.arange(E)[:, None]).sum(axis=1)
    first = mx.cumsum(counts) - counts  # in `order`
    used = (counts + GROUP - 1) // GROUP
    ends = mx.cumsum(used)
    start = (ends - used) * GROUP  # the first slot
    experts = (ends[None] <= mx.arange(B)[:, None]).sum(axis=1)
    slots = mx.argsort(order).astype(mx.int32) + (start - first)[chosen]
    of = mx.minimum(experts, E - 1)[:, None]  # each [B, 1]
    nth = mx.arange(B * GROUP).reshape(B, GROUP) - start[of]
    filled = (nth < counts[of]) & (experts[:, None] < E)
    source = order[mx.where(filled, first[of] + nth, 0)]
    source = mx.where(filled, source, mx.array(EMPTY, mx.uint32)).flatten()
    return experts.astype(mx.uint32), source, slots.astype(mx.uint32).reshape(ids.shape)


@cache
def _gated(limit: float) -> metal.Kernel:
    return metal.Kernel(
        "experts_grouped",
        inputs=["gate", "up", "source", "weights"],
        outputs=["out"],
        partial=True,
        call=f"""experts_grouped_gated<F>(gate, up, source, weights, {metal.literal(limit)}, out,
    source_shape[0], thread_position_in_grid.x);""",
    )


def _launch(kernel: metal.Kernel, *inputs, shape, dtype, **template) -> mx.array:
    (out,) = kernel(
        *inputs,
        template=template,
        grid=(metal.round_up(shape[0] * shape[1] // 8, 256), 1, 1),
        group=(256, 1, 1),
        shapes=[shape],
        dtypes=[dtype],
    )
    return out
