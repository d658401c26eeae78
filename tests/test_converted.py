"""Converted folders run as the GGUF does, bit for bit; and the verb that makes them."""

import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx import cli
from ds4mlx.config import TargetConfig
from ds4mlx.convert.config import target_config
from ds4mlx.convert.convert import JOURNAL, convert
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.pair import transcode
from ds4mlx.convert.receipt import reverse, verify
from ds4mlx.convert.write import write_gguf
from ds4mlx.errors import Ds4Error, FileError, UsageError
from ds4mlx.loading import find_draft
from tests.close import assert_same
from tests.golden_data import HERE

DATA = files("ds4mlx") / "data"
NANO, DRAFT = Path(DATA / "nano.gguf"), Path(DATA / "nano-dspark.gguf")
IDS = json.loads((HERE / "nano.json").read_text())[5]["prompt"][:40]
WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return convert(NANO, folder / "nano"), convert(DRAFT, folder / "draft")


def logits(path, **options) -> mx.array:
    with ds4mlx.load(path, **options) as model:
        found = model.session(ctx=64).feed(IDS)
        mx.eval(found)
    return found


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def edited(folder: Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# The embedded pair ----------------------------------------------------------------------------


@pytest.mark.parametrize("i", [0, 1])
def test_the_embedded_pair_comes_back_byte_for_byte(pair, tmp_path, i):
    source = (NANO, DRAFT)[i]
    verify(pair[i], source)
    (back,) = reverse(pair[i], tmp_path / "back.gguf")
    assert back.read_bytes() == source.read_bytes()


def test_logits_of_folder_and_gguf_are_the_same_bit_for_bit(pair):
    assert_same(logits(pair[0]), logits(NANO))


@pytest.mark.parametrize("experts", ["q4_k", "iq2_xxs"])
def test_so_are_those_of_other_expert_types(tmp_path, experts):
    transcode(NANO, tmp_path / "t.gguf", experts)
    out = convert(tmp_path / "t.gguf", tmp_path / "out")
    verify(out, tmp_path / "t.gguf")
    assert_same(logits(out), logits(tmp_path / "t.gguf"))


def test_tokens_with_and_without_drafts_are_those_of_the_gguf(pair):
    """CV-04."""
    found = []
    for target, draft in (pair, (NANO, DRAFT)):
        with ds4mlx.load(target, mtp=draft) as model:
            plain = model.generate("def fibonacci(n):", tokens=50).tokens
            options = dict(dspark_confidence=0, dspark_schedule=False)
            reply = model.generate("def fibonacci(n):", tokens=50, **options)
            found.append((plain, reply.tokens, reply.stats["dspark"]["accepted"]))
    assert found[0] == found[1] and found[0][2] > 0


def test_settings_and_tokenizer_of_folder_and_gguf_are_the_same(pair):
    """CV-04."""
    config = json.loads((pair[0] / "config.json").read_text())
    gguf = open_gguf(NANO)
    wanted = target_config(gguf)
    assert {key: config[key] for key in wanted} == wanted
    assert TargetConfig.from_dict(config) == TargetConfig.from_dict(wanted)
    with ds4mlx.load(pair[0]) as a, ds4mlx.load(NANO) as b:
        assert (a.chat, a.release) == (b.chat, b.release)
        assert a.tokenizer._tokens == b.tokenizer._tokens
        assert a.tokenizer._merges == b.tokenizer._merges
        assert a.tokenizer._added == b.tokenizer._added


def test_a_folder_can_be_open_twice(pair):
    with ds4mlx.load(pair[0]) as a, ds4mlx.load(pair[0]) as b:
        assert_same(a.session(ctx=64).feed(IDS), b.session(ctx=64).feed(IDS))


def test_a_folder_of_target_and_draft_files_together_still_loads(pair, tmp_path):
    """Drafts lay in draft*.safetensors before."""
    out = copy_of(pair[0], tmp_path / "out")
    shutil.copy(pair[1] / WEIGHTS, out / "draft.safetensors")
    assert_same(logits(out), logits(NANO))


# What is refused ------------------------------------------------------------------------------


def test_a_draft_folder_as_the_model_and_the_reverse_are_named(pair):
    """CV-06."""
    with pytest.raises(UsageError, match="this is a DSpark draft, wanted a DeepSeek V4 target"):
        ds4mlx.load(pair[1])
    with pytest.raises(UsageError, match="this is a DeepSeek V4 target model, wanted a DSpark"):
        ds4mlx.load(pair[0], mtp=pair[0])


def test_an_unfinished_folder_is_not_loaded(pair, tmp_path):
    out = copy_of(pair[0], tmp_path / "out")
    (out / "config.json").unlink()
    (out / JOURNAL).write_text("{}\n")
    for options in ({"path": out}, {"path": None, "mtp": out}):
        with pytest.raises(UsageError, match="not finished; run the same ds4mlx convert again"):
            ds4mlx.load(**options)


def test_every_plane_that_differs_from_the_settings_is_named(pair, tmp_path):
    """MF-02."""
    out = copy_of(pair[0], tmp_path / "out")
    method = json.loads((out / "config.json").read_text())["quantization_config"]
    tensors = method["tensors"]
    tensors["head.weight"]["type"] = "Q4_0"
    tensors["norm.weight"]["type"] = "IQ9"
    tensors["embed.weight"]["shape"][0] -= 1
    tensors["a.weight"] = {"type": "F32", "shape": [4]}
    del tensors["hc_head_base"]
    edited(out, quantization_config=method)
    with pytest.raises(FileError) as caught:
        ds4mlx.load(out)
    for name in ("head.weight.codes", "norm.weight", "embed.weight", "a.weight", "hc_head_base"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [None, 7, {}, {"type": "F32"}, {"type": "F32", "shape": []}, {"type": "F32", "shape": [0]}]
    + [{"type": "Q2_K", "shape": [8]}, {"type": ["F32"], "shape": [8]}, {"type": "F32", "shape": 8}]
    + [{"type": "F32", "shape": [1 << 62, 1 << 62]}],
)
def test_a_senseless_description_of_a_tensor_is_refused(pair, tmp_path, given):
    out = copy_of(pair[1], tmp_path / "out")
    method = json.loads((out / "config.json").read_text())["quantization_config"]
    method["tensors"]["mtp.0.main_norm.weight"] = given
    edited(out, quantization_config=method)
    with pytest.raises(FileError, match="mtp.0.main_norm.weight"):
        ds4mlx.load(mtp=out)


@pytest.mark.parametrize("tensors", [None, [], 7])
def test_settings_without_tensors_are_refused(pair, tmp_path, tensors):
    out = copy_of(pair[1], tmp_path / "out")
    method = json.loads((out / "config.json").read_text())["quantization_config"]
    edited(out, quantization_config=method | {"tensors": tensors})
    with pytest.raises(FileError, match="names no tensors"):
        ds4mlx.load(mtp=out)


def test_a_shortened_weight_file_is_refused(pair, tmp_path):
    """MF-05."""
    out = copy_of(pair[0], tmp_path / "out")
    with (out / WEIGHTS).open("r+b") as file:
        file.truncate((out / WEIGHTS).stat().st_size - 1)
    with pytest.raises(FileError, match=f"{WEIGHTS}.*incomplete download"):
        ds4mlx.load(out)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "receipt.json"])
