"""What `inspect` says of a file and of a pair."""

import json

import pytest

from ds4mlx.convert.gguf import Tensor
from ds4mlx.convert.inspect import lines, report

from .files import target_tensors, tiny_draft, tiny_target, write_gguf


@pytest.fixture(autouse=True)
def no_tensor_is_read(monkeypatch):
    monkeypatch.setattr(Tensor, "read", None)


def text(*args) -> str:
    return "\n".join(lines(report(*args)))


def test_the_census_counts_types_and_bytes_by_class(tmp_path):
    """MF-17."""
    out = report(tiny_target(tmp_path / "t.gguf"))
    assert out["classes"]["experts gate/up"] == {"MXFP4": {"tensors": 10, "bytes": 10 * 4352}}
    assert out["classes"]["experts down"] == {"MXFP4": {"tensors": 5, "bytes": 5 * 4352}}
    assert "other" not in out["classes"]
    assert sum(n["tensors"] for n in out["types"].values()) == len(target_tensors())
    assert out["bytes"] == (tmp_path / "t.gguf").stat().st_size


def test_a_report_says_what_would_be_used(tmp_path):
    use = report(tiny_target(tmp_path / "t-0731.gguf"))["use"]
    assert use["checkpoint"] == "0731"
    assert use["experts"] == "2 of 4, and 1 shared"
    assert use["layers"].startswith("5 (2 of ratio 0, 2 of ratio 4, 1 of ratio 8), 3 hash")
    assert use["context"].startswith("4096 tokens")


def test_a_report_is_plain_values(tmp_path):
    out = report(tiny_target(tmp_path / "t.gguf"), tiny_draft(tmp_path / "d.gguf"))
    assert json.loads(json.dumps(out)) == out


def test_long_values_are_abbreviated(tmp_path):
    metadata = {"tokenizer.ggml.merges": ["a b"] * 1000, "tokenizer.chat_template": "x" * 1000}
    out = text(tiny_target(tmp_path / "t.gguf", metadata))
    assert "'a b', ..] (1000)" in out and "(1002 characters)" in out
    assert max(map(len, out.split("\n"))) < 400


LABELLED = {"general.file_type": 19}  # mostly IQ2_XXS


def experts(kind: str) -> dict:
    """Experts large enough to be most of the bytes, at widths that K-quants fit."""
    return {f"blk.0.ffn_{x}_exps.weight": (kind, (8, 256, 256)) for x in ("gate", "up", "down")}


def test_a_label_unlike_the_bytes_is_flagged_behind_a_link(tmp_path):
    """MF-17."""
    path = write_gguf(tmp_path / "Flash-IQ2XXS.gguf", LABELLED, experts("Q4_K"))
    (tmp_path / "ds4flash.gguf").symlink_to(path)
    out = report(tmp_path / "ds4flash.gguf")
    assert out["path"] == str(path.resolve())
    assert out["given"] == str(tmp_path / "ds4flash.gguf")
    assert out["warnings"] == [
        "general.file_type says MOSTLY_IQ2_XXS, but most bytes are Q4_K",
        "the name Flash-IQ2XXS.gguf says IQ2_XXS, but most bytes are Q4_K",
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731", "IQ2_XXS"),
        ("Flash-Layers37-42Q4KExperts-OtherExpertLayersIQ2XXSGateUp-Q2KDown-AProjQ8", "IQ2_XXS"),
        ("DeepSeek-V4-Flash-Q4KExperts-F16HC-F16Compressor-F16Indexer-Q8Attn-0731", "Q4_K"),
        ("DeepSeek-V4-Flash-MXFP4Experts-F16HC-Q8Attn-chat-v2-mxfp4-0731", "MXFP4"),
        ("DeepSeek-V4-Flash-Q4_K_M", "Q4_K"),
        ("flash-q2", "IQ2_XXS"),
    ],
)
def test_a_label_like_the_bytes_is_not_flagged(tmp_path, name, kind):
    """MF-17."""
    assert report(write_gguf(tmp_path / f"{name}.gguf", {}, experts(kind)))["warnings"] == []


def test_a_file_type_like_the_bytes_is_not_flagged(tmp_path):
    """MF-17."""
    path = write_gguf(tmp_path / "t.gguf", {"general.file_type": 15}, experts("Q4_K"))  # Q4_K_M
    assert report(path)["warnings"] == []


def test_unsupported_types_are_listed_with_their_tensors(tmp_path):
    tensors = {"token_embd.weight": ("IQ3_XXS", (48, 256)), "output.weight": ("Q3_K", (48, 256))}
    out = report(tiny_target(tmp_path / "t.gguf", {}, tensors))
    assert out["unsupported"] == {"IQ3_XXS": ["token_embd.weight"], "Q3_K": ["output.weight"]}
    assert "IQ3_XXS is not supported: token_embd.weight" in out["problems"]


def test_what_is_wrong_with_a_model_is_in_the_report(tmp_path):
    path = tiny_target(tmp_path / "t.gguf", {"deepseek4.rope.freq_base": None})
    assert "metadata keys are missing: deepseek4.rope.freq_base" in text(path)


def test_a_report_tells_whether_a_pair_belongs_together(tmp_path):
    """CL-11."""
    target = tiny_target(tmp_path / "flash-0731.gguf")
    cases = {
        "belongs together": tiny_draft(tmp_path / "dspark-0731.gguf"),
        "does not belong together": tiny_draft(tmp_path / "dspark-preview.gguf"),
        "fits in shape; the draft does not tell": tiny_draft(tmp_path / "dspark.gguf"),
        "cannot be judged": tiny_draft(tmp_path / "bad.gguf", {"dspark.block_size": 0}),
        "does not belong together: ": tiny_draft(
            tmp_path / "gone-0731.gguf", {}, {"mtp.0.main_norm.weight": None}
        ),
    }
    for words, draft in cases.items():
        assert report(target, draft)["pair"].startswith(words), words


def test_a_swapped_pair_is_named(tmp_path):
    """CV-06."""
    target, draft = tiny_target(tmp_path / "t.gguf"), tiny_draft(tmp_path / "d.gguf")
    out = report(draft, target)
    assert "this is a DSpark draft" in out["problems"][0]
    assert "this is a DeepSeek V4 target" in out["draft"]["problems"][0]
    assert out["pair"].startswith("cannot be judged")


def test_a_draft_alone_is_reported_as_a_draft(tmp_path):
    out = report(tiny_draft(tmp_path / "d.gguf"))
    assert (out["kind"], out["problems"], out["use"]["block"]) == ("draft", [], 5)
