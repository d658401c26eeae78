import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.cache import Cache
from ds4mlx.packed import Packed
from ds4mlx.synthetic import (
    DSPARK,
    FLASH,
    draft_types,
    flash,
    flash_draft,
    made_target,
    random_matrix,
    target_types,
)
from tests.close import assert_close
from tests.ops.matrices import exact
from tests.test_synthesize import small


def padded_bytes(tensors) -> int:
    """As in a GGUF: each tensor starts at a multiple of 32."""
    total, key = 0, mx.random.key(0)
    for _, type, shape in tensors:
        matrix = random_matrix(type, shape, FLASH, key)  # not evaluated
        total += -(-matrix.nbytes // 32) * 32
    return total


@pytest.mark.parametrize(
    "recipe, total",
    [
        ("q2", 86_714_777_664),
        ("q2-q4", 97_586_413_632),
        ("q4", 164_628_168_768),
        ("mxfp4", 155_971_125_312),
    ],
)
def test_tensors_are_as_many_and_as_large_as_in_the_official_files(recipe, total):
    tensors = list(target_types(FLASH, recipe))
    assert len(tensors) == 1328
    assert padded_bytes(tensors) == total


def test_the_draft_has_the_tensors_of_the_official_file():
    tensors = list(draft_types(DSPARK, FLASH))
    assert len(tensors) == 81
    assert padded_bytes(tensors) == 5_989_108_832


@pytest.mark.parametrize("type", ["Q8_0", "F16", "MXFP4", "Q4_K", "Q2_K", "IQ2_XXS"])
def test_rows_of_a_matrix_turn_normed_rows_into_normed_ones(type):
    w = random_matrix(type, (64, 2048), FLASH, mx.random.key(3))
    values = exact(w)
    assert abs(values.std() * 2048**0.5 - 1) < 0.35  # a power of two has a coarse scale
    assert abs(values.mean()) < 0.1 * values.std()


def test_experts_of_a_hash_layer_are_valid_and_differ():
    ids = np.array(random_matrix("I32", (500, 6), FLASH, mx.random.key(1)))
    assert ids.min() >= 0 and ids.max() < 256
    assert all(len({*row}) == 6 for row in ids.tolist())


def test_hollow_tensors_take_no_memory():
    before = mx.get_active_memory()
    target = flash("mxfp4", seed=None)
    w1 = target.layers[40].ffn.w1
    assert isinstance(w1, Packed) and w1.type == "MXFP4" and w1.shape == (256, 2048, 4096)
    draft = flash_draft(target, seed=None)
    mx.eval(w1.planes, draft.markov_w1.planes)
    assert mx.get_active_memory() - before < 1e6


def test_the_same_seed_makes_the_same_model_and_activations_stay_small():
    """Of Flash's layers, with narrower matrices: the real ones take minutes on a CPU."""
    config = small(5)
    results = []
    for _ in range(2):
        target = made_target(config, "q2", 7)
        x, _ = target(mx.arange(12), Cache(config, 20))
        results.append(target.logits(x))
    assert_close(results[0], np.array(results[1]), atol=0)
    assert 0.3 < np.array(x).std() < 30
    assert 0.3 < np.array(results[0]).std() < 3
