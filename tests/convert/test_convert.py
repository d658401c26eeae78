"""GGUF to folder and back: every byte, what the receipt says, and what is refused."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ds4mlx.convert import convert as convert_module
from ds4mlx.convert import flow, plan
from ds4mlx.convert import receipt as receipt_module
from ds4mlx.convert.blocks import LAYOUTS, PLAIN, decode
from ds4mlx.convert.convert import JOURNAL, convert
from ds4mlx.convert.flow import new_file
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.hub import to_json
from ds4mlx.convert.inventory import SUPPORTED
from ds4mlx.convert.receipt import reverse, signed, verify
from ds4mlx.convert.repack import repack, unpack
from ds4mlx.convert.safetensors import read_safetensors
from ds4mlx.errors import FileError, UsageError
from ds4mlx.tokenizer import BOS, EOS

from .files import TARGET_METADATA, target_tensors, tiny_draft, tiny_target, write_gguf
from .test_config import FAMILIES, other_dialect

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "joyai-llm",
    "tokenizer.ggml.tokens": [BOS, EOS, *(f"t{i}" for i in range(46))],
    "tokenizer.ggml.token_type": np.array([3, 3] + [1] * 46, np.int32),
    "tokenizer.ggml.merges": [],
}
GATE, UP = "mtp.1.ffn_gate_exps.weight", "mtp.1.ffn_up_exps.weight"
NAMES = [
    *("config.json", "generation_config.json", "model-00001-of-00001.safetensors"),
    *("model.safetensors.index.json", "receipt.json", "source.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
]


def target(path, metadata=None, tensors=None, rename=None):
    return tiny_target(path, TOKENIZER | (metadata or {}), tensors, rename)


def random_bytes(type: str, shape: tuple, seed: int = 1) -> tuple:
    """A tensor in which no value is special: NaN, infinities and subnormals among them."""
    layout = LAYOUTS[type]
    n = int(np.prod(shape)) // layout.elements * layout.bytes
    return type, shape, np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8).tobytes()


def draft_of(path, type: str):
    tensors = {GATE: random_bytes(type, (2, 3, 512)), UP: random_bytes(type, (5, 256), 2)}
    return tiny_draft(path, tensors=tensors)


def round_trip(source, tmp_path):
    """The folder, after its conversion, verification and return to the same bytes."""
    out = convert(source, tmp_path / "out")
    verify(out, source)
    (back,) = reverse(out, tmp_path / "back.gguf")
    assert back.read_bytes() == source.read_bytes()
    return out


def config_of(out) -> dict:
    return json.loads((out / "config.json").read_text())


def receipt_of(out) -> dict:
    return json.loads((out / "receipt.json").read_text())


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("type", SUPPORTED)
def test_random_bytes_of_every_type_come_back(tmp_path, type):
    round_trip(draft_of(tmp_path / "d.gguf", type), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_draft_files_comes_back(tmp_path, family):
    keys, rename, types = FAMILIES[family]
    out = round_trip(tiny_draft(tmp_path / "d.gguf", keys, rename=rename, **types), tmp_path)
    assert len(config_of(out)["quantization_config"]["tensors"]) == 81


def test_both_dialects_of_a_target_come_back_and_give_the_same_tensors(tmp_path):
    """MF-15."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours = round_trip(target(tmp_path / "a.gguf"), tmp_path / "a")
    theirs = round_trip(target(tmp_path / "b.gguf", rename=other_dialect), tmp_path / "b")
    name = "model-00001-of-00001.safetensors"
    assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert config_of(ours) == config_of(theirs)


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4"])
def test_targets_with_matrices_of_any_type_come_back(tmp_path, type):
    shapes = target_tensors()
    names = [name for name in shapes if "attn_q_a.w" in name or "exps" in name]
    tensors = {name: random_bytes(type, shapes[name][1], i) for i, name in enumerate(names)}
    round_trip(target(tmp_path / "t.gguf", tensors=tensors), tmp_path)


