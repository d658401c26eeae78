import hashlib
import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest

import ds4mlx
from ds4mlx.convert.blocks import decode
from ds4mlx.convert.config import draft_config, target_config
from ds4mlx.convert.encode import encode
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.inventory import check_draft, check_target
from ds4mlx.convert.pair import EXPERTS, main, make_pair, transcode
from ds4mlx.errors import FileError

DATA = Path(ds4mlx.__path__[0]) / "data"
D, V, R, E = 256, 32, 32, 2
CONFIG = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": R,
    "o_groups": 2,
    "o_lora_rank": R,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 64,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "n_mtp_layers": 2,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 8,
    "dspark_target_layer_ids": [1, 2],
    "dspark_markov_rank": R,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TOKENS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<think>", "Ġ", "é"]
TOKENS += [f"t{i}" for i in range(V - len(TOKENS))]


def block(ratio: int, hashed: bool) -> dict[str, tuple]:
    """Shapes of one layer by official name."""
    shapes = {
        "attn_norm.weight": (D,),
        "ffn_norm.weight": (D,),
        "attn.wq_a.weight": (R, D),
        "attn.q_norm.weight": (R,),
        "attn.wq_b.weight": (64, R),
        "attn.wkv.weight": (32, D),
        "attn.kv_norm.weight": (32,),
        "attn.attn_sink": (2,),
        "attn.wo_a.weight": (2 * R, 32),
        "attn.wo_b.weight": (D, 2 * R),
        "ffn.gate.weight": (E, D),
        "ffn.gate.tid2eid" if hashed else "ffn.gate.bias": (V, 2) if hashed else (E,),
        **{f"ffn.experts.{e}.w{i}.weight": (256, D) for e in range(E) for i in (1, 2, 3)},
        **{f"ffn.shared_experts.w{i}.weight": (256, D) for i in (1, 2, 3)},
    }
    for s in ("attn", "ffn"):
        shapes |= {f"hc_{s}_fn": (24, 4 * D), f"hc_{s}_base": (24,), f"hc_{s}_scale": (3,)}
    names = ["attn.compressor", "attn.indexer.compressor"] if ratio == 4 else ["attn.compressor"]
    for name in names if ratio else []:
        rows = 64 if ratio == 4 else 32
        shapes |= {f"{name}.{w}.weight": (rows, D) for w in ("wkv", "wgate")}
        shapes |= {f"{name}.ape": (ratio, rows), f"{name}.norm.weight": (32,)}
    if ratio == 4:
        shapes["attn.indexer.wq_b.weight"] = (64, R)
        shapes["attn.indexer.weights_proj.weight"] = (2, D)
    return shapes


def model() -> tuple[dict, dict]:
    """Random values of a target and of a draft, by official name."""
    head = {"norm.weight": (D,), "hc_head_fn": (4, 4 * D), "hc_head_base": (4,)}
    head["hc_head_scale"] = (1,)
    target = {"embed.weight": (V, D), "head.weight": (V, D)} | head
    for i, ratio in enumerate(CONFIG["compress_ratios"][:3]):
        target |= {f"layers.{i}.{n}": s for n, s in block(ratio, i == 0).items()}
    draft = {f"mtp.{i}.{n}": s for i in range(2) for n, s in block(0, False).items()}
    draft |= {"mtp.0.main_proj.weight": (D, 2 * D), "mtp.0.main_norm.weight": (D,)}
    draft |= {f"mtp.1.{n}": s for n, s in head.items()}
    draft |= {f"mtp.1.markov_head.markov_w{i}.weight": (V, R) for i in (1, 2)}
    draft["mtp.1.confidence_head.proj.weight"] = (1, D + R)
    rng = np.random.default_rng(0)
    return tuple(
        {name: random_values(rng, name, shape) for name, shape in shapes.items()}
        for shapes in (target, draft)
    )


def random_values(rng, name: str, shape: tuple) -> np.ndarray:
    if "tid2eid" in name:
        return rng.integers(0, E, shape, dtype=np.int32)
    x = rng.standard_normal(shape, np.float32) / 32
    if ".experts." in name:
        return decode("MXFP4", encode("MXFP4", x))
    return x if len(shape) == 1 else bfloat16(x)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) & 0xFFFF0000).view(np.float32)


