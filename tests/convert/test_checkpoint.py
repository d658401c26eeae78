"""From the released checkpoint, FP8 and FP4, to the files that ds4 has."""

import json
import os
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ds4mlx
from ds4mlx import cli
from ds4mlx.convert.blocks import decode
from ds4mlx.convert.checkpoint import Source, open_checkpoint, sources
from ds4mlx.convert.config import draft_config, target_config
from ds4mlx.convert.convert import convert
from ds4mlx.convert.encode import encode
from ds4mlx.convert.flow import new_file
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.inventory import check_draft, check_target, wanted_draft, wanted_target
from ds4mlx.convert.metadata import draft_metadata, tokenizer_metadata
from ds4mlx.convert.names import draft_name, target_name
from ds4mlx.convert.quantize import image, write
from ds4mlx.convert.receipt import reverse, verify
from ds4mlx.convert.released import convert_released
from ds4mlx.convert.safetensors import Entry
from ds4mlx.errors import FileError, UsageError
from ds4mlx.tokenizer import Tokenizer
from tests import real_tokenizer

from .checkpoints import (
    VALUES,
    from_fp8,
    released,
    write_checkpoint,
    write_safetensors,
)
from .test_pair import CONFIG, TOKENS, E, model

NANO = Path(ds4mlx.__path__[0]) / "data" / "nano.gguf"
DRAFT = NANO.with_name("nano-dspark.gguf")
SPLITS = Tokenizer.from_gguf(real_tokenizer.metadata()).to_json()["pre_tokenizer"]
TOKENIZER = {
    "added_tokens": [{"id": i, "content": TOKENS[i], "special": i < 2} for i in range(4)],
    "model": {"vocab": {t: i for i, t in enumerate(TOKENS)}, "merges": []},
    "pre_tokenizer": SPLITS,
}
SETTINGS = {k: v for k, v in CONFIG.items() if k != "n_mtp_layers"}  # which the release lacks


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    target, draft = model()
    return target | draft


@pytest.fixture(scope="module")
def tensors(values) -> dict:
    return released(values)


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "DeepSeek-V4-Tiny-0731"
    return write_checkpoint(path, tensors, SETTINGS, TOKENIZER)


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory) -> tuple[Path, Path]:
    """The target and the draft as GGUF files."""
    out = tmp_path_factory.mktemp("made")
    list(convert_released(folder, out, gguf=True, dspark_support=out))
    draft = out / "DeepSeek-V4-Tiny-DSpark-support-0731.gguf"
    (target,) = set(out.glob("*.gguf")) - {draft}
    return target, draft


def by_official_name(path: Path) -> dict:
    return {
        target_name(n) or draft_name(n, 2): decode(t.type, t.read()).reshape(t.shape)
        for n, t in open_gguf(path).tensors.items()
    }


def fp8(codes: np.ndarray, scales: np.ndarray) -> Source:
    scale = Entry("F8_E8M0", scales.shape, scales)
    return Source("x", Entry("F8_E4M3", codes.shape, codes), scale)


def fp4(packed: np.ndarray, scales: np.ndarray) -> Source:
    return Source("x", Entry("I8", packed.shape, packed), Entry("F8_E8M0", scales.shape, scales))


# Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 256), (130, 160), (1, 32)])
def test_fp8_is_read_exactly_under_scales_of_many_sizes(shape):
    """CV-05."""
    codes = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) % 254
    codes = (codes + (codes >= 127)).astype(np.uint8)  # without the two NaN
    scales = np.array([[117, 127], [137, 120]], np.uint8)[
        : -(-shape[0] // 128), : -(-shape[1] // 128)
    ]
    found = fp8(codes, scales).values(0, shape[0])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.astype(np.float64), from_fp8(codes, scales))


@pytest.mark.parametrize(("exponent", "code"), [(0, 1), (0, 126), (246, 126), (254, 1)])
def test_fp8_is_exact_at_the_ends_of_its_range(exponent, code):
    """CV-05: e8m0 is an exponent, and the smallest ones make subnormal numbers."""
    codes, scales = np.full((1, 32), code, np.uint8), np.full((1, 1), exponent, np.uint8)
    wanted = VALUES[code].astype(np.float64) * 2.0 ** (exponent - 127)
    assert (fp8(codes, scales).values(0, 1) == wanted).all() and wanted > 0


@pytest.mark.parametrize("start", [0, 100, 127, 128, 255])
def test_rows_from_anywhere_have_the_scales_of_their_block(start):
    codes, scales = np.full((256, 32), 56, np.uint8), np.array([[127], [130]], np.uint8)
    found = fp8(codes, scales).values(start, 256)[:, 0]
    np.testing.assert_array_equal(found, [1 if r < 128 else 8 for r in range(start, 256)])


