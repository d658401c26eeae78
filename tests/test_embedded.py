"""The embedded model: the transcripts recorded with its weights as they were trained."""

import json
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx.cache import Cache, Step
from ds4mlx.config import TargetConfig
from ds4mlx.convert.folder import folder_tensors
from ds4mlx.generate import decode, prefill
from ds4mlx.graphs import Graphs
from ds4mlx.sampling import Sampler
from ds4mlx.target import Target
from ds4mlx.weights import load_weights
from tests.close import assert_close, assert_same
from tests.golden_data import HERE, SHARED
from tests.metal.bench import executed

PROMPTS = json.loads((HERE / "nano.json").read_text())
NANO = SHARED / "nano"
GREEDY = Sampler(0.0, 1.0, 0.0, 0)
beside = pytest.mark.skipif(
    not NANO.is_dir(), reason="the source weights are not beside this checkout (../shared/nano)"
)
each_prompt = pytest.mark.parametrize("index", range(len(PROMPTS)))
rounding = pytest.mark.parametrize("rounding", [False, True])


@cache
def shipped(rounding: bool) -> Target:
    return ds4mlx.load(rounding=rounding)._target


@cache
def source(rounding: bool) -> Target:
    config = TargetConfig.from_dict(json.loads((NANO / "config.json").read_text()))
    tensors = folder_tensors(sorted(NANO.glob("target_weights-*.safetensors")))
    return Target(config.rounded(rounding), load_weights(tensors, config.n_routed_experts))


def prefilled(target, ids):
    cache = Cache(target.config, len(ids) + 80)
    *_, (streams, _) = prefill(target, ids, cache, chunk=512)
    return streams, cache


def continued(target, prompt, n):
    streams, cache = prefilled(target, prompt)
    return list(decode(target, streams, cache, GREEDY, limit=n, stop={1}))


@each_prompt
@rounding
def test_the_shipped_file_gives_the_recorded_greedy_tokens(index, rounding):
    case = PROMPTS[index]
    want = case["on" if rounding else "off"]
    assert continued(shipped(rounding), case["prompt"], len(want)) == want


@beside
@each_prompt
@rounding
def test_the_source_weights_give_the_recorded_greedy_tokens_and_logits(index, rounding):
    case, key = PROMPTS[index], "on" if rounding else "off"
    recorded = mx.load(str(NANO / "golden.safetensors"))
    target = source(rounding)
    streams, cache = prefilled(target, case["prompt"])
    want = recorded[f"p{index}.{key}.logits"]
    # With rounding, values that sit on a step move single logits.
    assert_close(target.logits(streams[-1:])[0], want, atol=5e-3 if rounding else 5e-5)
    tokens = list(decode(target, streams, cache, GREEDY, limit=64, stop={1}))
    assert tokens == case[key]


def test_two_runs_of_the_shipped_file_give_the_same_logits_bit_for_bit():
    runs = []
    for _ in range(2):
        with ds4mlx.load() as model:
            runs.append(model.session(ctx=64).feed(PROMPTS[0]["prompt"]))
            mx.eval(runs[-1])
    assert_same(*runs)


def test_blocks_through_the_packed_model_equal_single_rows_bit_for_bit():
    """Rounding on, real widths, MXFP4 and Q8_0, across the window's and a window entry's border."""
    target, ids = shipped(True), (PROMPTS[5]["prompt"] * 2)[:300]
    rng = np.random.default_rng(7)

    def rows(plan):
        streams, cache = prefilled(target, ids[:250])
        out, at = [], 250
        for n in plan:
            streams, taps = target(mx.array(ids[at : at + n], mx.int32), cache)
            out.append(mx.concatenate([target.logits(streams), taps], axis=-1))
            mx.eval(out[-1], cache.arrays())
            at += n
        return mx.concatenate(out)

    blocks = [2, 3, 4, 5, 6, 7, 8]
    assert_same(rows(rng.permutation(blocks)), rows([1] * sum(blocks)))