def write_safetensors(path, arrays: dict[str, np.ndarray]):
    """Matrices as BF16, vectors as F32, ids as I32."""
    header, body = {}, b""
    for name, x in arrays.items():
        half = x.dtype == np.float32 and x.ndim > 1
        data = (x.view(np.uint32) >> 16).astype("<u2").tobytes() if half else x.tobytes()
        dtype = "BF16" if half else "I32" if x.dtype == np.int32 else "F32"
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_folder(folder, target: dict, draft: dict):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    added = [
        {"id": i, "content": TOKENS[i], "special": i < 2, "normalized": i > 1} for i in range(4)
    ]
    vocab = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = {"added_tokens": added, "model": {"vocab": vocab, "merges": [["Ġ", "é"], "t1 t2"]}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = sorted(target)
    for i, part in enumerate((names[::2], names[1::2])):
        path = folder / f"target_weights-0000{i + 1}-of-00002.safetensors"
        write_safetensors(path, {name: target[name] for name in part})
    write_safetensors(folder / "draft_weights.safetensors", draft)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the random pair and its two GGUF files, and the values."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = model()
    write_folder(folder, target, draft)
    assert main([str(folder), str(folder)]) == 0
    return folder, target, draft


def opened(folder):
    target, draft = open_gguf(folder / "nano.gguf"), open_gguf(folder / "nano-dspark.gguf")
    config = target_config(target)
    tensors = check_target(target, config)
    return target, draft, tensors | check_draft(draft, draft_config(draft), config)


def test_every_tensor_lies_under_ds4s_name_with_its_shape_and_no_other_does(made):
    _, _, tensors = opened(made[0])  # checks shapes
    names = [re.sub(r"experts\.[0-9]+\.", "experts.", n) for n in [*made[1], *made[2]]]
    assert set(tensors) == set(names)


def test_settings_read_from_the_file_are_those_of_config_json(made):
    found = target_config(open_gguf(made[0] / "nano.gguf"))
    found |= draft_config(open_gguf(made[0] / "nano-dspark.gguf"))
    wanted = CONFIG | {"compress_ratios": CONFIG["compress_ratios"][:3]}
    assert {key: found[key] for key in wanted} == wanted


def test_experts_decode_to_exactly_the_source_values(made):
    folder, *models = made
    _, _, tensors = opened(folder)
    for source in models:
        for name in (n for n in source if ".experts.0." in n):
            t = tensors[name.replace(".experts.0.", ".experts.")]
            wanted = [source[name.replace(".experts.0.", f".experts.{e}.")] for e in range(E)]
            assert t.type == "MXFP4"
            decoded = decode(t.type, t.read()).reshape(t.shape)
            np.testing.assert_array_equal(decoded.view("u4"), np.stack(wanted).view("u4"))


def test_vectors_and_ids_are_stored_bit_for_bit(made):
    folder, *models = made
    _, _, tensors = opened(folder)
    for source in models:
        for name in (n for n in source if source[n].ndim == 1 or "tid2eid" in n):
            assert tensors[name].read().tobytes() == source[name].tobytes()


@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("token_embd.weight", "F16"),
        ("output.weight", "Q8_0"),
        ("output_norm.weight", "F32"),
        ("output_hc_fn.weight", "F16"),
        ("blk.1.attn_q_a.weight", "Q8_0"),
        ("blk.1.attn_output_a.weight", "Q8_0"),
        ("blk.1.ffn_up_shexp.weight", "Q8_0"),
        ("blk.1.hc_attn_fn.weight", "F16"),
        ("blk.1.hc_ffn_base.weight", "F32"),
        ("blk.1.ffn_gate_inp.weight", "F16"),
        ("blk.1.exp_probs_b.bias", "F32"),
        ("blk.0.ffn_gate_tid2eid.weight", "I32"),
        ("blk.1.attn_compressor_ape.weight", "F16"),
        ("blk.1.attn_compressor_norm.weight", "F32"),
        ("blk.1.indexer.attn_q_b.weight", "F16"),
        ("blk.1.indexer.proj.weight", "F16"),
        ("blk.1.indexer_compressor_kv.weight", "F16"),
        ("mtp.0.ffn_gate_inp.weight", "Q8_0"),
        ("mtp.0.hc_attn_fn.weight", "F16"),
        ("mtp.0.main_proj.weight", "Q8_0"),
        ("mtp.0.main_norm.weight", "F32"),
        ("mtp.1.hc_head_fn.weight", "F16"),
        ("mtp.1.norm.weight", "F32"),
        ("mtp.1.markov_head.markov_w1.weight", "Q8_0"),
        ("mtp.1.confidence_head.proj.weight", "Q8_0"),
    ],
)
def test_types_are_those_of_ds4s_own_files(made, name, type):
    target, draft, _ = opened(made[0])
    assert (target.tensors | draft.tensors)[name].type == type