@pytest.mark.parametrize("exponent", [0, 1, 127, 252])
def test_fp4_is_the_even_column_first_under_a_scale_per_32(exponent):
    """CV-05."""
    codes = (np.arange(64) * 7 % 16).astype(np.uint8)
    packed = (codes[::2] | (codes[1::2] << 4))[None]
    scales = np.array([[exponent, 127]], np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    wide = np.exp2(np.repeat(scales.astype(np.float64) - 127, 32))
    wanted = np.where(codes > 7, -1, 1) * table[codes & 7] * wide
    source = fp4(packed, scales)
    np.testing.assert_array_equal(source.values(0, 1)[0].astype(np.float64), wanted)
    blocks = decode("MXFP4", source.mxfp4(0, 1))
    np.testing.assert_array_equal(blocks.view("u4"), source.values(0, 1).view("u4"))


@pytest.mark.parametrize("type", ["MXFP4", "Q4_K"])
def test_a_scale_that_is_nan_is_refused(type):
    """CV-05."""
    source = fp4(np.zeros((1, 128), np.uint8), np.array([[127] * 7 + [255]], np.uint8))
    with pytest.raises(FileError, match="x: a scale is NaN"):
        source.mxfp4(0, 1) if type == "MXFP4" else source.values(0, 1)


def test_a_code_that_is_nan_is_refused_by_the_tensors_name(tensors, tmp_path):
    tensors = tensors | {"layers.1.attn.wq_a.weight": ("F8_E4M3", np.full((32, 256), 127, "u1"))}
    path = write_checkpoint(tmp_path / "in", tensors, SETTINGS, TOKENIZER)
    with pytest.raises(FileError, match="blk.1.attn_q_a.weight: a value is not finite"):
        list(convert_released(path, tmp_path / "out.gguf", gguf=True))
    assert not (tmp_path / "out.gguf").exists() and not list(tmp_path.glob("*.part"))


# The files ------------------------------------------------------------------------------------


def test_every_tensor_is_there_and_fits_the_settings(made, values):
    target, draft = map(open_gguf, made)
    config = target_config(target)
    found = check_target(target, config) | check_draft(draft, draft_config(draft), config)
    assert set(found) == {n.replace(".experts.0.", ".experts.") for n in values} - {
        n for n in values if ".experts.1." in n
    }


def test_fp4_experts_become_mxfp4_bit_for_bit(made, values):
    for path in made:
        for name, found in by_official_name(path).items():
            if ".ffn.experts." in name:
                parts = (values[name.replace("experts.", f"experts.{e}.")] for e in range(E))
                np.testing.assert_array_equal(found.view("u4"), np.stack(list(parts)).view("u4"))


def test_dense_matrices_are_q8_0_of_the_exact_fp8_values(made, tensors):
    checked = 0
    for path in made:
        for t in open_gguf(path).tensors.values():
            name = target_name(t.name) or draft_name(t.name, 2)
            if ".experts." in name or tensors[name][0] != "F8_E4M3":
                continue
            scales = tensors[name.removesuffix(".weight") + ".scale"][1]
            exact = from_fp8(tensors[name][1], scales).astype(np.float32)
            kind = "F16" if "indexer" in name else "Q8_0"
            assert t.type == kind and t.read().tobytes() == encode(kind, exact).tobytes()
            checked += 1
    assert checked == 5 * 8 + 1 + 1  # layers and stages, the indexer's, main_proj


def test_vectors_and_ids_of_64_bits_keep_their_values(made, values):
    found = by_official_name(made[0]) | by_official_name(made[1])
    for name, x in values.items():
        if "tid2eid" in name:
            np.testing.assert_array_equal(found[name], x)
        elif x.ndim == 1:
            bf16 = "norm" in name
            wanted = (x.view(np.uint32) >> 16 << 16).view(np.float32) if bf16 else x
            np.testing.assert_array_equal(found[name], wanted)


def test_names_are_those_of_ds4_and_tell_the_lineage(made):
    assert made[0].name == (
        "DeepSeek-V4-Tiny-MXFP4Experts-F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out-"
        "0731.gguf"
    )
    target, draft = map(open_gguf, made)
    assert target.metadata["general.name"] == "DeepSeek V4 Tiny 0731"
    assert target_config(target)["lineage"] == draft_config(draft)["lineage"] == "0731"


def test_the_draft_has_ds4s_nine_keys(made):
    metadata = open_gguf(made[1]).metadata
    assert list(metadata)[:3] == ["general.architecture", "general.name", "general.alignment"]
    assert [k.removeprefix("dspark.") for k in list(metadata)[3:]] == [
        "block_size",
        "markov_rank",
        "noise_token_id",
        "target_layer_ids",
        "stage_count",
        "n_layers",
    ]
    assert metadata["dspark.stage_count"] == 2  # counted: config.json does not tell


def test_settings_survive(made):
    """CV-04."""
    found = target_config(open_gguf(made[0]))
    wanted = SETTINGS | {"compress_ratios": SETTINGS["compress_ratios"][:3]}
    assert {k: found[k] for k in wanted if "dspark" not in k} == {
        k: v for k, v in wanted.items() if "dspark" not in k
    }


def test_the_official_tokenizer_survives():
    """CV-04."""
    path = real_tokenizer.path()
    config = {"vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1}
    metadata = tokenizer_metadata(json.loads(path.read_text("utf-8")), config)
    found = Tokenizer.from_gguf({key: value for key, (_, value) in metadata.items()})
    assert found.to_json() == Tokenizer.from_json(path).to_json()


def test_a_second_run_writes_the_same_bytes(made, folder, tmp_path):
    list(convert_released(folder, tmp_path, gguf=True, dspark_support=tmp_path))
    for path in made:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("experts", "types", "stem"),
    [("q4_k", ("Q4_K", "Q4_K"), "Q4KExperts"), ("iq2_xxs", ("IQ2_XXS", "Q2_K"), "IQ2XXS-w2Q2K")],
)
def test_experts_can_be_rounded_on_demand(folder, values, tmp_path, experts, types, stem):
    """CV-03: the errors are measured and told."""
    lines = list(convert_released(folder, tmp_path, gguf=True, experts=experts))
    (path,) = tmp_path.glob(f"DeepSeek-V4-Tiny-{stem}*.gguf")
    tensors = open_gguf(path).tensors
    for part, type in zip(("gate", "down"), types, strict=True):
        t = tensors[f"blk.1.ffn_{part}_exps.weight"]
        end = "w1.weight" if part == "gate" else "w2.weight"
        x = np.concatenate([values[f"layers.1.ffn.experts.{e}.{end}"] for e in range(E)])
        assert t.type == type and t.read().tobytes() == encode(type, x).tobytes()
        assert any(line.startswith(f"  {type}: ") and "relative error 0." in line for line in lines)


def test_what_was_not_rounded_is_said_to_be_exact(folder, tmp_path):
    """CV-03."""
    lines = list(convert_released(folder, tmp_path, gguf=True))
    assert "  MXFP4: 9 tensors, exact" in lines and "  I32: 1 tensors, exact" in lines


def test_the_draft_alone_needs_only_its_shards(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    for i in (1, 2):
        (copy / f"model-0000{i}-of-00003.safetensors").unlink()
    list(convert_released(copy, dspark_support=tmp_path / "a.gguf", gguf=True))
    assert len(open_gguf(tmp_path / "a.gguf").tensors) == 24 * 2 + 2 + 7


def test_the_target_alone_needs_no_shard_of_the_draft(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    (copy / "model-00003-of-00003.safetensors").unlink()
    list(convert_released(copy, tmp_path / "a.gguf", gguf=True))
    list(convert_released(folder, tmp_path / "b.gguf", gguf=True))
    alone, whole = (open_gguf(tmp_path / name) for name in ("a.gguf", "b.gguf"))
    assert alone.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert np.array_equal(alone.tensors[name].read(), tensor.read())


def test_the_manifest_tells_what_the_draft_was_made_of(folder, tmp_path):
    file = tmp_path / "manifest.json"
    options = dict(dspark_support=tmp_path / "a.gguf", dspark_manifest=file, gguf=True)
    list(convert_released(folder, **options))
    manifest = json.loads(file.read_text())
    tensors = {t["name"]: t for t in manifest["tensors"]}
    assert manifest["stages"] == 2 and list(tensors) == list(open_gguf(tmp_path / "a.gguf").tensors)
    experts, dense = tensors["mtp.1.ffn_up_exps.weight"], tensors["mtp.0.main_proj.weight"]
    assert experts["sources"] == [
        {"name": f"mtp.1.ffn.experts.{e}.w3.weight", "file": "model-00003-of-00003.safetensors"}
        for e in range(E)
    ]
    assert (experts["format"], experts["type"], experts["relative_error"]) == ("FP4", "MXFP4", 0)
    assert dense["format"] == "FP8" and 0 < dense["relative_error"] < 0.01


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """CV-01: 64 MB of FP4 within 40 MB."""
    packed, scales = np.zeros((256, 2048, 128), np.uint8), np.full((256, 2048, 8), 120, np.uint8)
    stack = tuple(fp4(p, s) for p, s in zip(packed, scales, strict=True))
    made = image(tmp_path, {}, {"layers.0.ffn.experts.w1.weight": stack}, "mxfp4")
    tracemalloc.start()
    write(made, tmp_path / "a.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made.nbytes > 64e6 and peak < 40e6


# Flash itself ---------------------------------------------------------------------------------

FLASH = {
    "hidden_size": 4096,
    "vocab_size": 129280,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4],
    "num_hash_layers": 3,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "hc_mult": 4,
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
}


def unread(wanted) -> dict[str, tuple[Source, ...]]:
    """Sources with shapes and without bytes."""
    none, out = np.zeros((0, 1), np.uint8), {}
    for name, (kind, shape) in wanted:
        count, *shape = shape if ".experts." in name else (1, *shape)
        entry = Entry("I64" if kind == "ids" else "BF16", tuple(shape), none)
        out[name] = (Source(name, entry),) * count
    return out


@pytest.mark.parametrize(
    ("experts", "size"),
    [("iq2_xxs", 86_714_777_664), ("q4_k", 164_628_168_768), ("mxfp4", 155_971_125_312)],
)
def test_flash_has_as_many_bytes_of_tensors_as_ds4s_files(tmp_path, experts, size):
    made = image(tmp_path, {}, unread(wanted_target(FLASH)), experts)
    assert len(made.tensors) == 1328 and made.nbytes - len(made.header) == size


def test_the_draft_of_flash_is_as_long_as_ds4s_file(tmp_path):
    metadata = draft_metadata(FLASH, "DeepSeek V4 Flash DSpark support", 3)
    made = image(tmp_path, metadata, unread(wanted_draft(FLASH, FLASH)), "iq2_xxs")
    assert len(made.tensors) == 81 and made.nbytes == 5_989_114_272


# The embedded model ---------------------------------------------------------------------------


def embedded(dense: str) -> dict:
    """The embedded pair's tensors, dense ones as FP8 or as the float32 values that they are."""
    values = {}
    for path in (NANO, DRAFT):
        for name, x in by_official_name_of_nano(path).items():
            parts = enumerate(x) if ".ffn.experts." in name else [(None, x)]
            for e, part in parts:
                values[name if e is None else name.replace("experts.", f"experts.{e}.")] = part
    if dense == "FP8":
        return released(values)
    plain = {n: ("I32" if x.dtype == np.int32 else "F32", x) for n, x in values.items()}
    experts = {n: x for n, x in values.items() if ".ffn.experts." in n}
    return {n: t for n, t in plain.items() if n not in experts} | released(experts)


def by_official_name_of_nano(path: Path) -> dict:
    return {
        target_name(n) or draft_name(n, 3): decode(t.type, t.read()).reshape(t.shape)
        for n, t in open_gguf(path).tensors.items()
    }


def nano_checkpoint(path: Path, dense: str) -> Path:
    gguf = open_gguf(NANO)
    config = target_config(gguf) | draft_config(open_gguf(DRAFT))
    tokenizer = Tokenizer.from_gguf(gguf.metadata).to_json()
    return write_checkpoint(path, embedded(dense), config, tokenizer)


def test_the_embedded_pair_comes_back_byte_for_byte(tmp_path):
    source = nano_checkpoint(tmp_path / "in", "F32")
    target, draft = tmp_path / "a.gguf", tmp_path / "b.gguf"
    list(convert_released(source, target, gguf=True, dspark_support=draft))
    for path, wanted in ((target, NANO), (draft, DRAFT)):
        found = open_gguf(path).tensors
        for name, t in open_gguf(wanted).tensors.items():
            assert (found[name].type, found[name].shape) == (t.type, t.shape)
            assert found[name].read().tobytes() == t.read().tobytes(), name


def test_the_embedded_pair_as_a_release_generates_with_its_draft(tmp_path):
    source = nano_checkpoint(tmp_path / "in", "FP8")
    target, draft = tmp_path / "a.gguf", tmp_path / "b.gguf"
    list(convert_released(source, target, gguf=True, dspark_support=draft))
    prompt, options = "import os\nimport sys\n\n\ndef main(", dict(raw=True, tokens=12)
    with ds4mlx.load(target, mtp=draft) as model:
        found = "".join(model.generate(prompt, dspark=True, **options))
    with ds4mlx.load() as model:
        assert found == "".join(model.generate(prompt, **options))


# What is refused ------------------------------------------------------------------------------


def refusal(folder, **options) -> str:
    with pytest.raises((FileError, UsageError)) as caught:
        list(convert_released(folder, **options))
    return str(caught.value)


@pytest.fixture
def edit(tensors, tmp_path):
    """A checkpoint with some tensors changed, and what the conversion says of it."""

    def edit(changes: dict, config=SETTINGS, **options) -> str:
        changed = {n: t for n, t in (tensors | changes).items() if t is not None}
        path = write_checkpoint(tmp_path / "DeepSeek-V4-Tiny", changed, config, TOKENIZER)
        options = {"out": tmp_path / "a.gguf", "gguf": True} | options
        message = refusal(path, **options)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing was written
        return message

    return edit


def test_missing_shards_are_named(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    for i in (1, 2):
        (copy / f"model-0000{i}-of-00003.safetensors").unlink()
    message = refusal(copy, out=tmp_path / "a.gguf", gguf=True)
    assert "2 of 2 shards are missing: model-00001-of-00003.safetensors; model-00002-of" in message


def test_a_truncated_shard_is_refused(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    shard = copy / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "incomplete download" in refusal(copy, out=tmp_path / "a.gguf", gguf=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_without_its_small_files_is_refused(folder, tmp_path, name):
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    (copy / name).unlink()
    assert f"there is no {name}" in refusal(copy, out=tmp_path / "a.gguf", gguf=True)


def test_a_folder_without_tensors_is_refused(folder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    assert "no .safetensors file" in refusal(tmp_path, out=tmp_path / "a.gguf", gguf=True)


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F32", "F8_E4M3"])
def test_scales_of_another_shape_or_kind_are_refused(edit, dtype):
    """CV-05."""
    scale = np.ones((3, 2), "f4" if dtype == "F32" else "u1")
    message = edit({"layers.0.attn.wo_b.scale": (dtype, scale)})
    assert f"layers.0.attn.wo_b.scale is {dtype} [3, 2], wanted F8_E8M0 [2, 1] (128x128" in message


def test_scales_of_experts_are_one_per_32(edit):
    name = "layers.1.ffn.experts.1.w1.scale"
    message = edit({name: ("F8_E8M0", np.ones((2, 2), np.uint8))})
    assert f"{name} is F8_E8M0 [2, 2], wanted F8_E8M0 [256, 8] (one per 32 columns)" in message


def test_a_matrix_without_its_scales_is_refused(edit):
    """CV-05: never a cast without scales."""
    message = edit({"layers.1.attn.wkv.scale": None, "layers.0.ffn.experts.0.w1.scale": None})
    assert "layers.1.attn.wkv.weight is F8_E4M3 [32, 256], without its layers.1.attn.wkv" in message
    assert "layers.0.ffn.experts.0.w1.weight is I8 [256, 128], without its" in message


def test_scales_without_a_matrix_are_refused(edit):
    message = edit({"layers.0.attn.extra.scale": ("F8_E8M0", np.ones((1, 1), np.uint8))})
    assert "layers.0.attn.extra.scale belongs to no matrix" in message


def test_unknown_tensors_are_all_named(edit):
    extra = ("F32", np.zeros(3, np.float32))
    message = edit({"layers.0.attn.extra": extra, "layers.0.norm.weight": extra})
    assert "layers.0.attn.extra has no place in a GGUF" in message
    assert "layers.0.norm.weight has no place in a GGUF" in message


def test_an_unknown_dtype_is_refused(edit):
    message = edit({"norm.weight": ("F8_E5M2", np.zeros(256, np.uint8))})
    assert "norm.weight is F8_E5M2 [256], wanted a matrix of FP8 or FP4" in message


def test_missing_tensors_are_all_named(edit):
    message = edit({"norm.weight": None, "layers.2.attn.compressor.ape": None})
    assert "missing output_norm.weight [256]" in message
    assert "missing blk.2.attn_compressor_ape.weight" in message


def test_a_missing_expert_is_refused(edit):
    gone = dict.fromkeys(f"layers.1.ffn.experts.0.w2.{x}" for x in ("weight", "scale"))
    assert "layers.1.ffn.experts.w2.weight has experts [1], wanted 0, 1, .." in edit(gone)


def test_missing_settings_are_all_named(edit):
    config = {k: v for k, v in SETTINGS.items() if k not in ("hc_mult", "rope_scaling")}
    message = edit({}, config | {"hidden_size": "wide"})
    assert "fields are missing: hc_mult, rope_scaling.original_max_position" in message
    assert "hidden_size is 'wide', wanted an integer" in message


def test_another_scoring_is_refused(edit):
    message = edit({}, SETTINGS | {"scoring_func": "softmax"})
    assert "scoring_func is 'softmax', wanted 'sqrtsoftplus'" in message


def test_settings_at_odds_with_the_tensors_are_refused(edit):
    assert "missing blk.3.attn_norm.weight" in edit({}, SETTINGS | {"num_hidden_layers": 4})


def test_a_tokenizer_of_another_size_is_refused(edit):
    message = edit({}, SETTINGS | {"vocab_size": 33})
    assert "tokenizer.json: ids of 32 tokens, wanted 0 to 32" in message


def test_a_draft_with_stages_missing_is_refused_by_their_tensors(edit, tensors, tmp_path):
    gone = dict.fromkeys(n for n in tensors if n.startswith("mtp.1."))
    message = edit(gone, dspark_support=tmp_path / "b.gguf")
    assert "missing mtp.0.norm.weight [256]" in message and "markov_head.markov_w1" in message


def test_a_checkpoint_without_a_draft_is_refused(edit, tensors, tmp_path):
    gone = dict.fromkeys(n for n in tensors if n.startswith("mtp."))
    assert "holds no mtp.* tensors" in edit(gone, dspark_support=tmp_path / "b.gguf")


def test_the_older_one_stage_drafter_is_refused_by_name(edit, tensors, tmp_path):
    gone = dict.fromkeys(n for n in tensors if n.startswith("mtp."))
    gone["mtp.0.enorm.weight"] = ("F32", np.zeros(256, np.float32))
    message = edit(gone, dspark_support=tmp_path / "b.gguf")
    assert "holds an older one-stage MTP drafter" in message


def test_experts_off_the_grid_are_not_rounded_in_silence(edit):
    """CV-03."""
    changes = {"layers.1.ffn.experts.1.w1.scale": None}
    half = np.full((256, 256), 0x3F81, np.uint16)
    changes |= {f"layers.1.ffn.experts.{e}.w1.weight": ("BF16", half) for e in range(E)}
    changes["layers.1.ffn.experts.0.w1.scale"] = None
    message = edit(changes)
    assert "blk.1.ffn_gate_exps.weight: expert 0: values off the MXFP4 grid" in message


def test_nothing_is_overwritten_unasked(folder, tmp_path):
    """CV-06."""
    (tmp_path / "a.gguf").write_bytes(b"mine")
    options = dict(out=tmp_path / "a.gguf", gguf=True)
    assert "exists already" in refusal(folder, **options)
    assert (tmp_path / "a.gguf").read_bytes() == b"mine"
    list(convert_released(folder, overwrite=True, **options))
    open_gguf(tmp_path / "a.gguf")


def test_target_and_draft_need_two_places(folder, tmp_path):
    """CV-06."""
    place = tmp_path / "a.gguf"
    message = refusal(folder, out=place, dspark_support=place, gguf=True)
    assert "cannot be written to one place" in message


@pytest.mark.parametrize("gguf", [False, True])
@pytest.mark.parametrize("below", ["", "out"])
def test_a_checkpoint_is_never_written_over(folder, gguf, below):
    """CV-06: output = input, with --overwrite too."""
    before = sorted(folder.iterdir())
    message = refusal(folder, out=folder / below, gguf=gguf, overwrite=True)
    assert "lies in the checkpoint's own folder" in message
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("gguf", [False, True])
def test_all_places_are_judged_before_the_first_is_written(folder, folders, made, tmp_path, gguf):
    """CV-06."""
    taken = made[1] if gguf else folders[1]
    message = refusal(folder, out=tmp_path / "out", dspark_support=taken, gguf=gguf)
    assert "exists already" in message and not (tmp_path / "out").exists()


def test_a_disk_without_room_for_both_is_refused_at_once(folder, made, tmp_path, monkeypatch):
    """CV-06."""
    usage = SimpleNamespace(free=(1 << 25) + sum(p.stat().st_size for p in made) - 1)
    monkeypatch.setattr("ds4mlx.convert.flow.shutil.disk_usage", lambda path: usage)
    places = dict(out=tmp_path / "a.gguf", dspark_support=tmp_path / "b.gguf", gguf=True)
    assert "are to be written" in refusal(folder, **places)
    assert not list(tmp_path.iterdir())
    list(convert_released(folder, out=tmp_path / "a.gguf", gguf=True))


def test_a_converted_folder_is_no_checkpoint(folders, tmp_path):
    """CV-03: nothing is rounded twice."""
    message = refusal(folders[0], out=tmp_path / "a.gguf", gguf=True)
    assert "is converted already; --reverse makes the GGUF of it" in message


def test_a_manifest_that_cannot_be_written_is_refused_first(folder, tmp_path):
    options = dict(dspark_support=tmp_path / "a", dspark_manifest=tmp_path / "no" / "m.json")
    assert "there is no folder" in refusal(folder, **options)
    assert not list(tmp_path.iterdir())


def test_a_manifest_needs_a_draft(folder, tmp_path):
    message = refusal(folder, out=tmp_path / "a", dspark_manifest=tmp_path / "m.json")
    assert "give both" in message


def test_a_manifest_in_a_folder_that_cannot_be_written_costs_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    out, file = tmp_path / "a", tmp_path / "m.json"
    message = refusal(folder, dspark_support=out, dspark_manifest=file)
    assert "cannot be written" in message and not out.exists()


def test_a_place_below_a_file_is_one_sentence(folder, tmp_path):
    (tmp_path / "file").touch()
    message = refusal(folder, out=tmp_path / "file" / "x.gguf", gguf=True)
    assert "file: File exists" in message


def test_a_gguf_that_another_run_writes_is_left_to_it(folder, tmp_path):
    with new_file(tmp_path / "x.gguf") as file:
        file.write(b"from the other run")
        assert "another run" in refusal(folder, out=tmp_path / "x.gguf", gguf=True)
    assert (tmp_path / "x.gguf").read_bytes() == b"from the other run"


def with_file(folder, tmp_path, name: str, value) -> str:
    """What is said of the checkpoint with another JSON file."""
    path = tmp_path / "hf"
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    (path / name).unlink()
    (path / name).write_text(json.dumps(value))
    return refusal(path, out=tmp_path / "a")


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": 5},
        {"added_tokens": [{"content": "x", "special": True}]},
        {"added_tokens": [{"id": 0, "content": 5, "special": True}]},
        {"added_tokens": [{"id": "0", "content": "x", "special": True}]},
        {"added_tokens": [{"id": 0.5, "content": "x", "special": True}]},
        {"added_tokens": [TOKENIZER["added_tokens"][0] | {"id": 0.0}]},
        {"model": []},
        {"model": {"vocab": [], "merges": []}},
        {"model": {"vocab": {"\ud800": 0}, "merges": []}},
        {"model": TOKENIZER["model"] | {"merges": [5]}},
    ],
)
def test_a_tokenizer_of_another_form_is_refused(folder, tmp_path, change):
    said = with_file(folder, tmp_path, "tokenizer.json", TOKENIZER | change)
    assert said.startswith("tokenizer.json: ") and said.isprintable()


@pytest.mark.parametrize("name", ["x" * 300, "\ud800", "a\0b", "../x", "/etc/passwd", ""])
def test_a_shard_whose_name_cannot_be_is_missing(folder, tmp_path, name):
    index = {"weight_map": {"embed.weight": name}}
    said = with_file(folder, tmp_path, "model.safetensors.index.json", index)
    assert "1 of 1 shards are missing" in said and said.isprintable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4_000_000_000}, "compress_ratios has 4 entries"),
        ({"vocab_size": 4_000_000_000}, "wanted 0 to 3999999999"),
        ({"rope_theta": 1e308}, "rope_theta is 1e.308, wanted a number"),
        ({"hc_eps": 1 << 200}, "hc_eps is 16"),
    ],
)
def test_a_setting_beyond_its_type_is_refused_before_it_takes_memory(
    folder, tmp_path, change, message
):
    assert re.search(message, with_file(folder, tmp_path, "config.json", SETTINGS | change))


# Importance -----------------------------------------------------------------------------------


def write_imatrix(path: Path, vectors: dict[str, np.ndarray]) -> Path:
    data = struct.pack("<i", len(vectors))
    for name, v in vectors.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 7, v.size)
        data += v.astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 1, 3) + b"set")
    return path