def test_layers_that_no_model_reads_come_back(tmp_path):
    last = {n.replace("blk.4.", "blk.5."): t for n, t in target_tensors().items() if "blk.4." in n}
    last["blk.5.nextn.e_proj.weight"] = ("Q3_K", (2, 256))  # of a type that is not read either
    keys = {"deepseek4.nextn_predict_layers": 1}
    out = round_trip(target(tmp_path / "t.gguf", keys, last), tmp_path)
    assert not any("layers.5." in key for key in read_safetensors(out / NAMES[2]))


def test_a_draft_with_copies_of_the_targets_matrices_comes_back(tmp_path):
    copies = {n: ("F16", (48, 64)) for n in ("token_embd.weight", "output.weight")}
    out = round_trip(tiny_draft(tmp_path / "d.gguf", tensors=copies), tmp_path)
    assert not {"embed.weight", "head.weight"} & read_safetensors(out / NAMES[2]).keys()


def test_a_target_whose_head_is_its_embedding_comes_back(tmp_path):
    out = round_trip(target(tmp_path / "t.gguf", tensors={"output.weight": None}), tmp_path)
    assert config_of(out)["tie_word_embeddings"]
    assert "head.weight" not in read_safetensors(out / NAMES[2])


def test_two_tensors_on_the_same_bytes_come_back(tmp_path):
    round_trip(tied(tmp_path), tmp_path)


def tied(tmp_path):
    """A target whose head has a name of its own, and the bytes of its embedding."""
    path = target(tmp_path / "t.gguf", tensors={"output.weight": ("F16", (48, 64))})
    data = bytearray(path.read_bytes())
    tensors = open_gguf(path).tensors
    start = min(t.offset for t in tensors.values())
    entry = data.index(b"output.weight") + len("output.weight") + 4 + 2 * 8 + 4
    struct.pack_into("<Q", data, entry, tensors["token_embd.weight"].offset - start)
    path.write_bytes(data)
    assert len({t.place for t in open_gguf(path).tensors.values()}) == len(tensors) - 1
    return path


def test_bytes_between_tensors_come_back(tmp_path):
    keys = {"general.alignment": 4096}
    path = write_gguf(*target_parts(tmp_path / "t.gguf", keys), alignment=4096)
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    spans = [(t.offset, t.offset + t.nbytes) for t in open_gguf(path).tensors.values()]
    for start, end in plan.gaps(len(data), spans)[1:]:
        data[start:end] = 0xA5
    path.write_bytes(data.tobytes())
    round_trip(path, tmp_path)


def target_parts(path, metadata: dict) -> tuple:
    return path, TARGET_METADATA | TOKENIZER | metadata, target_tensors()


def shards(tmp_path, cuts=(0, 0, 70, 150)) -> list:
    """A tiny target in three files, the first of which holds only metadata."""
    path, keys, tensors = target_parts(tmp_path / "t", {})
    paths, items = [], list(tensors.items())
    for i in range(3):
        split = {"split.no": i, "split.count": 3, "split.tensors.count": 150}
        part = dict(items[cuts[i] : cuts[i + 1]])
        name = f"{path}-{i + 1:05}-of-00003.gguf"
        paths.append(write_gguf(name, (keys if i == 0 else {}) | split, part))
    return paths