def test_the_draft_has_ds4s_nine_keys_in_order(made):
    metadata = open_gguf(made[0] / "nano-dspark.gguf").metadata
    assert list(metadata) == [
        "general.architecture",
        "general.name",
        "general.alignment",
        "dspark.block_size",
        "dspark.markov_rank",
        "dspark.noise_token_id",
        "dspark.target_layer_ids",
        "dspark.stage_count",
        "dspark.n_layers",
    ]
    assert metadata["general.architecture"] == "deepseek4-dspark"


@pytest.mark.parametrize("name", ["nano.gguf", "nano-dspark.gguf"])
def test_tensors_are_sorted_by_the_bytes_of_their_names(made, name):
    names = [n.encode() for n in open_gguf(made[0] / name).tensors]
    assert names == sorted(names)


def test_value_types_are_those_that_ds4_demands(made):
    fields = gguf.GGUFReader(made[0] / "nano.gguf").fields
    floats = ["rope.freq_base", "expert_weights_scale", "hyper_connection.epsilon"]
    for key, kinds in {
        **{f"deepseek4.{k}": ["UINT32"] for k in ("block_count", "rope.dimension_count")},
        **{f"deepseek4.{k}": ["FLOAT32"] for k in floats},
        "deepseek4.attention.compress_ratios": ["ARRAY", "UINT32"],
        "deepseek4.swiglu_clamp_exp": ["ARRAY", "FLOAT32"],
        "deepseek4.expert_weights_norm": ["BOOL"],
        "tokenizer.ggml.token_type": ["ARRAY", "INT32"],
    }.items():
        assert [t.name for t in fields[key].types] == kinds, key


def test_the_tokenizer_keeps_tokens_merges_and_kinds(made):
    metadata = open_gguf(made[0] / "nano.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.pre"] == "joyai-llm"
    assert metadata["tokenizer.ggml.tokens"] == TOKENS
    assert metadata["tokenizer.ggml.merges"] == ["Ġ é", "t1 t2"]
    # Control, control, control by its spelling, user defined, then normal ones.
    assert list(metadata["tokenizer.ggml.token_type"][:5]) == [3, 3, 3, 4, 1]


def test_the_target_says_that_it_was_not_trained_on_chat(made):
    assert open_gguf(made[0] / "nano.gguf").metadata["ds4mlx.chat"] is False


def test_a_second_run_writes_the_same_bytes(made, tmp_path):
    make_pair(made[0], tmp_path)
    for name in ("nano.gguf", "nano-dspark.gguf"):
        assert (tmp_path / name).read_bytes() == (made[0] / name).read_bytes()


def test_the_report_counts_what_float16_cannot_hold(tmp_path):
    target, draft = model()
    target["embed.weight"] = np.full((V, D), 1.0, np.float32)
    target["embed.weight"][0, :3] = 2.0**-26
    write_folder(tmp_path, target, draft)
    report = make_pair(tmp_path, tmp_path)
    assert "3 values rounded in token_embd.weight (BF16 to F16)\n" in report


def refused(tmp_path, target, draft, capsys) -> str:
    write_folder(tmp_path, target, draft)
    assert main([str(tmp_path), str(tmp_path)]) == 1
    return capsys.readouterr().err


