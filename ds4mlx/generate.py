"""The loop: prefill the prompt, decode token by token, stop where told."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import mlx.core as mx

from .cache import Cache, DraftCache
from .draft import Draft
from .rows import FEW
from .sampling import Sampler
from .schedule import Schedule
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
    for at in range(0, len(ids), chunk):
        part = mx.array(ids[at : at + chunk], mx.int32)
        streams, taps = target(part, cache)
        if draft:
            draft.extend(taps, context)
        mx.eval(streams, taps, cache.arrays(), context.arrays() if draft else [])
        if progress:
            progress("prefill", at + len(part), len(ids))
        yield streams, taps


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

    After every cycle `cache` and `context` are those of plain decoding. A draft is verified if
    it and all before it in its block have at least `confidence`; 0 verifies whole blocks, and
    a cycle then waits once. `schedule` (None: no skipping) decides when drafting pays, `report`
    (None: nobody listens) gets a record of every cycle.
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
        self._steps, self._seconds = 0, 0.0  # of the plain steps in a row until now

    def decode(self, streams: mx.array, limit: int) -> Iterator[int]:
        """Tokens after the last row of `streams`; see `decode` for the limit and the end."""
        anchor = self.sampler(self.target.logits(streams[-1:]))
        mx.async_eval(anchor)
        while limit > 0 and anchor is not None:
            # The last token needs no row, the last row no draft.
            most = min(self.draft.config.dspark_block_size, FEW - 1, limit - 2)
            before = self.cache.position
            skip = "limit" if most < 1 else self.schedule.skip() if self.schedule else None
            if skip:
                anchor = yield from self._plain(anchor, min(1, limit - 1), skip)
            else:
                anchor = yield from self._drafted(anchor, most)
            limit -= self.cache.position - before or 1

    def _plain(self, anchor: mx.array, rows: int, skip: str):
        """One step without drafts; hands the anchor out, returns the next one."""
        start, following = self.clock(), anchor[:0]
        if rows:
            if self.report:
                self.report({"position": self.cache.position, "skipped": skip})
            streams, taps = self.target(anchor, self.cache)
            self.draft.extend(taps, self.context)
            following = self.sampler(self.target.logits(streams))
            mx.async_eval(following, self.cache.arrays(), self.context.arrays())
        ids = anchor.tolist()
        self._steps, self._seconds = self._steps + rows, self._seconds + self.clock() - start
        went_on = yield from self._hand_out(ids, rows)
        return following if went_on else None

    def _drafted(self, anchor: mx.array, most: int):
        """One cycle: propose, cut, verify in one block, accept; returns the next anchor."""
        start = self.clock()
        (id,) = anchor.tolist()
        if id in self.stop:
            return None
        if self.schedule and self._steps:
            self.schedule.plain_took(self._steps, self._seconds + self.clock() - start)
        self._steps, self._seconds = 0, 0.0
        start, position = self.clock(), self.cache.position
        block = self.draft.propose(anchor, self.context)
        most = min(most, block.tokens.shape[0] - 1)
        confidence = mx.sigmoid(block.confidence[:most])
        n = most
        if self.confidence > 0:
            sure = confidence.tolist()
            n = leading(c >= self.confidence for c in sure)
            if self.schedule:
                n = self.schedule.drafts(sure[:n])
        proposed = self.clock()
        tokens = block.tokens[: 1 + n]
        known = (tokens >= 0) & (tokens < self.target.config.vocab_size)
        streams, taps = self.target(mx.where(known, tokens, 0), self.cache)
        chosen = self.sampler(self.target.logits(streams))
        mx.async_eval(chosen, tokens, confidence, self.cache.arrays())
        launched = self.clock()
        if not (yield from self._hand_out([id], 1 + n)):
            return None
        resumed = self.clock()
        drafts, wanted = tokens.tolist()[1:], chosen.tolist()
        accepted = leading(d == w for d, w in zip(drafts, wanted, strict=False))
        verified = self.clock()
        self.cache.rewind(n - accepted)
        self.sampler.rewind(n - accepted)
        self.draft.extend(taps[: 1 + accepted], self.context)
        mx.async_eval(self.context.arrays())
        record = {
            "position": position,
            "anchor": id,
            "drafts": drafts,
            "confidences": confidence.tolist(),
            "rows": 1 + n,
            "accepted": accepted,
            "bonus": wanted[accepted],
            "draft_ms": 1e3 * (proposed - start),
            "verify_ms": 1e3 * (launched - proposed + verified - resumed),
            "rest_ms": 1e3 * (self.clock() - verified),
        }
        self._tell(record)
        went_on = yield from self._hand_out(drafts[:accepted], accepted)
        return chosen[accepted : accepted + 1] if went_on else None

    def _tell(self, record: dict):
        if self.report:
            self.report(record)
        if self.schedule:
            costs = (record["draft_ms"] / 1e3, (record["verify_ms"] + record["rest_ms"]) / 1e3)
            confidences, n = record["confidences"], record["rows"] - 1
            self.schedule.cycle_took(confidences, n, record["accepted"], *costs)

    def _hand_out(self, ids: list[int], rows: int):
        """Yield `ids`, of which the caches hold the newest `rows` rows, the first id's included.

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
                self.context.rewind(max(0, self.context.position - self.cache.position))


def leading(truths: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, truths))