GATE = "blk.1.ffn_gate_exps.weight"


def test_importance_of_each_expert_makes_its_important_columns_closer(folder, values, tmp_path):
    weights = np.ones((E, 256), np.float32)
    weights[0, ::4], weights[1, 1::4] = 100, 100
    file = write_imatrix(tmp_path / "i.dat", {GATE: weights * 1e-3})  # only ratios matter
    out = tmp_path / "a.gguf"
    list(convert_released(folder, out, gguf=True, experts="q4_k", imatrix=file))
    found = decode("Q4_K", open_gguf(out).tensors[GATE].read()).reshape(E, 256, 256)
    for e in range(E):
        x = values[f"layers.1.ffn.experts.{e}.w1.weight"]
        plain = decode("Q4_K", encode("Q4_K", x))
        a, b = (np.square(y - x)[:, e::4].sum() for y in (found[e], plain))
        assert a < 0.98 * b


def test_the_name_and_the_metadata_tell_of_an_importance_matrix(folder, tmp_path):
    file = write_imatrix(tmp_path / "i.dat", {GATE: np.ones(256)})
    list(convert_released(folder, tmp_path, gguf=True, experts="iq2_xxs", imatrix=file))
    (path,) = tmp_path.glob("*-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-imatrix-0731.gguf")
    assert open_gguf(path).metadata["quantize.imatrix.entries_count"] == 1


