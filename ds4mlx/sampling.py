"""From logits to a token: the likeliest, or one drawn from the filtered distribution."""

import secrets

import mlx.core as mx

from .ops import argmax


class Sampler:
    """Draws tokens one after the other; a draw depends on the seed, its number and its logits.

    temp 0 takes the likeliest token (the lowest id on ties). Otherwise logits are divided by
    `temp` and filtered by `top_p` and `min_p` as ds4 does (gguf-and-dspark 6.7).
    """

    def __init__(self, temp: float, top_p: float, min_p: float, seed: int | None):
        self.temp, self.top_p, self.min_p = temp, top_p, min_p
        self.seed = secrets.randbits(63) if seed is None else seed
        self._key = mx.random.key(self.seed)
        self._drawn = 0

    def __call__(self, logits: mx.array) -> mx.array:
        """logits [N, V] float32 -> the next N draws [N] int32, not yet evaluated."""
        N, first = logits.shape[0], self._drawn
        self._drawn += N
        if self.temp == 0:
            return argmax(logits)[0]
        return mx.concatenate([self._draw(logits[i : i + 1], first + i) for i in range(N)])

    def rewind(self, n: int):
        """Take the newest `n` draws back: the next ones have their numbers, so their luck."""
        self._drawn -= n

    def _draw(self, logits: mx.array, number: int) -> mx.array:
        p = filtered(logits, self.temp, self.top_p, self.min_p)
        # The split is made here: a lazy array belongs to the thread that built it.
        key = mx.random.split(self._key)[0] ^ mx.array([0, number], mx.uint32)
        return mx.random.categorical(mx.log(p), key=key).astype(mx.int32)


def filtered(logits: mx.array, temp: float, top_p: float, min_p: float) -> mx.array:
    """logits [N, V] -> probabilities [N, V] float32 of the tokens that may be drawn.

    A token stays if it is at least `min_p` as likely as the likeliest, and if those likelier
    than it (ties: lower ids) have together less than `top_p`.
    """
    p = mx.softmax(logits / temp, axis=-1)
    keep = p >= min_p * p.max(axis=-1, keepdims=True)
    if top_p < 1:
        order = mx.argsort(-p, axis=-1)
        before = mx.cumsum(mx.take_along_axis(p, order, axis=-1), axis=-1, inclusive=False)
        within = (before < top_p) | (mx.arange(p.shape[-1]) == 0)
        keep = keep & mx.put_along_axis(mx.zeros_like(within), order, within, axis=-1)
    p = mx.where(keep, p, 0.0)
    return p / p.sum(axis=-1, keepdims=True)
