import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops import metal
from ds4mlx.ops.attention_shares import attention_shares
from tests.close import assert_close
from tests.metal.bench import executed
from tests.metal.lint import generated, lint

WINDOW, SCALE = 5, 0.75


def make(n, H, own, B=0, K=0):
    """Arguments of an op: B entries, or K of B selected."""
    mx.random.seed(n)
    scores = 4 * mx.random.normal((n, H, own + n))
    sink = mx.random.normal((H,))
    if not B:
        return scores, sink, own, WINDOW, SCALE
    ready = [(4 * i + B) // 8 for i in range(n)]
    others = 4 * mx.random.normal((n, H, K or B))
    ids = None
    if K:
        rng = np.random.default_rng(n)
        ids = mx.array(np.sort([rng.permutation(B)[:K] for _ in range(n)]), mx.uint32)
    return scores, sink, own, WINDOW, SCALE, others, ready, ids


ARGUMENTS = {
    "raw keys": (9, 3, 7),
    "the first block": (16, 2, 0),
    "entries": (9, 3, 7, 11),
    "none yet for some": (20, 1, 4, 5),
    "more keys than lanes": (34, 2, 40, 70),
    "selected": (9, 2, 7, 40, 12),
}


@pytest.mark.parametrize("sizes", ARGUMENTS.values(), ids=ARGUMENTS)
def test_kernel_matches_the_reference(sizes):
    arguments = make(*sizes)
    want = [a for a in attention_shares(*arguments) if a is not None]
    with executed("check"):
        got = [a for a in attention_shares(*arguments) if a is not None]
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert_close(g, np.array(w), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sizes", ARGUMENTS.values(), ids=ARGUMENTS)
def test_shares_are_a_softmax_of_what_is_seen_and_the_sink(sizes):
    scores, sink, own, window, scale, *rest = make(*sizes)
    weights, more = attention_shares(scores, sink, own, window, scale, *rest)
    n, H, A = scores.shape
    for q in range(n):
        seen = [a for a in range(A) if own + q - window < a <= own + q]
        logits = [SCALE * np.array(scores, np.float64)[q][:, seen]]
        if rest:
            others, ready, ids = rest
            places = range(others.shape[2]) if ids is None else np.array(ids)[q]
            some = [j for j, entry in enumerate(places) if entry < ready[q]]
            logits.append(SCALE * np.array(others, np.float64)[q][:, some])
        logits = np.concatenate([*logits, np.array(sink)[:, None]], axis=1)
        want = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        got = [np.array(weights)[q][:, seen]]
        if rest:
            got.append(np.array(more)[q][:, some])
        np.testing.assert_allclose(np.concatenate(got, axis=1), want[:, :-1], atol=1e-6)
        assert np.count_nonzero(np.array(weights)[q]) <= H * len(seen)


def test_kernel_gives_no_nan_where_nothing_but_the_sink_is_large():
    scores = mx.full((9, 1, 16), -1e30)
    with executed("check"):
        weights, _ = attention_shares(scores, mx.zeros(1), 7, WINDOW, SCALE)
    assert mx.all(weights == 0).item()


@pytest.mark.parametrize("sizes", [(9, 1, 7), (9, 3, 7, 11), (1, 8, 7, 20, 12)])
def test_the_address_spaces_hold(sizes):
    scores, *rest = make(*sizes)
    (source,) = generated(lambda s: attention_shares(s, *rest)[0], scores)
    assert lint(source) == []
    with metal.reference():
        assert attention_shares(scores, *rest)[0].shape == scores.shape
