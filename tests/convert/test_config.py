"""Settings from the metadata: taken, derived, asked for, or refused."""

from dataclasses import fields

import numpy as np
import pytest

from ds4mlx.cache import Cache
from ds4mlx.config import TargetConfig
from ds4mlx.convert.config import check_folder_config, draft_config, kv_bytes, target_config
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.inventory import check_draft, check_target
from ds4mlx.errors import FileError, UsageError

from .files import TARGET_METADATA, target_tensors, tiny_draft, tiny_target, write_gguf

TINY = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 48,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "compress_ratios": [0, 0, 4, 8, 4, 0],
    "num_hash_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "lineage": None,
    "release": None,
}
DRAFT = {
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 32,
    "lineage": None,
    "release": None,
}


def d4(**values) -> dict:
    """Keys below `deepseek4.`, a double underscore for a dot."""
    return {f"deepseek4.{k.replace('__', '.')}": v for k, v in values.items()}


def target(tmp_path, *args, **kwargs) -> dict:
    return target_config(open_gguf(tiny_target(tmp_path / "t.gguf", *args, **kwargs)))


def draft(tmp_path, *args, **kwargs) -> dict:
    return draft_config(open_gguf(tiny_draft(tmp_path / "d.gguf", *args, **kwargs)))


def refused(make, *args, error=FileError, **kwargs) -> str:
    with pytest.raises(error) as caught:
        make(*args, **kwargs)
    return str(caught.value)


# The target ---------------------------------------------------------------------------------


def test_settings_have_the_official_names_and_values(tmp_path):
    assert target(tmp_path) == TINY


def test_the_settings_make_a_target_config(tmp_path):
    config = TargetConfig.from_dict(target(tmp_path))
    assert config.compress_ratios == (0, 0, 4, 8, 4)
    assert {f.name for f in fields(config)} > {"rope_scaling", "rms_norm_eps"}


DERIVED = """
block_count embedding_length vocab_size attention.head_count attention.head_count_kv
attention.key_length attention.value_length attention.q_lora_rank attention.output_lora_rank
attention.output_group_count expert_count expert_used_count expert_feed_forward_length
expert_shared_count hash_layer_count attention.indexer.head_count attention.indexer.key_length
hyper_connection.count expert_weights_norm expert_gating_func rope.scaling.type
rope.scaling.factor rope.scaling.original_context_length rope.scaling.yarn_beta_fast
rope.scaling.yarn_beta_slow
"""
UNDERIVABLE = """
attention.sliding_window attention.indexer.top_k rope.dimension_count rope.freq_base
hyper_connection.sinkhorn_iterations hyper_connection.epsilon attention.compress_rope_freq_base
attention.layer_norm_rms_epsilon expert_weights_scale swiglu_clamp_exp
"""


@pytest.mark.parametrize("key", DERIVED.split())
def test_a_missing_key_that_the_tensors_tell_is_derived(tmp_path, key):
    """MF-15."""
    assert target(tmp_path, {f"deepseek4.{key}": None}) == TINY


def test_all_that_tensors_tell_is_derived_at_once(tmp_path):
    """MF-15."""
    missing = dict.fromkeys(f"deepseek4.{key}" for key in DERIVED.split())
    ratios = {"deepseek4.attention.compress_ratios": None}
    expected = TINY | {"compress_ratios": [0, 0, 4, 8, 4]}
    assert target(tmp_path, missing | ratios) == expected


def test_the_vocabulary_size_comes_from_the_tokens_if_nothing_else_tells(tmp_path):
    """MF-15."""
    config = target(tmp_path, d4(vocab_size=None), {"token_embd.weight": None})
    assert config["vocab_size"] == 48


def test_a_missing_context_length_is_what_yarn_reaches(tmp_path):
    assert target(tmp_path, d4(context_length=None))["max_position_embeddings"] == 1 << 20


def test_all_missing_keys_that_nothing_tells_are_named_in_one_message(tmp_path):
    """MF-15."""
    keys = [f"deepseek4.{key}" for key in UNDERIVABLE.split()]
    message = refused(target, tmp_path, dict.fromkeys(keys))
    assert "metadata keys are missing" in message
    assert all(key in message for key in keys)


