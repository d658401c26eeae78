import sys

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops import metal
from ds4mlx.ops.experts import experts_reference
from ds4mlx.ops.experts_grouped import GROUP, experts_grouped, groups, held, places
from tests.close import assert_close
from tests.metal.bench import executed
from tests.metal.lint import generated, lint
from tests.ops.matrices import matrix

LIMIT = 2.0
ROUTINGS = {  # ids [N, K] of E experts, from N
    "spread": lambda n, E: (np.arange(n)[:, None] * 2 + [0, 1]) % E,
    "one busy": lambda n, E: np.array([[1, 3]] * n),
    "last only": lambda n, E: np.array([[E - 1, E - 2]] * n),
    "twice": lambda n, E: np.array([[2, 2]] * n),
}


def routing(name: str, n: int, E: int = 5) -> mx.array:
    return mx.array(ROUTINGS[name](n, E).astype(np.uint32))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("n", [1, 64, 65, 130, 200])
def test_every_place_has_a_slot_in_a_group_of_its_expert(name, n):
    ids, E = routing(name, n), 5
    experts, source, slots = (np.array(a) for a in places(ids, E))
    assert len(experts) == groups(E, 2 * n) and len(source) == GROUP * len(experts)
    flat = np.array(ids).flatten()
    assert (source[slots.flatten()] == np.arange(2 * n)).all()
    assert (experts[slots.flatten() // GROUP] == flat).all()
    assert np.count_nonzero(source != 0xFFFFFFFF) == 2 * n
    used = [-(-np.count_nonzero(flat == e) // GROUP) for e in range(E)]
    assert (np.bincount(experts, minlength=E + 1)[:E] == used).all()
    assert (np.diff(experts.astype(int)) >= 0).all()


@pytest.mark.parametrize("E, places", [(1, 1), (5, 3), (5, 1000), (256, 24576)])
def test_there_are_as_many_groups_as_the_worst_routing_needs(E, places):
    met = min(E, places)  # one row more than whole groups makes the most partial ones
    whole = (places - met) // GROUP
    assert groups(E, places) == whole + met


@pytest.mark.parametrize("types", [("IQ2_XXS", "Q2_K"), ("MXFP4", "MXFP4"), ("F16", "F32")])
@pytest.mark.parametrize("name", ["spread", "one busy"])
def test_kernels_match_the_reference(types, name, monkeypatch):
    a, b = types
    w1, w3, w2 = matrix(a, 5, 256, 256), matrix(a, 5, 256, 256, seed=1), matrix(b, 5, 256, 256)
    module = sys.modules["ds4mlx.ops.experts_grouped"]
    monkeypatch.setattr(module, "PIECE", 2 * 256 * 256)  # the last piece is smaller
    mx.random.seed(4)
    n = 141
    ids, x = routing(name, n), mx.random.normal((n, 256)) / 64
    weights = mx.random.uniform(shape=(n, 2))
    want = np.array(experts_reference(x, ids, weights, w1, w3, w2, LIMIT))
    with executed("guard"):
        got = experts_grouped(x, ids, weights, w1, w3, w2, LIMIT)
    assert_close(got, want, atol=1e-5 * np.abs(want).max())


def test_kernels_hide_no_nan():
    w = [matrix("Q8_0", 3, 96, 32), matrix("Q8_0", 3, 96, 32, seed=1), matrix("Q8_0", 3, 32, 96)]
    mx.random.seed(2)
    x, weights = mx.random.normal((9, 32)) / 8, mx.ones((9, 2))
    x[1, 5] = mx.nan
    with executed("check"):
        got = np.array(experts_grouped(x, routing("spread", 9, 3), weights, *w, LIMIT))
    assert np.isnan(got[1]).all() and np.isfinite(np.delete(got, 1, axis=0)).all()


def test_kernels_read_and_write_nothing_else_at_an_odd_shape():
    w = [matrix("Q8_0", 3, 96, 32), matrix("Q8_0", 3, 96, 32, seed=1), matrix("Q8_0", 3, 32, 96)]
    mx.random.seed(2)
    x, weights = mx.random.normal((9, 32)) / 8, mx.random.uniform(shape=(9, 2))
    ids = routing("spread", 9, 3)
    want = np.array(experts_reference(x, ids, weights, *w, LIMIT))
    with executed("check"):
        got = experts_grouped(x, ids, weights, *w, LIMIT)
    assert_close(got, want, atol=1e-5 * np.abs(want).max())


def test_each_piece_is_paced(monkeypatch):
    w = [matrix("Q8_0", 4, 32, 64), matrix("Q8_0", 4, 32, 64), matrix("Q8_0", 4, 64, 32)]
    monkeypatch.setattr(sys.modules["ds4mlx.ops.experts_grouped"], "PIECE", 3 * 32 * 64)
    seen = []
    with executed("guard"):
        experts_grouped(
            mx.ones((10, 64)),
            routing("spread", 10, 4),
            mx.ones((10, 2)),
            *w,
            LIMIT,
            lambda y, within: seen.append((y.shape, within)),
        )
    assert seen == [((3, GROUP, 64), True), ((1, GROUP, 64), True)]


@pytest.mark.parametrize("type", ["IQ2_XXS", "BF16"])
def test_the_address_spaces_hold(type):
    w = matrix(type, 2, 256, 256)
    ids, weights = mx.zeros((9, 2), mx.uint32), mx.zeros((9, 2))
    sources = generated(
        lambda x: experts_grouped(x, ids, weights, w, w, w, LIMIT), mx.zeros((9, 256))
    )
    assert len(sources) == 6
    assert [fault for source in sources for fault in lint(source)] == []


def test_what_is_held_is_what_the_launches_and_the_products_make(monkeypatch):
    E, F, D, n = 4, 32, 64, 10
    w = [matrix("Q8_0", E, F, D), matrix("Q8_0", E, F, D), matrix("Q8_0", E, D, F)]
    made = []
    with executed("guard"), pytest.MonkeyPatch.context() as patch:  # undone before it is left
        launch = metal.launch

        def counted(*arguments):
            made.extend(launch(*arguments))
            return made[-1:]

        patch.setattr(metal, "launch", counted)
        experts_grouped(
            mx.ones((n, D)),
            routing("spread", n, E),
            mx.ones((n, 2)),
            *w,
            LIMIT,
            lambda *_, within: 0,
        )
    B = groups(E, 2 * n)
    products = B * GROUP * (2 * F + 2 * D)  # gate, up, and y twice: in pieces and as one
    launched = sum(a.size for a in made[:-1])  # the last is the result
    assert held(E, F, D, 2 * n) == launched + products
    monkeypatch.setattr(sys.modules["ds4mlx.ops.experts_grouped"], "PIECE", F * D)
    assert held(E, F, D, 2 * n, paced=False) == launched + products
    assert held(E, F, D, 2 * n) < launched + products
