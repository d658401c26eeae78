"""The Python API, with the embedded model."""

import gc
import json
import shutil
import threading
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx import tokenizer
from ds4mlx.cache import LayerCache
from ds4mlx.errors import FileError, UsageError
from ds4mlx.generate import paced
from tests.close import assert_same
from tests.golden_data import folder

PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def model():
    return ds4mlx.load()


@pytest.fixture(scope="module")
def greedy(model):
    return model.generate(PROMPT, tokens=24).tokens


def test_a_reply_costs_nothing_until_it_is_read(model, monkeypatch):
    def never(*_):
        raise AssertionError("the model ran")

    monkeypatch.setattr(type(model._target), "__call__", never)
    reply = model.generate(PROMPT)
    with pytest.raises(AssertionError, match="the model ran"):
        next(iter(reply))


def test_streamed_pieces_join_to_the_text_and_can_be_read_again(model):
    reply = model.generate(PROMPT, tokens=20)
    pieces = list(reply)
    assert "".join(pieces) == reply.text == str(reply) == "".join(reply)
    assert model.tokenizer.decode(reply.tokens) == reply.text
    assert len(reply.tokens) == reply.stats["generated_tokens"] == 20
    assert reply.finish_reason == "length" and reply.reasoning == ""


def test_statistics_count_what_was_done(model):
    stats = model.generate(PROMPT, tokens=5).stats
    assert stats["generated_tokens"] == 0
    reply = model.generate(PROMPT, tokens=5)
    reply.text  # noqa: B018
    ids = model.tokenizer.encode(PROMPT)
    assert reply.stats["prompt_tokens"] == 1 + len(ids)  # the begin token comes first
    assert reply.stats["peak_bytes"] > 20e6
    assert reply.stats["first_token_seconds"] > 0
    assert reply.stats["generate_tokens_per_second"] > 0


def test_generation_stops_before_the_end_token(model, greedy):
    model.tokenizer.eos, eos = greedy[5], model.tokenizer.eos
    try:
        reply = model.generate(PROMPT, tokens=24)
        assert reply.tokens == greedy[:5] and reply.finish_reason == "stop"
    finally:
        model.tokenizer.eos = eos


def test_generation_stops_when_the_context_is_full(model, greedy):
    n = len(model.tokenizer.encode(PROMPT)) + 1
    reply = model.generate(PROMPT, ctx=n + 7, tokens=24)
    assert reply.tokens == greedy[:7] and reply.finish_reason == "context"


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(model):
    n = len(model.tokenizer.encode(PROMPT)) + 1
    with pytest.raises(UsageError, match=f"{n} tokens.* context of {n}"):
        model.generate(PROMPT, ctx=n)


def test_a_context_beyond_the_models_positions_is_refused_before_memory_is_taken(model):
    for ask in (lambda: model.generate(PROMPT, ctx=10**9), lambda: model.session(ctx=8193)):
        with pytest.raises(UsageError, match="wanted at most the model's 8192 positions"):
            ask()
    assert model.session(ctx=8192).position == 0


@pytest.mark.parametrize(
    "option, value",
    [("tokens", 0), ("ctx", 0), ("temp", -1), ("temp", float("nan")), ("top_p", 1.1)]
    + [("min_p", -0.1), ("seed", -1), ("prefill_chunk", 0), ("prefill_chunk", 2.5)]
    + [("tokens", "8"), ("temp", "hot"), ("ctx", 64.0), ("seed", 1.5)]
    + [("tokens", True), ("temp", False)],
)
def test_a_value_out_of_range_is_refused_by_name(model, option, value):
    with pytest.raises(UsageError, match=f"^{option} is "):
        model.generate(PROMPT, **{option: value})


def test_the_same_seed_gives_the_same_text_whatever_ran_before(model):
    options = dict(tokens=12, temp=1.0, top_p=0.95)
    first = model.generate(PROMPT, seed=3, **options).tokens
    for seed in range(4):
        model.generate(PROMPT, seed=seed, **options).tokens  # noqa: B018
    assert model.generate(PROMPT, seed=3, **options).tokens == first


