"""The scheduler and exact sampling, on a scripted target and draft with a clock of their own."""

from types import SimpleNamespace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.cache import Sequence
from ds4mlx.draft import Block
from ds4mlx.generate import Speculation, fetch
from ds4mlx.graphs import Graphs
from ds4mlx.report import SILENT, DraftReport
from ds4mlx.sampling import Sampler, filtered
from ds4mlx.schedule import _AGAIN, _SHARE, Cost, Cycle, Plan, Schedule

BLOCK, VOCAB = 5, 16


class State(Sequence):
    window = 128

    def arrays(self):
        return []


class Machine:
    """Target and draft in one: fixed costs, and drafts that are right with a given chance.

    A plain step takes the device 1 second, one with 5 drafts `verify`, a proposal `draft`. To
    launch one of these takes the host `launch`, the device being busy or not.
    """

    config = SimpleNamespace(vocab_size=VOCAB, dspark_block_size=BLOCK)

    def __init__(self, right, verify=1.0, draft=0.0, sure=None, seed=0, launch=0.0, first=0.0):
        self.right, self.costs, self.sure, self.launch = right, (verify, draft), sure, launch
        self.first, self.seen = first, set()  # what the first use of a number of rows costs
        self.now, self.rng = 0.0, np.random.default_rng(seed)
        self.ends, self.awaited = [0.0, 0.0], 1  # of what the device does; how much is not known
        self.waits = 0

    def work(self, seconds, kind=None):
        self.build(kind)
        self.now += self.launch
        self.ends.append(max(self.now, self.ends[-1]) + seconds)
        self.awaited += 1

    def build(self, kind):
        if self.first and kind is not None and kind not in self.seen:
            self.seen.add(kind)
            Graphs.traces += 1
            self.now += self.first

    def fetch(self, *arrays):
        # A plain step is launched before the token of the one before is read.
        earlier = len(arrays) == 1 and arrays[0].dtype == mx.int32 and self.awaited > 1
        self.now = max(self.now, self.ends[-2 if earlier else -1])
        self.awaited, self.waits = int(earlier), self.waits + 1
        return fetch(*arrays)

    def __call__(self, ids, state, submit=None):
        self.work(1 + (self.costs[0] - 1) * (len(ids) - 1) / BLOCK, len(ids))
        streams = state.position + mx.arange(len(ids))
        state.advance(len(ids))
        return streams, streams

    def logits(self, streams):
        """The token after position p is p mod 7."""
        return (mx.arange(VOCAB)[None] == (streams % 7)[:, None]).astype(mx.float32)

    def extend(self, taps, context):
        context.advance(len(taps))

    def propose(self, anchor, context):
        self.work(self.costs[1])
        block = self.config.dspark_block_size
        right = self.rng.random(block) < self.chance(context.position)
        tokens = (context.position + np.arange(block)) % 7 + 7 * ~right
        sure = self.sure if self.sure is not None else self.chance(context.position)
        confidence = mx.full((block,), float(np.log(sure / (1 - sure))))
        return Block(mx.concatenate([anchor, mx.array(tokens, mx.int32)]), None, confidence)

    def chance(self, position):
        return self.right(position) if callable(self.right) else self.right


