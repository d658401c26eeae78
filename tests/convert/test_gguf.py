"""The header reader: what it reads, what it refuses, and what it says then."""

import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest

from ds4mlx.convert import gguf as reader
from ds4mlx.convert.config import draft_config, target_config
from ds4mlx.convert.gguf import TYPES, open_gguf
from ds4mlx.convert.inspect import lines, report
from ds4mlx.convert.inventory import check_draft, check_target
from ds4mlx.errors import Ds4Error, FileError, UsageError

from .files import BLOCKS, header, string, tensor_info, tiny_draft, tiny_target, write_gguf

F32 = ("F32", (2, 8))
SMALL = {"a": F32, "b": ("Q8_0", (3, 32)), "c": ("I32", (5,))}


@pytest.fixture
def good(tmp_path):
    return write_gguf(tmp_path / "good.gguf", {"key": 1, "words": ["x", "y"]}, SMALL)


def refused(path, *words, error=FileError):
    """Opening `path` fails with a sentence that names the file and holds all `words`."""
    with pytest.raises(error) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (os.path.basename(str(path)), *words):
        assert str(word) in message, message
    return message


# Reading ------------------------------------------------------------------------------------


def test_values_come_back_with_their_types(tmp_path):
    values = {
        "int": 7,
        "long": np.uint64(1 << 40),
        "less": np.int16(-3),
        "real": 0.5,
        "double": np.float64(0.1),
        "yes": True,
        "text": "größer",
        "ints": np.array([3, -1], np.int32),
        "bools": np.array([True, False]),
        "words": ["", "Ġa", "中"],
    }
    metadata = open_gguf(write_gguf(tmp_path / "v.gguf", values, {})).metadata
    assert list(metadata) == list(values)
    for key, value in values.items():
        expected = value.item() if isinstance(value, np.generic) else value
        assert np.array_equal(metadata[key], expected), key
        assert type(metadata[key]) is type(expected), key
    assert metadata["ints"].dtype == np.int32


def test_tensor_bytes_come_back_row_by_row(tmp_path):
    raw = np.arange(2 * 3 * 68, dtype=np.uint8).tobytes()
    path = write_gguf(tmp_path / "t.gguf", {}, {"a": F32, "t": ("Q8_0", (2, 3, 64), raw)})
    tensor = open_gguf(path).tensors["t"]
    assert (tensor.type, tensor.shape, tensor.nbytes) == ("Q8_0", (2, 3, 64), 2 * 3 * 68)
    assert tensor.read().shape == (6, 68)
    assert tensor.read().tobytes() == raw


def test_block_sizes_are_those_of_the_format():
    table = {name: (code, n, size) for code, (name, n, size) in TYPES.items()}
    for name, sizes in BLOCKS.items():
        assert table.get(name) == (sizes if name != "unknown" else None), name


def test_gguf_py_finds_the_same_tensors_and_bytes(tmp_path):
    path = tiny_target(tmp_path / "t.gguf")
    ours = open_gguf(path).tensors
    theirs = gguf.GGUFReader(path).tensors
    assert [t.name for t in theirs] == list(ours)
    for t in theirs:
        assert ours[t.name].type == t.tensor_type.name
        assert ours[t.name].shape == tuple(int(n) for n in t.shape[::-1])
        assert ours[t.name].read().tobytes() == t.data.tobytes()


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_data_starts_at_the_declared_alignment(tmp_path, alignment):
    metadata = {"general.alignment": alignment}
    path = write_gguf(tmp_path / "a.gguf", metadata, {"a": F32, "b": F32}, alignment=alignment)
    theirs = {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors}
    assert {n: t.read().tobytes() for n, t in open_gguf(path).tensors.items()} == theirs


def test_version_2_is_read(tmp_path):
    path = write_gguf(tmp_path / "v2.gguf", {}, SMALL, version=2)
    assert set(open_gguf(path).tensors) == set(SMALL)


def test_a_file_of_the_real_size_opens_without_decoding_a_string(tmp_path, monkeypatch):
    """MF-10."""
    words = [f"word{i}" for i in range(129_280)]
    merges = [f"le{i} ri" for i in range(127_741)]
    path = write_gguf(
        tmp_path / "vocab_129280.gguf",
        {"tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": merges},
        {f"blk.{i}.t": ("F32", (1,)) for i in range(1328)},
    )
    decode = reader._Strings.decode
    monkeypatch.setattr(reader._Strings, "decode", None)
    file = open_gguf(path)
    assert file.metadata.length("tokenizer.ggml.tokens") == 129_280
    assert len(file.tensors) == 1328
    monkeypatch.setattr(reader._Strings, "decode", decode)
    assert file.metadata["tokenizer.ggml.tokens"] == words


