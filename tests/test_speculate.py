"""Drafted decoding gives the tokens and the caches of plain decoding, bit for bit."""

import json
from functools import cache
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ds4mlx
from ds4mlx.cache import Cache
from ds4mlx.check import Recorder
from ds4mlx.convert.folder import folder_tensors
from ds4mlx.draft import Block, Draft, DraftConfig
from ds4mlx.generate import Speculation, decode, prefill
from ds4mlx.sampling import Sampler
from ds4mlx.schedule import Plan
from ds4mlx.weights import load_weights
from tests.golden_data import HERE, draft
from tests.test_embedded import NANO, beside
from tests.test_embedded import source as source_target
from tests.test_identity import assert_same_state, greedy, taken

PROMPTS = json.loads((HERE / "nano.json").read_text())
TRANSCRIPTS = json.loads((HERE / "nano_spec.json").read_text())


@cache
def embedded(rounding):
    return ds4mlx.load(mtp="embedded", rounding=rounding)._draft


@cache
def source(rounding):
    config = json.loads((NANO / "config.json").read_text())
    tensors = folder_tensors([NANO / "draft_weights.safetensors"])
    weights = load_weights(tensors, config["n_routed_experts"])
    return Draft(DraftConfig.from_dict(config), source_target(rounding), weights)


@cache
def small():
    return draft("s4_odd_batch")


def prefilled(model, ids, ctx):
    state, rings = Cache(model.target.config, ctx), model.cache()
    *_, (streams, _) = prefill(model.target, ids, state, chunk=50, draft=model, context=rings)
    return streams, state, rings


def speculation(model, ids, *, ctx=None, stop=(), sampler=None, proposer=None, **options):
    """(loop, streams of the prompt's last row)"""
    streams, state, rings = prefilled(model, ids, ctx or len(ids) + 90)
    sampler = sampler or greedy()
    proposer = proposer or model
    return Speculation(model.target, proposer, state, rings, sampler, stop, **options), streams


def plain(model, ids, n, stop=(), leave_at=None, sampler=None):
    """Tokens, cache and rings of plain decoding, the rings fed row by row."""
    ctx = len(ids) + 90
    streams, state, rings = prefilled(model, ids, ctx)
    target, sampler = Recorder(model.target), sampler or greedy()
    tokens = taken(decode(target, streams, state, sampler, limit=n, stop=stop), leave_at)
    for taps in target.taps[: state.position - len(ids)]:
        model.extend(taps, rings)
    return tokens, state, rings


def assert_as_plain(model, ids, n, *, stop=(), leave_at=None, sampler=greedy, **options):
    """-> (tokens, records of the cycles)"""
    want, state, rings = plain(model, ids, n, stop, leave_at, sampler())
    records = []
    loop, streams = speculation(model, ids, stop=stop, sampler=sampler(), **options)
    loop.report = records.append
    assert taken(loop.decode(streams, n), leave_at) == want
    assert_same_state(loop.cache, state)
    assert_same_state(loop.caught_up(), rings)
    return want, [r for r in records if "rows" in r]


@beside
@pytest.mark.parametrize("index", range(len(PROMPTS)))
@pytest.mark.parametrize("rounding", ["off", "on"])
def test_the_source_weights_begin_as_the_recorded_transcripts(index, rounding):
    assert_transcript(source(rounding == "on"), index, rounding, cycles=3)


@pytest.mark.parametrize("index, rounding", [(0, "off"), (1, "on"), (2, "off"), (3, "on")])
def test_the_shipped_pair_begins_as_the_recorded_transcripts(index, rounding):
    """Of the two longest prompts a few rejected drafts differ: the shipped weights are packed."""
    assert_transcript(embedded(rounding == "on"), index, rounding, cycles=4)


def assert_transcript(model, index, rounding, cycles):
    want, records = TRANSCRIPTS[index][rounding], []
    cycles = min(cycles, len(want["accepted"]))
    total = 1 + cycles + sum(want["accepted"][:cycles])
    loop, streams = speculation(model, PROMPTS[index]["prompt"])
    loop.report = records.append
    assert taken(loop.decode(streams, 90), total)[: total - 1] == want["tokens"][: total - 1]
    records = [r for r in records if "rows" in r]
    for name, key in (("accepted", "accepted"), ("drafts", "draft"), ("bonus", "bonus")):
        assert [r[name] for r in records[:cycles]] == want[key][:cycles]
    got = np.array([r["confidences"] for r in records[:cycles]])
    worst = np.sort(np.abs(got - 1 / (1 + np.exp(-np.array(want["conf"][:cycles])))), axis=None)
    # Rounded to fp8, a value at a tie goes to either side: one confidence may show it.
    assert worst[-2] < 2e-2 and worst[-1] < (2e-2 if rounding == "off" else 0.1)


