"""The written synthetic models: what is in the files, and what commands make of them."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import mlx.core as mx
import pytest
from gguf import GGUFReader

import ds4mlx
from ds4mlx import cli, synthesize, synthetic
from ds4mlx.convert import flow
from ds4mlx.convert.config import draft_config, target_config
from ds4mlx.convert.convert import convert
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.inventory import check_draft, check_target
from ds4mlx.convert.receipt import reverse, verify
from ds4mlx.draft import DraftConfig
from ds4mlx.loading import find, find_draft
from ds4mlx.packed import Packed
from ds4mlx.synthesize import draft_file, target_file, vocabulary
from ds4mlx.synthetic import DSPARK, FLASH, dspark_of, made_draft, made_target, shortened
from ds4mlx.target import tensors
from ds4mlx.tokenizer import ASSISTANT, DSML, END_THINK, THINK, USER, Tokenizer
from tests import real_tokenizer
from tests.close import assert_same

TOTALS = {  # of recipes: tensor bytes of the official files, all in one place and shared
    "q2": (86_714_777_664, 10_613_325_888),
    "q2-q4": (97_586_413_632, 14_237_204_544),
    "q4": (164_628_168_768, 12_425_265_216),
    "mxfp4": (155_971_125_312, 12_223_938_624),
}


def small(layers: int):
    """Flash's layers with narrow matrices."""
    return replace(
        shortened(FLASH, layers),
        vocab_size=2048,
        hidden_size=256,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        num_attention_heads=4,
        head_dim=128,
        index_n_heads=4,
        q_lora_rank=256,
        o_groups=2,
        o_lora_rank=128,
        max_position_embeddings=4096,
    )


TARGET = small(5)
DRAFT = DraftConfig(3, 5, 1600, TARGET.dspark_target_layer_ids)


def written(file, path):
    file.write(path, lambda size: None)
    assert path.stat().st_size == file.nbytes
    return path


@pytest.fixture
def stand_in(monkeypatch):
    """Small shapes in place of Flash's."""
    for module in (synthetic, synthesize):
        monkeypatch.setattr(module, "FLASH", small(43))
    monkeypatch.setattr(synthetic, "DSPARK", DRAFT)


def plain(matrix) -> dict[str, mx.array]:
    return matrix.planes if isinstance(matrix, Packed) else {"data": matrix}


def assert_same_tensors(loaded, made):
    """Bit for bit; a CPU widens small matrices of float16 when they are loaded, exactly."""
    pairs = list(zip(tensors(loaded), tensors(made), strict=True))
    for got, want in pairs:
        assert getattr(got, "type", "") == getattr(want, "type", "")
        got, want = plain(got), plain(want)
        assert got.keys() == want.keys()
        for name in got:
            widens = (want[name].dtype, got[name].dtype) == (mx.float16, mx.float32)
            assert widens or want[name].dtype == got[name].dtype
            assert_same(got[name], want[name].astype(got[name].dtype))
    return len(pairs)


# The same tensors as in memory ------------------------------------------------------------------


@pytest.mark.parametrize("recipe, layers", [("q2", 5), ("q2-q4", 38), ("q4", 5), ("mxfp4", 5)])
def test_a_loaded_target_has_the_tensors_of_the_one_made_in_memory(tmp_path, recipe, layers):
    config = small(layers)
    path = written(target_file(config, recipe, seed=7), tmp_path / "t.gguf")
    with ds4mlx.load(path) as model:
        count = assert_same_tensors(model._target, made_target(config, recipe, 7))
    assert count == len(open_gguf(path).tensors)


def test_a_loaded_draft_has_the_tensors_of_the_one_made_in_memory(tmp_path):
    target = written(target_file(TARGET, "q2", seed=7), tmp_path / "t.gguf")
    path = written(draft_file(DRAFT, TARGET, seed=8), tmp_path / "d.gguf")
    with ds4mlx.load(target, mtp=path) as model:
        draft = made_draft(DRAFT, made_target(TARGET, "q2", 7), 8)
        assert model._draft.config == DRAFT
        assert assert_same_tensors(own(model._draft), own(draft)) == 81


def own(draft):
    """What a draft does not share."""
    return SimpleNamespace(**vars(draft) | {"target": None, "freqs": None})


def test_another_seed_makes_other_tensors(tmp_path):
    one, two = (
        written(target_file(TARGET, "q2", seed=s), tmp_path / f"{s}.gguf").read_bytes()
        for s in (7, 8)
    )
    assert len(one) == len(two) and one != two


def test_fewer_layers_are_the_first_of_more(tmp_path):
    more, fewer = (
        open_gguf(written(target_file(small(n), "q2"), tmp_path / f"{n}.gguf")).tensors
        for n in (5, 4)
    )
    assert {n for n in more if not n.startswith("blk.4.")} == fewer.keys()
    assert all((more[n].read() == t.read()).all() for n, t in fewer.items())


