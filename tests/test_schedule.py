"""The scheduler and exact sampling, on a scripted target and draft with a clock of their own."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.cache import Sequence
from ds4mlx.draft import Block
from ds4mlx.generate import Speculation
from ds4mlx.report import SILENT, DraftReport
from ds4mlx.sampling import Sampler, filtered
from ds4mlx.schedule import Schedule

BLOCK, VOCAB = 5, 16


class State(Sequence):
    def arrays(self):
        return []


class Machine:
    """Target and draft in one: fixed costs, and drafts that are right with a given chance."""

    config = SimpleNamespace(vocab_size=VOCAB, dspark_block_size=BLOCK)

    def __init__(self, right, verify=1.0, draft=0.0, sure=None, seed=0):
        self.right, self.costs, self.sure = right, (verify, draft), sure
        self.now, self.rng = 0.0, np.random.default_rng(seed)

    def __call__(self, ids, state):
        self.now += 1 + (self.costs[0] - 1) * (len(ids) - 1) / BLOCK
        streams = state.position + mx.arange(len(ids))
        state.advance(len(ids))
        return streams, streams

    def logits(self, streams):
        """The token after position p is p mod 7."""
        return (mx.arange(VOCAB)[None] == (streams % 7)[:, None]).astype(mx.float32)

    def extend(self, taps, context):
        context.advance(len(taps))

    def propose(self, anchor, context):
        self.now += self.costs[1]
        right = self.rng.random(BLOCK) < self.chance(context.position)
        tokens = (context.position + np.arange(BLOCK)) % 7 + 7 * ~right
        sure = self.sure if self.sure is not None else self.chance(context.position)
        confidence = mx.full((BLOCK,), float(np.log(sure / (1 - sure))))
        return Block(mx.concatenate([anchor, mx.array(tokens, mx.int32)]), None, confidence)

    def chance(self, position):
        return self.right(position) if callable(self.right) else self.right


def run(machine, tokens=500, confidence=0.1, schedule=True):
    """-> (seconds, records)"""
    records = []
    loop = Speculation(
        target=machine,
        draft=machine,
        cache=State(),
        context=State(),
        sampler=Sampler(0.0, 1.0, 0.0, 0),
        stop=(),
        confidence=confidence,
        schedule=Schedule(BLOCK) if schedule else None,
        report=records.append,
        clock=lambda: machine.now,
    )
    for state in (loop.cache, loop.context):
        state.advance(1)
    got = list(loop.decode(mx.array([0]), tokens))
    assert got == [i % 7 for i in range(tokens)]
    return machine.now, records


@pytest.mark.parametrize("verify", [1.6, 2.5, 6.0])
@pytest.mark.parametrize("right", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("sure", [None, 0.9], ids=["calibrated", "overconfident"])
def test_drafting_never_costs_more_than_3_percent_of_500_tokens(verify, right, sure):
    """SP-01."""
    for seed in range(3):
        seconds, _ = run(Machine(right, verify, draft=0.4, sure=sure, seed=seed))
        assert seconds < 1.03 * 499


@pytest.mark.parametrize("verify, right, share", [(1.6, 0.9, 0.6), (2.5, 0.9, 0.8), (1.6, 0.6, 1)])
def test_drafting_that_pays_is_kept(verify, right, share):
    seconds, _ = run(Machine(right, verify, draft=0.2))
    assert seconds < share * 499


def test_drafting_returns_when_it_pays_again():
    machine = Machine(lambda p: 0.02 if p < 400 else 0.95, verify=1.6, draft=0.2, sure=0.8)
    _, records = run(machine, tokens=900)
    cycles = [r["position"] for r in records if "rows" in r]
    assert sum(p < 400 for p in cycles) < 15
    assert sum(p >= 600 for p in cycles) > 40
    skipped = {r["skipped"] for r in records if "skipped" in r}
    assert skipped - {"limit"} == {"measure", "no gain"}


def test_rows_that_cost_more_than_they_bring_are_not_verified():
    schedule = Schedule(BLOCK)
    assert schedule.drafts([0.9] * 5) == 1
    schedule._script = []
    schedule.plain_took(1, 1.0)
    for n, seconds in ((5, 3.5), (1, 1.5)):
        schedule.cycle_took([0.9] * 5, n, n, 0.1, seconds)
    assert schedule.drafts([0.9] * 5) == 5
    assert schedule.drafts([0.9, 0.3, 0.3, 0.3, 0.3]) == 1
    assert schedule.drafts([0.2] * 5) == 0


def test_a_confidence_that_promises_too_much_is_corrected():
    schedule = Schedule(BLOCK)
    for _ in range(50):
        schedule.cycle_took([0.95], 1, 0, 0.1, 1.0)
    assert schedule._right(0.95) < 0.2
    assert schedule._right(0.5) == 0.5


def test_a_schedule_changes_no_token_and_off_means_the_plain_cut():
    _, records = run(Machine(0.5, verify=9.0, draft=1.0), tokens=60, schedule=False)
    assert {r["skipped"] for r in records if "skipped" in r} <= {"limit"}
    assert all(r["rows"] == 6 for r in records[:-3])


def settings(**changes):
    return {"block": BLOCK, "confidence": 0.7, **changes}


def test_a_draft_that_never_drafts_is_reported_after_32_cycles():
    """SP-02."""
    _, records = run(Machine(0.3), tokens=SILENT + 5, confidence=0.7, schedule=False)
    report = DraftReport(settings())
    for record in records:
        assert report.warning is None
        report(record)
        if len([r for r in report.records if "rows" in r]) == SILENT:
            break
    assert report.warning == (
        "nothing was drafted in 32 cycles: the highest confidence of a first draft was 0.30, "
        "the threshold is 0.7"
    )


def test_the_summary_counts_what_the_records_say():
    report = DraftReport(settings())
    _, records = run(Machine(0.7), tokens=80, confidence=0.5, schedule=False)
    for record in records:
        report(record)
    s = report.summary()
    cycles = [r for r in records if "rows" in r]
    assert s["cycles"] == len(cycles) == sum(s["accepted_histogram"])
    assert s["drafted"] == sum(r["rows"] - 1 for r in cycles)
    assert s["accepted"] == sum(n * k for n, k in enumerate(s["accepted_histogram"]))
    assert s["accepted"] == sum(p["accepted"] for p in s["by_position"])
    assert s["drafted"] == sum(p["drafted"] for p in s["by_position"])
    bucket = next(b for b in s["calibration"] if b["drafts"])
    assert abs(bucket["confidence"] - 0.7) < 1e-6
    assert abs(bucket["accepted"] - 0.7) < 0.15
    # Each pass gives its accepted drafts and a token of its own; the first token came before.
    assert s["tokens_per_pass"] == pytest.approx(79 / len(records))


class Table(Machine):
    """Fixed logits after every token; the draft proposes one fixed token, likely or not."""

    def __init__(self, guess):
        super().__init__(0.5)
        self.guess = guess
        self.table = mx.array(np.random.default_rng(4).normal(0, 1.5, (6, 6)), mx.float32)
        self.config = SimpleNamespace(vocab_size=6, dspark_block_size=2)

    def __call__(self, ids, state):
        state.advance(len(ids))
        return ids, ids

    def logits(self, streams):
        return self.table[streams]

    def propose(self, anchor, context):
        guesses = mx.array([self.guess(anchor), self.guess(anchor)], mx.int32)
        return Block(mx.concatenate([anchor, guesses]), None, mx.zeros((2,)))


@pytest.mark.parametrize("temp, top_p", [(1.0, 1.0), (0.7, 0.9)])
@pytest.mark.parametrize("guess", [lambda a: 0, lambda a: 3], ids=["zero", "three"])
def test_drafted_sampling_draws_from_the_targets_own_distribution(temp, top_p, guess):
    """CO-02: chi-square of each token given the one before it; 0.1 % points of the sum."""
    table, n = Table(guess), 6000
    loop = Speculation(
        target=table,
        draft=table,
        cache=State(),
        context=State(),
        sampler=Sampler(temp, top_p, 0.0, 11),
        stop=(),
    )
    for state in (loop.cache, loop.context):
        state.advance(1)
    drawn = [0, *loop.decode(mx.array([0]), n)]
    counts = np.zeros((6, 6))
    np.add.at(counts, (drawn[:-1], drawn[1:]), 1)
    p = np.array(filtered(table.table, temp, top_p, 0.0), np.float64)
    expected = counts.sum(1, keepdims=True) * p
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    chi = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    freedom = seen.sum() - (counts.sum(1) > 0).sum()
    assert chi < freedom + 3.1 * np.sqrt(2 * freedom) + 4


def test_drafted_sampling_is_the_plain_sampling_of_its_seed():
    texts = []
    for guess in (lambda a: 0, lambda a: 5):
        table = Table(guess)
        loop = Speculation(
            target=table,
            draft=table,
            cache=State(),
            context=State(),
            sampler=Sampler(1.0, 1.0, 0.0, 8),
            stop=(),
        )
        for state in (loop.cache, loop.context):
            state.advance(1)
        texts.append(list(loop.decode(mx.array([0]), 50)))
    assert texts[0] == texts[1]
