"""The arithmetic of ds4_answers.py: what two lists agree in, and rounding to 8 bits."""

from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.mlp import swiglu
from ds4mlx.synthetic import FLASH, random_matrix
from tests.close import assert_close, assert_same
from tests.flash.ds4_answers import (
    Agreement,
    best,
    log_probabilities,
    main,
    nudged,
    round_q8_0,
    round_q8_k,
    rounded,
    show,
    steps,
)


def ours(*values: float) -> np.ndarray:
    return np.array(values)


def test_the_same_list_agrees_wholly():
    values = np.linspace(-1, -3, 20)
    a = Agreement.of(dict(enumerate(values)), values)
    assert (a.correlation, a.overlap, a.mean, a.most, a.rank) == (pytest.approx(1), 10, 0, 0, 1)


def test_a_constant_shift_leaves_correlation_and_shows_as_difference():
    values = np.linspace(-1, -3, 20)
    a = Agreement.of(dict(enumerate(values)), values - 0.5)
    assert a.correlation == pytest.approx(1)
    assert (a.mean, a.most) == (pytest.approx(0.5), pytest.approx(0.5))


def test_tokens_beyond_the_others_list_count_in_overlap_and_rank():
    theirs = {token: -1.0 - 0.1 * token for token in range(12)}
    mine = np.full(30, -9.0)
    mine[:12] = -2.0 + 0.1 * np.arange(12)  # its order turned round
    mine[20:23] = -0.5  # the best of ours are not among its best
    a = Agreement.of(theirs, mine)
    assert a.correlation == pytest.approx(-1)
    assert a.overlap == 5  # of its 0 to 9 our best have 5 to 9, beside 10, 11 and 20 to 22
    assert a.rank == 15
    assert a.most == pytest.approx(1.2)  # of token 11: -2.1 and -0.9


def test_log_probabilities_are_those_of_a_softmax():
    logits = mx.array([[1.0, 2.0, 3.0], [1000.0, 0.0, -1000.0]])
    want = np.log([[0.09003057317038046, 0.24472847105479767, 0.6652409557748219]])
    got = log_probabilities(logits)
    assert got[0] == pytest.approx(want[0]) and got[1] == pytest.approx([0, -1000, -2000])


def test_the_recorded_steps_are_read_best_first():
    count, tops = steps()
    assert count == 16 and [len(top) for top in tops] == [64] * 6
    assert [next(iter(top)) for top in tops] == [67740, 91060, 3521, 108060, 57694, 125791]
    assert all([*top.values()] == sorted(top.values(), reverse=True) for top in tops)


def test_the_best_come_first():
    assert best(np.array([-3.0, -1.0, -2.0, -4.0]), 3) == {1: -1.0, 2: -2.0, 0: -3.0}


def test_nudged_embeddings_are_off_by_a_millionth_until_the_end():
    w, ids = mx.random.normal((64, 64)), mx.array([1, 5], mx.int32)
    plain = ops.embed(ids, w)
    with nudged():
        off = mx.abs(ops.embed(ids, w) / plain - 1)
    assert 0 < off.max().item() < 1e-5 and 1e-7 < off.mean().item() < 2e-6
    assert_same(ops.embed(ids, w), plain)


def test_the_table_ends_with_the_means(capsys):
    theirs = {token: -1.0 - 0.1 * token for token in range(12)}
    mine = ours(*theirs.values())
    show([theirs, theirs], np.stack([mine, mine - 0.5]))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "| all | 1.0000 | 10.0 of 10 | 0.2500 | 0.5000 | 2 of 2 first |"


class Parrot:
    """Stands in for a model: gives ds4's own logits, -20 for what ds4 did not record."""

    tokenizer = property(lambda self: self)

    def __init__(self):
        self.position, self.fed = 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def encode_parts(self, parts):
        assert "".join(parts).endswith("Write a haiku about rivers.<｜Assistant｜></think>")
        return [*range(16)]

    def session(self, ctx):
        return self

    def feed(self, ids, chunk):
        assert len(ids) <= chunk == 8
        logits = np.full((len(ids), 129280), -20, np.float32)
        for row in range(len(ids)):
            if self.position + row >= 15:
                top = steps()[1][self.position + row - 15]
                logits[row, [*top]] = [*top.values()]
        self.position += len(ids)
        self.fed += ids
        return mx.array(logits)