@pytest.mark.parametrize("recipe, layers, owners", [("q2", 5, {0}), ("q2-q4", 39, {0, 37})])
def test_with_alias_layers_have_the_experts_of_the_first_of_their_type(
    tmp_path, recipe, layers, owners
):
    config = small(layers)
    path = written(target_file(config, recipe, seed=7, alias=True), tmp_path / "t.gguf")
    made = made_target(config, recipe, 7)
    for i, layer in enumerate(made.layers):
        first = made.layers[max(o for o in owners if o <= i)]
        layer.ffn.w1, layer.ffn.w3, layer.ffn.w2 = first.ffn.w1, first.ffn.w3, first.ffn.w2
    with ds4mlx.load(path) as model:
        assert_same_tensors(model._target, made)
        experts = {id(layer.ffn.w1) for layer in model._target.layers}
        assert len(experts) == len(owners)  # loaded once, too


# Headers at full size ---------------------------------------------------------------------------


def sparse(file, path):
    """The file with holes for its tensors."""
    with path.open("wb") as out:
        out.write(file.head)
        out.truncate(file.nbytes)
    return path


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("recipe", TOTALS)
def test_a_whole_target_has_the_tensors_and_bytes_of_the_official_file(tmp_path, recipe, alias):
    gguf = open_gguf(sparse(target_file(FLASH, recipe, alias=alias), tmp_path / "t.gguf"))
    config = target_config(gguf)
    assert len(gguf.tensors) == len(check_target(gguf, config)) == 1328
    starts = {t.offset for t in gguf.tensors.values()}
    assert gguf.nbytes - min(starts) == TOTALS[recipe][alias]
    assert (len(starts) == 1328) != alias


@pytest.mark.parametrize("alias", [False, True])
def test_a_whole_draft_has_the_tensors_and_the_size_of_the_official_file(tmp_path, alias):
    path = sparse(draft_file(DSPARK, FLASH, alias=alias), tmp_path / "d.gguf")
    gguf = open_gguf(path)
    found = check_draft(gguf, draft_config(gguf), vars(FLASH) | {"n_shared_experts": 1})
    assert len(gguf.tensors) == len(found) == 81
    assert list(gguf.tensors) == sorted(gguf.tensors)
    assert gguf.nbytes == (2_365_235_616 if alias else 5_989_114_272)


def test_types_and_shapes_of_a_whole_target_are_those_of_the_format(tmp_path):
    found = open_gguf(sparse(target_file(FLASH, "q2-q4"), tmp_path / "t.gguf")).tensors
    wanted = {
        "token_embd.weight": ("F16", (129280, 4096)),
        "output.weight": ("Q8_0", (129280, 4096)),
        "output_hc_fn.weight": ("F16", (4, 16384)),
        "blk.0.ffn_gate_tid2eid.weight": ("I32", (129280, 6)),
        "blk.2.indexer.attn_q_b.weight": ("F16", (8192, 1024)),
        "blk.2.indexer_compressor_ape.weight": ("F16", (4, 256)),
        "blk.3.exp_probs_b.bias": ("F32", (256,)),
        "blk.3.attn_compressor_kv.weight": ("F16", (512, 4096)),
        "blk.36.ffn_down_exps.weight": ("Q2_K", (256, 4096, 2048)),
        "blk.36.ffn_up_exps.weight": ("IQ2_XXS", (256, 2048, 4096)),
        "blk.37.ffn_gate_exps.weight": ("Q4_K", (256, 2048, 4096)),
        "blk.42.attn_output_a.weight": ("Q8_0", (8192, 4096)),
    }
    assert {name: (found[name].type, found[name].shape) for name in wanted} == wanted


@pytest.mark.parametrize("layers", [3, 43])
def test_the_settings_of_a_target_come_back(tmp_path, layers):
    config = shortened(FLASH, layers)
    found = find(sparse(target_file(config, "q2"), tmp_path / "t.gguf"))
    loaded = type(config).from_dict(found["config"])
    assert loaded.rope_scaling.pop("type") == "yarn"
    assert loaded == config
    draft = find_draft(
        sparse(draft_file(dspark_of(config), config), tmp_path / "d.gguf"), found["config"]
    )
    assert DraftConfig.from_dict(draft["config"]) == dspark_of(config)


