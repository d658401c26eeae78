import sys

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.index_best import index_best
from ds4mlx.ops.index_scores import index_scores, index_scores_reference, weigh
from ds4mlx.ops.rope import rotation
from ds4mlx.ops.round_index import round_index
from tests.close import assert_close
from tests.golden_data import op_vectors
from tests.metal.bench import executed
from tests.metal.cases import Case


def make(Hi, Di, R, C, ready, rounded):
    # Rounded queries are small integers in quarter turns: another order of summation moves
    # no value over a step.
    mx.random.seed(17)
    q, w = mx.round(9 * mx.random.normal((8, Hi * Di))), mx.random.normal((8, Hi)) * Hi**-0.5
    quarters = mx.array([1, 1j, -1, -1j])[mx.random.randint(0, 4, (8, R // 2))]
    turn = quarters if rounded else rotation(mx.arange(1000, 1008), 0.5 ** mx.arange(R // 2))
    keys = mx.random.normal((C, Di)) * Di**-0.5

    def op(q, turn, w, ready):
        scores = index_scores(q, turn, w, keys, ready, rounded=rounded)
        return mx.where(scores == -mx.inf, -1e4, scores)

    return op, [q, turn, w, mx.array(list(ready), mx.int32)]


FLASH = (64, 128, 64, 300, [300, 0, 1, 64, 65, 200, 299, 300])
ODD = (9, 64, 6, 131, [131, 0, 1, 63, 64, 65, 128, 130])
CASES = {
    "one head": Case(lambda: make(1, 64, 2, 9, range(1, 9), False), "check", atol=2e-5),
    "odd": Case(lambda: make(*ODD, True), "check", atol=1e-4),
    "flash": Case(lambda: make(*FLASH, False), "guard", atol=4e-4),
    "flash rounded": Case(lambda: make(*FLASH, True), "guard", atol=4e-4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_a_threadgroup_walks_over_several_stretches(monkeypatch):
    monkeypatch.setattr(sys.modules["ds4mlx.ops.index_scores"], "_SHARES", 16)
    entries = [500, 0, 64, 65, 192, 193, 320, 499]
    Case(lambda: make(3, 64, 2, 500, entries, True), "check", atol=1e-4).verify()


def golden(kind):
    """The recorded vectors of the indexer, and of them what `index_scores` takes."""
    v = {k.removeprefix("indexer."): a for k, a in op_vectors().items() if "indexer" in k}
    w = v["wt"] * (128**-0.5 * 12**-0.5)
    keys = round_index(v["k"]) if kind == "sim" else v["k"]
    still = mx.ones((v["q"].shape[0], 32), mx.complex64)  # the vectors are turned already
    q = v["q"].flatten(1)
    return v, (q, still, w, keys, v["ready"].astype(mx.int32))


@pytest.mark.parametrize("kind", ["exact", "sim"])
def test_reference_matches_golden_vectors(kind):
    v, arrays = golden(kind)
    got = index_scores_reference(*arrays, rounded=kind == "sim")
    seen = np.arange(40)[None] < np.array(v["ready"])[:, None]
    scores = np.where(seen, np.array(v[f"score_{kind}"]), 0)
    assert_close(mx.where(mx.array(seen), got, 0.0), scores, atol=2e-5)


@pytest.mark.parametrize("kind", ["exact", "sim"])
def test_kernels_choose_the_golden_entries(kind):
    v, (q, turn, w, keys, ready) = golden(kind)
    N = q.shape[0]
    q, turn, w, ready = (a[N - 8 :] for a in (q, turn, w, ready))
    with executed("check"):
        scores = index_scores(q, turn, w, keys, ready, rounded=kind == "sim")
        chosen = np.array(index_best(scores, ready, 8))
    want = np.array(v[f"sel_{kind}"])[N - 8 :]
    got = np.zeros_like(want)
    for row, ids in zip(got, chosen, strict=True):
        row[ids[ids < 40]] = 1
    assert np.array_equal(got, want)


def test_a_head_adds_nothing_where_its_product_is_negative():
    q, keys = mx.array([[[1.0, 0.0], [0.0, 1.0]]]), mx.array([[2.0, 3.0], [-2.0, 3.0]])
    assert_close(weigh(q, mx.array([[1.0, -1.0]]), keys), [[-1.0, -3.0]], atol=0)
