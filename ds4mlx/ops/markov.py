"""The chain of a draft block: each token biases the logits of the next one."""

from functools import cache

import mlx.core as mx

from ..packed import Matrix
from . import metal
from .dequantize import arrays, kind, readers
from .embed import embed, takes
from .linear import linear

_GROUP = 256  # threads, and logits, of a threadgroup
_PICKING = """threadgroup float2 values[32];
threadgroup uint places[32];
"""


@cache
def _step(kind1, kind2) -> metal.Kernel:
    inputs, readers_ = readers({"w1": kind1, "w2": kind2})
    return metal.Kernel(
        "markov",
        inputs=["u", "known", "found", *inputs],
        outputs=["logits", "tokens", "best_of"],
        call=f"""{_PICKING}threadgroup float4 e[R / 4];
{readers_}uint at = found_shape[1] == 1 ? 0 : known_shape[0];
markov(u, known, found, w1, w2, logits, tokens, best_of, e, values, places, at, u_shape[1], R,
    found_shape[0], threadgroup_position_in_grid.x, thread_index_in_threadgroup,
    threads_per_threadgroup.x);""",
    )


@cache
def _finish(kind1) -> metal.Kernel:
    inputs, reader = readers({"w1": kind1})
    return metal.Kernel(
        "markov",
        inputs=["known", "found", *inputs],
        outputs=["tokens", "e"],
        call=f"""{_PICKING}{reader}markov_finish(w1, known, found, tokens, e, values,
    places, known_shape[0], R, found_shape[0], threadgroup_position_in_grid.y,
    thread_index_in_threadgroup, threads_per_threadgroup.x);""",
    )


def markov(u: mx.array, anchor: mx.array, w1: Matrix, w2: Matrix):
    """u [N, V] float32 logits, anchor [1] int32, w1 (table), w2 [V, R]
    -> tokens [N] int32, biased logits [N, V], e [N, R]: the row of w1 before each token.

    Token i is the argmax of u_i + w2 w1[token before], ties to the lowest id (model 16.2). The
    kernels take what `embed` takes, in N + 1 launches; the logits cost more only where they
    are used.
    """
    if not (takes(w1) and takes(w2)):
        return markov_reference(u, anchor, w1, w2)
    (N, V), R = u.shape, w1.shape[1]
    step, finish = _step(kind(w1), kind(w2)), _finish(kind(w1))
    groups = -(-V // _GROUP)
    logits, known, found = [], anchor, anchor.view(mx.uint32)[:, None]  # found is not read at 0
    for i in range(N):
        row, known, found = step(
            u,
            known,
            found,
            *arrays(w1, w2),
            template={"R": R},
            grid=(groups * _GROUP, 1, 1),
            group=(_GROUP, 1, 1),
            shapes=[(1, V), (i + 1,), (groups, 2)],
            dtypes=[mx.float32, mx.int32, mx.uint32],
        )
        logits.append(row)
    tokens, e = finish(
        known,
        found,
        *arrays(w1),
        template={"R": R},
        grid=(_GROUP, N, 1),
        group=(_GROUP, 1, 1),
        shapes=[(N,), (N, R)],
        dtypes=[mx.int32, mx.float32],
    )
    return tokens, mx.concatenate(logits), e


def markov_reference(u, anchor, w1, w2):
    tokens, logits, rows = [anchor], [], []
    for i in range(u.shape[0]):
        rows.append(embed(tokens[-1], w1))
        logits.append(u[i : i + 1] + linear(rows[-1], w2))
        tokens.append(mx.argmax(logits[-1], axis=-1).astype(mx.int32))
    return tuple(mx.concatenate(parts) for parts in (tokens[1:], logits, rows))
