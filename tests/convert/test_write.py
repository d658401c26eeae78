import gguf
import numpy as np
import pytest

from ds4mlx.convert import write
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.write import typed, write_gguf

METADATA = {
    "general.architecture": ("STRING", "deepseek4"),
    "a.u8": ("UINT8", 255),
    "a.i8": ("INT8", -128),
    "a.u16": ("UINT16", 65535),
    "a.i16": ("INT16", -32768),
    "a.u32": ("UINT32", 4294967295),
    "a.i32": ("INT32", -2147483648),
    "a.u64": ("UINT64", 1 << 63),
    "a.i64": ("INT64", -(1 << 63)),
    "a.f32": ("FLOAT32", 0.5),
    "a.f64": ("FLOAT64", 1e-6),
    "a.bool": ("BOOL", False),
    "a.list": ("[UINT32]", [40, 41, 42]),
    "a.floats": ("[FLOAT32]", [10.0, 0.25]),
    "a.bools": ("[BOOL]", [True, False]),
    "a.strings": ("[STRING]", ["Ġ Ġ", "", "<｜User｜>"]),
    "a.nothing": ("[INT32]", []),
}


def tensors() -> list[tuple]:
    rng = np.random.default_rng(0)
    kinds = [
        ("b.experts", "IQ2_XXS", (2, 3, 512), (2, 3, 132)),
        ("a.norm", "F32", (5,), (20,)),
        ("c.dense", "Q8_0", (3, 64), (3, 68)),
        ("d.grid", "MXFP4", (2, 2, 32), (2, 2, 17)),
        ("e.ids", "I32", (7, 2), (7, 8)),
        ("f.wide", "BF16", (1, 3), (1, 6)),
    ]
    return [(n, t, s, rng.integers(0, 256, b, dtype=np.uint8)) for n, t, s, b in kinds]


@pytest.fixture(params=[32, 64])
def written(request, tmp_path):
    """A file of every type of value, and what was written."""
    metadata = METADATA | {"general.alignment": ("UINT32", request.param)}
    write_gguf(tmp_path / "a.gguf", metadata, tensors())
    return tmp_path / "a.gguf", metadata


def test_ggufs_reader_finds_every_value_with_its_type(written):
    path, metadata = written
    fields = gguf.GGUFReader(path).fields
    assert [key for key in fields if not key.startswith("GGUF.")] == list(metadata)
    for key, (kind, value) in metadata.items():
        types = [t.name for t in fields[key].types]
        if kind.startswith("["):
            assert types[0] == "ARRAY" and types[1:] == ([kind[1:-1]] if value else types[1:])
        else:
            assert types == [kind]
        assert (fields[key].contents() if value != [] else []) == value


def test_ggufs_reader_finds_every_tensor_with_its_type_shape_and_bytes(written):
    path, metadata = written
    found = gguf.GGUFReader(path).tensors
    assert [t.name for t in found] == [name for name, *_ in tensors()]
    for t, (_, type, shape, data) in zip(found, tensors(), strict=True):
        assert t.tensor_type.name == type
        assert tuple(t.shape) == shape[::-1]
        assert t.data_offset % metadata["general.alignment"][1] == 0
        assert t.data.tobytes() == data.tobytes()


def test_tensors_that_share_their_bytes_start_at_one_place():
    shapes = [("a", "F32", (5,)), ("b", "F32", (3,)), ("c", "F32", (5,)), ("d", "F32", (1,))]
    head, starts, size = write.header({}, shapes, {"c": "a"})
    first = len(head)
    assert (starts, size) == ([first, first + 32, first, first + 64], first + 96)


def test_the_file_is_version_3_and_its_length_a_multiple_of_the_alignment(written):
    path, metadata = written
    data = path.read_bytes()
    assert data[:8] == b"GGUF\3\0\0\0"
    assert len(data) % metadata["general.alignment"][1] == 0


def test_own_reader_finds_what_was_written(written):
    path, _ = written
    found = open_gguf(path).tensors
    for name, type, shape, data in tensors():
        assert (found[name].type, found[name].shape) == (type, shape)
        assert found[name].read().tobytes() == data.tobytes()


def test_metadata_read_and_written_again_is_the_same(tmp_path):
    wide = {k: v for k, v in METADATA.items() if v[0] not in ("UINT8", "INT8", "UINT16", "INT16")}
    write_gguf(tmp_path / "a.gguf", wide, [])
    write_gguf(tmp_path / "b.gguf", typed(open_gguf(tmp_path / "a.gguf").metadata), [])
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_each_tensor_is_made_only_after_the_one_before_is_written(tmp_path):
    sizes = []

    def producer(data):
        def make():
            sizes.append((tmp_path / "a.gguf.part").stat().st_size)
            return data

        return make

    data = np.zeros((64, 1 << 16), np.uint8)
    items = [(f"t{i}", "F32", (64, 1 << 14), producer(data)) for i in range(3)]
    write_gguf(tmp_path / "a.gguf", METADATA, items)
    assert all(size >= i * data.nbytes for i, size in enumerate(sizes))
    assert len(sizes) == 3


def test_a_failed_write_leaves_the_older_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"older")

    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_gguf(path, METADATA, [*tensors(), ("z", "F32", (1,), fail)])
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_appears_under_its_name_only_when_it_is_whole(tmp_path):
    path = tmp_path / "a.gguf"

    def look():
        assert not path.exists()
        return np.zeros(4, np.uint8)

    write_gguf(path, {}, [("t", "F32", (1,), look)])
    assert path.exists()


@pytest.mark.parametrize("size", [67, 69])
def test_data_of_another_length_than_the_shape_is_caught(tmp_path, size):
    with pytest.raises(AssertionError):
        write_gguf(tmp_path / "a", {}, [("t", "Q8_0", (2, 32), np.zeros(size, np.uint8))])


def test_a_row_that_is_no_whole_number_of_blocks_is_caught():
    with pytest.raises(AssertionError):
        write.tensor_bytes("Q8_0", (2, 33))