def test_different_seeds_give_different_texts_and_no_seed_is_a_new_one(model):
    runs = [model.generate(PROMPT, seed=s, tokens=8, temp=1.5, min_p=0).text for s in range(12)]
    assert len(set(runs)) > 5
    assert model.generate(PROMPT, temp=1.0).stats["seed"] != model.generate(PROMPT).stats["seed"]


def test_a_reply_may_be_read_in_another_thread(model, greedy):
    for options in ({}, {"temp": 1.0, "seed": 1, "top_p": 0.9}):
        reply, found = model.generate(PROMPT, tokens=24, **options), []
        thread = threading.Thread(target=lambda r=reply, f=found: f.extend(r.tokens))
        thread.start()
        thread.join()
        assert found == model.generate(PROMPT, tokens=24, **options).tokens


@pytest.mark.parametrize("raw", [None, True, False])
@pytest.mark.parametrize("prompt", [None, b"import os", 5, {"role": "user", "content": "hi"}])
def test_a_prompt_of_another_kind_is_refused_for_what_it_is(model, prompt, raw):
    with pytest.raises(UsageError, match="^the prompt is .*, wanted a text or a list of messages$"):
        model.generate(prompt, raw=raw)


@pytest.mark.parametrize("chunk", [0, -1, 2.5, "8", None])
def test_a_chunk_that_is_none_is_refused_and_the_session_goes_on(model, chunk):
    ids, session = model.tokenizer.encode(PROMPT), model.session(ctx=64)
    with pytest.raises(UsageError, match="^chunk is .* wanted a whole number, at least 1$"):
        session.feed(ids, chunk=chunk)
    assert session.position == 0 and session.feed(ids).shape[0] == len(ids)


@pytest.mark.parametrize("bad", [1.5, "a", None, -1, 1 << 20])
def test_what_is_no_token_id_is_refused_and_the_session_goes_on(bad):
    with ds4mlx.load(mtp="embedded") as pair:
        session = pair.session(ctx=64)
        session.feed([1, 2])
        for use in (lambda: session.feed([3, bad]), lambda: session.propose(bad)):
            with pytest.raises(UsageError, match=f"^token id {bad!r} is outside the vocabulary"):
                use()
        assert session.position == 2 and session.feed([3]).shape[0] == 1


@pytest.mark.parametrize("n", [1.0, "1", None])
def test_a_rewind_by_no_whole_number_is_refused(model, n):
    session = model.session(ctx=64)
    session.feed([1, 2])
    with pytest.raises(UsageError, match=rf"^rewind\({n!r}\): wanted 0 to 2 at position 2$"):
        session.rewind(n)


