import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.sampling import Sampler, filtered
from tests.close import assert_close

P = np.array([[0.4, 0.3, 0.15, 0.1, 0.05]])
LOGITS = mx.array(np.log(P), mx.float32)


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = mx.array([[0.0, 3.0, 1.0, 3.0]])
    assert int(Sampler(0.0, 1.0, 0.0, 1)(logits).item()) == 1


@pytest.mark.parametrize(
    "top_p, min_p, kept",
    [(1.0, 0.0, 5), (0.5, 0.0, 2), (0.7, 0.0, 2), (0.71, 0.0, 3), (1.0, 0.3, 3), (0.0, 0.0, 1)],
)
def test_filters_keep_the_likeliest_and_renormalise(top_p, min_p, kept):
    want = np.where(np.arange(5) < kept, P, 0)
    got = filtered(LOGITS, 1.0, top_p, min_p)
    assert_close(got, want / want.sum(), atol=1e-6)


def test_temperature_divides_the_logits():
    want = P**2 / (P**2).sum()
    assert_close(filtered(LOGITS, 0.5, 1.0, 0.0), want, atol=1e-6)


def test_draws_follow_the_filtered_distribution():
    """Chi-square over 4,000 draws; the 0.1 % point for 2 degrees of freedom is 13.8."""
    sampler = Sampler(1.0, 0.8, 0.0, 5)
    draws = mx.concatenate([sampler(LOGITS) for _ in range(4000)])
    counts = np.bincount(np.array(draws), minlength=5)
    expected = 4000 * np.array(filtered(LOGITS, 1.0, 0.8, 0.0))[0]
    assert counts[3:].sum() == 0
    assert ((counts - expected)[:3] ** 2 / expected[:3]).sum() < 13.8
