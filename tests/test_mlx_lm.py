"""mlx-lm's own loader, loops, caches, server and evaluation run a converted folder."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
import tokenizers
from mlx_lm.generate import batch_generate, generate_step, stream_generate
from mlx_lm.models.cache import (
    LRUPromptCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import ds4mlx
import ds4mlx.mlx_lm
from ds4mlx.cache import LayerCache
from ds4mlx.chat import prompt_text, render
from ds4mlx.convert.convert import convert
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.write import typed, write_gguf
from ds4mlx.errors import FileError, UsageError
from ds4mlx.loading import find
from ds4mlx.mlx_lm import TargetCache
from ds4mlx.tokenizer import ASSISTANT, BOS, END_THINK, THINK, USER, Tokenizer
from ds4mlx.weights import loaded_bytes
from tests import real_tokenizer
from tests.close import assert_same

NANO = Path(files("ds4mlx") / "data" / "nano.gguf")
PROMPT = "import os\nimport sys\n\n\ndef main():\n"


@pytest.fixture(scope="module", autouse=True)
def offline():
    """No connection leaves this machine."""
    connect = socket.socket.connect

    def local(self, address):
        assert address[0] in ("127.0.0.1", "::1"), address
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return convert(NANO, tmp_path_factory.mktemp("mlx-lm") / "nano")


@pytest.fixture(scope="module")
def loaded(folder):
    return mlx_lm.load(str(folder))


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def own():
    with ds4mlx.load() as own:
        yield own


@pytest.fixture(scope="module")
def ids(own) -> list[int]:
    return own.tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def reply(own) -> list[int]:
    """ds4mlx's own greedy tokens after the prompt."""
    return own.generate(PROMPT, tokens=32, raw=True).tokens


def generated(model, ids, tokens: int, **options) -> list[int]:
    """mlx-lm's greedy tokens."""
    steps = generate_step(mx.array(ids), model, max_tokens=tokens, **options)
    return [int(token) for token, _ in steps]


def alone(model, ids) -> mx.array:
    return model(mx.array([ids]))[0]


# Loading --------------------------------------------------------------------------------------


def test_a_cache_whose_feed_was_interrupted_is_not_fed_again(model, ids):
    cache = TargetCache()
    interrupted = patch.object(LayerCache, "write", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        cache.feed(model.target, mx.array([ids]))
    with pytest.raises(UsageError, match="was interrupted, wanted a new cache"):
        cache.feed(model.target, mx.array([ids]))


def test_mlx_lm_sees_the_bytes_of_all_weights(model, folder):
    found = sum(a.nbytes for a in model.parameters()["planes"])
    assert found == loaded_bytes(find(folder)["tensors"])


def test_logits_are_those_of_ds4mlx_bit_for_bit(model, own, ids):
    assert_same(alone(model, ids), own.session(ctx=64).feed(ids))


def test_greedy_tokens_are_those_of_ds4mlx(model, ids, reply):
    assert generated(model, ids, 32) == reply


def test_streamed_text_is_that_of_ds4mlx(loaded, own, reply):
    pieces = [r.text for r in stream_generate(*loaded, PROMPT, max_tokens=12)]
    # mlx-lm's detokenizer drops a space at the start.
    assert "".join(pieces) == own.tokenizer.decode(reply[:12]).removeprefix(" ")
    assert len(pieces) == 12


def test_a_prompt_that_spells_the_begin_token_has_it(loaded, own):
    text = mlx_lm.generate(*loaded, BOS + PROMPT, max_tokens=12)
    assert text == own.generate(PROMPT, tokens=12).text.removeprefix(" ")


def test_control_tokens_have_the_ids_of_the_model(loaded, own):
    tokenizer, added = loaded[1], own.tokenizer._added
    assert tokenizer.eos_token_ids == {own.tokenizer.eos}
    assert {t: tokenizer.encode(t, add_special_tokens=False) for t in added} == {
        t: [i] for t, i in added.items()
    }


def test_other_readers_number_the_tokens_of_a_real_tokenizer_alike():
    tokenizer = Tokenizer.from_gguf(real_tokenizer.metadata())
    other = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.to_json()))
    assert other.get_vocab() == tokenizer._ids
    text = "Grüße, 12345 + 我们\n  def f(x):"
    assert other.encode(text).ids == tokenizer.encode(text)


def test_a_completion_model_has_no_chat_template(loaded):
    assert not loaded[1].has_chat_template


def test_the_settings_that_mlx_lm_returns_can_be_written(folder):
    config = mlx_lm.utils.load_config(folder)
    assert json.loads(json.dumps(config)) == config and config["hidden_size"] == 256


