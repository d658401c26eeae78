"""The compressor's pooling: the candidates of one window become one entry."""

import mlx.core as mx

from ..rows import each_row


def pool(c: mx.array, s: mx.array) -> mx.array:
    """c, s [N, M, D] float32: N windows of M candidates -> softmax over M per channel, [N, D].

    A missing candidate has score -inf and any finite value (model 7).
    """
    return pool_reference(c, s)


def pool_reference(c: mx.array, s: mx.array) -> mx.array:
    return each_row(lambda c, s: (c * mx.softmax(s, axis=1)).sum(axis=1), c, s)