def test_the_first_words_are_decoded_alone(tmp_path):
    blob = string("ok") + struct.pack("<Q", 1) + b"\xff"
    path = tmp_path / "w.gguf"
    path.write_bytes(header(string("words") + struct.pack("<IIQ", 9, 8, 2) + blob, keys=1))
    metadata = open_gguf(path).metadata
    assert metadata.first("words", 1) == ["ok"]
    with pytest.raises(FileError, match="words holds a string that is not UTF-8"):
        metadata["words"]


CHILD = """
import resource, sys
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.errors import Ds4Error
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 * (sys.platform == "linux")
before = peak()
try:
    for tensor in open_gguf(sys.argv[1]).tensors.values():
        tensor.read()
except Ds4Error as error:
    print(error, file=sys.stderr)
    status = error.status
else:
    status = 0
print(peak() - before)
sys.exit(status)
"""


def child(path, timeout=20):
    command = [sys.executable, "-c", CHILD, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_reading_holds_one_tensor_in_memory_and_no_mapped_copy(tmp_path):
    """ME-08."""
    size = 64 << 20
    tensors = {name: ("F32", (size // 4096, 1024), bytes(size)) for name in ("a", "b")}
    run = child(write_gguf(tmp_path / "big.gguf", {}, tensors))
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1.3 * size


def test_a_tensor_of_a_file_that_shrank_is_refused(good):
    tensor = open_gguf(good).tensors["c"]
    os.truncate(good, tensor.offset + 4)
    with pytest.raises(FileError, match="tensor c has 4 bytes, wanted 20"):
        tensor.read()


def test_a_file_has_a_short_repr(tmp_path):
    """AP-05."""
    assert len(repr(open_gguf(tiny_target(tmp_path / ("long" * 50 + ".gguf"))))) < 400


# Damaged files ------------------------------------------------------------------------------


def test_a_file_short_by_any_number_of_bytes_is_an_incomplete_download(good, tmp_path):
    """MF-05."""
    data, path = good.read_bytes(), tmp_path / "short.gguf"
    last = open_gguf(good).tensors["c"]
    for size in range(4, last.offset + last.nbytes):
        path.write_bytes(data[:size])
        refused(path, "incomplete download", size)


def test_an_incomplete_download_names_the_first_tensor_missing_and_both_sizes(good):
    """MF-05."""
    tensors = open_gguf(good).tensors
    os.truncate(good, tensors["b"].offset + 1)
    expected = tensors["c"].offset + tensors["c"].nbytes
    refused(good, "missing is b", tensors["b"].offset + 1, expected)


def test_missing_padding_after_the_last_tensor_is_no_damage(good):
    last = open_gguf(good).tensors["c"]
    os.truncate(good, last.offset + last.nbytes)
    assert len(open_gguf(good).tensors) == 3


def test_a_resumed_download_that_appended_the_file_is_refused_with_the_surplus(good):
    """MF-06."""
    data = good.read_bytes()
    good.write_bytes(data + data[100:])
    refused(good, f"{len(data) - 100} bytes too many", "download it again")


def test_one_byte_more_than_padding_is_refused(good):
    """MF-06."""
    good.write_bytes(good.read_bytes() + b"\0")
    refused(good, "1 bytes too many")


NOT_GGUF = {
    "html": (b"\n<!DOCTYPE html><html>404</html>", "a web page"),
    "xml": (b"<?xml version='1.0'?><Error/>", "a web page"),
    "lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    "empty": (b"", "an empty file; download it again"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}', "a safetensors file"),
    "zip": (b"PK\x03\x04rest", "not a GGUF file: it begins with b'PK"),
    "one_byte": (b"G", "not a GGUF file"),
}


@pytest.mark.parametrize("case", NOT_GGUF)
def test_a_file_of_another_kind_is_named_for_what_it_is(tmp_path, case):
    """MF-07."""
    data, words = NOT_GGUF[case]
    path = tmp_path / f"{case}.gguf"
    path.write_bytes(data)
    refused(path, words, error=UsageError)


def patched(path, at: int, value: int, format: str = "<Q"):
    """The file with the number at byte `at` replaced."""
    data = bytearray(path.read_bytes())
    struct.pack_into(format, data, at, value)
    path.write_bytes(data)
    return path


def big_endian(path):
    return write_gguf(path, {"key": 1}, SMALL, order=">")


def aligned(n: int):
    return lambda path: write_gguf(path, {"general.alignment": np.uint32(n)}, SMALL)


def entry(code: int, rest: bytes):
    """A file whose only metadata value is of type `code`."""
    return lambda path: path.write_bytes(header(string("k") + struct.pack("<I", code) + rest, 1))


def nested(path):
    deep = struct.pack("<IQ", 9, 1) * 1000
    path.write_bytes(header(string("k") + struct.pack("<I", 9) + deep, 1))


HOSTILE = {
    "big_endian": (big_endian, "big-endian"),
    "align_0": (aligned(0), "general.alignment is 0, wanted a power of two"),
    "align_3": (aligned(3), "general.alignment is 3, wanted a power of two"),
    "align_text": (
        lambda path: write_gguf(path, {"general.alignment": "32"}, SMALL),
        "general.alignment is '32', wanted a power of two",
    ),
    "bomb_tensor_count": (lambda p: patched(write_gguf(p, {}, SMALL), 8, 1 << 60), "tensors"),
    "tensor_count_of_the_limit": (
        lambda p: patched(write_gguf(p, {}, SMALL), 8, 1 << 16),
        "65536 tensors do not fit",
    ),
    "bomb_key_count": (lambda p: patched(write_gguf(p, {}, SMALL), 16, 1 << 60), "metadata keys"),
    "bomb_string_len": (entry(8, struct.pack("<Q", 1 << 62)), "metadata key k needs"),
    "bomb_array_len": (entry(9, struct.pack("<IQ", 4, 1 << 62)), "metadata key k needs"),
    "bomb_strings": (entry(9, struct.pack("<IQ", 8, 1 << 62)), "metadata key k has"),
    "strings_past_end": (entry(9, struct.pack("<IQ", 8, 1000)), "metadata key k needs"),
    "nested_arrays": (nested, "metadata key k is an array of value type 9"),
    "value_type": (entry(77, b""), "metadata key k has the unknown value type 77"),
    "bool_of_2": (entry(7, b"\2"), "metadata key k is a bool of 2"),
    "key_not_utf8": (
        lambda p: p.write_bytes(header(struct.pack("<Q", 1) + b"\xff" + bytes(5), 1)),
        "the name of metadata key 0 is not UTF-8",
    ),
    "name_with_newline": (
        lambda p: write_gguf(p, {}, {"a\nb": F32}),
        "wanted printable characters",
    ),
    "no_dimensions": (
        lambda p: p.write_bytes(header(tensors=tensor_info("t", (), 0, 0) + bytes(8), count=1)),
        "tensor t has 0 dimensions",
    ),
    "dimensions_bomb": (
        lambda p: p.write_bytes(header(tensors=string("t") + b"\xff" * 24, count=1)),
        "tensor t has 4294967295 dimensions",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_and_ends_no_process(tmp_path, case):
    """MF-08."""
    make, words = HOSTILE[case]
    path = tmp_path / f"{case}.gguf"
    make(path)
    run = child(path)
    assert run.returncode == 1, run.stderr
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert int(run.stdout) < path.stat().st_size + (64 << 20)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_another_version_is_refused_by_its_number(tmp_path, version):
    """MF-02."""
    path = write_gguf(tmp_path / "v.gguf", {}, SMALL, version=version)
    refused(path, f"GGUF version {version}, wanted 3")


def test_every_tensor_of_an_unknown_type_is_listed_with_its_code(tmp_path):
    """MF-02."""
    tensors = {"a": F32, "x": ("unknown", (4,)), "y": ("unknown", (4,))}
    path = write_gguf(tmp_path / "type_105_unknown.gguf", {}, tensors)
    refused(path, "tensor x has the unknown type code 105", "tensor y has the unknown type code")


def raw_tensors(path, *infos, data=1024):
    """A file of hand-made tensor entries: (name, dims innermost first, type code, offset)."""
    path.write_bytes(header(tensors=b"".join(tensor_info(*i) for i in infos), count=len(infos)))
    with open(path, "ab") as file:
        file.write(bytes(data))
    return path


STRUCTURE = {
    "dup_tensor": ([("t", (8,), 0, 0), ("t", (8,), 0, 32)], ["tensor t occurs twice"]),
    "overlap": ([("t", (16,), 0, 0), ("u", (8,), 0, 32)], ["tensors t and u overlap"]),
    "overlap_of_types": ([("t", (8,), 0, 0), ("u", (8,), 26, 0)], ["tensors t and u overlap"]),
    "overlap_of_shapes": ([("t", (8,), 0, 0), ("u", (4, 2), 0, 0)], ["t and u overlap"]),
    "overlap_behind_another": (
        [("t", (64,), 0, 0), ("u", (8,), 0, 32), ("v", (8,), 0, 96)],
        ["t and u overlap", "t and v overlap"],
    ),
    "offset_misaligned": ([("t", (8,), 0, 5)], ["tensor t is at 5", "alignment 32"]),
    "offset_past_end": ([("t", (8,), 0, 1 << 40)], ["missing is t"]),
    "dims_overflow": ([("t", (1 << 32, 1 << 32), 0, 0)], ["tensor t", "4294967296"]),
    "dims_zero": ([("t", (8, 0), 0, 0)], ["tensor t", "(8, 0)"]),
    "row_not_block_multiple": ([("t", (48, 2), 8, 0)], ["rows of 48", "Q8_0's 32"]),
    "two_at_once": (
        [("t", (48,), 8, 0), ("u", (8,), 0, 5)],
        ["tensor t has rows of 48", "tensor u is at 5"],
    ),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_tensors_that_cannot_be_are_named(tmp_path, case):
    """MF-11."""
    infos, words = STRUCTURE[case]
    refused(raw_tensors(tmp_path / f"{case}.gguf", *infos), *words)


def test_a_key_that_occurs_twice_is_named(tmp_path):
    """MF-11."""
    path = tmp_path / "dup_key.gguf"
    path.write_bytes(header((string("block_count") + struct.pack("<II", 4, 1)) * 2, keys=2))
    refused(path, "occur twice: block_count")


def test_tied_tensors_may_share_all_their_bytes(tmp_path):
    infos = [("t", (64,), 0, 0), ("u", (64,), 0, 0), ("v", (8,), 0, 256)]
    tensors = open_gguf(raw_tensors(tmp_path / "tied.gguf", *infos, data=288)).tensors
    assert replace(tensors["t"], name="u") == tensors["u"]


@pytest.fixture
def two_minutes():
    """A test that hangs fails."""

    def stop(*_):
        raise AssertionError("the test hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("two_minutes")
def test_changed_headers_give_a_sentence_or_a_model_and_never_anything_else(tmp_path):
    rng, path = np.random.default_rng(1), tmp_path / "changed.gguf"
    target, draft = tiny_target(tmp_path / "target.gguf"), tiny_draft(tmp_path / "draft.gguf")
    config = target_config(open_gguf(target))
    outcomes = {"model": 0, "error": 0}
    for i in range(800):
        good, other, size = [(target, draft, 10_000), (draft, target, 5_000)][i % 2]
        data = bytearray(good.read_bytes())
        for at in rng.integers(24, [size, 2000, 400][i % 3], rng.integers(1, 3)):
            data[at] = rng.choice([0, 1, 255, data[at] ^ (1 << rng.integers(8))])
        path.write_bytes(data[: rng.integers(len(data))] if i % 5 == 0 else data)
        try:
            lines(report(path, other if i % 7 else None))
            lines(report(other, path))
            if good is target:
                check_target(open_gguf(path), target_config(open_gguf(path)))
            else:
                check_draft(open_gguf(path), draft_config(open_gguf(path)), config)
            outcomes["model"] += 1
        except Ds4Error as error:
            assert "\n" not in str(error)
            outcomes["error"] += 1
    assert min(outcomes.values()) > 50, outcomes


# Paths --------------------------------------------------------------------------------------


def test_a_missing_file_is_a_usage_error_with_the_resolved_path(tmp_path, monkeypatch):
    """CL-08."""
    monkeypatch.chdir(tmp_path)
    refused("sub/../no.gguf", tmp_path / "no.gguf", "No such file", error=UsageError)


def test_home_and_variables_are_expanded(good, monkeypatch):
    """CL-08."""
    monkeypatch.setenv("HOME", str(good.parent))
    monkeypatch.setenv("MODELS", str(good.parent))
    assert open_gguf("~/good.gguf").path == open_gguf("$MODELS/good.gguf").path == good.resolve()


def test_a_path_with_spaces_and_other_letters_opens(tmp_path):
    """CL-08."""
    folder = tmp_path / "mein Modell 模型"
    folder.mkdir()
    path = write_gguf(folder / "größe 1.gguf", {}, SMALL)
    assert open_gguf(path).tensors["b"].read().shape == (3, 34)


def test_an_unreadable_file_is_a_usage_error(good, monkeypatch):
    """CL-08."""

    def deny(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", deny)
    refused(good, "Permission denied", error=UsageError)


def test_a_folder_is_refused_with_its_files_their_sizes_and_dates(tmp_path):
    """CL-08 and CL-11: nothing is picked silently."""
    for name in ("flash-preview.gguf", "flash-0731.gguf"):
        os.utime(write_gguf(tmp_path / name, {}, SMALL), (1.78e9, 1.78e9))
    words = ("a folder", "flash-preview.gguf (0.00 GB, 2026-05", "flash-0731.gguf")
    refused(tmp_path, *words, error=UsageError)


def test_an_empty_folder_a_pipe_and_a_zero_byte_are_usage_errors(tmp_path):
    """CL-08."""
    refused(tmp_path, "a folder without .gguf files", error=UsageError)
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "not a regular file", error=UsageError)
    with pytest.raises(UsageError, match="zero byte"):
        open_gguf("a\0b.gguf")


# Split sets ---------------------------------------------------------------------------------


def split(folder, name="split", count=3, total=None, architecture="deepseek4"):
    """A set of `count` shards with two tensors each; the first one carries the metadata."""
    paths = []
    for i in range(count):
        keys = {"split.no": np.uint16(i), "split.count": np.uint16(count)}
        keys["split.tensors.count"] = np.int32(total or 2 * count)
        if i == 0:
            keys |= {"general.architecture": architecture, "key": 5}
        path = folder / f"{name}-{i + 1:05d}-of-{count:05d}.gguf"
        tensors = {f"{name}.{i}.{x}": ("F32", (1, 8)) for x in "ab"}
        paths.append(write_gguf(path, keys, tensors))
    return paths


def test_any_shard_opens_the_whole_set(tmp_path):
    """MF-16."""
    paths = split(tmp_path)
    for path in paths:
        file = open_gguf(path)
        assert file.metadata["key"] == 5
        assert [t.path.name for t in file.tensors.values()] == [p.name for p in paths for _ in "ab"]
        assert file.nbytes == sum(p.stat().st_size for p in paths)
        assert file.tensors["split.2.b"].read().tobytes() == paths[2].read_bytes()[-32:]


def test_links_that_carry_the_shard_names_open_the_set(tmp_path):
    """MF-16: a hub's cache keeps the files under other names."""
    (tmp_path / "blobs").mkdir()
    for i, path in enumerate(split(tmp_path)):
        path.rename(tmp_path / "blobs" / str(i))
        path.symlink_to(tmp_path / "blobs" / str(i))
    assert len(open_gguf(path).tensors) == 6


def test_all_missing_shards_are_named(tmp_path):
    """MF-16."""
    paths = split(tmp_path)
    paths[0].unlink()
    paths[1].unlink()
    with pytest.raises(FileError) as caught:
        open_gguf(paths[2])
    assert paths[0].name in str(caught.value) and paths[1].name in str(caught.value)


def test_swapped_and_duplicated_shards_are_named(tmp_path):
    """MF-16."""
    paths = split(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(FileError, match=f"{paths[1].name} holds split.no 2, wanted 1"):
        open_gguf(paths[0])


def test_a_shard_of_another_set_is_named(tmp_path):
    """MF-16."""
    (tmp_path / "other").mkdir()
    paths, others = split(tmp_path), split(tmp_path / "other", total=7)
    paths[1].write_bytes(others[1].read_bytes())
    with pytest.raises(FileError, match=f"{paths[1].name} says split.tensors.count 7"):
        open_gguf(paths[0])


def test_shards_with_too_few_tensors_in_all_are_refused(tmp_path):
    """MF-16."""
    with pytest.raises(FileError, match="6 tensors in all, split.tensors.count says 9"):
        open_gguf(split(tmp_path, total=9)[0])


def test_a_renamed_shard_is_not_taken_for_the_model(tmp_path):
    """MF-16."""
    path = split(tmp_path)[0].rename(tmp_path / "model.gguf")
    refused(path, "one of 3 shards", "restore the names")


def test_a_shard_name_on_a_whole_file_is_refused(tmp_path):
    """MF-16."""
    refused(write_gguf(tmp_path / "a-00001-of-00003.gguf", {}, SMALL), "split.count says 1")


def test_a_split_count_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "a-00001-of-00003.gguf"
    write_gguf(path, {"split.count": np.array([3, 3], np.int32)}, SMALL)
    refused(path, "split.count", "wanted int")
