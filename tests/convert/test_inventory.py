"""The inventory: every tensor once, of a type that is read and a shape that fits."""

import numpy as np
import pytest

from ds4mlx.convert.config import draft_config, target_config
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.inventory import check_draft, check_ids, check_pair, check_target
from ds4mlx.errors import FileError

from .files import draft_tensors, target_tensors, tiny_draft, tiny_target
from .test_config import DRAFT, TINY


def target(tmp_path, tensors=None, metadata=None):
    file = open_gguf(tiny_target(tmp_path / "t.gguf", metadata, tensors))
    return check_target(file, target_config(file))


def draft(tmp_path, tensors=None, metadata=None, config=TINY):
    file = open_gguf(tiny_draft(tmp_path / "d.gguf", metadata, tensors))
    return check_draft(file, draft_config(file), config)


def refused(make, *args, **kwargs) -> str:
    with pytest.raises(FileError) as caught:
        make(*args, **kwargs)
    return str(caught.value)


def test_every_tensor_of_a_whole_target_is_taken_once(tmp_path):
    tensors = target(tmp_path)
    assert sorted(t.name for t in tensors.values()) == sorted(target_tensors())


def test_experts_are_stacked_and_shapes_are_outermost_first(tmp_path):
    tensors = target(tmp_path)
    assert tensors["layers.3.ffn.experts.w2.weight"].shape == (4, 64, 32)
    assert tensors["layers.3.attn.compressor.ape"].shape == (8, 32)
    assert tensors["layers.0.ffn.gate.tid2eid"].shape == (48, 2)


def test_missing_unexpected_and_mistyped_tensors_are_reported_together(tmp_path):
    """MF-02."""
    tensors = {
        "blk.0.attn_q_a.weight": None,
        "blk.0.attn_norm.weight": ("Q8_0", (64,)),
        "blk.1.attn_kv.weight": ("Q8_0", (32, 96)),
        "blk.1.ffn_gate_tid2eid.weight": ("I64", (48, 2)),
        "blk.1.attn_kv.bias": ("F32", (32,)),
    }
    message = refused(target, tmp_path, tensors)
    assert "5 problems" in message
    for words in (
        "missing blk.0.attn_q_a.weight [32, 64]",
        "blk.0.attn_norm.weight is Q8_0, wanted F32 or F16 or BF16",
        "blk.1.attn_kv.weight is [32, 96], wanted [32, 64]",
        "blk.1.ffn_gate_tid2eid.weight is I64, wanted I32",
        "unexpected blk.1.attn_kv.bias",
    ):
        assert words in message


