"""Drafts through the Python API: files that cannot draft, what is refused, and what is told."""

import re
import signal
import subprocess
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx.convert.blocks import decode
from ds4mlx.convert.encode import encode
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.write import typed, write_gguf
from ds4mlx.errors import FileError, UsageError
from ds4mlx.loading import EMBEDDED, EMBEDDED_DRAFT
from tests.close import assert_same
from tests.convert.test_config import in_family, keys_as
from tests.test_loading import rewritten

DATA = files("ds4mlx") / "data"
PROMPT = "def gcd(a, b):\n    while b:\n"
HEADS = ("markov_w1", "markov_w2", "confidence_head.proj")


@cache
def model():
    return ds4mlx.load(mtp="embedded")


def variant(path, metadata=(), without=(), types=(), rename=str):
    """The embedded draft with other metadata (None: gone), fewer tensors, other types or names."""
    gguf = open_gguf(DATA / EMBEDDED_DRAFT)
    values = typed(gguf.metadata) | dict(metadata)
    values = {key: value for key, value in values.items() if value is not None}
    tensors = []
    for t in gguf.tensors.values():
        kind = next((k for name, k in dict(types).items() if name in t.name), None)
        if any(name in t.name for name in without):
            continue
        if kind:
            tensors.append((rename(t.name), kind, t.shape, lambda t=t, k=kind: recoded(t, k)))
        else:
            tensors.append((rename(t.name), t.type, t.shape, t.read))
    write_gguf(path, values, tensors)
    return path


def recoded(t, kind):
    return encode(kind, decode(t.type, t.read()))


BROKEN = [
    ({"dspark.block_size": ("UINT32", 0)}, "block_size is 0, wanted an integer from 1 to 16"),
    ({"dspark.block_size": ("UINT32", 17)}, "block_size is 17, wanted an integer from 1 to 16"),
    ({"dspark.block_size": None}, "metadata keys are missing: deepseek4.dspark.block_size"),
    ({"dspark.markov_rank": ("UINT32", 0)}, "markov_rank is 0, wanted an integer from 1"),
    (
        {"dspark.noise_token_id": ("UINT32", 4096)},
        "noise token 4096 is outside the target's vocabulary of 4096",
    ),
    (
        {"dspark.target_layer_ids": ("[UINT32]", [4, 5, 7])},
        "target layer 7 is outside the target's 7 layers",
    ),
    (
        {"dspark.target_layer_ids": ("[UINT32]", [5, 4, 6])},
        "target layers are 5, 4, 6, wanted increasing layers",
    ),
    (
        {"dspark.target_layer_ids": ("[UINT32]", [5, 6])},
        "mtp.0.main_proj.weight is [256, 768], wanted [256, 512]",
    ),
]


@pytest.mark.parametrize("metadata, sentence", BROKEN, ids=[s for _, s in BROKEN])
def test_settings_that_cannot_draft_are_refused(tmp_path, metadata, sentence):
    """MF-13."""
    path = variant(tmp_path / "d.gguf", metadata)
    with pytest.raises(FileError) as caught:
        ds4mlx.load(mtp=path)
    assert sentence in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_tensor_is_named_and_nothing_loads(tmp_path):
    """CO-20."""
    path = variant(tmp_path / "d.gguf", without=["markov_w2", "mtp.1.ffn_up_shexp"])
    stages = []
    with pytest.raises(FileError) as caught:
        ds4mlx.load(mtp=path, progress=lambda *event: stages.append(event))
    assert "missing mtp.2.markov_head.markov_w2.weight [4096, 64]" in str(caught.value)
    assert "missing mtp.1.ffn_up_shexp.weight" in str(caught.value)
    assert stages == []


def test_a_target_in_the_place_of_a_draft_is_named():
    with pytest.raises(UsageError, match="this is a DeepSeek V4 target model, wanted a DSpark"):
        ds4mlx.load(mtp=DATA / EMBEDDED)


def test_an_older_one_stage_drafter_is_named(tmp_path):
    rows = np.zeros((1, 128), np.uint8)
    tensors = [(f"mtp.0.{n}.weight", "F32", (32,), lambda: rows) for n in ("e_proj", "h_proj")]
    write_gguf(tmp_path / "m.gguf", {"general.architecture": ("STRING", "deepseek4")}, tensors)
    with pytest.raises(UsageError, match="this is a one-stage MTP drafter .* wanted a DSpark"):
        ds4mlx.load(mtp=tmp_path / "m.gguf")


