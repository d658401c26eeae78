"""The draft against an independent reference, and its speculative transcripts."""

import gc
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import islice
from unittest.mock import patch
from weakref import ref

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.cache import Cache
from ds4mlx.draft import Stage
from ds4mlx.generate import Speculation, prefill
from ds4mlx.graphs import Graphs
from ds4mlx.launches import graph_primitives
from ds4mlx.ops import metal
from ds4mlx.sampling import Sampler
from ds4mlx.synthetic import dspark_of, evaluated, flash, flash_draft, made_draft, made_target
from tests.close import assert_close, assert_same
from tests.golden_data import CASES, draft, vectors
from tests.metal.bench import executed
from tests.test_synthesize import small
from tests.test_target import ATOL, batch, case_param, cases

TRANSCRIPTS = [("s4_odd_batch", 1) if i == 4 else (name, 0) for i, name in enumerate([*CASES, ""])]

CYCLES = 16  # of each transcript; with 99 all of them


def pair(case, rounding=False):
    return loaded(case, rounding)


@cache
def loaded(case, rounding):
    return draft(case, round_kv=rounding, round_index=rounding)


def taps(case):
    return vectors(case)["taps"][0]


def context(model, rows):
    """The rings after these taps, in portions of 1 to 40."""
    state, at = model.cache(), 0
    while at < len(rows):
        n = 1 + at % 40
        model.extend(rows[at : at + n], state)
        at += n
    return state


def blocks(case, rounding=False):
    """Every recorded block: its index, and the block proposed."""
    model, v = pair(case, rounding), vectors(case)
    for i, p in enumerate(np.array(v["draft.p"])):
        state = context(model, taps(case)[: int(p) + 1])
        yield i, model.propose(v["draft.anchor"][i : i + 1], state)


@cases
def test_blocks_match_the_reference(case):
    v = vectors(case)
    for i, block in blocks(case):
        assert_same(block.tokens[1:], v["draft.tokens"][i])
        assert_close(block.logits, v["draft.logits"][i], atol=ATOL)
        assert_close(block.confidence, v["draft.conf"][i], atol=ATOL)


@cases
def test_streams_of_every_stage_and_their_collapse_match_the_reference(case):
    v, outputs, original = vectors(case), [], Stage.__call__

    def recorded(self, *args):
        outputs.append(original(self, *args))
        return outputs[-1]

    with patch.object(Stage, "__call__", recorded):
        for i, _ in blocks(case):
            for s, (x, _) in enumerate(outputs):
                assert_close(x, v[f"draft.stage.{s}"][i], atol=ATOL)
            z = pair(case).collapse(x)
            assert_close(z, v["draft.z"][i], atol=ATOL)
            outputs.clear()


@cases
def test_logits_without_the_markov_term_match_the_reference(case):
    v = vectors(case)
    zero = mx.zeros_like(pair(case).markov_w2)
    with patch.object(pair(case), "markov_w2", zero):
        for i, block in blocks(case):
            assert_close(block.logits, v["draft.base"][i], atol=ATOL)


@cases
@pytest.mark.parametrize("portions", [True, False])
def test_context_rows_match_the_reference(case, portions):
    model, v, rows = pair(case), vectors(case), taps(case)
    assert_close(model.main_x(rows)[v["probe"]], v["draft.main_x"], atol=ATOL)
    for stop in (len(rows), 17):
        state = context(model, rows[:stop]) if portions else model.cache()
        if not portions:
            model.extend(rows[:stop], state)
        assert state.position == stop
        start = max(0, stop - state.window)
        for k, p in enumerate(np.array(v["probe"])):
            for s, seen in enumerate(state.read()):
                if start <= p < stop:
                    assert_close(seen[int(p) - start], v[f"draft.ctx_kv.{s}"][k], atol=ATOL)


@pytest.mark.parametrize("case", [case_param("s3_flashlike")])
def test_rounded_blocks_agree_within_the_steps_of_the_grid(case):
    v, errors = vectors(case), []
    for i, block in blocks(case, rounding=True):
        errors.append(np.abs(np.array(block.logits) - np.array(v["qat.draft.logits"][i])))
        assert_close(block.confidence, v["qat.draft.conf"][i], atol=5e-2)
    assert np.mean(errors) < 3e-3
    assert np.quantile(errors, 0.999) < 5e-2


def speculation(model, ids, *, stop=(), ctx=512, sampler=None, **options):
    """(loop, streams of the prompt's last row) after a prefill in chunks of 50."""
    state, rings = Cache(model.target.config, ctx), model.cache()
    *_, (streams, _) = prefill(model.target, ids, state, chunk=50, draft=model, context=rings)
    sampler = sampler or Sampler(0.0, 1.0, 0.0, 0)
    return Speculation(model.target, model, state, rings, sampler, stop, **options), streams