def test_an_interrupted_session_is_not_fed_again(model):
    ids, session = model.tokenizer.encode(PROMPT), model.session(ctx=64)
    interrupted = patch.object(LayerCache, "write", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        session.feed(ids)
    for use in (lambda: session.feed(ids), lambda: session.rewind(1)):
        with pytest.raises(UsageError, match="was interrupted, wanted a new session"):
            use()


def test_pieces_of_a_sublayer_are_no_progress():
    heard = []
    pace = paced(heard.append)
    for within in (False, True, True, False):
        pace(mx.ones(1), within=within)
    assert heard == [1, 2]


def test_a_session_may_be_fed_and_read_in_another_thread(model):
    ids, session, found = model.tokenizer.encode(PROMPT), model.session(ctx=64), []
    thread = threading.Thread(target=lambda: found.append(session.feed(ids)))
    thread.start()
    thread.join()
    assert np.array_equal(np.array(found[0]), np.array(model.session(ctx=64).feed(ids)))
    assert np.array(session.feed(ids)).shape == found[0].shape


def test_a_model_may_be_loaded_in_another_thread(greedy):
    found = []
    thread = threading.Thread(target=lambda: found.append(ds4mlx.load()))
    thread.start()
    thread.join()
    assert found[0].generate(PROMPT, tokens=24).tokens == greedy


def test_leaving_a_reply_early_does_not_touch_the_next_one(model, greedy):
    for n in range(1, 24, 2):
        pieces = iter(model.generate(PROMPT, tokens=24))
        for _ in range(n):
            next(pieces)
        del pieces
    assert model.generate(PROMPT, tokens=24).tokens == greedy


@pytest.mark.parametrize("at", [0, 1, 5, 30])
def test_an_interrupt_keeps_what_was_produced_and_the_model_usable(model, greedy, monkeypatch, at):
    original, calls = type(model._target).__call__, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return original(self, *args)

    reply = model.generate(PROMPT, tokens=24)
    with monkeypatch.context() as patch:
        patch.setattr(type(model._target), "__call__", interrupted)
        if at < 24:
            with pytest.raises(KeyboardInterrupt):
                list(reply)
            assert reply.finish_reason == "interrupted"
        else:
            list(reply)
    assert greedy[: len(reply.tokens)] == reply.tokens
    assert model.generate(PROMPT, tokens=24).tokens == greedy


def test_a_session_gives_logits_of_each_row_and_forgets_exactly(model):
    ids = model.tokenizer.encode(PROMPT)
    session = model.session(ctx=64)
    logits = session.feed(ids)
    assert logits.shape == (len(ids), model.config.vocab_size) and logits.dtype == mx.float32
    assert session.hidden.shape == (len(ids), 3 * model.config.hidden_size)
    assert session.position == len(ids)
    again = session.feed([5, 6, 7])
    session.rewind(3)
    assert session.position == len(ids)
    assert_same(session.feed([5, 6, 7]), again)


def test_a_session_refuses_what_it_cannot_do(model):
    session = model.session(ctx=12)
    session.feed([1] * 10)
    for ids, text in (([4096], "4096 is outside"), ([-1], "-1 is outside"), ([], "got 0 tokens")):
        with pytest.raises(UsageError, match=text):
            session.feed(ids)
    with pytest.raises(UsageError, match="3 tokens, wanted 1 to 2"):
        session.feed([1, 2, 3])
    session.rewind(5)
    with pytest.raises(UsageError, match=r"rewind\(4\): wanted 0 to 3"):
        session.rewind(4)
    assert session.position == 5


def test_closing_a_model_frees_its_memory_also_after_an_error():
    """ME-09."""

    def used():
        gc.collect()
        return mx.get_active_memory() + mx.get_cache_memory()

    mx.clear_cache()
    before = used()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), ds4mlx.load() as model:
            model.generate(PROMPT, tokens=2).text  # noqa: B018
            raise ZeroDivisionError
        assert used() <= before + 0.05 * 29e6
    with pytest.raises(UsageError, match="closed"):
        model.generate(PROMPT)


def test_a_model_and_a_reply_have_short_representations(model):
    reply = model.generate(PROMPT, tokens=24)
    for text in (repr(model), repr(reply), repr(reply._finish())):
        assert len(text) < 400 and "array" not in text


def test_a_completion_model_starts_with_the_begin_token_and_raw_adds_nothing(model):
    ids = model.tokenizer.encode(PROMPT)
    assert model.generate(PROMPT).stats["prompt_tokens"] == len(ids) + 1
    assert model.generate(PROMPT, raw=True).stats["prompt_tokens"] == len(ids)
    with pytest.raises(UsageError, match="empty"):
        model.generate("", raw=True)
    assert model.generate("", tokens=3).text


def test_a_completion_model_refuses_what_needs_chat_roles(model):
    with pytest.raises(UsageError, match="a system text needs chat roles"):
        model.generate(PROMPT, system="You are terse.")
    with pytest.raises(UsageError, match="a list of messages needs chat roles"):
        model.generate([{"role": "user", "content": "hi"}])