def test_a_long_list_of_problems_is_cut_with_a_count(tmp_path):
    gone = {name: None for name in target_tensors() if name.startswith("blk.0.hc_")}
    gone |= {name: None for name in target_tensors() if name.startswith("blk.1.")}
    message = refused(target, tmp_path, gone)
    assert f"{len(gone)} problems" in message
    assert f"and {len(gone) - 20} more" in message
    assert message.count("missing") == 20


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4"])
def test_a_matrix_may_be_of_any_type_that_is_read(tmp_path, kind):
    matrices = [n for n, (_, shape) in target_tensors().items() if len(shape) > 1]
    tensors = {n: (kind, target_tensors()[n][1]) for n in matrices if "tid2eid" not in n}
    assert {t.type for n, t in target(tmp_path, tensors).items() if n.endswith("wkv.weight")} == {
        kind
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_vector_may_be_of_any_float_type(tmp_path, kind):
    vectors = {n: (kind, s) for n, (_, s) in target_tensors().items() if len(s) == 1}
    assert target(tmp_path, vectors)["norm.weight"].type == kind


def test_types_that_are_known_but_not_read_are_refused_by_name(tmp_path):
    """MF-02."""
    tensors = {"token_embd.weight": ("IQ3_XXS", (48, 256)), "output.weight": ("Q3_K", (48, 256))}
    message = refused(target, tmp_path, tensors)
    assert "token_embd.weight is IQ3_XXS" in message and "output.weight is Q3_K" in message


def test_integer_tables_are_not_taken_as_floats(tmp_path):
    """CO-09."""
    message = refused(target, tmp_path, {"blk.0.ffn_gate_tid2eid.weight": ("BF16", (48, 2))})
    assert "ffn_gate_tid2eid.weight is BF16, wanted I32" in message


def test_gate_and_up_experts_of_a_layer_have_one_type(tmp_path):
    message = refused(target, tmp_path, {"blk.3.ffn_up_exps.weight": ("Q8_0", (4, 32, 64))})
    assert "blk.3.ffn_gate_exps.weight is MXFP4 but blk.3.ffn_up_exps.weight is Q8_0" in message


def test_without_an_output_matrix_the_head_is_the_embedding(tmp_path):
    tensors = target(tmp_path, {"output.weight": None})
    assert tensors["head.weight"] == tensors["embed.weight"]


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    message = refused(target, tmp_path, {"blk.0.attn_kv_norm.weight": ("F32", (32,))})
    assert "blk.0.attn_kv_norm.weight and blk.0.attn_kv_a_norm.weight are the same" in message


def test_compressors_are_wanted_where_the_ratios_say(tmp_path):
    ratios = {"deepseek4.attention.compress_ratios": np.array([0, 4, 4, 0, 4], np.int32)}
    message = refused(target, tmp_path, {}, ratios)
    assert "missing blk.1.attn_compressor_ape.weight [4, 64]" in message
    assert "missing blk.1.indexer.proj.weight [2, 64]" in message
    assert "unexpected blk.3.attn_compressor_ape.weight" in message


# CO-09 --------------------------------------------------------------------------------------


def test_expert_ids_up_to_383_stay_bit_equal(tmp_path):
    """CO-09."""
    ids = np.arange(288, 384, dtype=np.int32).reshape(48, 2)
    table = {"blk.0.ffn_gate_tid2eid.weight": ("I32", (48, 2), ids.tobytes())}
    tensor = target(tmp_path, table)["layers.0.ffn.gate.tid2eid"]
    assert tensor.type == "I32"
    assert np.array_equal(tensor.read().view(np.int32), ids)
    check_ids(tensor.name, ids, 384)


@pytest.mark.parametrize("bad", [383, -1])
def test_expert_ids_outside_the_experts_are_refused_with_the_token(bad):
    """CO-09."""
    ids = np.array([[0, 1], [2, bad], [3, 4]], np.int32)
    message = refused(check_ids, "tid2eid", ids, 383)
    assert f"tid2eid: token 1 is routed to experts 2, {bad}, wanted 0 to 382; 1 such" in message


# Drafts -------------------------------------------------------------------------------------

SMALL_HEADS = ("markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj")
HEADS = {f"mtp.2.{name}.weight": draft_tensors()[f"mtp.2.{name}.weight"][1] for name in SMALL_HEADS}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_every_dense_tensor_of_a_draft_may_be_of_these_types(tmp_path, kind):
    """MF-01."""
    dense = {n: (kind, s) for n, (_, s) in draft_tensors().items() if s[-1] % 32 == 0}
    assert len(draft(tmp_path, {n: t for n, t in dense.items() if "_exps" not in n})) == 81


@pytest.mark.parametrize("kinds", ["BF16 BF16 BF16", "Q8_0 Q8_0 BF16", "BF16 Q8_0 F32"])
def test_small_heads_may_mix_types(tmp_path, kinds):
    """MF-01."""
    tensors = {n: (k, s) for (n, s), k in zip(HEADS.items(), kinds.split(), strict=True)}
    found = draft(tmp_path, tensors)
    assert [found[name].type for name in tensors] == kinds.split()


def test_a_head_of_a_type_that_is_not_read_is_named(tmp_path):
    """MF-01."""
    message = refused(draft, tmp_path, {"mtp.2.confidence_head.proj.weight": ("I32", (1, 96))})
    assert "mtp.2.confidence_head.proj.weight is I32" in message


def test_one_extra_and_one_missing_tensor_of_a_draft_are_both_named(tmp_path):
    """CO-20."""
    tensors = {"mtp.1.ffn_gate_shexp.weight": None, "mtp.1.extra.weight": ("F32", (8,))}
    message = refused(draft, tmp_path, tensors)
    assert "missing mtp.1.ffn_gate_shexp.weight [32, 64]" in message
    assert "unexpected mtp.1.extra.weight" in message


def test_every_draft_tensor_is_taken_once(tmp_path):
    """CO-20."""
    assert sorted(t.name for t in draft(tmp_path).values()) == sorted(draft_tensors())


MISFITS = {
    "sidecar_missing_w2": (
        {"mtp.2.markov_head.markov_w2.weight": None},
        {},
        "missing mtp.2.markov_head.markov_w2.weight [48, 32]",
    ),
    "sidecar_noise_out_of_vocab": (
        {},
        {"dspark.noise_token_id": 48},
        "noise token 48 is outside the target's vocabulary of 48",
    ),
    "sidecar_target_layer_oob": (
        {},
        {"dspark.target_layer_ids": np.array([2, 3, 5], np.uint32)},
        "target layer 5 is outside the target's 5 layers",
    ),
    "sidecar_two_targets": (
        {},
        {"dspark.target_layer_ids": np.array([3, 4], np.uint32)},
        "mtp.0.main_proj.weight is [64, 192], wanted [64, 128]",
    ),
    "rank": ({}, {"dspark.markov_rank": 64}, "markov_w1.weight is [48, 32], wanted [48, 64]"),
    "middle stage": (
        {name: None for name in draft_tensors() if name.startswith("mtp.1.")},
        {},
        "missing mtp.1.attn_norm.weight [64]",
    ),
    "copied head": (
        {"output.weight": ("F16", (40, 64))},
        {},
        "output.weight is [40, 64], the target's is [48, 64]",
    ),
    "reduced vocabulary": ({"d2t": ("I64", (40,))}, {}, "unexpected d2t"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_draft_that_does_not_fit_the_target_is_refused(tmp_path, case):
    """MF-13."""
    tensors, metadata, words = MISFITS[case]
    assert words in refused(draft, tmp_path, tensors, metadata)


def test_a_draft_of_another_width_is_refused(tmp_path):
    """MF-13."""
    message = refused(draft, tmp_path, config=TINY | {"hidden_size": 96})
    assert "mtp.0.attn_norm.weight is [64], wanted [96]" in message


def test_copies_of_the_targets_embedding_and_head_are_left_out(tmp_path):
    copies = dict.fromkeys(("token_embd.weight", "output.weight"), ("F16", (48, 64)))
    assert len(draft(tmp_path, copies)) == 81


def test_axes_of_length_one_may_be_missing(tmp_path):
    found = draft(tmp_path, {"mtp.2.confidence_head.proj.weight": ("F32", (96,))})
    assert found["mtp.2.confidence_head.proj.weight"].shape == (1, 96)


@pytest.mark.parametrize(("a", "b"), [("preview", "0731"), ("0731", "vision-exp")])
def test_a_pair_of_two_checkpoints_is_refused_with_both(a, b):
    """MF-14."""
    for left, right in ((a, b), (b, a)):
        message = refused(check_pair, DRAFT | {"lineage": left}, TINY | {"lineage": right})
        assert f'"{left}"' in message and f'"{right}"' in message


def test_a_pair_of_which_one_tells_its_checkpoint_gives_a_warning():
    """MF-14."""
    told, silent = DRAFT | {"lineage": "0731"}, TINY | {"lineage": None}
    assert 'the target does not tell its checkpoint, the draft is of "0731"' in check_pair(
        told, silent
    )
    assert "the draft does not tell" in check_pair(silent, told)


def test_a_pair_of_one_checkpoint_gives_no_warning():
    """MF-14."""
    assert check_pair(DRAFT | {"lineage": "0731"}, TINY | {"lineage": "0731"}) is None
