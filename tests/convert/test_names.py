"""Official names behind the GGUF spellings."""

import pytest

from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.names import draft_name, gguf_name, kind, target_name

from .files import tiny_draft, tiny_target, write_gguf

# A hash routed layer of ratio 4 has every name but gate.bias (model 18).
LAYER = """
attn.attn_sink attn.compressor.ape attn.compressor.norm.weight attn.compressor.wgate.weight
attn.compressor.wkv.weight attn.indexer.compressor.ape attn.indexer.compressor.norm.weight
attn.indexer.compressor.wgate.weight attn.indexer.compressor.wkv.weight
attn.indexer.weights_proj.weight attn.indexer.wq_b.weight attn.kv_norm.weight attn.q_norm.weight
attn.wkv.weight attn.wo_a.weight attn.wo_b.weight attn.wq_a.weight attn.wq_b.weight
attn_norm.weight ffn.experts.w1.weight ffn.experts.w2.weight ffn.experts.w3.weight
ffn.gate.tid2eid ffn.gate.weight ffn.shared_experts.w1.weight ffn.shared_experts.w2.weight
ffn.shared_experts.w3.weight ffn_norm.weight hc_attn_base hc_attn_fn hc_attn_scale hc_ffn_base
hc_ffn_fn hc_ffn_scale
"""
GLOBAL = "embed.weight head.weight norm.weight hc_head_fn hc_head_base hc_head_scale"
PAIRS = {
    "blk.3.attn_q_a.weight": "layers.3.attn.wq_a.weight",
    "blk.3.attn_q_a_norm.weight": "layers.3.attn.q_norm.weight",
    "blk.3.attn_kv.weight": "layers.3.attn.wkv.weight",
    "blk.3.attn_kv_a_norm.weight": "layers.3.attn.kv_norm.weight",
    "blk.3.attn_kv_norm.weight": "layers.3.attn.kv_norm.weight",
    "blk.3.attn_output_a.weight": "layers.3.attn.wo_a.weight",
    "blk.42.indexer_compressor_gate.weight": "layers.42.attn.indexer.compressor.wgate.weight",
    "blk.42.indexer.proj.weight": "layers.42.attn.indexer.weights_proj.weight",
    "blk.3.exp_probs_b.bias": "layers.3.ffn.gate.bias",
    "blk.3.exp_probs_b.weight": "layers.3.ffn.gate.bias",
    "blk.3.exp_probs_b": "layers.3.ffn.gate.bias",
    "blk.3.ffn_gate_exps.weight": "layers.3.ffn.experts.w1.weight",
    "blk.3.ffn_up_exps.weight": "layers.3.ffn.experts.w3.weight",
    "blk.3.ffn_down_shexp.weight": "layers.3.ffn.shared_experts.w2.weight",
    "output_hc_fn.weight": "hc_head_fn",
    "hc_head_fn": "hc_head_fn",
    "token_embd.weight": "embed.weight",
    "blk.03.attn_kv.weight": None,
    "blk.٣.attn_kv.weight": None,
    "blk.3.attn_kv.bias": None,
    "mtp.3.attn_kv.weight": None,
    "rope_freqs.weight": None,
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_gguf_name_has_this_official_name(name):
    assert target_name(name) == PAIRS[name]


def test_the_tiny_target_has_all_official_names_of_a_layer(tmp_path):
    tensors = open_gguf(tiny_target(tmp_path / "t.gguf")).tensors
    names = {target_name(name) for name in tensors}
    assert names >= {f"layers.2.{name}" for name in LAYER.split()} | set(GLOBAL.split())


def test_messages_use_the_names_of_ds4(tmp_path):
    for path, official in (
        (tiny_target(tmp_path / "t.gguf"), target_name),
        (tiny_draft(tmp_path / "d.gguf"), lambda name: draft_name(name, 3)),
    ):
        for name in open_gguf(path).tensors:
            assert gguf_name(official(name)) == name


def test_markov_w1_and_the_experts_w1_are_told_apart():
    """CO-20."""
    names = {
        "mtp.2.markov_head.markov_w1.weight": "mtp.2.markov_head.markov_w1.weight",
        "mtp.2.ffn_gate_shexp.weight": "mtp.2.ffn.shared_experts.w1.weight",
        "mtp.2.ffn_gate_exps.weight": "mtp.2.ffn.experts.w1.weight",
        "dspark.markov_w1.weight": "mtp.2.markov_head.markov_w1.weight",
        "mtp.2.norm.weight": "mtp.2.norm.weight",
        "mtp.2.attn_norm.weight": "mtp.2.attn_norm.weight",
    }
    assert {name: draft_name(name, 3) for name in names} == names


def test_the_kind_of_a_file_is_told_from_its_tensors(tmp_path):
    legacy = {"mtp.0.e_proj.weight": ("F32", (8,)), "mtp.0.h_proj.weight": ("F32", (8,))}
    paths = {
        "target": tiny_target(tmp_path / "t.gguf", {"general.architecture": None}),
        "draft": tiny_draft(tmp_path / "d.gguf", {"general.architecture": None}),
        "mtp": write_gguf(tmp_path / "m.gguf", {}, legacy),
        "": write_gguf(tmp_path / "o.gguf", {}, {"blk.0.attn_q.weight": ("F32", (8,))}),
    }
    assert {kind(open_gguf(path)): path for path in paths.values()} == paths