@pytest.mark.parametrize("kinds", [("F32",) * 3, ("BF16",) * 3, ("BF16", "Q8_0", "F16")])
def test_heads_of_any_plain_type_draft(tmp_path, kinds):
    """MF-01."""
    path = variant(tmp_path / "d.gguf", types=zip(HEADS, kinds, strict=True))
    with ds4mlx.load(mtp=path) as other:
        blocks = []
        for m in (model(), other):
            session = m.session(ctx=64)
            session.feed(m.tokenizer.encode(PROMPT))
            blocks.append(session.propose(267))
        assert_same(blocks[0].tokens, blocks[1].tokens)


IDS = np.array([4, 5, 6], np.int32)
CONTAINERS = {
    "bleysg": (0, keys_as("deepseek4.dspark.", layer_count=3), {"target_layers": IDS}),
    "dflash": (
        1,
        keys_as("dflash.", markov_rank=None, noise_token_id=None)
        | {
            "general.architecture": "dflash",
            "dflash.hyper_connection.count": 4,
            "dflash.attention.compress_ratios": np.zeros(3, np.int32),
        },
        {"target_layers": IDS + 1},
    ),
}


@pytest.mark.parametrize("family", CONTAINERS)
def test_another_container_of_the_same_draft_writes_and_drafts_the_same(tmp_path, family):
    own = open_gguf(DATA / EMBEDDED_DRAFT).metadata
    kind, keys, ids = CONTAINERS[family]
    rank, noise = own["dspark.markov_rank"], own["dspark.noise_token_id"]
    known = {"deepseek4.dspark.markov_rank": rank, "deepseek4.dspark.noise_token_id": noise}
    prefix = "dflash." if family == "dflash" else "deepseek4.dspark."
    keys = keys | ({"tokenizer.ggml.mask_token_id": noise} if family == "dflash" else known)
    keys |= {prefix + name: value for name, value in ids.items()}
    keys = {k: v if v is None else next(iter(typed({k: v}).values())) for k, v in keys.items()}
    path = variant(tmp_path / "d.gguf", keys, rename=in_family(kind))
    told = []
    with ds4mlx.load(mtp=path) as other:
        for m in (model(), other):
            reply = m.generate(PROMPT, tokens=12, dspark_confidence=0, dspark_schedule=False)
            records = [r for r in reply._finish().stats["dspark"]["records"] if "rows" in r]
            told.append((reply.tokens, [(r["drafts"], r["confidences"]) for r in records]))
    assert told[0] == told[1] and len(told[0][1]) > 1


def test_a_file_without_its_last_stage_is_refused(tmp_path):
    path = variant(tmp_path / "d.gguf", without=["mtp.2."])
    with pytest.raises(FileError) as caught:
        ds4mlx.load(mtp=path)
    assert "dspark.stage_count is 3, the tensors are of 2 stages" in str(caught.value)


def test_a_vector_of_a_draft_may_be_packed(tmp_path):
    path = variant(tmp_path / "d.gguf", types={"attn_norm": "Q8_0", "main_norm": "Q8_0"})
    with ds4mlx.load(mtp=path) as other:
        session = other.session(ctx=64)
        session.feed(other.tokenizer.encode(PROMPT))
        assert bool(mx.isfinite(session.propose(267).logits).all())


def test_a_pair_of_two_checkpoints_is_refused_before_any_weight_is_read(tmp_path):
    def never(*_):
        raise AssertionError("weights were read")

    target = rewritten(
        tmp_path / "t.gguf",
        metadata=lambda keys: keys | {"general.version": ("STRING", "preview")},
    )
    draft = variant(tmp_path / "d.gguf", {"general.version": ("STRING", "0731")})
    with pytest.raises(FileError, match='draft is of checkpoint "0731", the target of "preview"'):
        ds4mlx.load(target, mtp=draft, progress=never)


def test_a_draft_of_another_checkpoint_than_the_target_says_is_told_once(tmp_path):
    """MF-14, one file silent; that both speak and differ is refused (tests/convert)."""
    path = variant(tmp_path / "d.gguf", {"general.version": ("STRING", "0731")})
    with ds4mlx.load(mtp=path) as other:
        notes = other.generate(PROMPT, tokens=2, dspark=True).notes
        assert notes == [
            'the target does not tell its checkpoint, the draft is of "0731": if they do not '
            "belong together, drafts are rarely accepted"
        ]
        assert other.generate(PROMPT, tokens=2, dspark=True).notes == []


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1, "0.7", True])
def test_a_confidence_outside_its_range_is_refused(value):
    with pytest.raises(UsageError) as caught:
        model().generate(PROMPT, dspark_confidence=value)
    assert str(caught.value) == f"dspark_confidence is {value!r}, wanted a number from 0 to 1"