@cache
def text():
    return plain(small(), PROMPT, 24)[0]


PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 380, 30)]


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_no_token_and_no_row_beyond_the_limit(limit):
    tokens, _ = assert_as_plain(small(), PROMPT, limit)
    assert len(tokens) == limit


@pytest.mark.parametrize("at", [0, 1, 4, 7])
def test_a_stop_token_ends_the_text_and_leaves_nothing_after_it(at):
    tokens = text()
    for proposer in (None, Script(PROMPT + tokens)):
        assert_as_plain(small(), PROMPT, 10, stop={tokens[at]}, proposer=proposer)


@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_loop_that_is_left_early_leaves_the_caches_of_plain_decoding(at):
    script = Script(PROMPT + text())
    for proposer in (None, script):
        assert_as_plain(small(), PROMPT, 10, leave_at=at, proposer=proposer)


class Script:
    """A draft that proposes the text that it was given, `wrong` positions of each block aside."""

    config = SimpleNamespace(dspark_block_size=5)

    def __init__(self, text, wrong=(), shift=1, confidence=None):
        self.text, self.wrong, self.shift = text, wrong, shift
        self.confidence = confidence or [3.0] * 5

    def extend(self, taps, context):
        small().extend(taps, context)

    def propose(self, anchor, context):
        at = context.position + 1
        drafts = [self.text[at + i] if at + i < len(self.text) else 0 for i in range(5)]
        drafts = [(d + self.shift * (i in self.wrong)) for i, d in enumerate(drafts)]
        tokens = mx.concatenate([anchor, mx.array(drafts, mx.int32)])
        return Block(tokens, None, mx.array(self.confidence))


@pytest.mark.parametrize(
    "wrong, shift, accepted",
    [
        *(((), 1, 5), ((0,), 1, 0), ((4,), 1, 4), (range(5), 1, 0), ((1, 3), 1, 1)),
        *(((2,), 100_000, 2), ((2,), -100_000, 2)),  # outside the vocabulary
    ],
)
def test_wrong_drafts_of_any_kind_change_nothing(wrong, shift, accepted):
    script = Script(PROMPT + text(), wrong, shift)
    _, records = assert_as_plain(small(), PROMPT, 14, proposer=script)
    assert records[0]["accepted"] == accepted


def test_a_draft_below_the_confidence_and_those_after_it_are_not_verified():
    script = Script(PROMPT + text(), confidence=[2.0, 1.0, -1.0, 5.0, 5.0])
    for confidence, drafts in ((0.0, 5), (0.3, 2), (0.8, 1), (0.9, 0)):
        loop, streams = speculation(small(), PROMPT, proposer=script, confidence=confidence)
        records = []
        loop.report = records.append
        taken(loop.decode(streams, 20), 8)
        assert records[0]["rows"] == 1 + drafts == 1 + records[0]["accepted"]


@pytest.mark.parametrize("temp, top_p", [(0.7, 0.9), (1.5, 1.0)])
def test_sampled_text_is_that_of_plain_sampling_with_the_same_seed(temp, top_p):
    assert_as_plain(small(), PROMPT, 12, sampler=lambda: Sampler(temp, top_p, 0.0, 3))


class Stretched:
    """A target whose step is handed over in two graphs, each a second after the last."""

    def __init__(self, target):
        self.target, self.config, self.logits, self.now = target, target.config, target.logits, 0.0

    def __call__(self, ids, cache, submit=None):
        streams, taps = self.target(ids, cache)
        for _ in range(2):
            self.now += 1
            if submit:
                submit(streams)
        return streams, taps


class Scripted:
    """A schedule that goes through these plans, again and again."""

    def __init__(self, plans):
        self.plans = cycle(plans)

    def begin(self):
        pass

    def plan(self, most, fixed):
        return next(self.plans)

    def drafts(self, confidences, cut):
        return cut

    def plain_took(self, seconds, filling=False):
        assert seconds > 0

    def cycle_took(self, told):
        assert told.drafts <= len(told.confidences) and told.accepted <= told.drafts


def test_a_long_pause_leaves_the_context_whole():
    """More steps than the context's rings hold, and then drafts."""
    window = small().cache().window + 8
    plans = [Plan("no gain")] * (window + 7) + [Plan(drafts=5)]
    _, records = assert_as_plain(small(), PROMPT, window + 30, schedule=Scripted(plans))
    assert len(records) == 1 and records[0]["position"] == len(PROMPT) + window + 7


def test_drafts_verified_unseen_are_taken_where_they_are_right_whatever_their_confidence():
    script = Script(PROMPT + text(), confidence=[-3.0] * 5)
    schedule = Scripted([Plan(drafts=4)])
    _, records = assert_as_plain(
        small(), PROMPT, 14, proposer=script, confidence=0.7, schedule=schedule
    )
    assert [(r["rows"], r["accepted"], r["waits"]) for r in records[:2]] == [(5, 4, 1)] * 2


