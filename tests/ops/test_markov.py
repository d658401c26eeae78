import mlx.core as mx
import numpy as np

from ds4mlx.ops.markov import markov_reference
from tests.close import assert_close


def test_each_token_is_biased_by_the_one_before_it():
    rng = np.random.default_rng(0)
    u, w1, w2 = rng.normal(size=(5, 11)), rng.normal(size=(11, 4)), rng.normal(size=(11, 4))
    tokens, logits, e = markov_reference(
        *(mx.array(a, mx.float32) for a in (u,)),
        mx.array([3]),
        mx.array(w1, mx.float32),
        mx.array(w2, mx.float32),
    )
    before = 3
    for i in range(5):
        want = u[i] + w2 @ w1[before]
        assert_close(e[i], w1[before], atol=1e-6)
        assert_close(logits[i], want, atol=1e-5)
        before = int(np.argmax(want))
        assert int(np.array(tokens)[i]) == before


def test_equal_logits_give_the_lowest_token():
    zero = mx.zeros((4, 2))
    tokens, _, _ = markov_reference(mx.zeros((1, 4)), mx.array([2]), zero, zero)
    assert np.array(tokens)[0] == 0
