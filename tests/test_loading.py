"""Files other than the shipped one: dialects, other types, shards, tied weights; memory."""

import json
import subprocess
import sys
from importlib.resources import files

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.pair import transcode
from ds4mlx.convert.write import typed, write_gguf
from ds4mlx.errors import FileError, UsageError
from tests.close import assert_same
from tests.convert.test_config import other_dialect
from tests.golden_data import HERE

SHIPPED = files("ds4mlx") / "data" / "nano.gguf"
IDS = json.loads((HERE / "nano.json").read_text())[5]["prompt"][:40]


def rewritten(path, *, metadata=lambda keys: keys, name=lambda name: name, keep=lambda name: True):
    """The shipped model written again with other metadata, tensor names or fewer tensors."""
    source = open_gguf(SHIPPED)
    tensors = [
        (name(t.name), t.type, t.shape, t.read) for t in source.tensors.values() if keep(t.name)
    ]
    write_gguf(path, metadata(typed(source.metadata)), tensors)
    return path


def logits(path=None, **options) -> mx.array:
    with ds4mlx.load(path, **options) as model:
        found = model.session(ctx=64).feed(IDS)
        mx.eval(found)
    return found


def test_both_dialects_of_a_file_give_the_same_logits_bit_for_bit(tmp_path):
    def derivable(keys):
        without = {"deepseek4.vocab_size", "deepseek4.attention.head_count_kv"}
        return {k: v for k, v in keys.items() if k not in without}

    path = rewritten(tmp_path / "b.gguf", metadata=derivable, name=other_dialect)
    assert "blk.0.attn_kv_a_norm.weight" not in open_gguf(path).tensors
    assert_same(logits(path), logits())


def test_a_path_with_spaces_and_other_letters_loads(tmp_path):
    folder = tmp_path / "mein Ördner ü"
    folder.mkdir()
    assert_same(logits(rewritten(folder / "模型 1.gguf")), logits())


def test_without_an_output_matrix_the_embedding_is_the_head_and_is_loaded_once(tmp_path):
    path = rewritten(tmp_path / "tied.gguf", keep=lambda name: name != "output.weight")
    with ds4mlx.load(path) as model:
        assert model._target.head is model._target.embed
        assert np.isfinite(np.array(model.session(ctx=64).feed(IDS))).all()


def test_shards_give_the_same_logits_as_the_whole(tmp_path):
    source = open_gguf(SHIPPED)
    tensors, keys = list(source.tensors.values()), typed(source.metadata)
    cuts = [0, len(tensors) // 3, len(tensors) // 2, len(tensors)]
    for i in range(3):
        split = {"split.no": ("UINT16", i), "split.count": ("UINT16", 3)}
        split["split.tensors.count"] = ("INT32", len(tensors))
        part = [(t.name, t.type, t.shape, t.read) for t in tensors[cuts[i] : cuts[i + 1]]]
        path = tmp_path / f"n-{i + 1:05}-of-00003.gguf"
        write_gguf(path, (keys if i == 0 else {}) | split, part)
    assert_same(logits(tmp_path / "n-00002-of-00003.gguf"), logits())
    (tmp_path / "n-00003-of-00003.gguf").unlink()
    with pytest.raises(FileError, match="n-00003-of-00003.gguf"):
        logits(tmp_path / "n-00001-of-00003.gguf")


@pytest.fixture(scope="module", params=["q4_k", "iq2_xxs"])
def variant(request, tmp_path_factory):
    """The shipped model with its experts in another type, as the big files have them."""
    path = tmp_path_factory.mktemp("variant") / f"{request.param}.gguf"
    transcode(SHIPPED, path, request.param)
    return path


def test_other_expert_types_run_and_stay_close_to_the_shipped_model(variant):
    types = {t.type for name, t in open_gguf(variant).tensors.items() if "exps" in name}
    assert types in ({"Q4_K"}, {"IQ2_XXS", "Q2_K"})
    a, b = np.array(logits(variant)), np.array(logits())
    assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.8


def test_blocks_with_other_expert_types_equal_single_rows_bit_for_bit(variant):
    with ds4mlx.load(variant) as model:
        alone, blocks = model.session(ctx=64), model.session(ctx=64)
        for n in (2, 3, 4, 5, 6, 7, 8):
            ids = IDS[blocks.position : blocks.position + n]
            assert_same(blocks.feed(ids), mx.concatenate([alone.feed([i]) for i in ids]))
            assert_same(blocks.hidden[-1:], alone.hidden)


def test_packed_weights_stay_as_large_as_in_the_file(variant):
    with ds4mlx.load(variant) as model:
        moe = model._target.layers[3].ffn
        tensors = open_gguf(variant).tensors
        for w, name in ((moe.w1, "gate"), (moe.w3, "up"), (moe.w2, "down")):
            assert w.nbytes <= 1.05 * tensors[f"blk.3.ffn_{name}_exps.weight"].nbytes


def test_a_routing_table_beyond_the_experts_is_refused(tmp_path):
    def bad(name):
        return name == "blk.0.ffn_gate_tid2eid.weight"

    source = open_gguf(SHIPPED)
    tensors = []
    for t in source.tensors.values():
        data = t.read()
        if bad(t.name):
            data.view(np.int32)[77, 1] = 8
        tensors.append((t.name, t.type, t.shape, data))
    write_gguf(tmp_path / "bad.gguf", typed(source.metadata), tensors)
    with pytest.raises(FileError, match="tid2eid.*token 77.*wanted 0 to 7"):
        logits(tmp_path / "bad.gguf")


LOAD = """
import sys
import mlx.core as mx
from ds4mlx.api import peak_bytes
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.weights import load_weights
mx.set_default_device(mx.cpu)
load_weights({}, 8)
before = peak_bytes()
weights = load_weights(open_gguf(sys.argv[1]).tensors, 8)
print(peak_bytes() - before)
"""


def test_loading_200_mb_takes_less_than_1_3_times_its_size(tmp_path):
    """ME-08."""
    path, rows = tmp_path / "big.gguf", 4096
    tensors = [
        (f"blk.{i}.x.weight", "Q2_K", (rows, 4096), np.full((rows, 16 * 84), i, np.uint8))
        for i in range(36)
    ]
    write_gguf(path, {"general.architecture": ("STRING", "deepseek4")}, tensors)
    size = path.stat().st_size
    assert size > 195e6
    done = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.95 * size < int(done.stdout) < 1.3 * size


def test_processes_load_the_same_file_at_the_same_time():
    code = "import ds4mlx; print(ds4mlx.load().generate('import os', tokens=4).tokens)"
    options = {"stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", code], **options) for _ in range(3)]
    told = [process.communicate()[0] for process in running]
    assert told[0].startswith("[") and set(told) == {told[0]}


@pytest.mark.parametrize("where", ["path", "mtp"])
@pytest.mark.parametrize("path", [5, b"model.gguf", ["model.gguf"]])
def test_a_path_of_another_kind_is_refused_for_what_it_is(where, path):
    with pytest.raises(UsageError, match="^the path is .*, wanted a text or a pathlib.Path$"):
        ds4mlx.load(**{where: path})