def test_ggufs_own_reader_finds_the_same_tensors(tmp_path):
    path = written(target_file(TARGET, "q2", alias=True), tmp_path / "t.gguf")
    own = open_gguf(path).tensors
    found = GGUFReader(path).tensors
    assert [t.name for t in found] == list(own)
    for t in found:
        mine = own[t.name]
        assert (t.tensor_type.name, int(t.data_offset)) == (mine.type, mine.offset)
        assert tuple(map(int, t.shape)) == mine.shape[::-1]


# The vocabulary ---------------------------------------------------------------------------------


def test_the_vocabulary_is_as_large_as_the_real_one_and_keeps_the_places_that_matter():
    made, real = vocabulary(129280), real_tokenizer.tokenizer()
    tokens = real_tokenizer.metadata()
    texts = list(made["model"]["vocab"])
    assert len(texts) == len(tokens["tokenizer.ggml.tokens"]) == 129280
    assert len(made["model"]["merges"]) == len(tokens["tokenizer.ggml.merges"])
    assert texts[:259] == tokens["tokenizer.ggml.tokens"][:259]
    added = [token["id"] for token in made["added_tokens"]]
    assert added == [i for i, kind in enumerate(tokens["tokenizer.ggml.token_type"]) if kind != 1]
    for role in (USER, ASSISTANT, THINK, END_THINK, DSML):
        assert texts.index(role) == real.special(role)


def test_text_is_encoded_and_comes_back(tmp_path):
    found = find(sparse(target_file(FLASH, "q2"), tmp_path / "t.gguf"))
    tokenizer: Tokenizer = found["tokenizer"]
    text = 'def f(x):\n\treturn "grüße 你好 😀 <think>"\r\n'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    assert not found["chat"]


# The command ------------------------------------------------------------------------------------


