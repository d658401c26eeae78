import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.route import route, route_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.ops.matrices import matrix


def make(E, D, k):
    mx.random.seed(13)
    gate, bias = mx.random.normal((E, D)) * D**-0.5, mx.random.normal((E,))
    return lambda x: route(x, gate, k=k, scale=1.5, bias=bias), [mx.random.normal((8, D))]


def make_hash(E, D, k):
    mx.random.seed(14)
    gate, chosen = mx.random.normal((E, D)) * 4 * D**-0.5, mx.random.randint(0, E, (8, k))
    return (
        lambda x, chosen: route(x, gate, k=k, scale=1.5, chosen=chosen),
        [mx.random.normal((8, D)), chosen.astype(mx.uint32)],
    )


CASES = {
    "one expert": Case(lambda: make(1, 8, 1), "check", atol=2e-6),
    "odd": Case(lambda: make(37, 65, 5), "check", atol=2e-6),
    "odd hash": Case(lambda: make_hash(37, 65, 5), "check", atol=2e-6),
    "flash": Case(lambda: make(256, 4096, 6), "guard", atol=2e-6),
    "flash hash": Case(lambda: make_hash(256, 4096, 6), "guard", atol=2e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_kernel_ties_go_to_the_lowest_expert_and_no_place_stays_empty_for_nan():
    gate, bias = mx.zeros((6, 8)), mx.array([0.0, 1.0, 0.0, 1.0, mx.nan, mx.nan])
    with executed("check"):
        ids, _ = route(mx.ones((2, 8)), gate, k=6, scale=1.5, bias=bias)
    assert np.array_equal(np.array(ids), [[1, 3, 0, 2, 4, 5]] * 2)


def test_kernel_keeps_the_score_of_a_very_negative_logit():
    gate, x = mx.array([[-40.0], [-60.0], [40.0]]), mx.ones((1, 1))
    chosen = mx.array([[0, 1]], mx.uint32)
    with executed("check"):
        _, weights = route(x, gate, k=2, scale=1.0, chosen=chosen)
    score = np.exp([-20.0, -30.0])
    assert_close(weights[0], score / score.sum(), atol=0, rtol=1e-5)


def scattered(ids, weights, experts):
    """Weights at their expert's place, [N, E]."""
    return mx.put_along_axis(mx.zeros((ids.shape[0], experts)), ids, weights, axis=-1)


def test_reference_matches_golden_vectors():
    v = {k.removeprefix("router."): a for k, a in op_vectors().items() if "router" in k}
    k = int((np.array(v["dense_w"][0]) > 0).sum())
    ids, weights = route_reference(v["x"], v["gate"], k=k, scale=1.5, bias=v["bias"])
    assert_close(scattered(ids, weights, 16), v["dense_w"], atol=2e-6)


def test_a_hash_layer_takes_the_table_and_weighs_by_score():
    v = {k.removeprefix("router."): a for k, a in op_vectors().items() if "router" in k}
    chosen = v["tid2eid"][v["ids"]]
    ids, weights = route_reference(v["x"], v["gate"], k=6, scale=1.5, chosen=chosen)
    assert np.array_equal(np.array(ids), np.array(v["hash_ix"]))
    assert_close(weights, v["hash_w"], atol=2e-6)


def test_ties_go_to_the_lowest_expert():
    gate, bias = mx.zeros((6, 8)), mx.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    for n in (1, 9):
        ids, weights = route_reference(mx.ones((n, 8)), gate, k=4, scale=1.5, bias=bias)
        assert np.array_equal(np.array(ids), [[1, 3, 0, 2]] * n)
        assert_close(weights, np.full((n, 4), 1.5 / 4), atol=1e-6)


def test_rows_of_a_block_equal_rows_alone():
    gate, bias = matrix("F16", 31, 512), mx.random.normal((31,))
    mx.random.seed(12)
    assert_rows_alone(
        lambda x: route_reference(x, gate, k=6, scale=1.5, bias=bias), mx.random.normal((8, 512))
    )
