"""The experts: each row meets its own k, weighed by the router, and perhaps one that all share."""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .dequantize import NATIVE, arrays, dequantize, kind, readers
from .experts_down import (
    blocks,
    bounds,
    experts_down,
    experts_down_reference,
    gather,
    takes,
    tiling,
)
from .experts_grouped import experts_grouped
from .hc_expand import Back, Streams, written
from .mlp import mlp, mlp_reference, swiglu
from .route import Choice, chosen_by

_CHOOSING = 2  # rows at most that choose their experts within the experts' launch
SORTED = 768  # rows from which widened experts are cheaper than the kernels in blocks
TILE = 1 << 28  # elements of the experts' matrices that prefill widens at a time (512 MB)


def experts(
    x,
    ids,
    weights,
    w1: Matrix,
    w3: Matrix,
    w2: Matrix,
    limit: float,
    shared=None,
    pace: Callable | None = None,
    back: Back | None = None,
) -> mx.array | Streams:
    """x [N, D], ids [N, K] uint32, weights [N, K]; w1, w3 [E, F, D], w2 [E, D, F] -> [N, D].

    The weight is applied before w2 (model 12). shared: w1, w3 [F, D] and w2 [D, F] of an expert
    that every row meets with weight 1; its product is added last. back: the sum is written back.

    Two launches, `experts` (w1 and w3) and `experts_down` (w2), where their kernels take the
    shapes (`takes`), w1 is of w3's type, and the shared ones are so too; else the reference. More
    rows than FEW go through them in blocks. Many go through MLX's grouped product (`_sorted`), on
    CUDA, where that one uses no tensor cores, through batched ones (`experts_grouped`, which
    takes `pace`); the shared expert then through a product of all.
    """
    N, K = ids.shape
    if N > FEW and takes((FEW, K), w1, w3, w2):
        if N < SORTED:
            blocks_ = (slice(i, i + FEW) for i in range(0, N, FEW))
            parts = [experts(x[b], ids[b], weights[b], w1, w3, w2, limit) for b in blocks_]
            routed = mx.concatenate(parts)
        else:
            routed = _many(x, ids, weights, w1, w3, w2, limit, pace)
        y = routed + mlp_reference(x, *shared, limit) if shared else routed
        return written(y, back)
    both = [(w1, w3), *([shared[:2]] if shared else [])]
    if not _taken((N, K), both):
        return written(experts_reference(x, ids, weights, w1, w3, w2, limit, shared), back)
    (h,) = _launch(x, K, {"ids": ids, "weights": weights}, both, limit)
    return experts_down(h, ids, w2, shared[2] if shared else None, back)


def routed(
    x, choice: Choice, w1: Matrix, w3: Matrix, w2: Matrix, limit, shared=None, pace=None, back=None
):
    """`experts` of what `route` chooses; one or two rows choose within the launch, one is spared.

    Each threadgroup chooses for itself, so that for more rows a launch takes less.
    """
    N, E, K = *choice.logits.shape, choice.k
    both = [(w1, w3), *([shared[:2]] if shared else [])]
    assert K <= E, (K, E)
    if N > _CHOOSING or not _taken((N, K), both) or E > 1024 or K > 32:
        return experts(x, *chosen_by(choice), w1, w3, w2, limit, shared, pace, back)
    inputs, ids = {"logits": choice.logits}, choice.chosen
    if ids is None:
        h, ids = _launch(x, K, inputs | {"bias": choice.bias}, both, limit, choice.scale)
    else:
        (h,) = _launch(x, K, inputs | {"ids": ids}, both, limit, choice.scale)
    return experts_down(h, ids, w2, shared[2] if shared else None, back)


def _taken(places: tuple[int, int], both) -> bool:
    """Whether the kernel is there for N and K and the pairs of w1 and w3."""
    w1 = both[0][0]
    return all(
        kind(gate) == kind(up) and takes(places, gate, up) and gate.shape[-2:] == w1.shape[1:]
        for gate, up in both
    )