def other_dialect(name: str) -> str:
    """Names that community converters use instead of ds4's."""
    for ours, theirs in {
        "attn_kv_a_norm": "attn_kv_norm",
        "attn_q_a_norm": "attn_q_norm",
        "attn_kv.": "attn_kv_a_mqa.",
        "attn_output_": "attn_o_",
        "output_hc_": "hc_head_",
        "attn_sinks.weight": "attn_sinks",
        "exp_probs_b.bias": "exp_probs_b.weight",
        "ffn_gate_tid2eid.weight": "ffn_gate_tid2eid",
        "attn_compressor_kv": "attn_compressor.wkv",
        "attn_compressor_gate": "attn_compressor.wgate",
        "attn_compressor_ape.weight": "attn_compressor.ape",
        "attn_compressor_norm": "attn_compressor.norm",
        "indexer_compressor_kv": "indexer.compressor.wkv",
        "indexer_compressor_gate": "indexer.compressor.wgate",
        "indexer_compressor_ape.weight": "indexer.compressor.ape",
        "indexer_compressor_norm": "indexer.compressor.norm",
    }.items():
        name = name.replace(ours, theirs)
    return name.removesuffix(".weight") if ".hc_" in name else name


def test_both_dialects_give_the_same_settings_and_tensors(tmp_path):
    """MF-15."""
    renamed = {
        "attention.output_lora_rank": "attention.o_lora_rank",
        "hyper_connection.count": "hyper_connection.mult",
        "hyper_connection.sinkhorn_iterations": "hyper_connection.sinkhorn_iters",
        "hyper_connection.epsilon": "hyper_connection.eps",
        "attention.compress_ratios": "attention.layer_compress_ratio",
        "attention.compress_rope_freq_base": "rope.freq_base_compress",
    }
    keys = {"deepseek4.vocab_size": None}
    for ours, theirs in renamed.items():
        keys[f"deepseek4.{ours}"] = None
        keys[f"deepseek4.{theirs}"] = TARGET_METADATA[f"deepseek4.{ours}"]
    a = open_gguf(tiny_target(tmp_path / "a.gguf"))
    b = open_gguf(tiny_target(tmp_path / "b.gguf", keys, rename=other_dialect))
    assert len(set(a.tensors) ^ set(b.tensors)) > 100
    assert target_config(a) == target_config(b)
    left, right = check_target(a, target_config(a)), check_target(b, target_config(b))
    assert list(left) == list(right)
    for name, t in left.items():
        assert (t.type, t.shape) == (right[name].type, right[name].shape)
        assert t.read().tobytes() == right[name].read().tobytes()


def test_the_number_of_active_experts_is_the_files(tmp_path):
    """MF-18."""
    narrow = {f"blk.{i}.ffn_gate_tid2eid.weight": ("I32", (48, 1)) for i in range(3)}
    config = target(tmp_path, d4(expert_used_count=1), narrow)
    assert config["num_experts_per_tok"] == 1


def test_active_experts_unlike_the_hash_table_are_refused_with_both_numbers(tmp_path):
    """MF-18."""
    wide = {"blk.1.ffn_gate_tid2eid.weight": ("I32", (48, 3))}
    message = refused(target, tmp_path, {}, wide)
    assert "expert_used_count is 2, rows of ffn_gate_tid2eid are 3 wide" in message