def test_the_command_writes_a_pair_that_generates_with_drafts(stand_in, tmp_path, capsys):
    out, draft = tmp_path / "new" / "t.gguf", tmp_path / "d.gguf"
    words = ["--recipe", "q4", "--layers", "4", "--alias", "--mtp", str(draft)]
    assert cli.main(["synthesize", str(out), *words]) == 0
    assert capsys.readouterr() == (f"{out}\n{draft}\n", "")
    generate = ["generate", "-m", str(out), "--mtp", str(draft), "-n", "6", "--json", "x = 1"]
    assert cli.main([*generate, "--dspark-schedule", "off", "--dspark"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert cli.main([*generate, "--dspark-strict"]) == 0
    assert drafted["tokens"] == json.loads(capsys.readouterr().out)["tokens"]
    assert len(drafted["tokens"]) == 6 and drafted["stats"]["dspark"]["cycles"]


def test_the_pair_is_that_of_bench(stand_in, tmp_path):
    places = tmp_path / "t.gguf", tmp_path / "d.gguf"
    assert [*synthesize.synthesize(places[0], "q2", 4, mtp=places[1])] == [*places]
    target = synthetic.flash("q2", 4)
    draft = synthetic.flash_draft(target)
    with ds4mlx.load(places[0], mtp=places[1]) as model:
        assert_same_tensors(model._target, target)
        assert_same_tensors(own(model._draft), own(draft))


def test_progress_counts_the_bytes_of_both_files_to_the_end(stand_in, tmp_path):
    told = []
    options = {"mtp": tmp_path / "d.gguf", "layers": 4, "progress": lambda *t: told.append(t)}
    places = [*synthesize.synthesize(tmp_path / "t.gguf", **options)]
    stages, done, totals = zip(*told, strict=True)
    assert {*stages} == {"write"} and [*done] == sorted(done)
    assert {*totals} == {done[-1]} == {sum(path.stat().st_size for path in places)}


def test_memory_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    right, sizes, active = synthesize.held, [], []
    monkeypatch.setattr(synthesize, "held", lambda m: sizes.append(m.nbytes) or right(m))
    before = mx.get_active_memory()
    file = target_file(TARGET, "q2")
    file.write(tmp_path / "t.gguf", lambda _: active.append(mx.get_active_memory() - before))
    assert max(active) < max(sizes) + 100_000 < sum(sizes) / 3  # and the seeds of all


def test_a_tensor_is_written_some_rows_at_a_time(tmp_path, monkeypatch):
    whole = written(target_file(TARGET, "mxfp4"), tmp_path / "a.gguf").read_bytes()
    monkeypatch.setattr(synthesize, "CHUNK", 1000)
    places = [0]
    target_file(TARGET, "mxfp4").write(tmp_path / "b.gguf", places.append)
    assert (tmp_path / "b.gguf").read_bytes() == whole
    steps = [b - a for a, b in pairwise(places[1:])]
    assert max(steps) < 5000  # a row and what lies between tensors


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_is_not_whole_leaves_nothing_and_keeps_the_older(
    stand_in, tmp_path, capsys, error
):
    out = tmp_path / "t.gguf"
    out.write_bytes(b"older")
    right, calls = synthesize.held, []

    def fail(matrix):
        calls.append(matrix)
        if len(calls) == 20:
            assert out.read_bytes() == b"older"
            raise error
        return right(matrix)

    with patch.object(synthesize, "held", fail):
        status = cli.main(["synthesize", str(out), "--layers", "3", "--overwrite"])
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 1)
    said = capsys.readouterr().err
    assert isinstance(error, KeyboardInterrupt) or said == f"ds4mlx: {out}: {error.strerror}\n"
    assert [*tmp_path.iterdir()] == [out] and out.read_bytes() == b"older"


def test_an_older_file_is_replaced_when_that_is_asked_for(stand_in, tmp_path, capsys):
    out = tmp_path / "t.gguf"
    out.write_bytes(b"older")
    assert cli.main(["synthesize", str(out), "--layers=3", "--overwrite"]) == 0
    assert open_gguf(out).metadata["deepseek4.block_count"] == 3


REFUSED = [
    (["{}/t.gguf", "--layers", "2"], "--layers is '2', wanted a whole number from 3 to 43"),
    (["{}/t.gguf", "--layers", "44"], "--layers is '44', wanted a whole number from 3 to 43"),
    (["{}/t.gguf", "--recipe", "q3"], "--recipe is 'q3', wanted one of q2, q2-q4, q4, mxfp4"),
    (["{}/old.gguf"], "{}/old.gguf exists already; name another file, or --overwrite"),
    (["{}/t.gguf", "--mtp", "{}/old.gguf"], "{}/old.gguf exists already; name another file"),
    (["{}"], "{}: a folder, wanted a file to write"),
    (["{}", "--overwrite"], "{}: a folder, wanted a file to write"),
    (["{}/t.gguf", "--mtp", "{}/./t.gguf"], "cannot be written to one place"),
    (["{}/t\0.gguf"], "no path of a file to write"),
    (["/dev/null", "--overwrite"], "/dev/null: not a regular file, wanted a file to write"),
    ([], "no file is given, wanted ds4mlx synthesize OUT.gguf"),
    (["{}/a", "{}/b"], "2 arguments are given"),
]


@pytest.mark.parametrize("words, said", REFUSED)
def test_what_cannot_be_meant_is_refused_with_a_sentence(tmp_path, capsys, words, said):
    (tmp_path / "old.gguf").write_bytes(b"older")
    assert cli.main(["synthesize", *(w.format(tmp_path) for w in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said.format(tmp_path) in err
    assert [p.name for p in tmp_path.iterdir()] == ["old.gguf"]


def test_one_place_by_two_names_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    places = tmp_path / "real/t.gguf", tmp_path / "link/t.gguf"
    with pytest.raises(ds4mlx.UsageError, match="cannot be written to one place"):
        next(synthesize.synthesize(places[0], mtp=places[1]))


@pytest.mark.parametrize("path, mtp", [(None, None), ("t.gguf", 5)])
def test_what_is_no_path_is_refused(path, mtp):
    with pytest.raises(ds4mlx.UsageError, match="^(None|5): no path of a file to write$"):
        next(synthesize.synthesize(path, mtp=mtp))


@pytest.mark.parametrize("values", [{"recipe": "q3"}, {"layers": 3.0}, {"layers": None}])
def test_in_python_too(tmp_path, values):
    with pytest.raises(ds4mlx.UsageError, match=f"{[*values][0]} is .*, wanted"):
        next(synthesize.synthesize(tmp_path / "t.gguf", **values))


def test_a_disk_without_room_for_both_files_is_refused_before_anything_is_written(
    tmp_path, capsys, monkeypatch
):
    free = SimpleNamespace(free=92_000_000_000)
    monkeypatch.setattr(flow.shutil, "disk_usage", lambda folder: free)
    words = ["synthesize", str(tmp_path / "a/t.gguf"), "--mtp", str(tmp_path / "b/d.gguf")]
    assert cli.main(words) == 1
    assert "92.74 GB are to be written, 92.00 GB are free" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_a_place_that_cannot_be_written_is_one_sentence(stand_in, tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"")
    assert cli.main(["synthesize", str(tmp_path / "file" / "t.gguf"), "--layers", "3"]) == 1
    said = capsys.readouterr().err
    assert said == f"ds4mlx: {tmp_path}/file: not a folder, wanted one for t.gguf\n"


def test_an_aliased_file_is_converted_and_comes_back(tmp_path):
    path = written(target_file(TARGET, "q2", alias=True), tmp_path / "t.gguf")
    out = convert(path, tmp_path / "out")
    verify(out, path)
    (back,) = reverse(out, tmp_path / "back.gguf")
    assert back.read_bytes() == path.read_bytes()