class Gpu(Machine):
    """Measured costs in ms, each a little off; the first use of a graph takes 50 to 3000.

    The first plain steps behind a cycle take `refill` more. To give the context the rows of plain
    steps takes `extend`: for each row, and at least for each call.
    """

    def __init__(self, right, plain, draft, verify, refill, extend, seed=0):
        super().__init__(right, draft=draft, seed=seed)
        self.plain, self.verify = plain, verify  # of 1 to 6 rows
        self.refill, (self.row, self.call) = refill, extend
        self.filling, self.cycling = [], False
        self.noise, self.built = np.random.default_rng(100 + seed), 0.0

    def work(self, seconds, kind="propose"):
        super().work(seconds * self.noise.lognormal(0, 0.05), kind)

    def build(self, kind):
        self.first = 50 * 60 ** self.noise.random()
        self.built -= self.now
        super().build(kind)
        self.built += self.now

    def __call__(self, ids, state, submit=None):
        n, p = len(ids), state.position
        closing = [(p + n) // r - p // r for r in (4, 128)]
        more = self.filling.pop(0) if self.filling and not self.cycling else 0.0
        self.work(self.verify[n - 1] if self.cycling else self.plain + more, (n, *closing))
        state.advance(n)
        return p + mx.arange(n), p + mx.arange(n)

    def propose(self, anchor, context):
        self.cycling = True
        return super().propose(anchor, context)

    def extend(self, taps, context):
        self.build(("extend", len(taps)))
        if self.cycling:  # it is in the costs of the cycle
            self.cycling, self.filling = False, [*self.refill]
        else:
            self.now += max(self.call, self.row * len(taps))
        super().extend(taps, context)

    def gains(self, tokens, texts=3, **options):
        """The speed of each of these texts over plain decoding, builds not counted."""
        schedule, found = Schedule(BLOCK), []
        for _ in range(texts):
            start = self.now - self.built
            run(self, tokens, schedule=schedule, **options)
            found.append(self.plain * (tokens - 1) / (self.now - self.built - start))
        return found

    def best(self):
        """The same of the best number of drafts, always verified."""
        tokens, best = 1.0, 1.0
        for n, verify in enumerate(self.verify[1:], 1):
            tokens += self.right**n
            best = max(best, tokens * self.plain / (self.costs[1] + verify))
        return best


SMALL = 2.4, 1.0, (2.4, 2.6, 2.75, 2.9, 3.05, 3.2), (0.2, 0.2), (0.0, 0.15)  # embedded, H200
# 43 layers of Flash's shapes; the refill of a slow host.
FLASH = 6.4, 1.8, (7.7, 9.3, 11.3, 13.6, 15.3, 16.5), (2.2, 2.5, 2.5), (0.1, 0.4)


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
        schedule=Schedule(BLOCK) if schedule is True else schedule or None,
        report=records.append,
        clock=lambda: machine.now,
    )
    for state in (loop.cache, loop.context):
        state.advance(1)
    machine.awaited = 1  # the first anchor
    with patch("ds4mlx.generate.fetch", machine.fetch):
        got = list(loop.decode(mx.array([0]), tokens))
    assert got == [i % 7 for i in range(tokens)]
    return machine.now, records


def drafted(records):
    return [r for r in records if "rows" in r]


