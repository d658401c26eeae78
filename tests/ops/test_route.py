import mlx.core as mx
import numpy as np

from ds4mlx.ops.route import route_reference
from tests.close import assert_close, assert_rows_alone
from tests.golden_data import op_vectors
from tests.ops.matrices import matrix


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