def test_a_chat_prompt_is_rendered_and_its_reply_split(model, monkeypatch):
    """The embedded tokenizer has the roles' tokens, so chat can be asked for, if without sense."""
    special, encode = model.tokenizer.special, model.tokenizer.encode
    reply = model.generate("hi", raw=False, think="off", release="0731", tokens=4)
    want = [special(t) for t in ("<｜begin▁of▁sentence｜>", "<｜User｜>")]
    want += encode("hi")
    want += [special(t) for t in ("<｜Assistant｜>", "</think>")]
    assert reply.stats["prompt_tokens"] == len(want)
    ids, parser = model._prompt("hi", None, "off", "0731", False, [])
    assert ids == want and parser is not None
    assert reply.reasoning == ""
    thinking = model.generate("hi", raw=False, think="low", release="0731", tokens=4)
    assert thinking.text == "" and thinking.finish_reason == "length"
    assert thinking.reasoning == model.tokenizer.decode(thinking.tokens).lstrip("\n")


def test_a_release_that_nothing_tells_is_assumed_aloud(model):
    assert "0731 is assumed" in model.generate("hi", raw=False, think="high").notes[0]
    assert model.generate("hi", raw=False, think="high", release="preview").notes == []
    assert model.generate("hi", raw=False, think="off").notes == []


def test_an_empty_chat_prompt_is_refused(model):
    with pytest.raises(UsageError, match="the prompt is empty"):
        model.generate("", raw=False)


def test_progress_reaches_its_total(model):
    seen = []
    loaded = ds4mlx.load(progress=lambda *at: seen.append(at))
    loaded.generate(PROMPT, tokens=1, prefill_chunk=3, progress=lambda *at: seen.append(at)).text  # noqa: B018
    loads = [at for at in seen if at[0] == "load"]
    assert loads[-1][1] == loads[-1][2] > 20e6 and len(loads) > 100
    n = len(model.tokenizer.encode(PROMPT)) + 1
    assert seen[-1] == ("prefill", n, n) and ("prefill", 3, n) in seen
    read = [at[1] for at in seen if at[0] == "prefill"]
    assert read == sorted(read) and len(read) > 2 * n / 3  # within chunks, too


def test_a_folder_with_official_names_loads(tmp_path):
    case = folder("s1_w16_r8")
    shutil.copy(case / "target_weights.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(UsageError):
        ds4mlx.load(tmp_path)
    config = json.loads((case / "case.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="no tokenizer.json"):
        ds4mlx.load(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json", 320)
    loaded = ds4mlx.load(tmp_path, rounding=False)
    assert not loaded.chat  # the tokenizer has no tokens for roles
    logits = loaded.session(ctx=200).feed([1, 2, 3])
    assert np.isfinite(np.array(logits)).all()
    for change, text in (({"hidden_size": 97}, "97"), ({"head_dim": None}, "head_dim")):
        changed = config | change
        changed = {k: v for k, v in changed.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(FileError, match=text):
            ds4mlx.load(tmp_path)


def write_tokenizer(path, vocab_size):
    """A tokenizer.json with begin and end tokens, every byte, and no merges."""
    embedded = ds4mlx.load().tokenizer
    texts = [embedded._tokens[i] for i in range(embedded.vocab_size)]
    letters = [t for t in texts if len(t) == 1]
    texts = (texts[:2] + letters + [t for t in texts[2:] if len(t) > 1])[:vocab_size]
    added = [{"id": i, "content": text} for i, text in enumerate(texts[:2])]
    splits = [{"pattern": {"Regex": pattern}} for pattern in tokenizer._SPLITS]
    data = {
        "model": {"vocab": {t: i + 2 for i, t in enumerate(texts[2:])}, "merges": []},
        "added_tokens": added,
        "pre_tokenizer": {"pretokenizers": [*splits, {}]},
    }
    path.write_text(json.dumps(data), "utf-8")
