"""The loop: prefill the prompt, decode token by token, stop where told."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import mlx.core as mx

from .cache import Cache, DraftCache
from .draft import Draft
from .graphs import Graphs
from .rows import FEW
from .sampling import Sampler
from .schedule import Cycle, Plan, Schedule
from .target import Target
from .weights import Progress


def prefill(
    target: Target,
    ids: Sequence[int],
    cache: Cache,
    *,
    chunk: int,
    progress: Progress | None = None,
    draft: Draft | None = None,
    context: DraftCache | None = None,
) -> Iterator[tuple[mx.array, mx.array]]:
    """Feed `ids` in chunks; yields the evaluated (streams [n, HC, D], taps [n, T * D]) of each.

    The context of a `draft` grows along.
    """
    sublayers = 2 * target.config.num_hidden_layers
    for at in range(0, len(ids), chunk):
        part = mx.array(ids[at : at + chunk], mx.int32)

        def done(n: int, at=at, part=part):
            if progress and n < sublayers:
                progress("prefill", at + len(part) * n // sublayers, len(ids))

        streams, taps = target(part, cache, paced(done))
        if draft:
            draft.extend(taps, context)
        mx.eval(streams, taps, cache.arrays(), context.arrays() if draft else [])
        if progress:
            progress("prefill", at + len(part), len(ids))
        yield streams, taps


def awaited(arrays):
    """The same arrays, in memory: a lazy one belongs to the thread that built it."""
    mx.eval(arrays)
    return arrays


def paced(done: Callable[[int], None]) -> Callable:
    """Evaluates what it is called with, two calls at a time; `done` hears of the n-th sublayer.

    What a chunk of prefill takes would else all be held at once.
    """
    before, calls = [], count(1)

    def pace(*arrays, within: bool = False):
        mx.async_eval(arrays)
        if before:
            mx.eval(before.pop())
        before.append(arrays)
        if not within:
            done(next(calls))

    return pace


def decode(
    target: Target,
    streams: mx.array,
    cache: Cache,
    sampler: Sampler,
    *,
    limit: int,
    stop: Collection[int],
) -> Iterator[int]:
    """Tokens after the last row of `streams`, at most `limit`; ends before a token of `stop`.

    The next step is under way while a token is handed out. Afterwards the cache holds the
    prompt and every token handed out but the last, whether or not the loop was left early.
    """
    token = sampler(target.logits(streams[-1:]))
    mx.async_eval(token)
    for left in range(limit, 0, -1):
        start = cache.position
        following = None
        if left > 1:
            streams, _ = target(token, cache)
            following = sampler(target.logits(streams))
            mx.async_eval(following, cache.arrays())
        done = False
        try:
            id = int(token.item())
            if id in stop:
                return
            yield id
            done = True
        finally:
            if not done:
                cache.rewind(cache.position - start)
        token = following


@dataclass
class Speculation:
    """Tokens as `decode` gives them, bit for bit, several for one pass of the target (model 17).

    After every cycle `cache` is that of plain decoding; so is `context`, `caught_up`. Of a block
    those drafts are verified that have at least `confidence`, up to the first that has not, which
    takes a wait for the confidences; 0 verifies whole blocks. A `schedule` (None: neither) skips
    drafting where it does not pay, verifies fewer, or verifies unseen where a wait costs more
    than rows do. `report` (None: nobody listens) gets a record of every cycle.
    """

    target: Target
    draft: Draft
    cache: Cache
    context: DraftCache
    sampler: Sampler
    stop: Collection[int]
    confidence: float = 0.0
    schedule: Schedule | None = None
    report: Callable[[dict], None] | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self):
        self._steps = 0  # plain steps in a row that traced nothing
        self._taps: deque[mx.array] = deque()  # [1, T * D] each: what the context has not seen

    def decode(self, streams: mx.array, limit: int) -> Iterator[int]:
        """Tokens after the last row of `streams`; see `decode` for the limit and the end."""
        if self.schedule:
            self.schedule.begin()
        anchor, id = self.sampler(self.target.logits(streams[-1:])), None
        mx.async_eval(anchor)
        while limit > 0 and anchor is not None:
            # The last token needs no row, the last row no draft.
            most = min(self.draft.config.dspark_block_size, FEW - 1, limit - 2)
            before = self.cache.position
            plan = self._plan(most)
            if plan.skip:
                anchor, id = yield from self._plain(anchor, id, min(1, limit - 1), plan.skip)
            else:
                anchor, id = yield from self._drafted(anchor, id, most, plan.drafts)
            limit -= self.cache.position - before or 1

    def caught_up(self) -> DraftCache:
        """The context with the rows of plain steps, which it is given only when it is read."""
        rows = list(self._taps)
        self._taps.clear()
        for at in range(0, len(rows), FEW):
            self.draft.extend(mx.concatenate(rows[at : at + FEW]), self.context)
        return self.context

    def _plan(self, most: int) -> Plan:
        if most < 1:
            return Plan("limit")
        fixed = self.confidence == 0
        if self.schedule:
            return self.schedule.plan(most, fixed)
        return Plan(drafts=most if fixed else None)

    def _plain(self, anchor: mx.array, id: int | None, rows: int, skip: str):
        """One step without drafts; hands the anchor out, returns the next one."""
        start, traces, following = self.clock(), Graphs.traces, anchor[:0]
        if rows:
            if self.report:
                self.report({"position": self.cache.position, "skipped": skip})
            # The device waits for the first step behind a cycle.
            submit = None if self._steps else mx.async_eval
            streams, taps = self.target(anchor, self.cache, submit=submit)
            following = self.sampler(self.target.logits(streams))
            mx.async_eval(following, self.cache.arrays(), taps)
            self._taps.append(taps)
            if len(self._taps) > self.context.window + FEW:  # it would leave the rings at once
                self._taps.popleft()
                self.context.advance(1)
        if id is None:
            ((id,),) = fetch(anchor)
        # The first step waits for nothing, the second for the first: these fill the pipeline.
        self._steps = self._steps + 1 if rows and Graphs.traces == traces else 0
        if self.schedule and self._steps:
            self.schedule.plain_took(self.clock() - start, filling=self._steps <= 2)
        went_on = yield from self._hand_out([id], rows)
        return (following if went_on else None), None

    def _drafted(self, anchor: mx.array, id: int | None, most: int, n: int | None):
        """One cycle: propose, cut, verify in one block, accept; returns the next anchor.

        With `n` its drafts are verified unseen, and it waits once.
        """
        ahead, begin, built = n is not None, self.clock(), Graphs.traces
        if id is None:
            ((id,),) = fetch(anchor)
        if id in self.stop:
            return None, None
        self._steps = 0
        catch_up = 0.0
        if self._taps:  # awaited, or a proposal would seem to cost all these rows
            mx.eval(self.caught_up().arrays())
            catch_up = self.clock() - begin if Graphs.traces == built else 0.0
        start, traces, position = self.clock(), Graphs.traces, self.cache.position
        block = self.draft.propose(anchor, self.context)
        most = min(most, block.tokens.shape[0] - 1)
        confidence = mx.sigmoid(block.confidence[:most])
        if ahead:
            mx.async_eval(block.tokens, confidence)
            n = min(n, most)
        else:
            n = self._length(confidence)
        proposed, begun = self.clock(), []
        tokens = block.tokens[: 1 + n]

        def submit(streams):
            mx.async_eval(streams)
            begun.append(self.clock())

        # An id outside the vocabulary is no token that the target could choose, nor embed.
        known = mx.clip(tokens, 0, self.target.config.vocab_size - 1)
        streams, taps = self.target(known, self.cache, submit=submit)
        chosen = self.sampler(self.target.logits(streams))
        # All rows, so that it waits for no answer of the host: `rewind` forgets the rejected ones.
        self.draft.extend(taps, self.context)
        mx.async_eval(chosen, tokens, confidence, self.cache.arrays(), self.context.arrays())
        launched = self.clock()
        if not (yield from self._hand_out([id], 1 + n)):
            return None, None
        resumed = self.clock()
        (_, *drafts), wanted, sure = fetch(tokens, chosen, confidence)
        accepted = leading(d == w for d, w in zip(drafts, wanted, strict=False))
        verified = self.clock()
        self.cache.rewind(n - accepted)
        self.sampler.rewind(n - accepted)
        self.context.rewind(n - accepted)
        done = self.clock()
        record = {
            "position": position,
            "anchor": id,
            "drafts": drafts,
            "confidences": sure,
            "rows": 1 + n,
            "accepted": accepted,
            "bonus": wanted[accepted],
            "waits": 1 if ahead else 2,
            "draft_ms": 1e3 * (proposed - start),
            "verify_ms": 1e3 * (launched - proposed + verified - resumed),
            "rest_ms": 1e3 * (done - verified),
        }
        if self.report:
            self.report(record)
        if self.schedule:
            lead = (*begun, launched)[0] - proposed
            verify = done - proposed - (resumed - launched)
            seconds = proposed - start, lead, launched - proposed, verify
            found = sure, self._cut(sure), n, accepted, ahead
            self.schedule.cycle_took(Cycle(*found, *seconds, catch_up, Graphs.traces > traces))
        went_on = yield from self._hand_out(drafts[:accepted], accepted)
        following = chosen[accepted : accepted + 1]
        return (following, wanted[accepted]) if went_on else (None, None)

    def _length(self, confidence: mx.array) -> int:
        """How many drafts to verify, once their confidences are known."""
        (sure,) = fetch(confidence)
        cut = self._cut(sure)
        return self.schedule.drafts(sure, cut) if self.schedule else cut

    def _cut(self, sure: list[float]) -> int:
        return leading(c >= self.confidence for c in sure)

    def _hand_out(self, ids: list[int], rows: int):
        """Yield `ids`, of which the cache holds the newest `rows` rows, the first id's included.

        Left early, or before a token of `stop`, the caches forget the rows from that id on.
        -> whether all were handed out.
        """
        done = 0
        try:
            for id in ids:
                if id in self.stop:
                    return False
                yield id
                done += 1
            return True
        finally:
            if done < len(ids):
                self.cache.rewind(max(0, rows - done))
                while self._taps and self._seen > self.cache.position:
                    self._taps.pop()
                self.context.rewind(max(0, self._seen - self.cache.position))

    @property
    def _seen(self) -> int:
        """Tokens of which the context holds rows, or will when it is caught up."""
        return self.context.position + len(self._taps)


def fetch(*arrays: mx.array) -> list[list]:
    """Wait for all of these at once -> their values."""
    mx.eval(arrays)
    return [a.tolist() for a in arrays]


def leading(truths: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, truths))