def test_a_split_set_comes_back_in_its_files_from_any_shard(tmp_path):
    """MF-16."""
    paths = shards(tmp_path)
    out = convert(paths[1], tmp_path / "out")
    verify(out, paths[2])
    back = reverse(out, tmp_path / "back.gguf")
    assert [p.name for p in back] == [f"back-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path, original in zip(back, paths, strict=True):
        assert path.read_bytes() == original.read_bytes()


def test_a_model_of_several_safetensors_files_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "FILE_BYTES", 100_000)
    out = round_trip(target(tmp_path / "t.gguf"), tmp_path)
    files = sorted(p.name for p in out.glob("model-*"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {key: name for name in files for key in read_safetensors(out / name)}
    assert index["weight_map"] == found


def test_the_size_of_a_chunk_changes_nothing(tmp_path, monkeypatch):
    source = draft_of(tmp_path / "d.gguf", "Q5_K")
    whole = content(convert(source, tmp_path / "a"))
    for module in (convert_module, receipt_module):
        monkeypatch.setattr(module, "CHUNK", 500)
    assert content(round_trip(source, tmp_path)) == whole


# The folder ---------------------------------------------------------------------------------


def test_a_target_becomes_an_ordinary_folder(tmp_path):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    assert sorted(content(out)) == NAMES
    config = config_of(out)
    assert config["model_type"] == "deepseek_v4"
    described = config["quantization_config"]["tensors"]
    assert len(described) == 150
    assert described["layers.0.ffn.experts.w1.weight"] == {"type": "MXFP4", "shape": [4, 32, 64]}
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def test_a_draft_becomes_a_folder_without_a_tokenizer(tmp_path):
    out = convert(tiny_draft(tmp_path / "d.gguf"), tmp_path / "out")
    assert sorted(content(out)) == [
        name for name in NAMES if "token" not in name and name[0] != "g"
    ]
    assert config_of(out)["dspark_block_size"] == 5


def test_every_entry_is_aligned_to_its_type(tmp_path):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    for path in out.glob("*.safetensors"):
        for entry in read_safetensors(path).values():
            width = {"U32": 4, "I32": 4, "F32": 4, "F16": 2, "BF16": 2}.get(entry.dtype, 1)
            assert entry.raw.ctypes.data % width == 0


def test_the_official_safetensors_library_reads_the_files(tmp_path):
    from safetensors import safe_open

    out = convert(draft_of(tmp_path / "d.gguf", "IQ2_XXS"), tmp_path / "out")
    with safe_open(out / NAMES[2], "numpy") as file:
        found = file.get_tensor("mtp.1.ffn.experts.w1.weight.signs")
    assert (found.dtype, found.shape) == (np.uint32, (2, 3, 16))


def test_the_embedded_tokenizers_json_gives_the_same_ids_as_the_library(tmp_path):
    from tokenizers import Tokenizer as Backend

    from tests import real_tokenizer

    tokenizer = real_tokenizer.tokenizer()
    text = "Die Größe: 123456 <think>\n\n  def f(x): return 你好"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer.to_json()))
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    ids = backend.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode_marked(text)
    assert backend.decode(ids, skip_special_tokens=False) == text
    again = type(tokenizer).from_json(tmp_path / "tokenizer.json")
    assert again.encode_marked(text) == ids and again.stop_ids == tokenizer.stop_ids


