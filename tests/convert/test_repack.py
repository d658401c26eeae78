import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.convert import repack as repack_module
from ds4mlx.convert.blocks import LAYOUTS, PLAIN, as_blocks, decode, spread
from ds4mlx.convert.repack import repack, unpack

from .test_blocks import PACKED, random_rows

# Planes of 3 rows of 4 blocks.
PLANES = {
    "F32": {"data": (np.float32, (3, 4))},
    "F16": {"data": (np.float16, (3, 4))},
    "BF16": {"data": (np.uint16, (3, 4))},
    "I32": {"data": (np.int32, (3, 4))},
    "Q8_0": {"codes": (np.uint32, (3, 32)), "scales": (np.float16, (3, 4))},
    "Q4_0": {"codes": (np.uint32, (3, 16)), "scales": (np.float16, (3, 4))},
    "MXFP4": {"codes": (np.uint32, (3, 16)), "scales": (np.uint8, (3, 4))},
    "Q4_K": {
        "codes": (np.uint32, (3, 128)),
        "scales": (np.uint8, (3, 4, 12)),
        "d": (np.float16, (3, 4, 2)),
    },
    "Q5_K": {
        "codes": (np.uint32, (3, 128)),
        "high": (np.uint32, (3, 32)),
        "scales": (np.uint8, (3, 4, 12)),
        "d": (np.float16, (3, 4, 2)),
    },
    "Q6_K": {
        "codes": (np.uint32, (3, 128)),
        "high": (np.uint32, (3, 64)),
        "scales": (np.int8, (3, 64)),
        "d": (np.float16, (3, 4)),
    },
    "Q2_K": {
        "codes": (np.uint32, (3, 64)),
        "scales": (np.uint8, (3, 64)),
        "d": (np.float16, (3, 4, 2)),
    },
    "IQ2_XXS": {
        "grid": (np.uint8, (3, 128)),
        "signs": (np.uint32, (3, 32)),
        "d": (np.float16, (3, 4)),
    },
}


def sequential(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 32-bit words, low bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1)


@pytest.mark.parametrize("type", LAYOUTS)
def test_planes_have_the_names_types_and_shapes_that_ops_read(type):
    planes = repack(type, random_rows(type))
    assert {name: (plane.dtype, plane.shape) for name, plane in planes.items()} == PLANES[type]


@pytest.mark.parametrize("type", LAYOUTS)
def test_unpack_gives_back_any_bytes(type):
    raw = random_rows(type, finite=False)  # NaN scales among them
    np.testing.assert_array_equal(unpack(type, repack(type, raw)), raw)


@pytest.mark.parametrize("type", PACKED)
def test_every_half_bit_pattern_survives(type):
    raw = np.resize(np.arange(1 << 16, dtype="<u2").view(np.uint8), (256, 9 * LAYOUTS[type].bytes))
    np.testing.assert_array_equal(unpack(type, repack(type, raw)), raw)


@pytest.mark.parametrize("type", PACKED)
def test_row_blocks_of_any_size_give_the_same_planes(type, monkeypatch):
    raw = random_rows(type, rows=7)
    whole = repack(type, raw)
    monkeypatch.setattr(repack_module, "CHUNK", 2 * raw.shape[1])
    for name, plane in repack(type, raw).items():
        np.testing.assert_array_equal(plane.view(np.uint8), whole[name].view(np.uint8))
    np.testing.assert_array_equal(unpack(type, whole), raw)


@pytest.mark.parametrize("type", LAYOUTS)
def test_planes_have_the_bytes_of_the_file(type):
    raw = random_rows(type)
    assert sum(plane.nbytes for plane in repack(type, raw).values()) == raw.nbytes


@pytest.mark.parametrize(
    ("type", "field"),
    [(t, f) for t in PACKED for f, (bits, _) in LAYOUTS[t].codes.items() if bits < 8],
)
def test_codes_lie_in_the_order_of_elements(type, field):
    raw = random_rows(type)
    bits = LAYOUTS[type].codes[field][0]
    wanted = spread(type, as_blocks(type, raw), field).reshape(3, -1)
    np.testing.assert_array_equal(sequential(repack(type, raw)[field], bits), wanted)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "MXFP4"])
def test_mlx_reads_the_planes_as_its_own_format(type):
    raw = random_rows(type)
    if type == "MXFP4":
        as_blocks(type, raw)["scales"] = 64 + as_blocks(type, raw)["scales"] % 128
    planes = {name: mx.array(plane) for name, plane in repack(type, raw).items()}
    if type == "MXFP4":
        form = dict(scales=planes["scales"], bits=4, mode="mxfp4")
    else:
        scales = planes["scales"].astype(mx.float32)
        bits, zero = (8, 128) if type == "Q8_0" else (4, 8)
        form = dict(scales=scales, biases=-zero * scales, bits=bits)
    values = mx.dequantize(planes["codes"], group_size=32, dtype=mx.float32, **form)
    np.testing.assert_array_equal(np.array(values), decode(type, raw))


@pytest.mark.parametrize("type", PLAIN)
def test_plain_types_are_views_of_the_bytes(type):
    raw = random_rows(type)
    assert np.shares_memory(repack(type, raw)["data"], raw)


def test_bf16_beyond_the_range_of_float16_keeps_its_bits():
    bits = (np.array([[1e5, -3e38, 1e-7, 1.0]], np.float32).view(np.uint32) >> 16).astype("<u2")
    np.testing.assert_array_equal(repack("BF16", bits.view(np.uint8))["data"], bits)


def test_expert_ids_up_to_383_keep_their_bits():
    ids = np.arange(384, dtype=np.int32).reshape(64, 6)
    data = repack("I32", ids.view(np.uint8))["data"]
    assert data.dtype == np.int32
    np.testing.assert_array_equal(data, ids)


def test_no_rows_make_empty_planes():
    planes = repack("Q2_K", np.empty((0, 84), np.uint8))
    assert planes["codes"].shape == (0, 16)
    assert unpack("Q2_K", planes).shape == (0, 84)