@pytest.mark.parametrize("start", [1, 123, 126, 252])
def test_rewinds_at_every_border_equal_decoding_that_never_saw_the_rejected(start):
    """1 to 8 tokens are taken back before each of 8 steps, over ring, window and entry borders."""
    target, ids = shipped(True), PROMPTS[5]["prompt"]
    (_, cache), (_, clean) = prefilled(target, ids[:start]), prefilled(target, ids[:start])
    for rejected, id in enumerate(ids[start : start + 8], start=1):
        target(mx.array([9 + i for i in range(rejected)], mx.int32), cache)
        cache.rewind(rejected)
        after, _ = target(mx.array([id], mx.int32), cache)
        never, _ = target(mx.array([id], mx.int32), clean)
        assert_same(after, never)


@cache
def whole_prompt() -> mx.array:
    streams, _ = prefilled(shipped(False), PROMPTS[5]["prompt"][:300])
    return shipped(False).logits(streams[-1:])


@pytest.mark.parametrize("chunk", [7, 128, 129])
def test_a_long_prompt_gives_the_same_logits_in_any_chunks(chunk):
    target, ids = shipped(False), PROMPTS[5]["prompt"][:300]
    state = Cache(target.config, 300)
    *_, (streams, _) = prefill(target, ids, state, chunk=chunk)
    assert_close(target.logits(streams[-1:]), whole_prompt(), atol=5e-4)


@contextmanager
def untraced(model):
    """What `model` compiles it runs as it stands: the executor's launches cannot be traced."""
    with (
        patch("ds4mlx.target.compiled", lambda run: run),
        patch.object(model, "_steps", Graphs(model.graph)),
    ):
        yield


def fed(model, ids, plan, *, kernels=False):
    """Logits and taps of the last sum(plan) ids after a plain prefill, in blocks as `plan` says.

    With `kernels` they are executed, by what a GPU makes graphs of: it knows a position as an array
    only, and passes from a stretch of layers to the next.
    """
    cache, outputs, at = Cache(model.config, len(ids) + 8), [], len(ids) - sum(plan)
    model(mx.array(ids[:at], mx.int32), cache)
    mx.eval(cache.arrays())
    for rows in plan:
        step = Step.of(model.config, at, rows)
        block = mx.array(ids[at : at + rows], mx.int32)
        if kernels:
            with executed("guard"), untraced(model):
                streams, taps = model.by_graphs(block, step, cache)
                outputs.append(mx.concatenate([model.logits(streams), taps], axis=1))
        else:
            streams, taps = model.forward(block, step, cache)
            outputs.append(mx.concatenate([model.logits(streams), taps], axis=1))
        cache.advance(rows)
        mx.eval(outputs, cache.arrays())
        at += rows
    return mx.concatenate(outputs)


def test_executed_kernels_give_the_logits_of_the_references_in_any_blocks():
    """Positions 125 to 128 close windows of 4 and of 128."""
    model, ids = shipped(True), [int(i) for i in np.random.default_rng(0).integers(2, 4000, 129)]
    singly = fed(model, ids, [1] * 4, kernels=True)
    assert_same(fed(model, ids, [4], kernels=True), singly)
    # A key at a tie of fp8 may be rounded to the other side.
    assert_close(singly, np.array(fed(model, ids, [1] * 4)), atol=0.02)


def test_executed_kernels_select_entries_as_the_references_do():
    model, ids = shipped(True), [int(i) for i in np.random.default_rng(0).integers(2, 4000, 129)]
    few = replace(model.config, index_topk=16)
    places = [model, *(layer.attn.indexer for layer in model.layers if layer.attn.indexer)]
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(place, "config", few))
        singly = fed(model, ids, [1] * 4, kernels=True)
        assert_same(fed(model, ids, [4], kernels=True), singly)
        assert_close(singly, np.array(fed(model, ids, [1] * 4)), atol=0.02)


def test_a_prefill_through_executed_kernels_gives_the_logits_of_the_references():
    model, ids = shipped(True), [int(i) for i in np.random.default_rng(1).integers(2, 4000, 35)]
    results = []
    for place in (executed("guard"), nullcontext()):
        with place:
            streams, _ = model(mx.array(ids, mx.int32), Cache(model.config, 40))
            results.append(model.logits(streams))
            mx.eval(results)
    assert_close(results[0], np.array(results[1]), atol=0.1)