def test_folders_of_others_stay_with_mlx_lm(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    config = mlx_lm.utils.load_config(tmp_path)
    assert config == {"model_type": "deepseek_v4"}


def test_a_damaged_folder_is_refused_with_the_names(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["tensors"]["hc_head_base"]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match="hc_head_base"):
        mlx_lm.load(str(tmp_path))


def test_an_adapter_is_refused(model):
    with pytest.raises(UsageError, match="no adapters"):
        model.load_weights("adapters.safetensors", strict=False)


def test_more_context_than_positions_is_refused(folder):
    with pytest.raises(UsageError, match="ctx is 8193, wanted at most the model's 8192"):
        mlx_lm.load(str(folder), model_config={"ctx": 8193})


# Caches ---------------------------------------------------------------------------------------


def test_a_second_turn_goes_on_from_the_cache_of_the_first(model, own, ids):
    cache = make_prompt_cache(model)
    first = generated(model, ids, 8, prompt_cache=cache)
    more = own.tokenizer.encode("\n    return 0\n")
    again = generated(model, more, 8, prompt_cache=cache)
    assert again == generated(model, ids + first + more, 8)


@pytest.mark.parametrize("n", [0, 1, 8])
def test_trimming_up_to_8_tokens_leaves_the_cache_as_if_never_fed(model, ids, n):
    cache, plain = make_prompt_cache(model), make_prompt_cache(model)
    for c, fed in ((cache, ids + ids[:n]), (plain, ids)):
        for at in range(len(fed)):
            model(mx.array([fed[at : at + 1]]), cache=c)
    assert cache[0].trim(n) == n
    for a, b in zip(cache[0].rows[0].live(), plain[0].rows[0].live(), strict=True):
        assert_same(a, b)


def test_trimming_more_is_refused(model, ids):
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    with pytest.raises(UsageError, match=r"rewind\(9\): wanted 0 to 8"):
        cache[0].trim(9)


def test_trimming_an_empty_cache_is_refused(model):
    with pytest.raises(UsageError, match="the cache is empty"):
        make_prompt_cache(model)[0].trim(1)


def test_mlx_lm_does_not_take_the_cache_for_one_of_any_length(model, ids):
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    assert not can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 1) == 0


def test_a_draft_model_of_mlx_lm_is_refused(loaded):
    with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
        mlx_lm.generate(*loaded, PROMPT, draft_model=loaded[0])


def test_the_servers_store_gives_back_the_longest_prefix(model, ids):
    store, cache = LRUPromptCache(), make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    store.insert_cache("m", ids, cache)
    found, rest = store.fetch_nearest_cache("m", [*ids, 7])
    assert rest == [7]
    assert_same(model(mx.array([[7]]), cache=found), model(mx.array([[7]]), cache=cache))
    assert store.fetch_nearest_cache("m", [*ids[:-2], 7])[0] is None  # not cut to what is shared


def test_a_copied_cache_goes_its_own_way(model, ids):
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    other = deepcopy(cache)
    wanted = model(mx.array([[7]]), cache=deepcopy(cache))
    model(mx.array([[8]]), cache=other)
    assert_same(model(mx.array([[7]]), cache=cache), wanted)


@pytest.fixture
def saved(model, ids, tmp_path):
    """A cache that holds the prompt, and the same from a file."""
    cache, path = make_prompt_cache(model), str(tmp_path / "cache.safetensors")
    model(mx.array([ids]), cache=cache)
    save_prompt_cache(path, cache)
    return cache, load_prompt_cache(path)


def test_a_saved_cache_goes_on_as_if_never_saved(model, saved):
    assert saved[0][0].nbytes == saved[1][0].nbytes
    found = [generated(model, [7], 8, prompt_cache=cache) for cache in saved]
    assert found[0] == found[1]


def test_of_a_saved_cache_only_what_came_later_can_be_trimmed(model, saved):
    cache = saved[1]
    with pytest.raises(UsageError, match="as it was read from a file"):
        cache[0].trim(1)
    model(mx.array([[7, 8]]), cache=cache)
    assert cache[0].trim(2) == 2
    with pytest.raises(UsageError, match="wanted 0 to 0"):
        cache[0].trim(1)


def test_a_saved_cache_of_another_model_is_refused(model):
    other = TargetCache.from_state([[3, 64, mx.zeros((4, 4))]])
    with pytest.raises(UsageError, match="that of another model"):
        model(mx.array([[7]]), cache=[other])