@pytest.mark.parametrize("case, index", [case_param(*t) for t in TRANSCRIPTS])
def test_golden_transcripts_are_reproduced(case, index):
    model, v = pair(case), vectors(case)
    spec = {k.split(".")[2]: np.array(v[k]) for k in v if k.startswith(f"spec.{index}.")}
    first = int(spec["start_pos"][0]) + 1
    rows = [ids for _, ids in batch(case)]
    loop, streams = speculation(model, rows[index][:first])
    cycles, records = min(CYCLES, len(spec["accepted"]) - 1), []
    loop.report = records.append
    total = 1 + cycles + sum(spec["accepted"][:cycles])
    got = list(islice(loop.decode(streams, 200), total))
    assert got == list(spec["tokens"][:total])
    for name in ("accepted", "anchor", "bonus"):
        assert [r[name] for r in records[:cycles]] == list(spec[name][:cycles]), name
    assert [r["position"] - 1 for r in records[:cycles]] == list(spec["start_pos"][:cycles])
    assert [r["drafts"] for r in records[:cycles]] == spec["draft"][:cycles].tolist()
    want = 1 / (1 + np.exp(-spec["conf"][:cycles]))
    assert_close(mx.array([r["confidences"] for r in records[:cycles]]), want, atol=ATOL)


def hollow(*shape, dtype=mx.float32):
    return mx.broadcast_to(mx.array(0, dtype), shape)


def hollow_draft():
    """A draft of Flash's shapes, a context of 200 tokens for it, and an anchor."""
    model = flash_draft(flash(layers=3, seed=None), seed=None)
    context = model.cache()
    context.replace([hollow(*rows.shape) for rows in context.arrays()])
    context.advance(200)
    return model, context, hollow(1, dtype=mx.int32)


def test_a_compiled_proposal_launches_what_one_does_that_is_not():
    model, context, anchor = hollow_draft()
    graph, ops = Counter(), Counter()
    with metal.traced(graph):
        block = model.propose(anchor, context)
        primitives = graph_primitives([block.tokens, block.confidence])
    with metal.traced(ops):
        tokens, _, confidence = model.block(anchor, 200, *context.arrays())
    assert graph == ops and graph["attention"] == 2 * 3
    assert primitives.total() < graph_primitives([tokens, confidence]).total() < 20


def test_kernels_propose_what_references_do():
    target = made_target(small(3), "q4", 0)
    model = evaluated(
        made_draft(replace(dspark_of(target.config), dspark_noise_token_id=7), target, 1)
    )
    context = model.cache()
    mx.random.seed(1)
    model.extend(mx.random.normal((130, 3 * 256)), context)
    want = model.propose(mx.array([3], mx.int32), context)
    with executed("guard"):
        got = model.propose(mx.array([3], mx.int32), context)
    assert_same(got.tokens, want.tokens)
    assert_close(got.logits, np.array(want.logits), atol=1e-4)
    assert_close(got.confidence, np.array(want.confidence), atol=1e-3)


def test_a_block_of_more_rows_than_attention_has_a_kernel_for_is_no_graph():
    model, context, anchor = hollow_draft()
    model.config, positions = replace(model.config, dspark_block_size=9), []
    block = lambda anchor, position, *rings: positions.append(position) or [anchor] * 3  # noqa: E731
    with metal.traced(Counter()), patch.object(model, "block", block):
        model.propose(anchor, context)
    assert positions == [200]


def test_compiled_context_rows_launch_what_those_do_that_are_not():
    model, context, _ = hollow_draft()
    taps, before, graph, ops = hollow(3, 3 * 4096), context.arrays(), Counter(), Counter()
    with metal.traced(graph):
        model.extend(taps, context)
        primitives = graph_primitives(context.arrays())
    with metal.traced(ops):
        rings = model.context(taps, mx.array(200), *before)
    assert context.position == 203
    assert graph == ops and graph["linear"] == 1 + 3
    assert primitives.total() < graph_primitives(rings).total()


def test_proposals_are_one_graph_and_context_rows_one_for_each_number_up_to_8():
    model, context, anchor = hollow_draft()
    traces = Graphs.traces
    with metal.traced(Counter()):
        for rows in (1, 3, 1, 3):
            model.propose(anchor, context)
            model.extend(hollow(rows, 3 * 4096), context)
        assert Graphs.traces - traces == 3
        model.extend(hollow(9, 3 * 4096), context)
    assert Graphs.traces - traces == 3


def test_graphs_do_not_keep_the_weights_of_a_model_that_is_gone():
    model, context, anchor = hollow_draft()
    held = [ref(model), ref(model.target)]
    with metal.traced(Counter()):
        model.propose(anchor, context)
        model.target(anchor, Cache(model.target.config, 8))
    gc.disable()
    try:
        del model
        assert [r() for r in held] == [None, None]
    finally:
        gc.enable()
