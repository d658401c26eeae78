from collections import Counter
from unittest.mock import patch

import mlx.core as mx
import pytest

from ds4mlx.launches import graph_primitives, launches, mean_launches
from ds4mlx.ops import metal
from ds4mlx.synthetic import flash

FLASH = flash(seed=None)


def test_every_kernel_and_primitive_of_a_graph_is_counted_and_no_view():
    a, b = mx.arange(4.0), mx.array([1.0])
    c = mx.concatenate([a, b, (a @ a).reshape(1)]).reshape(2, 3).T
    got = graph_primitives([c])
    assert got == Counter({"Arange": 1, "Matmul": 1, "Concatenate": 3})


def test_each_layer_of_flash_launches_its_kernels_once():
    counts = launches(FLASH, 1, 1000)
    # The first mixture begins with a launch of its own, and the last output is written back so.
    assert counts["hc_mix"] == 2 * 43 + 1 and counts["hc_expand"] == 1
    assert counts["attention"] == 2 * 43
    assert counts["latents"] == counts["experts"] == counts["experts_down"] == 43
    assert not any(counts[n] for n in ("route", "index_scores", "round_index", "Scatter"))


def test_a_window_that_closes_and_an_indexer_that_selects_add_their_launches():
    plain, closing, selecting = (launches(FLASH, 1, at) for at in (1000, 1003, 4096))
    assert (closing - plain)["round_index"] == 21 and (closing - plain)["Scatter"] == 42
    assert (selecting - plain)["index_scores"] == (selecting - plain)["index_best"] == 21


@pytest.mark.parametrize("rows, position", [(1, 1000), (1, 4095), (2, 4096)])
def test_no_layer_reads_an_array_that_cuda_leaves_with_the_host(rows, position):
    """Of 8 bytes or fewer are a step's token ids alone."""
    small, launch = set(), metal.launch

    def spied(kernel, inputs, *rest):
        named = zip(kernel.inputs, inputs, strict=True)
        small.update((kernel.name, name) for name, x in named if x.nbytes <= 8)
        return launch(kernel, inputs, *rest)

    with patch.object(metal, "launch", spied):
        launches(FLASH, rows, position)
    assert small == {("embed", "ids")}


def test_what_does_not_belong_to_a_layer_is_little():
    """A token's own launches: embedding, rotations, places, taps."""
    counts = launches(FLASH, 1, 1000)
    assert sum(n for n in counts.values() if n < 43) < 30


def test_the_mean_weighs_tokens_that_close_windows():
    counts = [launches(FLASH, 1, at).total() for at in (1024, 1027, 1151)]
    want = (96 * counts[0] + 31 * counts[1] + counts[2]) / 128
    assert mean_launches(FLASH, 1, 1024) == want


@pytest.mark.parametrize("position", [1024, 4096])
def test_a_token_of_flash_costs_at_most_14_launches_a_layer(position):
    assert mean_launches(FLASH, 1, position) / 43 <= 14
