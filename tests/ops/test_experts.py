import sys
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops import metal
from ds4mlx.ops.columns import Columns
from ds4mlx.ops.experts import Shared, experts, experts_reference, routed
from ds4mlx.ops.linear import Gated, beside
from ds4mlx.ops.mlp import mlp_reference
from ds4mlx.ops.route import Choice, chosen_by
from tests.close import assert_close, assert_rows_alone, assert_same
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.metal.lint import generated, lint
from tests.ops.matrices import TYPES, exact, matrix

KINDS = [
    ("IQ2_XXS", "Q2_K"),
    ("Q4_K", "Q4_K"),
    ("MXFP4", "MXFP4"),
    ("Q8_0", "Q8_0"),
    ("BF16", "F32"),
]
E, F, D, K, LIMIT = 5, 256, 512, 3, 2.0


def make(up, down, rows):
    w1, w3, w2 = matrix(up, E, F, D), matrix(up, E, F, D, seed=1), matrix(down, E, D, F)
    rng = np.random.default_rng(rows)
    mx.random.seed(rows)
    x = mx.random.normal((rows, D)) / 8
    ids = np.stack([rng.permutation(E)[:K] for _ in range(rows)])
    return x, mx.array(ids, mx.uint32), mx.random.uniform(shape=(rows, K)), w1, w3, w2


def shared(type, F, D):
    """Of x: what every row meets, with random weights of that type; h stands among columns."""
    shapes = ((F, D), (F, D), (D, F))
    w1, w3, w2 = (matrix(type, *shape, seed=2 + i) for i, shape in enumerate(shapes))
    before = matrix("F16", 4, D)
    return lambda x: Shared(beside(x, [before, Gated(w1, w3, LIMIT)])[1], w2)


def block(up, down, E, F, D, K, type=None):
    """experts(...) with random weights, a shared one of that type, and 8 rows for it."""
    w = [matrix(up, E, F, D), matrix(up, E, F, D, seed=1), matrix(down, E, D, F)]
    rng = np.random.default_rng(E)
    mx.random.seed(E)
    ids = mx.array(np.stack([rng.permutation(E)[:K] for _ in range(8)]), mx.uint32)
    x, weights = mx.random.normal((8, D)) / 8, mx.random.uniform(shape=(8, K))
    met = shared(type, F, D) if type else lambda x: None
    op = lambda x, ids, weights: experts(x, ids, weights, *w, LIMIT, met(x))  # noqa: E731
    return op, [x, ids, weights]


def routing(E, K, listed):
    """routed(...) of random logits, and 8 rows for it: a row alone chooses within the launch."""
    within, _, (x, logits, chosen) = choosing(E, K, listed)
    logits[1, 0] = 0.0
    return within, [x, logits, chosen]