def test_an_expert_that_was_never_seen_is_encoded_without_importance(folder, tmp_path):
    weights = np.array([np.zeros(256), np.ones(256)])
    file = write_imatrix(tmp_path / "i.dat", {GATE: weights})
    list(convert_released(folder, tmp_path / "a.gguf", gguf=True, experts="q4_k", imatrix=file))
    list(convert_released(folder, tmp_path / "b.gguf", gguf=True, experts="q4_k"))
    a, b = (open_gguf(tmp_path / f"{x}.gguf").tensors[GATE].read() for x in "ab")
    assert a.tobytes() == b.tobytes()


def test_importance_of_another_shape_is_refused(folder, tmp_path):
    file = write_imatrix(tmp_path / "i.dat", {GATE: np.ones(128)})
    message = refusal(folder, out=tmp_path / "a.gguf", gguf=True, imatrix=file)
    assert f"the importance of {GATE} has 128 values, wanted 256 or 512" in message


def test_importance_of_another_model_is_refused(folder, tmp_path):
    file = write_imatrix(tmp_path / "i.dat", {"blk.77.ffn_gate_exps.weight": np.ones(256)})
    message = refusal(folder, out=tmp_path / "a.gguf", gguf=True, imatrix=file)
    assert "the importance matrix names none of these tensors" in message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF" + bytes(20), "an importance matrix in GGUF; wanted the older .dat layout"),
        (b"", "not a whole importance matrix"),
        (struct.pack("<ii", 1, 1 << 20), "a name of 1048576 bytes"),
        (struct.pack("<ii3sii", 1, 3, b"abc", 1, 9), "not a whole importance matrix"),
        (struct.pack("<ii3siif", 1, 3, b"abc", 1, 1, -1.0), "abc holds values that are negative"),
        (struct.pack("<i", 0), "of no tensor"),
    ],
)
def test_a_damaged_importance_matrix_is_refused(folder, tmp_path, data, message):
    (tmp_path / "i.dat").write_bytes(data)
    options = dict(out=tmp_path / "a.gguf", gguf=True, imatrix=tmp_path / "i.dat")
    assert message in refusal(folder, **options)