def test_a_damaged_folder_ends_in_a_sentence_and_not_in_a_crash(pair, tmp_path, name):
    """MF-08."""
    out, rng = copy_of(pair[1], tmp_path / "out"), np.random.default_rng(3)
    whole = (out / name).read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little") if name == WEIGHTS else len(whole)
    target = json.loads((pair[0] / "config.json").read_text())
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, end, rng.integers(1, 4)):
            data[at] = rng.choice([*b'0123456789[]{}",:-', rng.integers(0, 256)])
        (out / name).write_bytes(data)
        act = verify if name == "receipt.json" else lambda out: find_draft(out, target)
        try:
            act(out)
        except Ds4Error as error:
            assert str(error)


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "7", "null", "{", "\x00"])
@pytest.mark.parametrize("name", ["config.json", "receipt.json"])
def test_json_of_another_kind_is_refused(pair, tmp_path, name, text):
    out = copy_of(pair[1], tmp_path / "out")
    (out / name).write_text(text)
    with pytest.raises(FileError, match=name):
        verify(out) if name == "receipt.json" else ds4mlx.load(mtp=out)


# Memory ---------------------------------------------------------------------------------------

LOAD = """
import json, resource, sys
from pathlib import Path
from ds4mlx.convert.folder import stored_tensors
from ds4mlx.weights import load_weights
def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
load_weights({}, 8)
before, out = peak(), Path(sys.argv[1])
config = json.loads((out / "config.json").read_text())
weights = load_weights(stored_tensors(out, config["quantization_config"]["tensors"]), 8)
print(peak() - before)
"""


