import gguf
import numpy as np
import pytest

from ds4mlx.convert.blocks import (
    LAYOUTS,
    PLAIN,
    as_blocks,
    decode,
    gather,
    iq2xxs_grid,
    iq2xxs_signs,
    k_scales,
    pack_k_scales,
    spread,
)

PACKED = [type for type in LAYOUTS if type not in PLAIN]


def random_rows(type: str, rows: int = 3, blocks: int = 4, finite: bool = True) -> np.ndarray:
    """Random bytes; with `finite`, scales are random finite halves, subnormal ones too."""
    rng = np.random.default_rng(len(type) + rows)
    raw = rng.integers(0, 256, (rows, blocks * LAYOUTS[type].bytes), dtype=np.uint8)
    if finite:
        fields = as_blocks(type, raw)
        for name in fields.dtype.names:
            if fields.dtype[name].base == np.float16:
                fields[name] = rng.choice([1e-7, 3e-3, -0.7, 65504], fields[name].shape)
        if type == "MXFP4":
            fields["scales"] %= 255
    return raw


@pytest.mark.parametrize("type", [*PLAIN[:3], *PACKED])
def test_random_blocks_of_several_rows_decode_as_ggufs_own(type):
    raw = random_rows(type, blocks=64 if type in PLAIN else 4)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])
    np.testing.assert_array_equal(decode(type, raw), wanted.astype(np.float32))


def test_every_mxfp4_code_at_every_scale_decodes_as_ggufs_own():
    raw = np.zeros((255, 17), np.uint8)
    raw[:, 0] = np.arange(255)
    raw[:, 1:] = np.arange(16) * 16 + np.arange(16)[::-1]
    with np.errstate(over="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(decode("MXFP4", raw), wanted)


def test_mxfp4_keeps_the_sign_of_zero():
    raw = np.full((1, 17), 0x88, np.uint8)
    assert np.signbit(decode("MXFP4", raw)).all()


def test_bf16_beyond_the_range_of_float16_stays_finite_and_exact():
    values = np.array([[1e5, -3e38, 1e-7, 1.0]], np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    wanted = (raw.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(decode("BF16", raw.view(np.uint8)), wanted)


def test_expert_ids_stay_integers():
    ids = np.arange(384, dtype=np.int32).reshape(64, 6)
    decoded = decode("I32", ids.view(np.uint8))
    assert decoded.dtype == np.int32
    np.testing.assert_array_equal(decoded, ids)


@pytest.mark.parametrize(
    ("type", "field"), [(type, field) for type in PACKED for field in LAYOUTS[type].codes]
)
def test_gather_is_the_inverse_of_spread(type, field):
    blocks = as_blocks(type, random_rows(type))
    codes = spread(type, blocks, field)
    assert codes.shape == (3, 4, LAYOUTS[type].elements)
    np.testing.assert_array_equal(gather(type, codes, field), blocks[field])


def test_six_bit_scales_pack_into_the_bytes_they_came_from():
    packed = random_rows("Q4_K", 5, 7)[:, : 7 * 12].reshape(5, 7, 12)
    np.testing.assert_array_equal(pack_k_scales(*k_scales(packed)), packed)


def test_iq2_xxs_grid_has_256_rows_of_three_magnitudes():
    grid = iq2xxs_grid()
    assert grid.shape == (256, 8) and grid.dtype == np.uint8
    assert set(grid.ravel()) == {8, 25, 43}
    assert len(np.unique(grid, axis=0)) == 256


def test_iq2_xxs_signs_hold_their_index_and_an_even_number_of_bits():
    signs = iq2xxs_signs()
    assert signs.shape == (128,) and signs.dtype == np.uint8
    np.testing.assert_array_equal(signs & 127, np.arange(128))
    assert not (np.unpackbits(signs[:, None], axis=1).sum(axis=1) % 2).any()
