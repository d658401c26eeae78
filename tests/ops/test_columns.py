import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.attention import attention
from ds4mlx.ops.columns import Columns, joined, source, whole
from ds4mlx.ops.index_scores import index_scores
from ds4mlx.ops.latents import latents
from ds4mlx.ops.linear import beside, linear
from ds4mlx.ops.rope import rotation
from tests.close import assert_same
from tests.metal.bench import executed
from tests.ops.matrices import matrix
from tests.ops.test_attention import Sequence
from tests.ops.test_latents import csa, odd


def beside_another(*parts: mx.array) -> list[Columns]:
    """The same, as columns of one array that begins with others."""
    mx.random.seed(3)
    of = mx.concatenate([mx.random.normal((parts[0].shape[0], 8)), *parts], axis=1)
    firsts = 8 + np.cumsum([0, *(p.shape[1] for p in parts[:-1])])
    return [Columns(of, int(at), p.shape[1]) for at, p in zip(firsts, parts, strict=True)]


def test_columns_know_their_array_and_their_place():
    of = mx.arange(16.0).reshape(2, 8)
    part = Columns(of, 4, 3)
    assert part.shape == (2, 3) and np.array_equal(whole(part), [[4, 5, 6], [12, 13, 14]])
    assert whole(of) is of and source(of)[0] is of and source(of)[1:] == (0, 8)
    assert source(part)[0] is of and source(part)[1:] == (4, 8)


@pytest.mark.parametrize("first, stride", [(4, 10), (2, 8)])
def test_columns_that_cannot_be_read_in_fours_become_an_array(first, stride):
    part = Columns(mx.arange(2.0 * stride).reshape(2, stride), first, 3)
    array, *place = source(part)
    assert np.array_equal(array, whole(part)) and place == [0, 3]


def test_columns_of_one_array_are_joined_in_place_and_others_in_a_new_one():
    of = mx.arange(12.0).reshape(2, 6)
    array, firsts = joined([Columns(of, 4, 2), Columns(of, 0, 3)])
    assert array is of and firsts == [4, 0]
    array, firsts = joined([Columns(of, 4, 2), mx.zeros((2, 1)), Columns(of, 0, 3)])
    assert np.array_equal(array, [[4, 5, 0, 0, 1, 2], [10, 11, 0, 6, 7, 8]]) and firsts == [0, 2, 3]


@pytest.mark.parametrize("rows", [1, 3])
def test_products_lie_side_by_side(rows):
    ws = [matrix("Q8_0", 24, 256), matrix("F16", 10, 256), matrix("Q4_K", 16, 256)]
    x = mx.random.normal((rows, 256))
    with executed("check"):
        parts = beside(x, ws)
        assert [(p.of is parts[0].of, p.first, p.width) for p in parts] == [
            (True, 0, 24),
            (True, 24, 10),
            (True, 34, 16),
        ]
        for part, w in zip(parts, ws, strict=True):
            assert_same(whole(part), linear(x, w))


def test_linear_reads_columns_in_place():
    w, x = matrix("Q8_0", 24, 256), mx.random.normal((3, 256))
    (part,) = beside_another(x)
    with executed("check"):
        assert_same(linear(part, w), linear(x, w))
        with pytest.raises(AssertionError):
            linear(part._replace(width=128), w)


@pytest.mark.parametrize("make, mode", [(odd, "check"), (csa, "guard")])
def test_latents_reads_columns_in_place(make, mode):
    layer = make()
    ring = layer.ring(6)

    def side_by_side(q, kv, q_norm, kv_norm, turns, pools, *rest, **settings):
        q, kv, *parts = beside_another(q, kv, *(a for p in pools for a in (p.c, p.s)))
        pools = [p._replace(c=parts[2 * i], s=parts[2 * i + 1]) for i, p in enumerate(pools)]
        return latents(q, kv, q_norm, kv_norm, turns, pools, *rest, **settings)

    with executed(mode):
        got, want = (layer.run(op, ring, 6, 3) for op in (side_by_side, latents))
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)


def test_attention_reads_columns_in_place():
    sequence = Sequence(40, 3, 128, 64, 5, extra=4)

    def side_by_side(q, *rest, **settings):
        return attention(*beside_another(q), *rest, **settings)

    with executed("check"):
        got, want = (sequence.run(op, 11, 3) for op in (side_by_side, attention))
    assert_same(got, want)


@pytest.mark.parametrize("Di", [64, 128])
def test_index_scores_reads_columns_in_place(Di):
    mx.random.seed(5)
    q, w, keys = (mx.random.normal(s) for s in ((3, 10 * Di), (3, 10), (40, Di)))
    turn, ready = rotation(mx.arange(3), 0.5 ** mx.arange(16)), mx.array([7, 40, 19])
    with executed("check"):
        q_, w_, _ = beside_another(q, w, mx.zeros((3, 2)))
        got = index_scores(q_, turn, w_, keys, ready, rounded=True)
        want = index_scores(q, turn, w, keys, ready, rounded=True)
    assert_same(got, want)
