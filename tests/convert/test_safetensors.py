import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from ds4mlx.convert.safetensors import read_safetensors
from ds4mlx.errors import FileError


def write(path, header, body: bytes = bytes(16), length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape=None) -> dict:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_written_by_the_reference_come_back(tmp_path):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(384, dtype=np.int32).reshape(64, 6),
        "c": np.array(2.5, np.float16),
        "d": np.zeros((0, 5), np.float32),
    }
    save_file(arrays, tmp_path / "a.safetensors")
    found = read_safetensors(tmp_path / "a.safetensors")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name].values(), array)


def test_bytes_are_rows_of_the_last_axis(tmp_path):
    path = write(tmp_path / "a", {"t": entry(0, 16, shape=[2, 1, 2])})
    assert read_safetensors(path)["t"].raw.shape == (2, 8)


def test_bf16_widens_to_the_float32_of_the_same_bits(tmp_path):
    bits = (np.array([1e5, -3e38, 1e-7, 1.0], np.float32).view(np.uint32) >> 16).astype("<u2")
    path = write(tmp_path / "a", {"t": entry(0, 8, "BF16", [2, 2])}, bits.tobytes())
    values = read_safetensors(path)["t"].values()
    assert values.dtype == np.float32 and values.shape == (2, 2)
    np.testing.assert_array_equal(values.ravel().view(np.uint32) >> 16, bits)


def test_metadata_is_no_tensor(tmp_path):
    path = write(tmp_path / "a", {"__metadata__": {"format": "pt"}, "t": entry(0, 16)})
    assert list(read_safetensors(path)) == ["t"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xff", "not JSON"),
        (b"[]", "not a JSON object"),
        ({"t": [1]}, "tensor t needs dtype"),
        ({"t": {"dtype": "F32", "shape": [4]}}, "tensor t needs dtype"),
        ({"t": entry(0, 16, "F33")}, "tensor t has the unknown dtype 'F33'"),
        ({"t": entry(0, 16, ["F32"])}, "tensor t has the unknown dtype"),
        ({"t": entry(0, 20)}, "tensor t lies at 0 to 20, but the file has 16 bytes"),
        ({"t": entry(16, 0)}, "tensor t"),
        ({"t": entry(-4, 0)}, "tensor t"),
        ({"t": entry(0, 16, shape=[5])}, r"tensor t has 16 bytes, F32 \[5\] needs 20"),
        ({"t": entry(0, 16, shape=[-4])}, "tensor t"),
        ({"t": entry(0, 16, shape=[4.0])}, "tensor t"),
        ({"t": entry(0, 12), "u": entry(8, 16)}, "tensors t and u overlap"),
        ({"t": entry(0, 16, shape=4)}, "tensor t has shape 4, wanted a list"),
        ({"t": entry(0, 16, shape="x" * 9999)}, "tensor t has shape 'xxx"),
        ({"t": entry(0, 4, shape=[1] * 100_000)}, "tensor t has shape .*up to 8"),
        ({"\ud800\x1b[2J": [1]}, r"tensor \\ud800\\x1b\[2J needs dtype"),
    ],
)
def test_a_header_at_odds_with_the_file_is_refused_in_one_sentence(tmp_path, header, message):
    path = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(FileError, match=f"bad.safetensors: .*{message}") as caught:
        read_safetensors(path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_all_bad_tensors_are_named_at_once(tmp_path):
    path = write(tmp_path / "a", {"t": entry(0, 20), "u": entry(0, 16, "F33"), "v": entry(0, 16)})
    with pytest.raises(FileError, match="tensor t lies.*; tensor u has the unknown dtype"):
        read_safetensors(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    path = write(tmp_path / "a", b"{}", length=1 << 62)
    with pytest.raises(FileError, match="header of 4611686018427387904 bytes"):
        read_safetensors(path)


def test_a_file_too_short_for_a_length_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"1234567")
    with pytest.raises(FileError, match="7 bytes are too few"):
        read_safetensors(tmp_path / "a")


def test_a_header_that_no_checkpoint_has_is_not_parsed(tmp_path):
    path = write(tmp_path / "a", b"{}")
    os.truncate(path, 1 << 26)
    with path.open("r+b") as file:
        file.write((1 << 25).to_bytes(8, "little").replace(b"\0", b"\1", 1))
    with pytest.raises(FileError, match="wanted at most 33554432"):
        read_safetensors(path)