def test_loading_a_folder_of_200_mb_takes_less_than_1_1_times_its_size(tmp_path):
    """ME-08."""
    keys = {
        "general.architecture": ("STRING", "deepseek4-dspark"),
        "dspark.block_size": ("UINT32", 5),
        "dspark.markov_rank": ("UINT32", 32),
        "dspark.noise_token_id": ("UINT32", 7),
        "dspark.target_layer_ids": ("[UINT32]", [2, 3, 4]),
    }
    data = np.arange(4096 * 16 * 84, dtype=np.uint8)
    names = [f"mtp.{s}.{n}.weight" for s in range(8) for n in ("attn_q_a", "attn_q_b", "attn_kv")]
    names += [f"mtp.{s}.ffn_{n}_exps.weight" for s in range(4) for n in ("gate", "up", "down")]
    tensors = [(name, "Q2_K", (4096, 4096), data) for name in names]
    tensors.append(("mtp.0.main_proj.weight", "F16", (4, 4), np.zeros(32, np.uint8)))
    write_gguf(tmp_path / "big.gguf", keys, tensors)
    size = (tmp_path / "big.gguf").stat().st_size
    assert size > 195e6
    out = convert(tmp_path / "big.gguf", tmp_path / "out")
    done = subprocess.run([sys.executable, "-c", LOAD, out], capture_output=True, text=True)
    shutil.rmtree(out)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.1 * size


# The verb -------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    """Runs `ds4mlx convert` in this process -> (status, standard output, standard error)."""

    def run(*words):
        status = cli.main(["convert", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_convert_verify_and_reverse_from_the_command_line(run, tmp_path):
    out, back = tmp_path / "a b ü", tmp_path / "1e5.gguf"
    assert run(DRAFT, out) == (0, f"{out}\n", "")
    status, said, _ = run("--verify", out, DRAFT)
    assert status == 0 and "as the receipt says, 81 tensors" in said
    assert run("--reverse", out, back) == (0, f"{back}\n", "")
    assert back.read_bytes() == DRAFT.read_bytes()
    assert run("--overwrite", DRAFT, out)[0] == 0


def test_a_folder_that_differs_from_its_receipt_ends_with_status_1(run, pair, tmp_path):
    out = copy_of(pair[1], tmp_path / "out")
    (out / "config.json").write_text("{}")
    status, said, error = run("--verify", out)
    assert (status, said) == (1, "") and "config.json has 2 bytes" in error


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "0 paths are given, wanted IN.gguf OUT/"),
        (["a"], "1 paths are given, wanted IN.gguf OUT/"),
        (["a", "b", "c"], "3 paths are given"),
        (["--verify"], "0 paths are given, wanted OUT/ [IN.gguf]"),
        (["--verify", "--reverse", "a", "b"], "exclude each other"),
        (["--verify", "--overwrite", "a"], "writes nothing"),
        (["--reverse", "a"], "wanted OUT/ OUT.gguf"),
        (["absent.gguf", "b"], "No such file"),
        (["", "b"], "wanted a path"),
    ],
)
def test_what_cannot_be_meant_ends_with_status_2(run, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    status, said, error = run(*words)
    assert (status, said) == (2, "") and says in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_progress_counts_every_byte_of_the_file(tmp_path):
    calls = []
    out = convert(DRAFT, tmp_path / "out", progress=lambda *call: calls.append(call))
    verify(out, DRAFT, progress=lambda *call: calls.append(call))
    reverse(out, tmp_path / "back.gguf", progress=lambda *call: calls.append(call))
    size = DRAFT.stat().st_size
    for stage, total in (("convert", size), ("verify", 2 * size), ("reverse", size)):
        counts = [done for name, done, of in calls if name == stage and of == total]
        assert counts == sorted(counts) and counts[-1] == total