@pytest.mark.parametrize("verify", [1.6, 2.5, 6.0])
@pytest.mark.parametrize("right", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("sure", [None, 0.9], ids=["calibrated", "overconfident"])
@pytest.mark.parametrize("launch", [0.0, 0.3], ids=["cpu", "gpu"])
@pytest.mark.parametrize("confidence", [0.0, 0.7])
def test_drafting_never_costs_more_than_3_percent_of_500_tokens(
    verify, right, sure, launch, confidence
):
    """SP-01."""
    for seed in range(3):
        machine = Machine(right, verify, draft=0.4, sure=sure, seed=seed, launch=launch)
        seconds, _ = run(machine, confidence=confidence)
        assert seconds < 1.03 * 499


def test_rows_that_cost_a_token_each_are_hardly_ever_drafted():
    """A CPU: a proposal costs two steps, a row one."""
    seconds, records = run(Machine(0.95, verify=6.0, draft=2.0))
    assert len(drafted(records)) <= 4
    assert seconds < 1.025 * 499


@pytest.mark.parametrize(
    "verify, right, share", [(1.6, 0.9, 0.55), (2.5, 0.9, 0.75), (1.6, 0.6, 1)]
)
@pytest.mark.parametrize("launch", [0.0, 0.3], ids=["cpu", "gpu"])
@pytest.mark.parametrize("confidence", [0.0, 0.5])
def test_drafting_that_pays_is_kept(verify, right, share, launch, confidence):
    seconds, _ = run(Machine(right, verify, draft=0.2, launch=launch), confidence=confidence)
    assert seconds < (share + 0.1 * launch) * 499


@pytest.mark.parametrize(
    "machine, tokens, right", [*((SMALL, 192, p) for p in (0.48, 0.68, 0.9)), (FLASH, 512, 0.62)]
)
def test_from_the_second_text_on_it_is_nearly_as_fast_as_the_best_fixed_length(
    machine, tokens, right
):
    gpus = [Gpu(right, *machine, seed=seed) for seed in range(8)]
    gains = [gain for gpu in gpus for gain in gpu.gains(tokens, confidence=0.7)[1:]]
    assert np.mean(gains) > 0.94 * gpus[0].best()
    assert min(gains) > 0.96


@pytest.mark.parametrize("machine, tokens", [(SMALL, 192), (FLASH, 160), (FLASH, 512)])
@pytest.mark.parametrize("right", [0.0, 0.2])
@pytest.mark.parametrize("sure", [None, 0.9], ids=["calibrated", "overconfident"])
def test_graphs_that_are_built_and_drafts_that_fail_cost_less_than_3_percent_of_a_session(
    machine, tokens, right, sure
):
    gains = []
    for seed in range(4):
        gpu = Gpu(right, *machine, seed=seed)
        gpu.sure = sure or max(right, 0.01)
        gains += gpu.gains(tokens, texts=6, confidence=0.7)
    assert np.mean(gains) > 0.97 and min(gains) > 0.94


def test_first_drafts_that_fail_do_not_end_drafting():
    for seed in range(4):
        gpu = Gpu(lambda p: 0.0 if p < 24 else 0.68, *SMALL, seed=seed)
        gpu.sure = 0.6
        first, second = gpu.gains(192, texts=2, confidence=0.7)
        assert first > 1.1 and second > 1.1


def test_drafting_returns_when_it_pays_again():
    machine = Machine(lambda p: 0.02 if p < 400 else 0.95, verify=1.6, draft=0.2, sure=0.8)
    _, records = run(machine, tokens=900)
    cycles = [r["position"] for r in drafted(records)]
    assert sum(p < 400 for p in cycles) < 20
    assert sum(p >= 650 for p in cycles) > 40
    skipped = {r["skipped"] for r in records if "skipped" in r}
    assert skipped - {"limit"} == {"measure", "no gain"}


@pytest.mark.parametrize("first", [5.0, 500.0])
def test_kernels_that_are_built_at_first_use_do_not_end_drafting(first):
    schedule = Schedule(BLOCK)
    run(Machine(0.9, verify=1.6, draft=0.2, first=first), tokens=120, schedule=schedule)
    seconds, _ = run(Machine(0.9, verify=1.6, draft=0.2), schedule=schedule)
    assert seconds < 0.5 * 499


def test_a_hiccup_while_a_cost_is_new_is_forgotten():
    schedule = Schedule(BLOCK)
    machine = Machine(0.9, verify=1.6, draft=0.2)
    run(machine, tokens=30, schedule=schedule)
    for cost in (*schedule.ahead, *schedule.verify, schedule.draft):
        cost.samples = [100.0]
    _, records = run(machine, tokens=900, schedule=schedule)
    assert len(drafted(records)) > 40


def test_where_a_wait_costs_more_than_rows_a_cycle_waits_once():
    machine = Machine(0.8, verify=1.2, draft=0.2, launch=0.3)
    _, records = run(machine, confidence=0.7)
    cycles = drafted(records)
    assert sum(r["waits"] == 1 for r in cycles) > 0.9 * len(cycles)
    plain = len(records) - len(cycles)
    # Twice where confidences were looked at, and once for the last token of each run of steps.
    assert machine.waits <= plain + sum(r["waits"] for r in cycles) + plain


def test_where_rows_cost_more_than_a_wait_confidences_are_looked_at():
    class Fickle(Machine):
        """Every other block is wrong from its second draft on, and says so."""

        def propose(self, anchor, context):
            self.right = 0.97
            block = super().propose(anchor, context)
            if self.rng.random() < 0.5:
                return block
            wrong = mx.array([0, 0] + [7] * 4) + block.tokens % 7
            return Block(wrong, None, mx.array([3.5] + [-5.0] * 4))

    _, records = run(Fickle(0.97, verify=3.0, draft=0.1), confidence=0.3)
    cycles = drafted(records)
    assert sum(r["waits"] == 2 for r in cycles) > 0.8 * len(cycles)
    assert {2, 6} <= {r["rows"] for r in cycles}


def test_the_end_of_a_text_does_not_stop_drafting_in_the_next():
    schedule, machine = Schedule(BLOCK), Machine(0.9, verify=1.6, draft=0.4)
    run(machine, tokens=60, schedule=schedule)
    for _ in range(20):
        _, records = run(machine, tokens=9, schedule=schedule)
        assert "no gain" not in {r.get("skipped") for r in records}
    assert drafted(records)


def test_a_new_text_is_tried_soon_where_the_last_one_did_not_pay():
    schedule = Schedule(BLOCK)
    run(Machine(0.02, verify=1.6, draft=0.2, sure=0.8), schedule=schedule)
    _, records = run(Machine(0.95, verify=1.6, draft=0.2, sure=0.8), schedule=schedule)
    assert drafted(records)[0]["position"] < 30


@pytest.mark.parametrize("block", [1, 2, 7])
def test_blocks_of_every_size_are_scheduled(block):
    machine = Machine(0.95, verify=1.1, draft=0.05)
    machine.config = SimpleNamespace(vocab_size=VOCAB, dspark_block_size=block)
    _, records = run(machine, tokens=150, schedule=Schedule(block))
    assert drafted(records)[-1]["rows"] > 1


def costs(**known):
    """A schedule that knows these seconds: verify={drafts: seconds}, ahead likewise."""
    schedule = Schedule(BLOCK)
    schedule.plain.samples = 3 * [known["plain"]]
    for name in ("draft", "lead", "launch"):
        getattr(schedule, name).add(known.get(name, 0.0))
    for name in ("verify", "ahead"):
        for n, seconds in known.get(name, {}).items():
            getattr(schedule, name)[n].add(seconds)
    return schedule


def test_rows_that_cost_more_than_they_bring_are_not_verified():
    schedule = costs(plain=1.0, draft=0.1, verify={1: 1.5, 5: 3.5})
    assert schedule.drafts([0.9] * 5, 5) == 5
    assert schedule.drafts([0.9, 0.3, 0.3, 0.3, 0.3], 5) == 1
    assert schedule.drafts([0.2] * 5, 5) == 0


def test_a_draft_below_the_threshold_is_not_verified_once_it_is_seen():
    assert costs(plain=1.0, draft=0.1, verify={5: 1.1}).drafts([0.9] * 5, 3) == 3


def test_what_a_wait_costs_is_at_most_the_launch_and_a_row_what_it_costs_beyond_a_lead():
    schedule = costs(plain=1.0, draft=0.5, lead=0.2, launch=0.3, verify={2: 1.6})
    assert schedule._unseen_cost(2) == pytest.approx(0.5 + 1.6 - 0.3)
    # On the line from a plain step behind a lead.
    assert schedule._unseen_cost(4) == pytest.approx(0.5 + 1.2 + 0.8 - 0.3)
    schedule.ahead[2].add(2.5)
    assert schedule._unseen_cost(4) == pytest.approx(2.2 + 0.7)


def test_the_account_pays_for_the_catch_up_and_for_steps_that_refill_the_pipeline():
    schedule = costs(plain=1.0, draft=0.1, verify={5: 1.1})
    schedule.plain_took(1.0)
    before = schedule._account
    schedule.cycle_took(Cycle([0.9] * 5, 5, 5, 0, False, 0.1, 0.0, 0.0, 1.1, catch_up=0.5))
    paid = before - schedule._account
    assert paid == pytest.approx(0.1 + 1.1 + 0.5 - 1, abs=0.02)  # the text gives a little
    for seconds, filling in ((0.0, True), (1.5, True), (2.5, False), (1.25, False), (2.0, False)):
        schedule.plain_took(seconds, filling)
    assert before - schedule._account == pytest.approx(paid + 1.25)
    assert schedule.plain.samples == [1.0, 1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("launch", [0.0, 0.3, 0.95], ids=["device", "both", "host"])
@pytest.mark.parametrize("machine", [SMALL, FLASH], ids=["small", "flash"])
def test_the_account_pays_what_texts_lose_whether_they_begin_with_a_cycle_or_not(machine, launch):
    gpu, schedule, never = Gpu(0.0, *machine), Schedule(BLOCK), Schedule(BLOCK)
    gpu.sure, gpu.launch, never.plan = 0.01, launch * gpu.plain, lambda *_: Plan("never")
    gpu.noise, gpu.build = SimpleNamespace(lognormal=lambda *_: 1.0), lambda kind: None

    def text(schedule):
        start = gpu.now
        _, records = run(gpu, 160, confidence=0.7, schedule=schedule)
        return gpu.now - start, "rows" in records[0]

    text(schedule)  # of costs that are not known yet
    given, lost, begun = 0.0, 0.0, set()
    for account in 4 * [1.0, -2.0]:
        schedule._account = account
        given += account + _AGAIN * schedule._tokens
        (plain, _), (seconds, drafted) = text(never), text(schedule)
        given += _SHARE * schedule._tokens - schedule._account
        lost += (seconds - plain) / schedule.plain.value
        begun.add(drafted)
    assert begun == {True, False}
    assert given == pytest.approx(lost, abs=1.0)


def test_a_cost_is_the_lower_median_of_its_newest_samples():
    cost = Cost()
    assert cost.value is None
    for seconds, value in ((9.0, 9.0), (1.0, 1.0), (2.0, 2.0), (3.0, 2.0), (4.0, 3.0), (5.0, 3.0)):
        cost.add(seconds)
        assert cost.value == value


def test_a_confidence_that_promises_too_much_is_corrected():
    schedule = costs(plain=1.0, draft=0.1)
    for _ in range(60):
        schedule.cycle_took(Cycle([0.95], 1, 1, 0, False, 0.1, 0.0, 0.0, 1.0))
    assert schedule._right(0.95) < 0.2
    assert schedule._right(0.5) == 0.5


def test_a_schedule_changes_no_token_and_off_means_the_plain_cut():
    _, records = run(Machine(0.5, verify=9.0, draft=1.0), tokens=60, schedule=False)
    assert {r["skipped"] for r in records if "skipped" in r} <= {"limit"}
    assert all(r["rows"] == 6 for r in records[:-3])


def test_costs_are_learnt_from_steps_that_build_nothing():
    """Of plain steps the first two fill the pipeline."""
    _, records = run(Machine(0.9, verify=1.6, draft=0.2), tokens=30)
    kinds = ["cycle" if "rows" in r else r["skipped"] for r in records[:7]]
    assert kinds == ["measure"] * 5 + ["cycle"] * 2
    assert drafted(records)[0]["rows"] == 2
    schedule, seconds = Schedule(BLOCK), dict.fromkeys(("draft", "lead", "launch", "verify"), 9.0)
    for traced in (True, False):
        assert schedule.draft.value is None
        schedule.cycle_took(Cycle([0.9] * 5, 5, 3, 3, False, **seconds, traced=traced))
    assert schedule.draft.value == 9.0 and schedule.places[2][0] > 1.9


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


def test_drafting_that_is_left_off_is_told():
    """SP-01."""
    report = DraftReport(settings())
    _, records = run(Machine(0.95, verify=6.0, draft=2.0), tokens=100)
    for record in records:
        report(record)
    idle = report.summary()["skipped"]["no gain"]
    assert (
        report.summary()["warning"]
        == report.warning
        == (
            f"drafting did not pay and was left off in {idle} of {len(records)} steps; "
            "--dspark-schedule off drafts all the same"
        )
    )
    assert idle > 80


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

    def __call__(self, ids, state, submit=None):
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


def test_one_slow_cycle_does_not_end_drafting():
    schedule, drafted = Schedule(BLOCK), []
    schedule.begin()
    for step in range(600):
        plan = schedule.plan(BLOCK)
        if plan.skip:
            schedule.plain_took(0.01)
            continue
        n = plan.drafts or schedule.drafts([0.9] * BLOCK, BLOCK)
        slow = 60.0 if not drafted else 0.0
        drafted.append(step)
        ahead = plan.drafts is not None
        seconds = 0.002, 0.0, 0.001, 0.015 + slow
        schedule.cycle_took(Cycle([0.9] * BLOCK, BLOCK, n, n, ahead, *seconds))
    assert sum(step >= 500 for step in drafted) > 50