REFUSED = {
    "expert groups": (d4(expert_group_count=2), "expert_group_count is 2, wanted 0"),
    "gating": (d4(expert_gating_func=2), "expert_gating_func is 2, wanted 4"),
    "no norm": (d4(expert_weights_norm=False), "expert_weights_norm is False, wanted True"),
    "rope type": (d4(rope__scaling__type="linear"), "'linear', wanted 'yarn'"),
    "clamps": (
        d4(swiglu_clamp_exp=np.array([10, 10, 7, 10, 10], np.float32)),
        "swiglu_clamp_exp is 7, 10, wanted one limit",
    ),
    "clamp of the shared expert": (
        d4(swiglu_clamp_shexp=np.full(5, 7, np.float32)),
        "swiglu_clamp_exp is 7, 10, wanted one limit",
    ),
    "clamp nan": (d4(swiglu_clamp_exp=float("nan")), "swiglu_clamp_exp is nan"),
    "few ratios": (
        d4(attention__compress_ratios=np.array([0, 0, 4], np.int32)),
        "3 compress_ratios for 5 layers",
    ),
    "negative ratio": (
        d4(attention__compress_ratios=np.array([0, 0, 4, -8, 4], np.int32)),
        "compress_ratios hold -8",
    ),
    "text": (d4(block_count="5"), "block_count is '5', wanted a number"),
    "zero": (d4(embedding_length=0), "embedding_length is 0, wanted an integer from 1"),
    "fraction": (d4(block_count=4.5), "block_count is 4.5, wanted an integer"),
    "infinite": (d4(rope__freq_base=float("inf")), "rope.freq_base is inf"),
    "bomb": (d4(block_count=1 << 30), "block_count is 1073741824, for 150 tensors"),
    "too many used": (
        d4(expert_used_count=5, hash_layer_count=0) | {},
        "expert_used_count is 5, expert_count 4",
    ),
    "kv heads": (d4(attention__head_count_kv=2), "head_count_kv is 2, wanted 1"),
    "value length": (d4(attention__value_length=16), "value_length is 16, key_length 32"),
    "odd rotary": (d4(rope__dimension_count=15), "rope.dimension_count is 15, wanted an even"),
    "groups": (d4(attention__output_group_count=3), "3 output groups do not divide 64"),
    "hash layers": (d4(hash_layer_count=6), "hash_layer_count is 6 of 5"),
    "tokens": (
        {"tokenizer.ggml.tokens": [str(i) for i in range(49)]},
        "49 tokens for a vocab_size of 48",
    ),
    "eos": ({"tokenizer.ggml.eos_token_id": 48}, "eos_token_id is 48, wanted an integer from 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_senseless_setting_is_refused_with_what_was_found_and_wanted(tmp_path, case):
    metadata, words = REFUSED[case]
    assert words in refused(target, tmp_path, metadata)


def test_several_wrong_keys_are_reported_together(tmp_path):
    message = refused(
        target, tmp_path, d4(expert_group_count=2, block_count="x", rope__freq_base=None)
    )
    for key in ("expert_group_count", "block_count", "rope.freq_base"):
        assert key in message


def test_a_layer_of_next_token_drafting_is_not_a_layer_of_the_target(tmp_path):
    """llama.cpp may count and keep it, ds4 does neither."""
    tensors = {
        n.replace("blk.4.", "blk.5."): t for n, t in target_tensors().items() if "blk.4." in n
    }
    tensors["blk.5.nextn.e_proj.weight"] = ("Q8_0", (64, 64))
    for counted in (5, 6, None):
        if counted == 5:
            keys = d4(block_count=5, nextn_predict_layers=1)
        else:
            keys = d4(block_count=counted)
        file = open_gguf(tiny_target(tmp_path / "t.gguf", keys, tensors))
        config = target_config(file)
        assert config == TINY | ({"num_hidden_layers": 5})
        assert len(check_target(file, config)) == 150


def test_a_draft_or_another_model_in_the_place_of_the_target_is_named(tmp_path):
    """CV-06."""
    legacy = {"mtp.0.e_proj.weight": ("F32", (8,)), "mtp.0.h_proj.weight": ("F32", (8,))}
    cases = {
        "this is a DSpark draft, wanted a DeepSeek V4 target": tiny_draft(tmp_path / "d.gguf"),
        "this is a one-stage MTP drafter": write_gguf(tmp_path / "m.gguf", {}, legacy),
        "of architecture 'llama'": write_gguf(
            tmp_path / "l.gguf", {"general.architecture": "llama"}, {"a": ("F32", (8,))}
        ),
        "of architecture 'deepseek41'": tiny_target(
            tmp_path / "4.1.gguf", {"general.architecture": "deepseek41"}
        ),
    }
    for words, path in cases.items():
        assert words in refused(target_config, open_gguf(path), error=UsageError)


@pytest.mark.parametrize(
    ("metadata", "name", "lineage"),
    [
        ({"general.version": "0731"}, "a.gguf", "0731"),
        ({"general.base_model.0.name": "DeepSeek V4 Flash 0731"}, "a.gguf", "0731"),
        ({"general.name": "DeepSeek-V4-Flash-Preview"}, "a-0731.gguf", "preview"),
        ({}, "Flash-chat-v2-imatrix-fixed-0731.gguf", "0731"),
        ({}, "Flash-Vision-Exp-q2.gguf", "vision-exp"),
        ({"x.checkpoint_variant": "preview"}, "a.gguf", "preview"),
        ({"x.source_revision": "ab0731cd9e10731f"}, "a.gguf", None),
        ({}, "Flash-imatrix.gguf", None),
    ],
)
def test_the_checkpoint_is_told_by_metadata_or_else_by_the_name(tmp_path, metadata, name, lineage):
    config = target_config(open_gguf(tiny_target(tmp_path / name, metadata)))
    assert config["lineage"] == lineage
    assert config["release"] == (None if lineage == "vision-exp" else lineage)


def test_the_checkpoint_is_told_by_the_file_behind_a_link(tmp_path):
    """MF-17."""
    (tmp_path / "ds4flash.gguf").symlink_to(tiny_target(tmp_path / "flash-0731.gguf"))
    assert target_config(open_gguf(tmp_path / "ds4flash.gguf"))["release"] == "0731"


@pytest.mark.parametrize("ctx", [1, 1000, 100_000])
def test_estimated_cache_bytes_are_those_of_the_real_cache(tmp_path, ctx):
    """ME-03."""
    config = target(tmp_path)
    estimate = kv_bytes(config, ctx)
    real = dict.fromkeys(estimate, 0)
    layers = Cache(TargetConfig.from_dict(config), ctx).layers
    for layer, ratio in zip(layers, (0, 0, 4, 8, 4), strict=True):
        real[ratio] += layer.ring.rows.nbytes + sum(e.nbytes for e in layer.entries)
    assert {ratio: sum(parts.values()) for ratio, parts in estimate.items()} == real


def test_a_million_tokens_of_flash_take_15_gigabytes_and_not_a_dense_cache():
    """ME-03: 43 dense layers of float32 rows would take 92 GB."""
    ratios = [0, 0] + [4, 128] * 20 + [4]
    flash = dict(head_dim=512, index_head_dim=128, sliding_window=128, compress_ratios=ratios)
    estimate = kv_bytes(flash | {"num_hidden_layers": 43}, 1 << 20)
    assert estimate[4]["entries"] == 21 * ((1 << 18) + 1) * 512 * 4
    assert estimate[4]["index keys"] == 21 * ((1 << 18) + 1) * 128 * 4
    assert estimate[128]["entries"] == 20 * (8192 + 1) * 512 * 4
    assert estimate[128]["open windows"] == 20 * 2 * 136 * 512 * 4
    assert estimate[0]["raw rows"] == 2 * 136 * 512 * 4
    assert round(sum(sum(parts.values()) for parts in estimate.values()) / 1e9, 2) == 14.48


# The draft ----------------------------------------------------------------------------------


def test_a_drafts_settings_have_the_official_names(tmp_path):
    assert draft(tmp_path) == DRAFT


NONSENSE = {
    "sidecar_block0": ({"dspark.block_size": 0}, "block_size is 0, wanted an integer from 1 to 16"),
    "sidecar_block_huge": ({"dspark.block_size": 65}, "block_size is 65"),
    "sidecar_block17": ({"dspark.block_size": 17}, "block_size is 17"),
    "sidecar_no_block_key": ({"dspark.block_size": None}, "missing: deepseek4.dspark.block_size"),
    "sidecar_rank0": ({"dspark.markov_rank": 0}, "markov_rank is 0"),
    "no noise": ({"dspark.noise_token_id": None}, "missing: deepseek4.dspark.noise_token_id"),
    "no targets": ({"dspark.target_layer_ids": None}, "missing: dspark.target_layer_ids"),
    "empty targets": (
        {"dspark.target_layer_ids": np.array([], np.uint32)},
        "wanted increasing layers",
    ),
    "not increasing": (
        {"dspark.target_layer_ids": np.array([2, 4, 3], np.uint32)},
        "target layers are 2, 4, 3, wanted increasing layers",
    ),
    "twice": (
        {"dspark.target_layer_ids": np.array([2, 2, 3], np.int32)},
        "target layers are 2, 2, 3",
    ),
    "negative": ({"dspark.target_layer_ids": np.array([-1, 2], np.int32)}, "target layers are -1"),
    "reals": ({"dspark.target_layer_ids": np.array([1.5, 2])}, "wanted integers"),
    "stages": ({"dspark.stage_count": 2}, "stage_count is 2, the tensors are of 3 stages"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_in_a_drafts_metadata_is_refused(tmp_path, case):
    """MF-13."""
    metadata, words = NONSENSE[case]
    assert words in refused(draft, tmp_path, metadata)


def test_all_nonsense_of_a_draft_is_reported_together(tmp_path):
    """MF-13."""
    keys = {"dspark.block_size": 0, "dspark.markov_rank": 0, "dspark.noise_token_id": None}
    message = refused(draft, tmp_path, keys)
    assert all(key[7:] in message for key in keys)


def test_a_target_in_the_place_of_the_draft_is_named(tmp_path):
    """CV-06."""
    file = open_gguf(tiny_target(tmp_path / "t.gguf"))
    message = refused(draft_config, file, error=UsageError)
    assert "this is a DeepSeek V4 target model, wanted a DSpark draft" in message


def test_a_draft_of_another_architecture_is_named(tmp_path):
    words = "of architecture 'deepseek41-dspark'"
    keys = {"general.architecture": "deepseek41-dspark"}
    assert words in refused(draft, tmp_path, keys, error=UsageError)


HEADS = {
    "mtp.0.main_proj": ("dspark.main_proj", "fc"),
    "mtp.0.main_norm": ("dspark.main_norm", "enc.output_norm"),
    "mtp.2.norm": ("dspark.norm", "output_norm"),
    "mtp.2.hc_head_": ("dspark.hc_head_", "output_hc_"),
    "mtp.2.markov_head.markov_w": ("dspark.markov_w", "markov_w"),
    "mtp.2.confidence_head.proj": ("dspark.conf_proj", "conf_proj"),
    "mtp.": ("dspark.", "blk."),
}


def in_family(family: int):
    def rename(name: str) -> str:
        ours = next(prefix for prefix in HEADS if name.startswith(prefix))
        return HEADS[ours][family] + name.removeprefix(ours)

    return rename


def keys_as(prefix: str, **more) -> dict:
    """The draft's keys under another prefix."""
    names = ("block_size", "markov_rank", "noise_token_id")
    out = {f"dspark.{n}": None for n in (*names, "target_layer_ids", "stage_count", "n_layers")}
    values = dict(zip(names, (5, 32, 7), strict=True)) | more
    return out | {f"{prefix}{name}": value for name, value in values.items()}


IDS = np.array([2, 3, 4], np.int32)
FAMILIES = {
    "ds4": ({}, str, {}),
    "underscore": (keys_as("deepseek4.dspark_", target_layer_ids=IDS), str, {}),
    "bleysg": (
        keys_as("deepseek4.dspark.", target_layers=IDS, layer_count=3, expert_count=4),
        in_family(0),
        {"head": "F16", "router": "F32"},
    ),
    "redhunt07": (keys_as("deepseek4.dspark.", target_layer_ids=IDS), str, {"head": "F16"}),
    "gmlx": ({}, str, {"head": "F16", "router": "F32"}),
    "embed and head": (
        {},
        lambda n: n.replace("markov_w1", "embed").replace("markov_w2", "head"),
        {},
    ),
    "dflash": (
        keys_as("dflash.", target_layers=IDS + 1, markov_rank=None, noise_token_id=None)
        | {
            "general.architecture": "dflash",
            "tokenizer.ggml.mask_token_id": 7,
            "dflash.hyper_connection.count": 4,
            "dflash.expert_gating_func": 4,
            "dflash.attention.compress_ratios": np.zeros(3, np.int32),
        },
        in_family(1),
        {},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_draft_files_gives_the_same_settings_and_tensors(tmp_path, family):
    keys, rename, types = FAMILIES[family]
    whole = open_gguf(tiny_draft(tmp_path / "ds4.gguf", **types))
    file = open_gguf(tiny_draft(tmp_path / "d.gguf", keys, rename=rename, **types))
    assert draft_config(file) == DRAFT
    expected = check_draft(whole, DRAFT, TINY)
    found = check_draft(file, DRAFT, TINY)
    assert len(found) == 81 and list(found) == list(expected)
    for name, t in found.items():
        assert t.read().tobytes() == expected[name].read().tobytes()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sample_from_anchor", False),
        ("expert_gating_func", 2),
        ("hash_layer_count", 1),
        ("attention.compress_ratios", np.array([0, 4, 0], np.int32)),
    ],
)
def test_a_dflash_draft_of_another_kind_is_refused(tmp_path, key, value):
    keys, rename, _ = FAMILIES["dflash"]
    assert key in refused(draft, tmp_path, keys | {f"dflash.{key}": value}, rename=rename)


# A folder's config.json ------------------------------------------------------------------------


def test_the_settings_of_a_file_are_those_of_a_folder(tmp_path):
    check_folder_config(target_config(open_gguf(tiny_target(tmp_path / "t.gguf"))), "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_shared_experts": None}, "fields are missing: n_shared_experts"),
        ({"hidden_size": "64"}, "hidden_size is '64', wanted an integer from 1"),
        ({"o_groups": 0}, "o_groups is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"compress_ratios": 0}, "compress_ratios is 0, wanted a list"),
        ({"compress_ratios": [0, "4"]}, "compress_ratios is .*wanted a list of integers"),
        ({"dspark_target_layer_ids": 5}, "dspark_target_layer_ids is 5"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, wanted a number above 0"),
        ({"rope_scaling": []}, "missing: .*rope_scaling.factor"),
        ({"qk_rope_head_dim": 1 << 30}, "qk_rope_head_dim is 1073741824, wanted an even one"),
    ],
)
def test_a_folder_with_a_senseless_setting_is_refused(change, message):
    with pytest.raises(FileError, match=f"^config.json: .*{message}"):
        check_folder_config(TINY | change, "config.json")
