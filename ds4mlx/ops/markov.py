"""The chain of a draft block: each token biases the logits of the next one."""

import mlx.core as mx

from ..packed import Matrix
from .embed import embed
from .linear import linear


def markov(u: mx.array, anchor: mx.array, w1: Matrix, w2: Matrix):
    """u [N, V] float32 logits, anchor [1] int32, w1 (table), w2 [V, R]
    -> tokens [N] int32, biased logits [N, V], e [N, R]: the row of w1 before each token.

    Token i is the argmax of u_i + w2 w1[token before], ties to the lowest id (model 16.2).
    """
    return markov_reference(u, anchor, w1, w2)


def markov_reference(u, anchor, w1, w2):
    tokens, logits, rows = [anchor], [], []
    for i in range(u.shape[0]):
        rows.append(embed(tokens[-1], w1))
        logits.append(u[i : i + 1] + linear(rows[-1], w2))
        tokens.append(mx.argmax(logits[-1], axis=-1).astype(mx.int32))
    return tuple(mx.concatenate(parts) for parts in (tokens[1:], logits, rows))