@pytest.mark.parametrize(
    "options, waits",
    [
        ({"confidence": 0.0}, 1),
        ({"confidence": 0.5}, 2),
        ({"confidence": 0.5, "schedule": Scripted([Plan(drafts=3)])}, 1),
    ],
    ids=["whole blocks", "cut", "unseen"],
)
def test_a_cycle_waits_once_unless_confidences_cut_it(options, waits):
    counted, at, original = [], [], mx.eval
    loop, streams = speculation(small(), PROMPT, **options)
    loop.report = lambda record: at.append((len(counted), record["waits"]))
    with patch.object(mx, "eval", lambda *arrays: counted.append(arrays) or original(*arrays)):
        taken(loop.decode(streams, 30), 12)
    # The first anchor is awaited before the first cycle.
    assert at[:3] == [(1 + waits * n, waits) for n in (1, 2, 3)]


def test_a_plain_step_is_launched_before_the_token_of_the_last_is_awaited():
    loop, streams = speculation(small(), PROMPT, schedule=Scripted([Plan("no gain")]))
    launched, at, loop.target = [], [], Recorder(loop.target)
    original, loop.target.taps = mx.eval, launched
    with patch.object(mx, "eval", lambda *arrays: at.append(len(launched)) or original(*arrays)):
        taken(loop.decode(streams, 30), 5)
    assert at == [1, 2, 3, 4, 5]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, 388), min_size=1, max_size=20),
    limit=st.integers(1, 10),
    confidence=st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0]),
    leave_at=st.none() | st.integers(1, 14),
    stop=st.sets(st.integers(0, 388), max_size=60),
    plans=st.lists(
        st.sampled_from([Plan("no gain"), Plan(), *(Plan(drafts=n) for n in range(6))]),
        max_size=6,
    ),
)
def test_any_prompt_limit_threshold_schedule_and_end_gives_the_plain_text(
    ids, limit, confidence, leave_at, stop, plans
):
    options = {"confidence": confidence, "schedule": Scripted(plans) if plans else None}
    assert_as_plain(small(), ids, limit, leave_at=leave_at, stop=stop, **options)


def test_a_cycles_lead_is_the_wait_for_its_first_graph_which_is_handed_over_at_once():
    told, handed, begin = [], [], mx.async_eval
    schedule = Scripted([Plan(drafts=3)])
    schedule.cycle_took = told.append
    loop, streams = speculation(small(), PROMPT, schedule=schedule)
    loop.target = target = Stretched(loop.target)
    loop.clock = lambda: target.now

    def spy(*arrays):
        handed.append((target.now, len(arrays)))
        begin(*arrays)

    with patch.object(mx, "async_eval", spy):
        taken(loop.decode(streams, 9), 2)
    assert (told[0].lead, told[0].launch, told[0].verify) == (1.0, 2.0, 2.0)
    assert [n for n in handed if n[0]][:2] == [(1.0, 1), (2.0, 1)]


def test_the_context_of_all_rows_is_under_way_before_the_host_waits_for_which_stay():
    loop, streams = speculation(small(), PROMPT)
    handed, at, wait, begin = [], [], mx.eval, mx.async_eval

    def waits(*arrays):
        grown = loop.context.position == loop.cache.position
        rows = loop.context.arrays()
        at.append(grown and all(any(a is b for b in handed) for a in rows))
        return wait(*arrays)

    def spy(*arrays):
        handed[:] = [a for part in arrays if isinstance(part, list) for a in part]
        return begin(*arrays)

    with patch.object(mx, "eval", waits), patch.object(mx, "async_eval", spy):
        taken(loop.decode(streams, 30), 12)
    assert at[0] is False and all(at[1:])  # the first anchor's wait comes before any


class Handed:
    """A target that keeps, of each step, its rows and whether it is handed over in parts."""

    def __init__(self, target):
        self.target, self.config, self.logits, self.steps = target, target.config, target.logits, []

    def __call__(self, ids, cache, submit=None):
        self.steps.append((len(ids), submit is not None))
        return self.target(ids, cache)


def test_only_the_first_plain_step_behind_a_cycle_is_handed_over_in_parts():
    plain = Plan(skip="no gain")
    schedule = Scripted([Plan(drafts=2), plain, plain, plain])
    loop, streams = speculation(small(), PROMPT, schedule=schedule)
    loop.target = target = Handed(loop.target)
    taken(loop.decode(streams, 40), 14)
    assert target.steps[:5] == [(3, True), (1, True), (1, False), (1, False), (3, True)]