@pytest.mark.parametrize("type", SUPPORTED)
def test_the_values_are_those_of_the_gguf(tmp_path, type):
    """CV-03."""
    source = draft_of(tmp_path / "d.gguf", type)
    entries = read_safetensors(convert(source, tmp_path / "out") / NAMES[2])
    raw = open_gguf(source).tensors[GATE].read()
    planes = {}
    for name, like in repack(type, raw).items():
        key = "mtp.1.ffn.experts.w1.weight" + ("" if type in PLAIN else f".{name}")
        planes[name] = np.array(entries[key].raw).view(like.dtype).reshape(like.shape)
    wanted, found = decode(type, raw), decode(type, unpack(type, planes))
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_bf16_beyond_halfs_range_stays(tmp_path):
    """MF-04."""
    values = np.array([1e5, -3e38, 1e-7, 1.0], np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {"mtp.2.norm.weight": ("BF16", (4,), halves.tobytes())}
    out = convert(tiny_draft(tmp_path / "d.gguf", tensors=tensors), tmp_path / "out")
    found = read_safetensors(out / NAMES[2])["mtp.2.norm.weight"].values()
    np.testing.assert_array_equal(found, decode("BF16", halves.view(np.uint8)[None])[0])
    assert np.isfinite(found).all()


# The receipt --------------------------------------------------------------------------------

HOW = {"F32": "moved", "F16": "moved", "BF16": "moved", "I32": "moved", "Q8_0": "re-expressed"}


@pytest.mark.parametrize("type", SUPPORTED)
def test_the_receipt_tells_what_became_of_a_tensor(tmp_path, type):
    source = draft_of(tmp_path / "d.gguf", type)
    out = convert(source, tmp_path / "out")
    tensor = open_gguf(source).tensors[GATE]
    (line,) = [t for t in receipt_of(out)["tensors"] if t["name"] == GATE]
    raw = source.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    assert line["how"] == HOW.get(type, "rearranged")
    assert (line["type"], line["shape"], line["offset"]) == (type, [2, 3, 512], tensor.offset)
    assert (line["bytes"], line["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())
    entries = read_safetensors(out / line["file"])
    for plane in line["planes"].values():
        data = entries[plane["key"]].raw.tobytes()
        assert plane["sha256"] == hashlib.sha256(data).hexdigest()
    assert line["how"] != "moved" or {line["sha256"]} == {
        plane["sha256"] for plane in line["planes"].values()
    }


def test_the_receipt_tells_source_size_hashes_and_tool(tmp_path):
    """CV-04."""
    source = target(tmp_path / "t.gguf")
    found = receipt_of(convert(source, tmp_path / "out"))
    (part,) = found["sources"]
    assert (part["path"], part["bytes"]) == (str(source), source.stat().st_size)
    assert found["tool"].startswith("ds4mlx ")
    hashed = sum(t["bytes"] for t in found["tensors"]) + part["rest"]["bytes"]
    assert hashed == part["bytes"] and len(part["rest"]["sha256"]) == 64


def flipped(path, at: int):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def odd(out, source=None) -> str:
    with pytest.raises(FileError) as caught:
        verify(out, source)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_bit_at_the_end_of_any_file_is_named(tmp_path, name):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    flipped(out / name, -3 if name.endswith("json") else -1)
    assert name in odd(out) or "rest.1" in odd(out)


def test_every_changed_tensor_is_named(tmp_path):
    source = target(tmp_path / "t.gguf")
    out = convert(source, tmp_path / "out")
    layout = {t["name"]: t for t in receipt_of(out)["tensors"]}
    entries = read_safetensors(out / NAMES[2])
    base = (out / NAMES[2]).stat().st_size - sum(e.raw.nbytes for e in entries.values())
    first = entries[next(iter(entries))].raw.ctypes.data
    for name, plane in (("blk.1.attn_kv.weight", "scales"), ("output_norm.weight", "data")):
        key = layout[name]["planes"][plane]["key"]
        flipped(out / NAMES[2], base + entries[key].raw.ctypes.data - first)
    message = odd(out)
    assert "2 differences" in message
    assert "blk.1.attn_kv.weight: changed" in message and "output_norm.weight: changed" in message


def test_a_changed_source_is_named(tmp_path):
    source = target(tmp_path / "t.gguf")
    out = convert(source, tmp_path / "out")
    tensor = open_gguf(source).tensors["blk.2.ffn_norm.weight"]
    flipped(source, tensor.offset)
    assert "tensor blk.2.ffn_norm.weight is not what was converted" in odd(out, source)
    flipped(source, source.read_bytes().index(b"tiny"))
    assert "2 differences" in odd(out, source) and "the header" in odd(out, source)


def test_a_source_of_another_size_is_named_with_both_sizes(tmp_path):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    other = tiny_draft(tmp_path / "d.gguf")
    assert f"[{other.stat().st_size}] bytes" in odd(out, other)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_missing_file_is_named(tmp_path, name):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    (out / name).unlink()
    assert name in odd(out)


def test_reverse_leaves_no_file_if_a_tensor_has_changed(tmp_path):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    flipped(out / NAMES[2], -1)
    with pytest.raises(FileError, match="differs from its receipt"):
        reverse(out, tmp_path / "back.gguf")
    assert not list(tmp_path.glob("back*"))


def test_a_file_that_another_run_writes_is_left_to_it(tmp_path):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    back = tmp_path / "back.gguf"
    with new_file(back) as file:
        file.write(b"from the other run")
        with pytest.raises(UsageError, match="back.gguf: another run is writing this file"):
            reverse(out, back)
    assert back.read_bytes() == b"from the other run"


def test_reverse_onto_a_folder_says_that_it_is_one(tmp_path):
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    with pytest.raises(UsageError, match="a folder, wanted a file"):
        reverse(out, tmp_path, overwrite=True)


def test_a_link_to_nothing_is_no_place_to_convert_into(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="a link to what is not there"):
        convert(target(tmp_path / "t.gguf"), tmp_path / "link")


@pytest.mark.parametrize("out", ["x" * 300, "t.gguf/out"])
def test_a_path_that_cannot_be_is_one_sentence(tmp_path, out):
    with pytest.raises(FileError, match="File name too long|Not a directory"):
        convert(target(tmp_path / "t.gguf"), tmp_path / out)


def test_a_source_whose_name_is_no_utf8_is_converted_and_verified(tmp_path):
    source = target(tmp_path / "t.gguf")
    odd = source.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    out = convert(odd, tmp_path / "out")
    verify(out, odd)
    assert receipt_of(out)["sources"][0]["path"].endswith("\\xff.gguf")


def test_verify_with_the_source_tells_its_sha256(tmp_path):
    """CV-04."""
    paths = shards(tmp_path)
    said = verify(convert(paths[0], tmp_path / "out"), paths[0])
    for path in paths:
        assert f"SHA-256 of {path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" in said


def test_verify_of_tied_tensors_tells_the_sha256_of_the_source(tmp_path):
    path = tied(tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in verify(
        convert(path, tmp_path / "out"), path
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["tensors"][0].update(how="kept"),
        lambda r: r["tensors"][0].update(how=[]),
        lambda r: r["tensors"].append(r["tensors"][0]),
        lambda r: r["tensors"][0].update(name=""),
        lambda r: r["tensors"][0].update(file="x" * 300),
        lambda r: r["tensors"][0]["planes"]["data"].update(key=[]),
        lambda r: r["files"].update({"../x": r["files"]["config.json"]}),
        lambda r: r["sources"][0].update(bytes="1"),
    ],
)
def test_a_receipt_that_no_conversion_wrote_is_refused(tmp_path, change):
    out = convert(tiny_draft(tmp_path / "d.gguf"), tmp_path / "out")
    receipt = receipt_of(out)
    del receipt["sha256"]
    receipt["tensors"].sort(key=lambda t: t["how"])  # a plain one first
    change(receipt)
    (out / "receipt.json").write_bytes(to_json(signed(receipt)))
    with pytest.raises(FileError, match="receipt.json: not a receipt of a conversion"):
        verify(out)


def test_reverse_does_not_replace_a_file_unasked(tmp_path):
    source = target(tmp_path / "t.gguf")
    out = convert(source, tmp_path / "out")
    before = source.read_bytes()
    with pytest.raises(UsageError, match="t.gguf exists.*--overwrite"):
        reverse(out, source)
    reverse(out, source, overwrite=True)
    assert source.read_bytes() == before


def test_a_changed_receipt_is_named(tmp_path):
    out = convert(tiny_draft(tmp_path / "d.gguf"), tmp_path / "out")
    receipt = receipt_of(out)
    receipt["tensors"][0]["offset"] += 32
    (out / "receipt.json").write_text(json.dumps(receipt))
    assert "the receipt has changed" in odd(out)


DAMAGE = [
    ("sources", []),
    ("sources", None),
    ("format", 2),
    ("tensors", [{}]),
    ("tensors", [7]),
    ("files", {"../x": {"bytes": 1, "sha256": "0"}}),
    *(("tensor", {"offset": value}) for value in (-1, 1 << 60, "x")),
    *(("tensor", {"bytes": value}) for value in (-1, 0, 1, 1 << 60, "x")),
    *(("tensor", {"source": value}) for value in (9, None)),
    *(("tensor", {"type": value}) for value in ("Q9", "Q8_0", 3)),
    *(("tensor", {"file": value}) for value in ("../x", "/x", 3)),
    *(("tensor", {"planes": value}) for value in ({}, {"data": {}}, 3)),
    ("tensor", {"planes": {"data": dict(key="a", dtype="U8", shape=[1 << 50], sha256="")}}),
    ("tensor", {"planes": {"data": dict(key="a", dtype="Z8", shape=[1], sha256="")}}),
]


@pytest.mark.parametrize("key, value", DAMAGE)
def test_a_damaged_receipt_is_refused(tmp_path, key, value):
    out = convert(tiny_draft(tmp_path / "d.gguf"), tmp_path / "out")
    receipt = receipt_of(out)
    del receipt["sha256"]
    if key == "tensor":
        next(t for t in receipt["tensors"] if t["name"] == GATE).update(value)
    else:
        receipt[key] = value
    (out / "receipt.json").write_text(json.dumps(signed(receipt)))
    for act in (verify, lambda out: reverse(out, tmp_path / "back.gguf")):
        with pytest.raises(FileError, match="receipt"):
            act(out)


# Refused before anything is written -----------------------------------------------------------


def refused(source, out, error=UsageError, **options) -> str:
    with pytest.raises(error) as caught:
        convert(source, out, **options)
    return str(caught.value)


def test_an_existing_model_is_replaced_only_when_asked(tmp_path):
    """CV-06."""
    out = convert(target(tmp_path / "t.gguf"), tmp_path / "out")
    draft, before = tiny_draft(tmp_path / "d.gguf"), content(out)
    assert "holds a model already" in refused(draft, out)
    assert content(out) == before
    convert(draft, out, overwrite=True)
    verify(out, draft)
    assert content(out) == content(convert(draft, tmp_path / "other"))


def test_a_folder_with_other_files_is_not_written_into_unasked(tmp_path):
    """CV-06."""
    (tmp_path / "notes.txt").write_text("mine")
    source = target(tmp_path / "t.gguf")
    assert "notes.txt" in refused(source, tmp_path)
    convert(source, tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine" and source.exists()


def test_output_equal_to_input_is_refused(tmp_path):
    """CV-06."""
    source = target(tmp_path / "t.gguf")
    before = source.read_bytes()
    for overwrite in (False, True):
        assert "a file, wanted a folder" in refused(source, source, overwrite=overwrite)
    assert source.read_bytes() == before


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path, monkeypatch):
    """CV-06."""
    source = target(tmp_path / "t.gguf")
    monkeypatch.setattr(flow.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    assert "0.00 GB are free" in refused(source, tmp_path / "out", FileError)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_another_run_in_the_same_folder_is_refused(tmp_path):
    source, out = target(tmp_path / "t.gguf"), tmp_path / "out"
    out.mkdir()
    with (out / JOURNAL).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run" in refused(source, out)


def test_an_incomplete_or_foreign_file_makes_no_folder(tmp_path):
    """MF-02, MF-05, MF-06, MF-07."""
    whole = target(tmp_path / "t.gguf").read_bytes()
    unknown = {"blk.0.attn_q_a.weight": ("unknown", (32, 64))}
    cases = {
        "incomplete download": (whole[:-64], FileError),
        "bytes too many": (whole + whole, FileError),
        "a web page": (b"<!doctype html>", UsageError),
        "git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1", UsageError),
        "an empty file": (b"", UsageError),
        "unknown type code 105": (
            target(tmp_path / "u.gguf", tensors=unknown).read_bytes(),
            FileError,
        ),
        "tokenizer": (tiny_target(tmp_path / "v.gguf").read_bytes(), FileError),
    }
    for says, (data, error) in cases.items():
        (tmp_path / "bad.gguf").write_bytes(data)
        assert says in refused(tmp_path / "bad.gguf", tmp_path / "out", error)
        assert not (tmp_path / "out").exists()


def test_types_that_no_op_reads_are_named(tmp_path):
    bad = {GATE: ("Q3_K", (2, 256)), UP: ("IQ3_XXS", (2, 256))}
    source = tiny_draft(tmp_path / "d.gguf", tensors=bad)
    message = refused(source, tmp_path / "out", FileError)
    assert "Q3_K" in message and "IQ3_XXS" in message


def test_unknown_tensors_of_a_draft_are_named(tmp_path):
    extra = {"conf_proj.bias": ("F32", (1,)), "d2t": ("I64", (8,))}
    source = tiny_draft(tmp_path / "d.gguf", tensors=extra)
    message = refused(source, tmp_path / "out", FileError)
    assert "conf_proj.bias" in message and "d2t" in message


def test_a_folder_that_is_none_of_ours_is_not_verified(tmp_path):
    for act in (verify, lambda out: reverse(out, tmp_path / "back.gguf")):
        with pytest.raises(UsageError, match="wanted a folder"):
            act(tmp_path / "absent")
        with pytest.raises(FileError, match="there is no config.json"):
            act(tmp_path)


# Memory -------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from ds4mlx.convert.convert import convert
from ds4mlx.convert.receipt import reverse, signed, verify
def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
source, out = sys.argv[1:]
before = peak()
convert(source, out)
verify(out, source)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """CV-01."""
    path, row = tmp_path / "big.gguf", np.arange(8 * 84 * 49152, dtype=np.uint8)
    largest = row.nbytes
    tensors = {
        f"mtp.{s}.ffn_{part}_exps.weight": ("Q2_K", (48, 1024, 2048), row.tobytes())
        for s in range(5)
        for part in ("gate", "up", "down")
    }
    keys = {"general.architecture": "deepseek4-dspark", "dspark.block_size": 5}
    keys |= {"dspark.markov_rank": 32, "dspark.noise_token_id": 7}
    keys["dspark.target_layer_ids"] = np.array([2, 3, 4], np.uint32)
    tensors["mtp.0.main_proj.weight"] = ("F32", (4, 4))
    write_gguf(path, keys, tensors)
    assert path.stat().st_size > 490e6, path.stat().st_size
    paths = [path, tmp_path / "out"]
    done = subprocess.run([sys.executable, "-c", PEAK, *paths], capture_output=True, text=True)
    shutil.rmtree(tmp_path / "out")
    path.unlink()
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150e6 + 2 * largest


@pytest.mark.parametrize("name", ["receipt.json", "config.json", NAMES[2], "source.safetensors"])
def test_a_file_that_cannot_be_opened_is_one_sentence(tmp_path, name):
    out = convert(tiny_draft(tmp_path / "d.gguf"), tmp_path / "out")
    (out / name).unlink()
    (out / name).symlink_to(name)  # in a circle
    for act in (lambda: verify(out), lambda: reverse(out, tmp_path / "back.gguf")):
        with pytest.raises(FileError, match=rf"{name}|not a finished conversion"):
            act()


def test_a_file_without_permission_is_one_sentence(tmp_path, monkeypatch):
    out = convert(tiny_draft(tmp_path / "d.gguf"), tmp_path / "out")
    read_bytes = Path.read_bytes

    def denied(path):  # root may read any file
        if path.name == "receipt.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(FileError, match="receipt.json: Permission denied"):
        verify(out)
