import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.markov import markov, markov_reference
from tests.close import assert_close
from tests.metal.bench import executed
from tests.metal.cases import Case
from tests.ops.matrices import matrix


def table(type, V, R, seed):
    w = matrix(type, V, R, seed=seed)
    dtype = {"F16": mx.float16, "BF16": mx.bfloat16}.get(type)
    return w.astype(dtype) if dtype else w  # not widened, as on a GPU


def make(type1, type2, V, R):
    """Eight blocks of one row each: rows of one block depend on those before."""
    w1, w2 = table(type1, V, R, 0), table(type2, V, R, 1)
    mx.random.seed(22)
    u, anchors = 3 * mx.random.normal((8, V)), mx.random.randint(0, V, (8,))

    def op(u, anchors):
        parts = [markov(u[i : i + 1], anchors[i : i + 1], w1, w2) for i in range(u.shape[0])]
        return tuple(mx.concatenate(p) for p in zip(*parts, strict=True))

    return op, [u, anchors]


CASES = {
    "f32-q8_0": Case(lambda: make("F32", "Q8_0", 65, 32), "check", atol=1e-4),
    "q8_0-bf16": Case(lambda: make("Q8_0", "BF16", 300, 288), "check", atol=1e-4),
    "f16-f16": Case(lambda: make("F16", "F16", 5000, 256), "guard", atol=1e-4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


# 66000 logits are found by more threadgroups than a threadgroup has threads.
@pytest.mark.parametrize(
    "type, V, R, mode", [("F16", 261, 256, "check"), ("Q8_0", 66000, 32, "guard")]
)
def test_kernels_draft_the_block_of_the_reference(type, V, R, mode):
    w1, w2 = table(type, V, R, 0), table(type, V, R, 1)
    u, anchor = mx.random.normal((5, V)), mx.array([V - 1], mx.int32)
    want = markov_reference(u, anchor, w1, w2)
    with executed(mode):
        tokens, logits, e = markov(u, anchor, w1, w2)
    assert np.array_equal(np.array(tokens), np.array(want[0]))
    assert_close(logits, np.array(want[1]), atol=1e-4)
    assert_close(e, np.array(want[2]), atol=0)


def test_kernel_gives_the_lowest_of_equal_tokens_and_takes_no_nan():
    zero, u = mx.zeros((300, 32)), np.zeros((3, 300), np.float32)
    u[0, [290, 41, 295]], u[1, [7, 299]] = 1, np.nan
    with executed("check"):
        tokens, *_ = markov(mx.array(u), mx.array([2], mx.int32), zero, zero)
    assert np.array_equal(np.array(tokens), [41, 0, 0])


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
