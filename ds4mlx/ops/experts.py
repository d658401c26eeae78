"""The experts: each row meets its own k, weighed by the router, and perhaps one that all share."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..packed import Matrix, Packed
from ..rows import FEW, each_row
from . import metal
from .columns import Columns, source
from .dequantize import NATIVE, arrays, bounds, dequantize, kind, readers
from .experts_down import (
    blocks,
    experts_down,
    experts_down_reference,
    gather,
    takes,
    tiling,
)
from .experts_grouped import experts_grouped
from .hc_expand import Back, Streams, written
from .linear import blocking, linear, padded_rows, part_size, swiglu
from .linear import takes as linear_takes
from .mlp import mlp
from .route import Choice, chosen_by

_CHOOSING = 2  # rows at most that choose their experts within the experts' launch
SORTED = 768  # rows from which widened experts are cheaper than the kernels in blocks
TILE = 1 << 28  # elements of the experts' matrices that prefill widens at a time (512 MB)


class Shared(NamedTuple):
    """An expert that all rows meet: what w1 and w3 of it have made, [N, F], and w2 [D, F].

    Its F may be another than that of the routed experts.
    """

    h: mx.array | Columns
    w2: Matrix


def experts(
    x,
    ids,
    weights,
    w1: Matrix,
    w3: Matrix,
    w2: Matrix,
    limit: float,
    shared: Shared | None = None,
    pace: Callable | None = None,
    back: Back | None = None,
) -> mx.array | Streams:
    """x [N, D], ids [N, K] uint32, weights [N, K]; w1, w3 [E, F, D], w2 [E, D, F] -> [N, D].

    The weight is applied before w2 (model 12). shared: of an expert that every row meets with
    weight 1, whose product is added last. back: the sum is written back.

    Two launches, `experts` (w1 and w3, and the shared w2 for all rows) and `experts_down` (w2),
    where their kernels take the shapes (`takes`) and w1 is of w3's type; else the reference. A
    shared w2 of IQ2_XXS takes a launch of its own. More rows than FEW go through them in blocks.
    Many go through MLX's grouped product (`_sorted`), on CUDA, where that one uses no tensor
    cores, through batched ones (`experts_grouped`, which takes `pace`).
    """
    N, K = ids.shape
    if N > FEW and takes((FEW, K), w1, w3, w2):
        if N < SORTED:
            blocks_ = (slice(i, i + FEW) for i in range(0, N, FEW))
            parts = [experts(x[b], ids[b], weights[b], w1, w3, w2, limit) for b in blocks_]
            routed = mx.concatenate(parts)
        else:
            routed = _many(x, ids, weights, w1, w3, w2, limit, pace)
        return written(_added(routed, shared), back)
    if not _taken((N, K), w1, w3):
        return written(experts_reference(x, ids, weights, w1, w3, w2, limit, shared), back)
    h, own = _launch(x, K, {"ids": ids, "weights": weights}, w1, w3, limit, shared)
    return experts_down(h, ids, w2, own, back)


def routed(x, choice: Choice, *matrices, shared=None, pace=None, back=None) -> mx.array | Streams:
    """`experts` of what `route` chooses; one or two rows choose within the launch, one is spared.

    matrices: w1, w3, w2 and limit. Each threadgroup chooses for itself, so that for more rows a
    launch takes less.
    """
    (w1, w3, w2, limit), (N, E), K = matrices, choice.logits.shape, choice.k
    assert K <= E, (K, E)
    if N > _CHOOSING or not _taken((N, K), w1, w3) or E > 1024 or K > 32:
        return experts(x, *chosen_by(choice), *matrices, shared, pace, back)
    logits, at, stride = source(choice.logits)
    inputs, ids = {"logits": logits}, choice.chosen
    inputs |= {"bias": choice.bias} if ids is None else {"ids": ids}
    template = {"E": E, "LOGITS_AT": at, "LOGITS_STRIDE": stride}
    h, own, *chosen = _launch(x, K, inputs, w1, w3, limit, shared, choice.scale, template)
    return experts_down(h, chosen[0] if ids is None else ids, w2, own, back)


def _taken(places: tuple[int, int], w1: Matrix, w3: Matrix) -> bool:
    """Whether the kernel is there for N and K."""
    return kind(w1) == kind(w3) and takes(places, w1, w3)


def _added(y: mx.array, shared: Shared | None) -> mx.array:
    return y if shared is None else y + linear(*shared)


def _launch(
    x,
    K: int,
    choice: dict[str, mx.array],
    w1: Matrix,
    w3: Matrix,
    limit: float,
    shared: Shared | None,
    scale: float = 0.0,
    template: dict | None = None,
):
    """h [N, K, F]; what the shared expert gives [N, D], or None; and the ids [N, K] if chosen."""
    N, (F, D) = x.shape[0], w1.shape[1:]
    tile, simdgroups, chooses = tiling(F), blocks(D), "bias" in choice
    template = {"D": D, "F": F, "K": K, "T": tile, "PART": 2 * tile * simdgroups} | (template or {})
    within, inputs, size = None, [], 0
    if shared and linear_takes(*shared) and kind(shared.w2) != "IQ2_XXS":  # which wants a table
        within, inputs = kind(shared.w2), [source(shared.h)[0], *arrays(shared.w2)]
        assert shared.w2.shape[0] == D, (shared.w2.shape, D)
        more, size = _shared(N, simdgroups, shared)
        template |= more | {"PART": max(template["PART"], more["PART"])}
    template |= bounds(32 * simdgroups, w1, w3, registers=80 if within else 72)
    h, *others = _kernel(limit, tuple(choice), scale, kind(w1), within)(
        x,
        *choice.values(),
        *inputs,
        *arrays(w1, w3),
        template=template,
        grid=(F // tile * 32 * simdgroups, K * N + -(-size * tile // F), 1),
        group=(32 * simdgroups, 1, 1),
        shapes=[(N, K, F), *[(N, D)] * bool(within), *[(N, K)] * chooses],
        dtypes=[mx.float32, *[mx.float32] * bool(within), *[mx.uint32] * chooses],
    )
    own = others.pop(0) if within else shared and linear(*shared)
    return h, own, *others


def _shared(N: int, simdgroups: int, shared: Shared) -> tuple[dict, int]:
    """Of the template, and how many threadgroups of so many simdgroups multiply w2."""
    (h, at, stride), rows = source(shared.h), padded_rows(N)
    assert shared.h.shape == (N, shared.w2.shape[1]) and h.dtype == mx.float32, shared.h.shape
    # A tile as for one row: registers are few.
    shares, sets, tile, size = blocking(shared.w2, 1, simdgroups=simdgroups)
    return {
        **{"ROWS": rows, "TILE": tile, "SETS": sets, "SPLIT": shares.bit_length() - 1},
        **{"SHARED_K": shared.w2.shape[1], "SHARED_AT": at, "SHARED_STRIDE": stride},
        "PART": part_size(rows, tile, sets, simdgroups),
    }, size


def experts_reference(x, ids, weights, w1, w3, w2, limit, shared=None):
    if shared is not None:
        return _added(experts_reference(x, ids, weights, w1, w3, w2, limit), shared)

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
    inputs, readers_ = readers({"gate": routed, "up": routed})
    outputs, own, weight, expert = ["h"], "", "weights[slot]", "ids[slot]"
    if shared:
        planes, reader = readers({"w2": shared})
        inputs, outputs = ["shared", *planes, *inputs], ["h", "y"]
        # Short ones come last, and fill the device as it empties.
        readers_ = f"""if (threadgroup_position_in_grid.y >= K * x_shape[0]) {{
  {reader}uint number = (threadgroup_position_in_grid.y - K * x_shape[0]) *
      threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  experts_shared<ROWS, TILE, SETS, SPLIT, SHARED_K, SHARED_STRIDE>(shared + SHARED_AT, w2, y,
      part, x_shape[0], D, number * ((D + 1023) / 1024) + simdgroup_index_in_threadgroup,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
  return;
}}
{readers_}"""
    if "logits" in choice:
        own = "threadgroup float keys[E];\nthreadgroup float chosen[K];\nthreadgroup uint own[K];\n"
        row, where = "logits + row * LOGITS_STRIDE + LOGITS_AT", "thread_index_in_threadgroup"
        if "bias" in choice:
            outputs = [*outputs, "ids"]
            own += f"""route_choose<E, K>({row}, bias, keys, chosen, own, {where},
    threads_per_threadgroup.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
if (threadgroup_position_in_grid.x == 0 && {where} == 0) {{
  ids[slot] = own[place];
}}
"""
        else:
            own += f"route_look<E, K>({row}, ids + row * K, chosen, own, {where});\n"
        weight, expert = f"route_weight(chosen, place, K, {metal.literal(scale)})", "own[place]"
    return metal.Kernel(
        "experts",
        inputs=["x", *choice, *inputs],
        outputs=outputs,
        call=f"""threadgroup float4 stage[(D + 1023) / 1024 * 128];
threadgroup float part[PART];
{readers_}uint row = threadgroup_position_in_grid.y % x_shape[0];
uint place = threadgroup_position_in_grid.y / x_shape[0];
uint slot = row * K + place;
{own}experts<D, F, T>(gate, up, x + row * D, {weight}, {metal.literal(limit)}, h + slot * F, stage,
    part, {expert}, threadgroup_position_in_grid.x, thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
    )
