"""From logits to a token: the likeliest, or one drawn from the filtered distribution."""

import secrets

import mlx.core as mx


class Sampler:
    """Draws one token a call. The same seed and logits give the same tokens.

    temp 0 takes the likeliest token (the lowest id on ties). Otherwise logits are divided by
    `temp` and filtered by `top_p` and `min_p` as ds4 does (gguf-and-dspark 6.7).
    """

    def __init__(self, temp: float, top_p: float, min_p: float, seed: int | None):
        self.temp, self.top_p, self.min_p = temp, top_p, min_p
        self.seed = secrets.randbits(63) if seed is None else seed
        self._key = mx.random.key(self.seed)

    def __call__(self, logits: mx.array) -> mx.array:
        """logits [1, V] float32 -> token [1] int32, not yet evaluated."""
        if self.temp == 0:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        self._key, key = mx.random.split(self._key)
        p = filtered(logits, self.temp, self.top_p, self.min_p)
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