CASES = {  # atol: about 1e-5 of the greatest element
    "odd": Case(lambda: block("MXFP4", "MXFP4", 5, 32, 96, 3), "check", atol=1e-3),
    "one expert": Case(lambda: block("Q4_K", "Q4_K", 1, 256, 256, 1), "check", atol=1e-2),
    "q8": Case(lambda: block("Q8_0", "Q8_0", 4, 32, 32, 2), "check", atol=1e-3),
    "shared": Case(lambda: block("IQ2_XXS", "Q2_K", 3, 256, 256, 2, "Q8_0"), "check", atol=1e-3),
    "shared, two simdgroups": Case(
        lambda: block("MXFP4", "Q8_0", 2, 64, 1056, 1, "Q8_0"), "check", atol=1e-3
    ),
    "shared, three simdgroups": Case(
        lambda: block("Q8_0", "MXFP4", 2, 96, 2080, 2, "BF16"), "guard", atol=1e-2
    ),
    # Sums of a shared tile, of four sets, take more memory than those of the experts.
    "shared, flash": Case(
        lambda: block("MXFP4", "MXFP4", 2, 32, 4096, 1, "Q8_0"), "guard", atol=1e-3
    ),
    "two blocks": Case(lambda: block("MXFP4", "Q8_0", 1, 1056, 64, 1, "F16"), "guard", atol=1e-3),
    "embedded": Case(lambda: block("MXFP4", "MXFP4", 8, 256, 256, 2), "guard", atol=1e-3),
    "routed": Case(lambda: routing(256, 6, False), "check", atol=1e-4),
    "routed, listed": Case(lambda: routing(37, 3, True), "check", atol=1e-4),
    # Flash's k of 6 and parts of its matrices, for whole ones are slow on a CPU
    "flash": Case(lambda: block("MXFP4", "MXFP4", 8, 128, 512, 6), "guard", atol=1e-2),
    "flash iq2": Case(lambda: block("IQ2_XXS", "Q2_K", 8, 256, 256, 6), "guard", atol=1e-2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


def test_kernels_match_reference_at_the_whole_shape_of_flash():
    op, arrays = block("MXFP4", "MXFP4", 6, 2048, 4096, 6, "Q8_0")
    row = [a[:1] for a in arrays]
    want = np.array(op(*row))
    with executed("guard"):
        got = op(*row)
    assert_close(got, want, atol=1e-5 * np.abs(want).max())


def choosing(E, K, listed, rows=8):
    """routed(...), and the same in a launch more, of random logits; then these."""
    w = [matrix("MXFP4", E, 32, 64), matrix("MXFP4", E, 32, 64, seed=1), matrix("Q8_0", E, 64, 32)]
    mx.random.seed(E)
    logits, bias = mx.random.normal((rows, E)), mx.random.normal((E,))
    logits[1, 0], logits[2], bias[E // 2] = mx.nan, 0.25, bias[0]
    chosen = mx.random.randint(0, E, (rows, K)).astype(mx.uint32)
    met = shared("Q8_0", 32, 64)

    def choice(logits, chosen):
        how = {"chosen": chosen} if listed else {"bias": bias}
        others = [mx.zeros((logits.shape[0], n)) for n in (4, -E % 4)]
        logits = Columns(mx.concatenate([others[0], logits, others[1]], axis=1), 4, E)
        return Choice(logits, k=K, scale=1.5, **how)

    def within(x, logits, chosen):
        return routed(x, choice(logits, chosen), *w, LIMIT, shared=met(x))

    def before(x, logits, chosen):
        return experts(x, *chosen_by(choice(logits, chosen)), *w, LIMIT, met(x))

    return within, before, [mx.random.normal((rows, 64)) / 8, logits, chosen]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("E, K", [(1, 1), (5, 5), (37, 3), (256, 6)])
def test_experts_chosen_within_the_launch_are_those_of_the_router(E, K, listed):
    within, before, arrays = choosing(E, K, listed)
    with executed("check"):
        want = np.array(before(*arrays))
        for n in (1, 2):
            parts = [within(*(a[i : i + n] for a in arrays)) for i in range(0, 8, n)]
            assert np.array_equal(mx.concatenate(parts), want, equal_nan=True)
    assert np.isfinite(np.delete(want, 1, axis=0)).all()


def test_of_equal_experts_the_lowest_are_chosen_within_the_launch():
    within, before, (x, logits, chosen) = choosing(96, 3, False)
    arrays = x[:2], mx.full((2, 96), mx.nan), chosen[:2]  # all keys are minus infinity
    names, outputs = [], []
    with executed("check"), pytest.MonkeyPatch.context() as patch:
        launch = metal.launch
        keep = lambda k, *a: outputs.append(launch(k, *a)) or names.append(k.name) or outputs[-1]  # noqa: E731
        patch.setattr(metal, "launch", keep)
        within(*arrays)
    assert names == ["linear", "experts", "experts_down"]  # the first: what is shared
    assert np.array_equal(outputs[1][-1], [[0, 1, 2]] * 2)


def test_two_rows_choose_within_the_launch_and_three_before_it():
    names = []
    with executed(), pytest.MonkeyPatch.context() as patch:  # undone before the executor is left
        launch = metal.launch
        patch.setattr(metal, "launch", lambda k, *a: names.append(k.name) or launch(k, *a))
        for rows in (2, 3):
            within, _, arrays = choosing(5, 2, False, rows)
            within(*arrays)
    assert names[:3] == ["linear", "experts", "experts_down"]
    assert names[3:] == ["linear", "route", "experts", "experts_down"]


def test_kernel_takes_an_expert_twice_in_a_row():
    op, (x, _, weights) = block("MXFP4", "MXFP4", 4, 32, 32, 3)
    ids = mx.array([[2, 1, 2], [1, 1, 1], [2, 0, 1]] + [[3, 2, 2]] * 5, mx.uint32)
    want = np.array(op(x, ids, weights))
    with executed("check"):
        assert_close(op(x, ids, weights), want, atol=1e-5 * np.abs(want).max())
        assert_rows_alone(op, x, ids, weights)


def test_kernel_hides_no_nan():
    op, (x, *rest) = block("Q8_0", "Q8_0", 4, 32, 32, 2)
    x[1, 5] = float("nan")
    with executed("check"):
        out = np.array(op(x, *rest))
    assert np.isnan(out).all(axis=1).tolist() == [False, True] + 6 * [False]
    assert not np.isnan(out[[0, 2, 3, 4, 5, 6, 7]]).any()


@pytest.mark.parametrize(
    "types, last, launched",
    [
        (("IQ2_XXS", "IQ2_XXS", "Q2_K"), "Q8_0", ["experts", "experts_down"]),
        (("MXFP4", "MXFP4", "BF16"), None, ["experts", "experts_down"]),
        (("Q8_0", "MXFP4", "Q8_0"), None, []),
        (("Q8_0", "MXFP4", "Q8_0"), "Q8_0", ["linear"]),
        (("Q8_0",) * 3, "IQ2_XXS", ["experts", "linear", "experts_down"]),
    ],
)
def test_types_choose_kernels_or_the_reference(types, last, launched):
    """last: of the shared w2."""
    w1, w3, w2 = (matrix(t, 2, 256, 256, seed=i) for i, t in enumerate(types))
    shared = last and Shared(mx.ones((1, 256)) / 8, matrix(last, 256, 256, seed=7))
    x, ids, weights = mx.ones((1, 256)), mx.array([[1, 0]], mx.uint32), mx.ones((1, 2))
    names = []
    with executed(), pytest.MonkeyPatch.context() as patch:  # undone before the executor is left
        launch = metal.launch
        patch.setattr(metal, "launch", lambda k, *a: names.append(k.name) or launch(k, *a))
        out = experts(x, ids, weights, w1, w3, w2, LIMIT, shared)
    want = experts_reference(x, ids, weights, w1, w3, w2, LIMIT, shared)
    assert names == launched
    assert_close(out, want, atol=1e-5 * float(mx.abs(want).max()))


@pytest.mark.parametrize("type", TYPES)
def test_the_address_spaces_of_every_type_hold(type):
    w1, w2 = matrix(type, 2, 256, 256), matrix(type, 256, 256)
    ids, weights = mx.zeros((3, 2), mx.uint32), mx.zeros((3, 2))
    sources = generated(
        lambda x: experts(x, ids, weights, w1, w1, w1, LIMIT, Shared(x, w2)), mx.zeros((3, 256))
    )
    assert len(sources) == 2 + (type == "IQ2_XXS")
    assert [fault for source in sources for fault in lint(source)] == []


def test_a_shared_expert_adds_what_it_gives_alone():
    x, ids, weights, *w = make("MXFP4", "Q8_0", 3)
    w1, w3, last = (matrix("Q8_0", *m.shape[1:], seed=7 + i) for i, m in enumerate(w))
    routed = experts_reference(x, ids, weights, *w, LIMIT)
    want = routed + mlp_reference(x, w1, w3, last, LIMIT)
    (h,) = beside(x, [Gated(w1, w3, LIMIT)])
    assert_same(experts(x, ids, weights, *w, LIMIT, Shared(h, last)), want)


@pytest.mark.parametrize("up, down", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_reference_matches_float64(up, down, rows):
    x, ids, weights, *w = make(up, down, rows)
    W1, W3, W2 = (exact(m) for m in w)
    X, P = np.array(x, dtype=np.float64), np.array(weights, dtype=np.float64)
    want = np.zeros((rows, D))
    for n, chosen in enumerate(np.array(ids)):
        for e, p in zip(chosen, P[n], strict=True):
            gate = np.minimum(W1[e] @ X[n], LIMIT)
            up_ = np.clip(W3[e] @ X[n], -LIMIT, LIMIT)
            want[n] += p * (W2[e] @ (gate / (1 + np.exp(-gate)) * up_))
    got = experts_reference(x, ids, weights, *w, LIMIT)
    assert_close(got, want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("up, down", KINDS)
def test_rows_of_a_block_equal_rows_alone(up, down):
    x, ids, weights, *w = make(up, down, 8)
    assert_rows_alone(
        lambda x, ids, weights: experts_reference(x, ids, weights, *w, LIMIT), x, ids, weights
    )


@pytest.mark.parametrize("rows", [1, 33, 63])
@pytest.mark.parametrize("type", ["MXFP4", "Q8_0", "Q4_K"])
def test_gathered_products_equal_a_dense_loop_at_ragged_sizes(type, rows):
    """MLX's gather_qmm has had silently wrong tails: K = 96 is no multiple of 64, rows are odd."""
    columns = 256 if type == "Q4_K" else 96
    w1, w3 = matrix(type, 8, 64, columns), matrix(type, 8, 64, columns, seed=1)
    w2 = matrix("Q8_0", 8, columns, 64)
    mx.random.seed(13)
    x = mx.random.normal((rows, columns))
    ids = mx.array(np.random.default_rng(2).integers(0, 8, (rows, 1)), mx.uint32)
    ones = mx.ones((rows, 1))
    got = experts_reference(x, ids, ones, w1, w3, w2, 1e9)
    W1, W3, W2 = (exact(m) for m in (w1, w3, w2))
    X = np.array(x, dtype=np.float64)
    for n, e in enumerate(np.array(ids)[:, 0]):
        gate = W1[e] @ X[n]
        want = W2[e] @ (gate / (1 + np.exp(-gate)) * (W3[e] @ X[n]))
        assert_close(got[n], want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("types", [("IQ2_XXS", "Q2_K"), ("MXFP4", "MXFP4"), ("F32", "F32")])
def test_many_rows_are_sorted_by_expert_and_come_back_in_order(types, monkeypatch):
    a, b = types
    w1, w3, w2 = matrix(a, 5, 256, 256), matrix(a, 5, 256, 256), matrix(b, 5, 256, 256)
    monkeypatch.setattr(sys.modules["ds4mlx.ops.experts"], "SORTED", 9)
    monkeypatch.setattr(sys.modules["ds4mlx.ops.experts"], "TILE", 100 * 5 * 256)
    mx.random.seed(4)
    x = mx.random.normal((13, 256)) / 64
    ids = ((mx.random.randint(0, 3, (13, 1)) + mx.array([[0, 2]])) % 5).astype(mx.uint32)
    weights = mx.random.uniform(shape=(13, 2))
    want = np.array(experts_reference(x, ids, weights, w1, w3, w2, LIMIT))
    with executed("guard"):
        got = experts(x, ids, weights, w1, w3, w2, LIMIT)
    assert_close(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("type", ["IQ2_XXS", "MXFP4"])
def test_many_rows_go_through_the_kernels_in_blocks(type):
    w = [matrix(type, 4, 64, 256), matrix(type, 4, 64, 256), matrix("Q8_0", 4, 256, 64)]
    met = shared("Q8_0", 64, 256)
    mx.random.seed(6)
    x, weights = mx.random.normal((19, 256)) / 16, mx.random.uniform(shape=(19, 2))
    ids = mx.concatenate([mx.arange(19)[:, None] % 4, (mx.arange(19)[:, None] + 3) % 4], axis=1)
    ids = ids.astype(mx.uint32)
    want = np.array(experts_reference(x, ids, weights, *w, LIMIT, met(x)))
    with executed():
        got = experts(x, ids, weights, *w, LIMIT, met(x))
        routed = experts(x, ids, weights, *w, LIMIT)
        for i in (0, 7, 8, 18):
            alone = experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], *w, LIMIT)
            assert_same(routed[i : i + 1], alone)
    assert_close(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("rows", [2, 3])
def test_a_shared_expert_may_be_of_another_width_and_adds_no_launch(rows):
    w = [matrix("MXFP4", 3, 64, 256), matrix("MXFP4", 3, 64, 256), matrix("MXFP4", 3, 256, 64)]
    mx.random.seed(5)
    x, weights = mx.random.normal((rows, 256)) / 16, mx.random.uniform(shape=(rows, 2))
    ids = mx.array([[0, 1], [2, 0], [1, 2]], mx.uint32)[:rows]
    met = Shared(mx.random.normal((rows, 128)), matrix("Q8_0", 256, 128))
    want, names = np.array(experts_reference(x, ids, weights, *w, LIMIT, met)), Counter()
    with executed("check"):
        got = experts(x, ids, weights, *w, LIMIT, met)
    assert_close(got, want, atol=1e-5 * np.abs(want).max())
    with metal.traced(names):
        experts(x, ids, weights, *w, LIMIT, met)
    assert names == Counter(["experts", "experts_down"])


def test_a_shared_expert_that_does_not_fit_the_others_is_refused():
    w = [matrix("MXFP4", 3, 64, 256), matrix("MXFP4", 3, 64, 256), matrix("MXFP4", 3, 256, 64)]
    x, ids, weights = mx.zeros((2, 256)), mx.zeros((2, 1), mx.uint32), mx.ones((2, 1))
    columns = Columns(mx.zeros((2, 192)), 0, 64)
    with executed("check"):
        for h, M in ((mx.zeros((2, 64)), 256), (columns, 256), (mx.zeros((2, 128)), 512)):
            with pytest.raises(AssertionError):
                experts(x, ids, weights, *w, LIMIT, Shared(h, matrix("Q8_0", M, 128)))


@pytest.mark.parametrize("backend, name", [("cuda", "experts_grouped"), ("metal", "_sorted")])
def test_the_backend_chooses_the_products_of_many_rows(backend, name, monkeypatch):
    module = sys.modules["ds4mlx.ops.experts"]
    w = [matrix("Q8_0", 4, 64, 64)] * 3
    x, ids, weights = mx.zeros((9, 64)), mx.zeros((9, 2), mx.uint32), mx.zeros((9, 2))
    monkeypatch.setattr(module, "SORTED", 9)
    monkeypatch.setattr(metal, "backend", lambda: backend)
    called = []
    for other in ("experts_grouped", "_sorted"):
        monkeypatch.setattr(module, other, lambda *_, other=other: called.append(other) or x)
    experts(x, ids, weights, *w, LIMIT)
    assert called == [name]