@pytest.mark.parametrize("asked", ["dspark", "dspark_strict"])
def test_without_a_draft_dspark_says_what_to_download(asked):
    with ds4mlx.load() as plain, pytest.raises(UsageError) as caught:
        plain.generate(PROMPT, **{asked: True})
    assert str(caught.value) == (
        "dspark needs a draft, wanted --mtp FILE: DeepSeek-V4-Flash-DSpark-support-0731.gguf fits "
        "the 0731 weights (ds4mlx download ds4f-dspark fetches it); the small model has its own, "
        '"embedded"'
    )


def test_a_temperature_is_refused_unless_exact_sampling_is_asked_for():
    sentence = (
        "dspark decodes greedily and temp is 0.7: wanted --temp 0, or --exact-sampling to draw as "
        "without drafts"
    )
    with pytest.raises(UsageError) as caught:
        model().generate(PROMPT, dspark=True, temp=0.7)
    assert str(caught.value) == sentence
    options = {"tokens": 12, "temp": 0.7, "seed": 4}
    drafted = model().generate(PROMPT, dspark_confidence=0, exact_sampling=True, **options)
    assert drafted.tokens == model().generate(PROMPT, **options).tokens


def test_strict_loads_the_draft_and_decodes_without_it():
    reply = model().generate(PROMPT, tokens=6, dspark=True, dspark_strict=True)
    assert reply.tokens == model().generate(PROMPT, tokens=6).tokens
    assert "dspark" not in reply.stats


def test_a_drafted_reply_has_the_plain_text_and_tells_every_cycle():
    plain = model().generate(PROMPT, tokens=20)
    reply = model().generate(PROMPT, tokens=20, dspark_confidence=0, dspark_schedule=False)
    assert reply.tokens == plain.tokens and reply.finish_reason == plain.finish_reason
    told = reply.stats["dspark"]
    assert told["block"] == 5 and told["confidence"] == 0 and len(told["fingerprint"]) == 16
    assert told["cycles"] + told["accepted"] + sum(told["skipped"].values()) == 19
    for record in told["records"]:
        assert record.keys() >= {"position"} and ("rows" in record or "skipped" in record)


def test_ctrl_c_inside_a_drafted_run_keeps_the_text_and_tells_of_the_drafts():
    words = ["generate", PROMPT, "--mtp", "embedded", "--dspark-confidence", "0"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ds4mlx", *words, "--dspark-schedule", "off", "-n", "20000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=Path(__file__).parent.parent,
    )
    first = b""
    while len(first) < 20:
        first += process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = (part.decode() for part in process.communicate(timeout=60))
    assert process.returncode == 130 and err.endswith("ds4mlx: interrupted\n")
    tokens = int(re.search(r"generated (\d+) tokens", err)[1])
    assert int(re.search(r"drafts: (\d+) cycles", err)[1]) > 0
    text = model().generate(PROMPT, tokens=tokens).text
    assert first.decode() + rest == text.removesuffix("\n") + "\n"


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_context_limit_ends_a_drafted_reply_as_a_plain_one(room):
    prompt = model().tokenizer.encode(PROMPT)
    replies = [
        model().generate(PROMPT, ctx=len(prompt) + 1 + room, **options)
        for options in ({}, {"dspark_confidence": 0, "dspark_schedule": False})
    ]
    assert replies[0].tokens == replies[1].tokens and len(replies[0].tokens) == room
    assert [r.finish_reason for r in replies] == ["context"] * 2


def test_a_session_proposes_and_rewinds():
    session = model().session(ctx=64)
    ids = model().tokenizer.encode(PROMPT)
    with pytest.raises(UsageError, match="wanted at least one to be fed"):
        session.propose(267)
    session.feed(ids)
    block = session.propose(267)
    assert (block.tokens.shape, block.logits.shape, block.confidence.shape) == (
        (6,),
        (5, 4096),
        (5,),
    )
    session.feed([9, 10, 11])
    session.rewind(3)
    assert_same(session.propose(267).logits, block.logits)
    with pytest.raises(UsageError, match="token id 4096 is outside the vocabulary of 4096"):
        session.propose(4096)


def test_a_session_without_a_draft_says_so():
    with ds4mlx.load() as plain, pytest.raises(UsageError, match="propose needs a draft"):
        plain.session().propose(1)