def test_a_cache_grows_without_a_change_of_the_logits(model, ids, monkeypatch):
    wanted = alone(model, ids * 3)
    monkeypatch.setattr(ds4mlx.mlx_lm, "STEP", 16)
    cache = make_prompt_cache(model)
    found = [model(mx.array([ids]), cache=cache)[0] for _ in range(3)]
    assert cache[0].rows[0].ctx == -(-3 * len(ids) // 16) * 16
    assert mx.allclose(mx.concatenate(found), wanted, atol=1e-3)


def test_more_tokens_than_positions_are_refused(model):
    with pytest.raises(UsageError, match="8193 tokens, wanted at most the model's 8192"):
        model(mx.zeros((1, 8193), mx.int32))


def test_evaluating_the_logits_leaves_no_graph_in_the_cache(model, ids, tmp_path):
    cache, path = make_prompt_cache(model), tmp_path / "graph.dot"
    for id in ids[:9]:
        mx.eval(model(mx.array([[id]]), cache=cache))
    for a in cache[0].rows[0].arrays():
        mx.export_to_dot(str(path), a)
        assert "[label" not in path.read_text().replace(" ", "").replace('[label="A"', "")


# Batches --------------------------------------------------------------------------------------


def test_sequences_of_a_batch_get_the_logits_they_get_alone(model, ids):
    found = model(mx.array([ids[:6], ids[1:7]]))
    assert_same(found[0], alone(model, ids[:6]))
    assert_same(found[1], alone(model, ids[1:7]))


def test_a_batch_of_prompts_of_any_length_is_continued_as_each_alone(loaded, ids):
    prompts = [ids, ids[:3], ids[:1], ids[2:]]
    found = batch_generate(*loaded, prompts, max_tokens=[4, 9, 6, 2], return_token_ids=True)
    wanted = [generated(loaded[0], p, n) for p, n in zip(prompts, (4, 9, 6, 2), strict=True)]
    assert found.token_ids == wanted


def test_the_caches_of_a_batch_go_on_as_often_as_wanted(loaded, ids):
    options = {"max_tokens": 3, "return_token_ids": True}
    first = batch_generate(*loaded, [ids, ids[:5]], return_prompt_caches=True, **options)
    texts = zip((ids, ids[:5]), first.token_ids, ([7, 9], [8, 9]), strict=True)
    wanted = [generated(loaded[0], [*a, *b, *c], 3) for a, b, c in texts]
    for _ in range(2):
        found = batch_generate(*loaded, [[7, 9], [8, 9]], prompt_caches=first.caches, **options)
        assert found.token_ids == wanted


def test_a_cache_taken_out_of_a_batch_stays_as_it_was(model, ids):
    batch = TargetCache()
    model(mx.array([ids[:4], ids[4:8]]), cache=[batch])
    taken = batch.extract(1)
    model(mx.array([[7], [8]]), cache=[batch])
    found = model(mx.array([[9]]), cache=[taken])[0]
    assert_same(found, alone(model, [*ids[4:8], 9])[-1:])


def test_a_cache_of_one_sequence_does_not_take_two(model, ids):
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    with pytest.raises(UsageError, match="2 sequences of tokens for a cache of 1"):
        model(mx.array([[7], [8]]), cache=cache)


# Chat -----------------------------------------------------------------------------------------

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module", params=["preview", "0731", None])
def chat(request, tmp_path_factory):
    """The tokenizer of the folder of a chat model, and its release."""
    place, gguf = tmp_path_factory.mktemp("chat"), open_gguf(NANO)
    changes = {"ds4mlx.chat": True, "tokenizer.chat_template": "of an older model"}
    changes["general.version"] = request.param or ""
    tensors = [(t.name, t.type, t.shape, t.read().reshape(-1)) for t in gguf.tensors.values()]
    write_gguf(place / "chat.gguf", typed(dict(gguf.metadata) | changes), tensors)
    out = convert(place / "chat.gguf", place / "out")
    return mlx_lm.utils.load_tokenizer(out), request.param or "0731"


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("level", ["off", "high", "max"])
def test_chat_prompts_are_those_of_ds4mlx(chat, own, level, tools):
    tokenizer, release = chat
    options = {"enable_thinking": False} if level == "off" else {"reasoning_effort": level}
    found = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=True, **options
    )
    parts = render(MESSAGES, think=level, release=release, tools=tools)
    assert found == own.tokenizer.encode_parts(parts)


def test_reasoning_as_the_server_returns_it_stays_in_a_loop_of_calls(chat):
    call = {"id": "1", "function": {"name": "now", "arguments": {}}}
    asked = {"role": "assistant", "content": "", "reasoning": "Ask.", "tool_calls": [call]}
    messages = [*MESSAGES, asked, {"role": "tool", "tool_call_id": "1", "content": "12:00"}]
    text = chat[0].apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert f"{THINK}Ask.{END_THINK}" in text