def _launch(x, K: int, choice: dict[str, mx.array], both, limit: float, scale: float = 0.0):
    """h [N, places, F], and where the launch chooses the ids [N, K]."""
    N, (F, D) = x.shape[0], both[0][0].shape[1:]
    tile, places, chooses = tiling(F), K + len(both) - 1, "bias" in choice
    kernel = _kernel(limit, tuple(choice), scale, *(kind(gate) for gate, _ in both))
    template = {"D": D, "F": F, "K": K, "PLACES": places, "T": tile}
    template |= bounds(32 * blocks(D), *(w for pair in both for w in pair))
    if "logits" in choice:
        template["E"] = choice["logits"].shape[1]
    return kernel(
        x,
        *choice.values(),
        *arrays(*(w for pair in both for w in pair)),
        template=template,
        grid=(F // tile * 32 * blocks(D), places * N, 1),
        group=(32 * blocks(D), 1, 1),
        shapes=[(N, places, F), (N, K)][: 1 + chooses],
        dtypes=[mx.float32, mx.uint32][: 1 + chooses],
    )


def experts_reference(x, ids, weights, w1, w3, w2, limit, shared=None):
    if shared is not None:
        routed = experts_reference(x, ids, weights, w1, w3, w2, limit)
        return routed + mlp_reference(x, *shared, limit)

    def gathered(x, ids, weights):
        up = swiglu(gather(x[:, None], w1, ids), gather(x[:, None], w3, ids), limit)
        return experts_down_reference(up * weights[..., None], ids, w2)

    if x.shape[0] <= FEW:
        return each_row(gathered, x, ids, weights)
    if all(isinstance(w, Packed) and w.type in NATIVE for w in (w1, w3, w2)):
        return gathered(x, ids, weights)
    # One expert after the other over all rows: each is widened once, and memory stays small.
    total = mx.zeros_like(x)
    for e in range(w1.shape[0]):
        share = mx.where(ids == e, weights, 0.0).sum(axis=1, keepdims=True)
        total = total + share * mlp(x, w1[e], w3[e], w2[e], limit)
    return total


def _many(x, ids, weights, w1, w3, w2, limit, pace) -> mx.array:
    if metal.backend() == "cuda":
        return experts_grouped(x, ids, weights, w1, w3, w2, limit, pace)
    return _sorted(x, ids, weights, w1, w3, w2, limit)


def _sorted(x, ids, weights, w1, w3, w2, limit) -> mx.array:
    """The rows of an expert lie together, and weights are widened tile by tile.

    Products are of float16, summed in float32: of as many bits as MLX's of float32 on CUDA.
    """
    N, K = ids.shape
    half = mx.float16 if mx.default_device() == mx.gpu else mx.float32  # MLX has no other there
    chosen = ids.flatten()
    order = mx.argsort(chosen)
    chosen = chosen[order]
    rows = x.astype(half)[order // K]
    up = swiglu(*(_grouped(rows, w, chosen).astype(mx.float32) for w in (w1, w3)), limit)
    up = (up * weights.flatten()[order][:, None]).astype(half)
    y = _grouped(up, w2, chosen)[mx.argsort(order)]
    return y.reshape(N, K, -1).astype(mx.float32).sum(axis=1)


def _grouped(x: mx.array, w: Matrix, chosen: mx.array) -> mx.array:
    """x [R, D], w [E, M, D], chosen [R] ascending -> w[chosen[r]] x[r], [R, M]."""
    E, M, D = w.shape
    tile = max(1, TILE // (E * D))
    # Not x[:, None], whose new axis has stride 1: MLX's grouped product on CUDA then takes the
    # rows for transposed ones, and what it gives is wrong.
    x = x.reshape(-1, 1, D)
    parts = []
    for m in range(0, M, tile):
        part = dequantize(w if tile >= M else w[:, m : min(M, m + tile)], x.dtype)
        part = part.swapaxes(1, 2)
        product = mx.gather_mm(x, part, rhs_indices=chosen, sorted_indices=True)
        parts.append(product.squeeze(1))
    return mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


@cache
def _kernel(limit: float, choice: tuple, scale: float, routed, shared=None) -> metal.Kernel:
    """choice: names of the inputs that say which experts a row meets, and with what weights."""
    kinds = {"gate": routed, "up": routed}
    if shared:
        kinds |= {"shared_gate": shared, "shared_up": shared}
    inputs, readers_ = readers(kinds)

    def call(gate, up, weight, expert):
        return f"""experts<D, F, T>({gate}, {up}, x + row * D, {weight},
    {metal.literal(limit)}, h + (row * PLACES + place) * F, stage, part, {expert},
    threadgroup_position_in_grid.x, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);"""

    # The shared expert, which may take longest, comes first.
    meet_shared = f"""if (place == K) {{
  {call("shared_gate", "shared_up", "1", "0")}
  return;
}}
"""
    own, weight, expert = "", "weights[slot]", "ids[slot]"
    if "logits" in choice:
        own = "threadgroup float keys[E];\nthreadgroup float chosen[K];\nthreadgroup uint own[K];\n"
        where = "thread_index_in_threadgroup"
        if "bias" in choice:
            own += f"""route_choose<E, K>(logits + row * E, bias, keys, chosen, own, {where},
    threads_per_threadgroup.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
if (threadgroup_position_in_grid.x == 0 && {where} == 0) {{
  ids[slot] = own[place];
}}
"""
        else:
            own += f"route_look<E, K>(logits + row * E, ids + row * K, chosen, own, {where});\n"
        weight, expert = f"route_weight(chosen, place, K, {metal.literal(scale)})", "own[place]"
    return metal.Kernel(
        "experts",
        inputs=["x", *choice, *inputs],
        outputs=["h", "ids"] if "bias" in choice else ["h"],
        call=f"""threadgroup float4 stage[(D + 1023) / 1024 * 128];
threadgroup float part[(D + 1023) / 1024 * 2 * T];
{readers_}uint row = threadgroup_position_in_grid.y % x_shape[0];
uint place = (threadgroup_position_in_grid.y / x_shape[0] + K) % PLACES;
{meet_shared if shared else ""}uint slot = row * K + place;
{own}{call("gate", "up", weight, expert)}""",
    )