def test_the_command_feeds_the_recorded_tokens_and_compares_with_a_saved_run(capsys, tmp_path):
    saved = str(tmp_path / "one.npy")
    for options in (["--save", saved], ["--rounded", "--nudge", "--against", saved]):
        parrot = Parrot()
        with patch("ds4mlx.load", lambda path, ctx, parrot=parrot: parrot):
            main(["flash.gguf", *options])
        assert parrot.fed == [*range(16), 67740, 91060, 3521, 108060, 57694]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| all")]
    assert len(rows) == 3  # with ds4, with ds4, with the saved run
    assert all(row.startswith("| all | 1.0000 | 10.0 of 10 |") for row in rows)
    assert all(row.endswith("| 6 of 6 first |") for row in rows)


# Rounding ---------------------------------------------------------------------------------------


def test_q8_0_has_a_scale_for_each_32_and_rounds_ties_to_even():
    x = np.zeros((2, 64), np.float32)
    x[0, :5] = [127, 0.5, 1.5, -2.5, 3.4]
    x[0, 32:34] = [-1.27, 0.014]
    want = x.copy()
    want[0, :5] = [127, 0, 2, -2, 3]
    want[0, 33] = 0.01
    assert_close(round_q8_0(mx.array(x)), want, atol=1e-6)


def test_q8_k_has_a_scale_for_each_256_and_the_extreme_becomes_minus_127():
    x = np.zeros((1, 512), np.float32)
    x[0, :4] = [127, 1.5, -126.6, 40.4]  # the scale is negative: 127 is -127 of it
    x[0, 256:259] = [-254, 253.5, 5]  # and 253.5 / 2 is 126.75, 2.5 is a tie
    want = x.copy()
    want[0, :4] = [127, 2, -127, 40]
    want[0, 256:259] = [-254, 254, 4]
    assert_close(round_q8_k(mx.array(x)), want, atol=1e-4)


@pytest.mark.parametrize("rounding", [round_q8_0, round_q8_k])
def test_what_is_rounded_stays_and_the_error_is_half_a_step(rounding):
    x = mx.random.normal((3, 512), key=mx.random.key(2))
    once = rounding(x)
    assert_close(rounding(once), np.array(once), atol=1e-6)
    assert 0 < mx.abs(once - x).max().item() <= mx.abs(x).max().item() / 127 / 2 * 1.001


INPUTS = {"Q8_0": round_q8_0, "Q2_K": round_q8_k, "IQ2_XXS": round_q8_k, "F16": lambda x: x}


@pytest.mark.parametrize("type", INPUTS)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_products_read_their_inputs_rounded_as_the_type_of_the_weights_wants(type, rows):
    w = matrix(type, 64, 256)
    x = mx.random.normal((rows, 2, 256), key=mx.random.key(2))
    plain = ops.linear(x[:, 0], w), ops.grouped_linear(x, w, 2)
    with rounded():
        got = ops.linear(x[:, 0], w), ops.grouped_linear(x, w, 2)
    x = INPUTS[type](x)
    assert_same(got[0], ops.linear(x[:, 0], w))
    assert_same(got[1], ops.grouped_linear(x, w, 2))
    for mine, exact in zip(got, plain, strict=True):
        assert mx.array_equal(mine, exact).item() == (type == "F16")


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_experts_read_their_inputs_and_what_is_between_their_matrices_rounded(rows):
    w1, w3 = (matrix("IQ2_XXS", 4, 256, 512, seed=i) for i in range(2))
    w2 = matrix("Q2_K", 4, 512, 256)
    shared = [
        matrix("Q8_0", *shape, seed=i) for i, shape in enumerate([(64, 512)] * 2 + [(512, 64)])
    ]
    x = mx.random.normal((rows, 512), key=mx.random.key(2))
    ids = mx.array([[i % 4, (i + 1) % 4] for i in range(rows)], mx.uint32)
    weights = mx.array([[0.9, 0.6]] * rows)
    with rounded():
        (h,) = ops.linears(x, [ops.Gated(*shared[:2], 10.0)])
        got = ops.experts(x, ids, weights, w1, w3, w2, 10.0, ops.Shared(h, shared[2]))

    def expert(x, gate, up, down, round, weight=1.0):
        gate, up = (dequantize(w) @ round(x) for w in (gate, up))
        return dequantize(down) @ round(swiglu(gate, up, 10.0) * weight)

    for i in range(rows):
        want = expert(x[i], *shared, round_q8_0)
        for k in range(2):
            e = ids[i, k].item()
            want += expert(x[i], w1[e], w3[e], w2[e], round_q8_k, weights[i, k])
        assert_close(got[i], np.array(want), atol=2e-5)


def matrix(type: str, *shape: int, seed: int = 0):
    return random_matrix(type, shape, FLASH, mx.random.key(sum(shape) + seed))