def test_without_a_turn_to_generate_a_prompt_ends_after_the_user(chat):
    text = chat[0].apply_chat_template(MESSAGES, tokenize=False, enable_thinking=False)
    assert text == f"{BOS}Be brief.{USER}Hi"


def test_a_started_answer_is_gone_on_with(chat):
    messages = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    options = {"continue_final_message": True, "enable_thinking": False, "tokenize": False}
    text = chat[0].apply_chat_template(messages, **options)
    assert text == f"{BOS}Be brief.{USER}Hi{ASSISTANT}{END_THINK}Hello"


def test_calls_are_read_from_their_block(chat):
    tokenizer = chat[0]
    call = {"function": {"name": "now", "arguments": {"zone": "UTC", "n": 2}}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = prompt_text(render(messages, think="off", tools=[TOOL], continue_last=True))
    block = text.rpartition(tokenizer.tool_call_start)[2].partition(tokenizer.tool_call_end)[0]
    assert tokenizer.tool_parser(block, [TOOL]) == [call["function"]]


def test_a_block_without_a_call_is_an_error_that_the_server_knows(chat):
    with pytest.raises(ValueError):
        chat[0].tool_parser("nothing", [TOOL])


# Evaluation -----------------------------------------------------------------------------------


def test_perplexity_is_that_of_the_logits_of_ds4mlx(model, own, ids, capsys):
    from mlx_lm.perplexity import eval_ppl

    data = [ids[:6], ids[1:7], ids[2:8]]
    losses = []
    for row in data:
        logits = own.session(ctx=64).feed(row[:-1])
        losses.append(mx.logsumexp(logits, -1) - logits[mx.arange(5), mx.array(row[1:])])
    found, _ = eval_ppl(model, mx.array(data), batch_size=2)
    assert found == pytest.approx(mx.exp(mx.mean(mx.stack(losses))).item(), rel=1e-4)


@pytest.fixture
def harness(monkeypatch, folder):
    """mlx-lm's model for the evaluation harness, which is not installed: its base class is."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = object
    sys.modules["lm_eval.api.registry"].register_model = lambda _: lambda cls: cls
    from mlx_lm.evaluate import MLXLM

    return MLXLM(str(folder), batch_size=2)


class Request:
    def __init__(self, *args):
        self.args = args


def test_the_evaluation_harness_scores_and_generates(harness, own, capsys):
    ((score, greedy),) = harness.loglikelihood([Request("import", " os\n")])
    ids, n = own.tokenizer.encode("import os\n"), len(own.tokenizer.encode("import"))
    logits = own.session(ctx=64).feed(ids)[n - 1 : -1]
    best = logits[mx.arange(len(ids) - n), mx.array(ids[n:])]
    assert score == pytest.approx((best - mx.logsumexp(logits, -1)).sum().item(), rel=1e-3)
    assert greedy == (mx.argmax(logits, -1).tolist() == ids[n:])
    assert len(harness.loglikelihood_rolling([Request(PROMPT), Request("import os")])) == 2
    (text,) = harness.generate_until([Request(PROMPT, {"until": ["@"], "max_gen_toks": 8})])
    assert text == own.generate(PROMPT, tokens=8, raw=True).text


# The server, as its users start it -----------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder):
    """The address of `python -m ds4mlx.mlx_lm server`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--model", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([sys.executable, "-m", "ds4mlx.mlx_lm", *words], env=env) as process:
        try:
            yield wait_for(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()


def wait_for(address: str, process) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return address
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError("the server did not start")


def complete(server: str, prompt: str, **options) -> dict:
    data = json.dumps({"prompt": prompt, "max_tokens": 12} | options).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def test_the_server_completes_as_ds4mlx_does(server, own, reply):
    text = text_of(complete(server, PROMPT))
    assert text == own.tokenizer.decode(reply[:12]).removeprefix(" ")


def test_requests_at_the_same_time_get_what_each_gets_alone(server):
    prompts = [PROMPT, "import re\n", "class A:\n    def f(self):\n"]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda prompt: text_of(complete(server, prompt)), prompts))
    # With a seed mlx-lm serves a request by itself.
    assert answers == [text_of(complete(server, prompt, seed=1)) for prompt in prompts]


def test_a_second_turn_reuses_the_first(server, own, ids, reply):
    first = complete(server, PROMPT)
    second = PROMPT + own.tokenizer.decode(reply[:12]) + "Parser()\n"
    answer = complete(server, second)
    assert text_of(answer) == own.generate(second, tokens=12, raw=True).text.removeprefix(" ")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) + 12
    assert first["usage"]["completion_tokens"] == 12