def test_an_expert_off_the_mxfp4_grid_is_refused(tmp_path, capsys):
    target, draft = model()
    target["layers.1.ffn.experts.1.w2.weight"][3, 5] = 1.0078125
    message = refused(tmp_path, target, draft, capsys)
    assert "blk.1.ffn_down_exps.weight: expert 1: values off the MXFP4 grid" in message


def test_a_value_beyond_float16_is_refused_by_name(tmp_path, capsys):
    target, draft = model()
    target["embed.weight"][1, 1] = 131072.0
    message = refused(tmp_path, target, draft, capsys)
    assert message == "token_embd.weight: 131072 is beyond the range of float16\n"


def test_all_tensors_without_a_place_are_named(tmp_path, capsys):
    target, draft = model()
    target["layers.0.attn.extra"] = target["layers.0.norm.weight"] = np.zeros(3, np.float32)
    message = refused(tmp_path, target, draft, capsys)
    assert "layers.0.attn.extra has no place" in message
    assert "layers.0.norm.weight has no place" in message


def test_a_missing_expert_is_refused(tmp_path, capsys):
    target, draft = model()
    del draft["mtp.1.ffn.experts.0.w3.weight"]
    message = refused(tmp_path, target, draft, capsys)
    assert "mtp.1.ffn.experts.w3.weight has experts [1], wanted 0, 1, .." in message


def test_a_folder_without_tensors_is_refused(tmp_path):
    write_folder(tmp_path, *model())
    (tmp_path / "draft_weights.safetensors").unlink()
    with pytest.raises(FileError, match="no tensors in draft_weights"):
        make_pair(tmp_path, tmp_path)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", ["nano.gguf", "nano-dspark.gguf"])
def test_transcoding_changes_the_experts_and_nothing_else(made, tmp_path, name, experts):
    source = open_gguf(made[0] / name)
    transcode(made[0] / name, tmp_path / name, experts)
    result = open_gguf(tmp_path / name)
    kept, new = (gguf.GGUFReader(p / name).fields for p in (made[0], tmp_path))
    assert {k: (f.types, f.contents()) for k, f in kept.items()} == {
        k: (f.types, f.contents()) for k, f in new.items()
    }
    assert list(result.tensors) == list(source.tensors)
    for t, s in zip(result.tensors.values(), source.tensors.values(), strict=True):
        assert t.shape == s.shape
        if "_exps" in t.name:
            assert t.type == EXPERTS[experts]["_down_" in t.name]
        else:
            assert t.type == s.type and t.read().tobytes() == s.read().tobytes()


@pytest.mark.parametrize(("experts", "limit"), [("mxfp4", 0), ("q4_k", 0.09), ("iq2_xxs", 0.4)])
def test_transcoded_experts_stay_near_their_source(made, tmp_path, experts, limit):
    transcode(made[0] / "nano.gguf", tmp_path / "a.gguf", experts)
    source, result = (open_gguf(p).tensors for p in (made[0] / "nano.gguf", tmp_path / "a.gguf"))
    for name in (n for n in source if "_exps" in n):
        x, y = (decode(t.type, t.read()) for t in (source[name], result[name]))
        assert np.sqrt(np.square(y - x).mean() / np.square(x).mean()) <= limit


def test_the_option_makes_the_same_experts_as_transcoding(made, tmp_path):
    make_pair(made[0], tmp_path, "iq2_xxs")
    transcode(made[0] / "nano.gguf", tmp_path / "a.gguf", "iq2_xxs")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "nano.gguf").read_bytes()


def test_the_shipped_pair_passes_the_inventory():
    target, draft, tensors = opened(DATA)
    assert len(target.tensors) + len(draft.tensors) == len(tensors) == 293


def test_the_shipped_pair_is_the_one_that_the_command_made():
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in DATA.glob("*.gguf")}
    assert sums == {
        "nano.gguf": "499867729b57595d578b08ae5960d2e29c96763dab2b221e448a992f18bc76c8",
        "nano-dspark.gguf": "5be5794c3955c6aac2cf40f36def29c051ed407b1259a389247678c0b1987733",
    }


def test_the_shipped_pair_takes_at_most_31_megabytes():
    assert sum(p.stat().st_size for p in DATA.iterdir()) <= 31_000_000