# The command ----------------------------------------------------------------------------------


def test_the_command_converts_a_checkpoint(folder, tmp_path, capsys):
    out = str(tmp_path / "a.gguf")
    assert cli.main(["convert", str(folder), out, "--gguf", "--experts", "q4_k"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{out}\n") and "Q4_K: 9 tensors, relative error" in text
    open_gguf(out)


@pytest.mark.parametrize("flag", [["--gguf"], ["--experts", "q4_k"], ["--imatrix", "a"]])
def test_flags_of_a_checkpoint_are_refused_for_a_gguf(made, tmp_path, capsys, flag):
    """CV-03: a GGUF is never requantised."""
    assert cli.main(["convert", str(made[0]), str(tmp_path / "out"), *flag]) == 2
    assert f"{flag[0]}: only for the folder of a checkpoint" in capsys.readouterr().err


def test_a_checkpoint_alone_asks_for_a_place(folder, capsys):
    assert cli.main(["convert", str(folder)]) == 2
    assert "nothing is to be written" in capsys.readouterr().err


def test_tensors_given_twice_are_refused(tmp_path):
    for name in "ab":
        write_safetensors(tmp_path / name, {"norm.weight": ("F32", np.zeros(4, np.float32))})
    with pytest.raises(FileError, match="b and a both hold norm.weight"):
        sources([tmp_path / "a", tmp_path / "b"])


def test_a_checkpoint_without_an_index_is_read_from_all_its_files(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    (copy / "model.safetensors.index.json").unlink()
    assert open_checkpoint(copy, lambda name: True).stages == 2


# MLX folders ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory) -> tuple[Path, Path]:
    """The target and the draft as MLX folders."""
    out = tmp_path_factory.mktemp("folders")
    options = dict(dspark_support=out / "draft", dspark_manifest=out / "manifest.json")
    list(convert_released(folder, out / "target", **options))
    return out / "target", out / "draft"


@pytest.mark.parametrize("i", [0, 1])
def test_a_folder_holds_what_the_gguf_would(folders, made, tmp_path, i):
    out = convert(made[i], tmp_path / "out")
    names = {p.name for p in out.iterdir()}
    assert names == {p.name for p in folders[i].iterdir()}
    for name in names - {"receipt.json"}:
        assert (folders[i] / name).read_bytes() == (out / name).read_bytes(), name


@pytest.mark.parametrize("i", [0, 1])
def test_a_folder_gives_the_gguf_that_never_was(folders, made, tmp_path, i):
    verify(folders[i])
    verify(folders[i], made[i])
    reverse(folders[i], tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == made[i].read_bytes()


def test_the_receipt_tells_the_checkpoint_and_what_rounding_cost(folders, folder):
    """CV-03, CV-04."""
    receipt = json.loads((folders[0] / "receipt.json").read_text())
    assert [source["path"] for source in receipt["sources"]] == [str(folder)]
    errors = {t["name"]: t.get("relative_error") for t in receipt["tensors"]}
    assert 0 < errors["blk.0.attn_q_a.weight"] < 0.01
    assert errors["blk.0.ffn_gate_exps.weight"] is errors["blk.0.attn_norm.weight"] is None


def test_folder_and_gguf_tell_the_same_errors(folders, folder, tmp_path):
    file = tmp_path / "manifest.json"
    options = dict(dspark_support=tmp_path / "a.gguf", dspark_manifest=file, gguf=True)
    list(convert_released(folder, **options))
    a, b = (json.loads(p.read_text()) for p in (file, folders[0].parent / "manifest.json"))
    for x, y in zip(a["tensors"], b["tensors"], strict=True):
        assert x["name"] == y["name"]
        np.testing.assert_allclose(x["relative_error"], y["relative_error"], rtol=1e-12)


class Killed(Exception):
    pass


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_a_conversion_that_was_killed_goes_on(folder, folders, tmp_path, monkeypatch, fraction):
    monkeypatch.setattr("ds4mlx.convert.convert.COMMIT", 1 << 16)

    def kill(stage: str, done: int, total: int):
        if done > fraction * total:
            raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        list(convert_released(folder, out, progress=kill))
    assert not (out / "config.json").exists()
    list(convert_released(folder, out))
    for path in folders[0].iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_conversion_does_not_go_on_with_other_experts_or_importance(folder, tmp_path):
    def kill(stage: str, done: int, total: int):
        raise Killed

    options = dict(out=tmp_path / "out", experts="q4_k")
    with pytest.raises(Killed):
        list(convert_released(folder, progress=kill, **options))
    file = write_imatrix(tmp_path / "i.dat", {GATE: np.ones(256)})
    for other in (options | {"experts": "mxfp4"}, options | {"imatrix": file}):
        assert "an unfinished conversion of another file" in refusal(folder, **other)


def test_a_folder_is_not_overwritten_unasked(folders, folder):
    """CV-06."""
    assert "exists already" in refusal(folder, out=folders[0])


def test_an_mlx_folder_is_not_named_like_a_gguf(folder, tmp_path):
    message = refusal(folder, out=tmp_path / "a.gguf")
    assert "an MLX folder is written without --gguf" in message
