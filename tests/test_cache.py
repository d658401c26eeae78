import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.cache import Ring
from ds4mlx.errors import UsageError
from tests.close import assert_same


@pytest.mark.parametrize("step", [1, 3, 8, 13, 40])
def test_a_ring_holds_the_newest_rows_at_any_step(step):
    ring, rows = Ring(13, 2), mx.random.normal((40, 2))
    for at in range(0, 40, step):
        ring.write(at, rows[at : at + step])
        end = min(at + step, 40)
        for start in range(max(0, end - 13), end):
            assert_same(ring.read(start, end), rows[start:end])


def test_what_a_ring_would_hold_leaves_it_as_it_is():
    ring, rows = Ring(5, 2), mx.random.normal((9, 2))
    ring.write(0, rows[:6])
    before = mx.array(np.array(ring.rows))
    held = ring.written(6, rows[6:])
    assert_same(ring.rows, before)
    assert_same(ring.holding(held).read(4, 9), rows[4:])


def test_rewinding_twice_never_goes_beyond_the_spare_rows():
    from ds4mlx.cache import Cache
    from tests.golden_data import target

    cache = Cache(target("s4_odd_batch").config, 64)
    cache.advance(20)
    cache.rewind(5)
    cache.rewind(3)
    with pytest.raises(UsageError, match=r"rewind\(1\): wanted 0 to 0 at position 12"):
        cache.rewind(1)
    cache.advance(3)
    with pytest.raises(UsageError, match="wanted 0 to 3"):
        cache.rewind(4)
    with pytest.raises(UsageError):
        cache.rewind(-1)


def test_every_array_of_the_state_is_listed_and_counted():
    from ds4mlx.cache import Cache
    from tests.golden_data import target

    config = target("s1_w16_r8").config
    cache = Cache(config, 40)
    ratios = np.array(config.compress_ratios)
    assert len(cache.arrays()) == len(ratios) + (ratios > 0).sum() + (ratios == 4).sum()
    assert cache.nbytes == sum(a.nbytes for a in cache.arrays())
