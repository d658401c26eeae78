import sys

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.index_scores import weigh
from ds4mlx.ops.index_select import index_select, index_select_reference, scored
from ds4mlx.ops.round_index import round_index
from tests.close import assert_close, assert_same
from tests.golden_data import op_vectors
from tests.metal.bench import executed


def chosen(selected, ready, entries):
    """0/1 [N, C] of the entries that each row reads."""
    out = np.zeros((len(ready), entries), np.uint8)
    for i, n in enumerate(ready):
        ids = np.arange(n) if selected[i] is None else np.array(selected[i])
        out[i, ids[ids < n]] = 1
    return out


@pytest.mark.parametrize("kind", ["exact", "sim"])
@pytest.mark.parametrize("rows", [8, 9])
def test_reference_matches_golden_vectors(kind, rows):
    v = {k.removeprefix("indexer."): a for k, a in op_vectors().items() if "indexer" in k}
    q, keys = v["q"], v["k"]
    if kind == "sim":
        q, keys = round_index(q), round_index(keys)
    w = v["wt"] * (128**-0.5 * 12**-0.5)
    ready = [int(n) for n in v["ready"]]
    scores = np.array(v[f"score_{kind}"])
    seen = np.arange(40)[None] < np.array(ready)[:, None]
    got = np.where(seen, np.array(weigh(q, w, keys)), 0)
    assert_close(mx.array(got), np.where(seen, scores, 0), atol=2e-5)
    selected = index_select_reference(q[:rows], w[:rows], keys, ready[:rows], 8)
    want = np.array(v[f"sel_{kind}"])[:rows]
    assert np.array_equal(chosen(selected, ready[:rows], 40), want)


@pytest.mark.parametrize("n", [1, 9])
def test_ties_go_to_the_lowest_entry(n):
    q, keys = -mx.ones((n, 2, 4)), mx.ones((12, 4))  # every product is below 0: all scores tie
    selected = index_select_reference(q, mx.ones((n, 2)), keys, [11] * n, 3)
    assert np.array_equal(np.array(selected[0]), [0, 1, 2])


@pytest.mark.parametrize("n", [1, 9])
def test_an_entry_that_is_not_ready_is_never_chosen_before_one_with_a_negative_score(n):
    keys = mx.concatenate([mx.ones((5, 4)), 100 * mx.ones((3, 4))])
    selected = index_select_reference(mx.ones((n, 1, 4)), -mx.ones((n, 1)), keys, [5] * n, 4)
    assert np.array(selected[0]).max() < 5


def test_rows_of_a_block_equal_rows_alone():
    mx.random.seed(14)
    q, w, keys = mx.random.normal((8, 4, 32)), mx.random.normal((8, 4)), mx.random.normal((50, 32))
    ready = [6, 7, 8, 9, 20, 33, 49, 50]
    block = index_select_reference(q, w, keys, ready, 8)
    for i, n in enumerate(ready):
        (alone,) = index_select_reference(q[i : i + 1], w[i : i + 1], keys[:n], [n], 8)
        assert (alone is None) == (block[i] is None) == (n <= 8)
        if alone is not None:
            assert_same(block[i], alone)


def test_large_blocks_are_scored_in_bounded_pieces(monkeypatch):
    import sys

    mx.random.seed(15)
    q, w, keys = mx.random.normal((9, 4, 32)), mx.random.normal((9, 4)), mx.random.normal((50, 32))
    ready = list(range(42, 51))
    whole = index_select_reference(q, w, keys, ready, 8)
    monkeypatch.setattr(sys.modules["ds4mlx.ops.index_select"], "PRODUCTS", 2 * 4 * 50)
    assert_same(index_select_reference(q, w, keys, ready, 8), whole)


def test_the_kernel_chooses_as_the_reference_does_for_rows_that_are_ready(monkeypatch):
    monkeypatch.setattr(sys.modules["ds4mlx.ops.index_select"], "PRODUCTS", 5 * 3 * 70)
    mx.random.seed(3)
    q, w = mx.random.normal((13, 3, 32)), mx.random.normal((13, 3))
    keys, ready = mx.random.normal((70, 32)), [0, 3, 16, 17, *range(30, 70, 5), 70]
    want = index_select_reference(q, w, keys, ready, 16)
    with executed("guard"):
        got = index_select(q, w, keys, ready, 16)
    for i, n in enumerate(ready):  # what is not ready is masked
        assert_same(got[i][: min(n, 16)], want[i][: min(n, 16)])
        assert (np.array(got[i][min(n, 16) :]) >= n).all()


def test_cuda_scores_twice_as_many_at_a_time():
    assert scored("cuda") == 2 * scored("metal") == 2 * scored(None)
