from importlib.resources import files

import gguf
import numpy as np
import pytest

from ds4mlx.convert.blocks import as_blocks, decode, half_scale, iq2xxs_grid
from ds4mlx.convert.encode import encode
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.errors import FileError

from .test_blocks import random_rows

SEARCHED = ["Q8_0", "MXFP4", "Q4_K", "Q2_K", "IQ2_XXS"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def normal(rows: int, columns: int = 512) -> np.ndarray:
    rng = np.random.default_rng(rows)
    return rng.standard_normal((rows, columns), np.float32) * 0.02


def squared_error(type: str, x: np.ndarray, **options) -> np.ndarray:
    """Per element; each 256 of a row apart: [rows * columns / 256, 256]."""
    return ((decode(type, encode(type, x, **options)) - x) ** 2).reshape(-1, 256)


@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0"])
def test_bytes_are_those_of_ggufs_reference(type):
    x = normal(5)
    wanted = gguf.quants.quantize(x, gguf.GGMLQuantizationType[type])
    np.testing.assert_array_equal(encode(type, x), wanted.view(np.uint8))


def test_q8_0_rounds_halves_away_from_zero():
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = 127, 0.5, 1.5, -0.5, -1.5
    codes = as_blocks("Q8_0", encode("Q8_0", x))["codes"].view(np.int8)
    assert list(codes[0, 0, :5]) == [127, 1, 2, -1, -2]


def test_values_on_the_mxfp4_grid_come_back_bit_for_bit():
    raw = random_rows("MXFP4", rows=64, blocks=32)
    as_blocks("MXFP4", raw)["scales"] %= 253  # beyond, the largest codes overflow float32
    x = decode("MXFP4", raw)
    again = decode("MXFP4", encode("MXFP4", x))
    np.testing.assert_array_equal(again.view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("code", range(1, 8))
def test_an_mxfp4_block_of_one_magnitude_comes_back_at_the_lowest_and_highest_scale(code):
    raw = np.full((2, 17), code * 17, np.uint8)
    raw[:, 0] = 0, 252
    x = decode("MXFP4", raw)
    np.testing.assert_array_equal(decode("MXFP4", encode("MXFP4", x)), x)


@pytest.mark.parametrize("tail", [1, 3])
def test_no_other_power_of_two_makes_mxfp4_better(tail):
    x = normal(32) ** tail  # the third power has outliers
    blocks = x.reshape(-1, 32)
    scales = half_scale(np.arange(90, 130))[:, None, None, None]
    grid = scales * 2 * np.concatenate([E2M1, -E2M1])
    errors = np.square(blocks[..., None] - grid).min(axis=-1).sum(axis=-1).min(axis=0)
    found = squared_error("MXFP4", x).reshape(-1, 32).sum(axis=-1)
    np.testing.assert_allclose(found, errors, rtol=1e-4)


def test_mxfp4_is_no_worse_than_ggufs_reference():
    x = normal(32)
    kind = gguf.GGMLQuantizationType.MXFP4
    reference = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    assert squared_error("MXFP4", x).sum() < ((reference - x) ** 2).sum()


@pytest.mark.parametrize(
    ("type", "levels", "steps", "factors", "slack"),
    [("Q2_K", 3, 15, np.linspace(0.8, 1.2, 9), 1.1), ("Q4_K", 15, 63, (0.97, 1, 1.03), 1.08)],
)
def test_k_blocks_come_close_to_an_exhaustive_search(type, levels, steps, factors, slack):
    x = normal(2)
    d = as_blocks(type, encode(type, x))["d"].astype(np.float32).reshape(-1, 2)
    for block, (scale, least), error in zip(
        x.reshape(-1, 256), d, squared_error(type, x).sum(axis=-1), strict=True
    ):
        sub = block.reshape(-1, 1, 1, 16 if type == "Q2_K" else 32)
        best = np.inf
        for f in factors:
            for g in factors:
                s = (scale * f * np.arange(1, steps + 1, dtype=np.float32))[:, None, None]
                shifted = sub + (least * g * np.arange(steps + 1, dtype=np.float32))[:, None]
                codes = np.clip(np.rint(shifted / s), 0, levels)
                errors = np.square(codes * s - shifted).sum(axis=-1)
                best = min(best, errors.min(axis=(1, 2)).sum())
        assert np.sqrt(error / best) < slack


def test_iq2_xxs_comes_close_to_an_exhaustive_search():
    x = normal(2)
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    signs = 1 - 2.0 * bits[bits.sum(axis=1) % 2 == 0]
    points = (signs[:, None] * iq2xxs_grid()).reshape(-1, 8).astype(np.float32)
    squares = (points * points).sum(axis=-1)
    for block, error in zip(
        x.reshape(-1, 256), squared_error("IQ2_XXS", x).sum(axis=-1), strict=True
    ):
        eights = block.reshape(32, 8)
        dots, norms, best = eights @ points.T, np.square(eights).sum(axis=-1), np.inf
        for d in np.abs(block).max() / 43 * 8 / 31 * np.linspace(0.7, 1.3, 7):
            scales = d * (2 * np.arange(16) + 1) / 8
            errors = [norms + (s * s * squares - 2 * s * dots).min(axis=-1) for s in scales]
            best = min(best, np.reshape(errors, (16, 8, 4)).sum(axis=-1).min(axis=0).sum())
        assert np.sqrt(error / best) < 1.05


@pytest.mark.parametrize(
    ("type", "limit"),
    [("Q8_0", 0.007), ("MXFP4", 0.13), ("Q4_K", 0.08), ("Q2_K", 0.3), ("IQ2_XXS", 0.36)],
)
def test_relative_error_of_normal_values_stays_below(type, limit):
    x = normal(16)
    assert np.sqrt(squared_error(type, x).mean() / np.square(x).mean()) < limit


# Relative errors of ggml's own encoders (libggml-base 0.13.1, ggml_quantize_chunk) on the samples
# below; a second figure is under importance, as the error is then measured.
GGML = {
    ("normal", "Q8_0"): (0.00533,),
    ("normal", "MXFP4"): (0.11508,),
    ("normal", "Q4_K"): (0.07137, 0.06408),
    ("normal", "Q2_K"): (0.29710, 0.23442),
    ("normal", "IQ2_XXS"): (0.34311, 0.29461),
    ("laplace", "Q8_0"): (0.00670,),
    ("laplace", "MXFP4"): (0.12674,),
    ("laplace", "Q4_K"): (0.08456, 0.07667),
    ("laplace", "Q2_K"): (0.34446, 0.26416),
    ("laplace", "IQ2_XXS"): (0.38409, 0.33757),
    ("blk.3.attn_kv.weight", "MXFP4"): (0.11739,),
    ("blk.3.attn_kv.weight", "Q4_K"): (0.07185, 0.06532),
    ("blk.3.attn_kv.weight", "Q2_K"): (0.29863, 0.23894),
    ("blk.3.attn_kv.weight", "IQ2_XXS"): (0.34477, 0.30180),
    ("blk.3.ffn_up_exps.weight", "Q8_0"): (0.00556,),
    ("blk.3.ffn_up_exps.weight", "Q4_K"): (0.06374, 0.05786),
    ("blk.3.ffn_up_exps.weight", "Q2_K"): (0.30601, 0.23945),
    ("blk.3.ffn_up_exps.weight", "IQ2_XXS"): (0.35236, 0.30734),
}


def sample(name: str) -> np.ndarray:
    """Random values, or trained ones: rows of a tensor of the embedded model."""
    rng = np.random.default_rng(3)
    if name == "normal":
        return rng.standard_normal((128, 1024), np.float32)
    if name == "laplace":
        return rng.laplace(size=(128, 1024)).astype(np.float32)
    t = open_gguf(files("ds4mlx") / "data" / "nano.gguf").tensors[name]
    return decode(t.type, t.read())[:512]


@pytest.mark.parametrize(("name", "type"), GGML)
def test_the_error_is_no_worse_than_that_of_ggmls_encoders(name, type):
    x = sample(name)
    weights = np.exp(np.random.default_rng(1).standard_normal(x.shape[1])).astype(np.float32)
    for limit, importance in zip(GGML[name, type], (None, weights), strict=False):
        error = np.square(decode(type, encode(type, x, importance)).astype(np.float64) - x)
        w = 1 if importance is None else importance
        relative = np.sqrt((w * error).sum() / (w * np.square(x, dtype=np.float64)).sum())
        assert relative < limit + 5e-6  # the figures above are rounded


@pytest.mark.parametrize("type", SEARCHED)
def test_a_row_is_encoded_as_if_it_were_alone(type):
    x = normal(300)
    alone = [encode(type, x[i : i + 1])[0] for i in (0, 127, 128, 299)]
    np.testing.assert_array_equal(encode(type, x)[[0, 127, 128, 299]], alone)


@pytest.mark.parametrize("type", SEARCHED)
def test_zeros_stay_zeros(type):
    assert not decode(type, encode(type, np.zeros((2, 256), np.float32))).any()


@pytest.mark.parametrize("type", SEARCHED)
def test_values_too_small_for_a_half_scale_decode_to_something_as_small(type):
    x = np.full((1, 256), 1e-42, np.float32)
    x[0, ::3] *= -1
    assert np.abs(decode(type, encode(type, x))).max() <= 2e-42


@pytest.mark.parametrize("type", ["MXFP4", "Q4_K", "Q2_K", "IQ2_XXS"])
def test_important_columns_come_out_closer(type):
    x = normal(16)
    importance = np.where(np.arange(512) % 4 == 0, 100, 1).astype(np.float32)
    weighed = squared_error(type, x, importance=importance).reshape(16, 512)[:, ::4].sum()
    plain = squared_error(type, x).reshape(16, 512)[:, ::4].sum()
    assert weighed < 0.98 * plain


@pytest.mark.parametrize("type", ["F16", *SEARCHED])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(type, value):
    x = normal(1)
    x[0, 7] = value
    with pytest.raises(FileError, match=f"not finite.*{type}"):
        encode(type, x)


@pytest.mark.parametrize("type", ["F16", "Q8_0", "Q4_K", "Q2_K", "IQ2_XXS"])
def test_a_value_beyond_float16_scales_is_refused(type):
    x = normal(1)
    x[0, 7] = 1e9
    with pytest.raises(FileError, match="range of float16"):
        encode(type, x)


def test_bf16_keeps_nan_and_values_beyond_float16():
    x = np.array([[1e5, -3e38, 1e-7, np.nan]], np.float32)
    y = decode("BF16", encode("BF16", x))
    np.testing.assert_allclose(y, x, rtol=1 / 256)


def test_expert_ids_are_stored_as_they_are():
    ids = np.arange(384, dtype=np.int32).reshape(64, 6)
    np.testing.assert_array_equal(encode("I32", ids), ids.view(np.uint8))
