"""Which way to take the next tokens: costs and gains as measured. It changes speed, never text."""

from dataclasses import dataclass

_PROBE = 1  # drafts that are verified to learn what a row costs
_SAMPLES, _SURE = 5, 3  # a cost is the median of the newest 5; a plain step's is of 3 at least
# What drafts may lose, in plain steps: at first, more for each token, and again in a new text for
# each of the one before; no more than that is saved up.
_GRANT, _SHARE, _AGAIN, _MOST = 3.0, 0.012, 0.008, 6.0
_SHORTEST, _LONGEST = 64, 1024  # steps without drafts until their costs are measured again
_REFILL = 4  # plain steps behind a cycle that may take longer than others
_REFRESH = 128  # cycles in a row until the plain step is measured again
_HOPE = 3.0  # drafts, taken for right, that weigh against what was seen
_KEPT, _FADED = 0.98, 0.985  # of what was seen: after a cycle, after a step without drafts
_MISSES = 3  # cycles without a right draft, after which it pauses
_LATELY = 0.8  # of what cycles with a look would have gained, after one more


@dataclass(frozen=True)
class Plan:
    """The next step. Without a skip it is a cycle with drafts.

    A cycle that verifies `drafts` of them unseen waits once; with None it waits for their
    confidences first, and again for what the target chose.
    """

    skip: str | None = None  # why it takes no draft
    drafts: int | None = None


@dataclass(frozen=True)
class Cycle:
    """What a cycle came to; seconds of the injected clock."""

    confidences: list[float]  # of all drafts
    cut: int  # how many of them, from the first, reach the threshold
    drafts: int  # verified
    accepted: int
    ahead: bool  # verified unseen
    draft: float  # until the confidences were known; ahead: until the draft was launched
    lead: float  # until the verification's first layers are launched, for which the device waits
    launch: float  # until all are: what it may save that the draft is not waited for
    verify: float  # the rest, with `launch`
    catch_up: float = 0.0  # before, until plain steps were awaited and the context had their rows
    traced: bool = False  # a graph was traced and built meanwhile: the seconds are none of these


class Cost:
    """Seconds of something done again and again: the lower median of the newest samples."""

    def __init__(self):
        self.samples: list[float] = []

    def add(self, seconds: float):
        self.samples = [*self.samples[1 - _SAMPLES :], seconds]

    @property
    def value(self) -> float | None:
        return _median(self.samples) if self.samples else None


class Schedule:
    """Decides before every step whether to draft, in which way, and how many to verify.

    A cycle gains what plain decoding of its tokens would have cost, less what it cost, the catch-up
    before it and the slower plain steps behind it included. It drafts as long as the best way
    promises a gain. Promises are hopeful: what is not known of drafts counts as right, and what was
    seen of them fades while there are none, so that it tries again; after cycles without a right
    draft it pauses, each time longer. An account of plain steps bounds what hope loses: it begins
    with a grant, grows by gains and with the text; where it is empty nothing is drafted. Times in
    which a graph was built are not counted. Costs go by the number of rows: the experts that rows
    share show only in them.
    """

    def __init__(self, block: int):
        self.plain, self.draft, self.lead, self.launch = Cost(), Cost(), Cost(), Cost()
        self.verify = [Cost() for _ in range(block + 1)]  # by drafts, their confidences seen
        self.ahead = [Cost() for _ in range(block + 1)]  # whole cycles, drafts unseen
        self.hits = [[0.0, 0.0] for _ in range(10)]  # by confidence: expected, accepted
        self.places = [[0.0, 0.0] for _ in range(block)]  # judged, accepted if those before were
        self._looks = (0.0, 0.0)  # tokens and seconds of cycles that see confidences
        self._account = _GRANT
        self._most, self._probing = 0, False  # the longest block
        self._idle, self._wait = 0, _SHORTEST  # steps without drafts, and how many are enough
        self._misses = 0  # cycles in a row without a right draft
        self._behind = 0  # plain steps behind a cycle that are still to come
        self._filled = False  # whether this text had plain steps
        self._cycles = self._tokens = 0  # since the plain step was measured; of this text

    def begin(self):
        """A new text: it may pay where the last one did not."""
        self._credit(min(_GRANT, _AGAIN * self._tokens))
        self._tokens, self._misses = 0, min(self._misses, _MISSES - 1)
        self._behind, self._filled = 0, False
        self._fade(0.5)

    def plan(self, most: int, fixed: bool = False) -> Plan:
        """The next step, of at most `most` drafts; `fixed`: a cycle verifies that many."""
        self._most = max(self._most, most)
        plan = self._plan(most, fixed)
        if plan.skip:
            self._idle += 1
            self._told(1)
            self._fade(_FADED)
        else:
            self._idle = 0
        return plan

    def _plan(self, most: int, fixed: bool) -> Plan:
        self._probing = False
        if len(self.plain.samples) < _SURE or self._cycles >= _REFRESH:
            return Plan("measure")
        if self._account <= 0 or self._idle < self._pause():
            return Plan("no gain")
        if self._idle >= self._wait:
            # They may have been hiccups, or be true no longer.
            self._idle, self._wait = 0, min(2 * self._wait, _LONGEST)
            for cost in (self.draft, self.lead, self.launch, *self.ahead, *self.verify):
                cost.samples = []
        if self.draft.value is not None:
            rate, plan = self._best(most, fixed)
            if rate > 1:
                self._wait = _SHORTEST
                return plan
        if most < self._most:
            return Plan("limit")  # of too few tokens nothing is learnt
        self._probing = self.draft.value is None
        return Plan() if self._probing else Plan("no gain")

    def _pause(self) -> int:
        """Steps without drafts that the cycles of late ask for, of which none had a right one."""
        return 0 if self._misses < _MISSES else min(_SHORTEST, 1 << self._misses - 2)

    def _best(self, most: int, fixed: bool) -> tuple[float, Plan]:
        """The way with the most tokens a plain step's time, and how many those are."""
        # Few lengths, since each has graphs of its own to be built.
        unseen = [most] if fixed else range(most, 0, -2)
        ways = [(self._unseen_rate(n), Plan(drafts=n)) for n in unseen]
        if not fixed:
            tokens, seconds = self._looks
            ways.append((tokens * self.plain.value / seconds if seconds else 0.0, Plan()))
        return max(ways, key=lambda way: way[0])

    def _unseen_rate(self, n: int) -> float:
        right, tokens, chance = 1.0, 1.0, 1.0
        for judged, accepted in self.places[:n]:
            # Of a place of which nothing is known: as the one before.
            right = (accepted + _HOPE * right) / (judged + _HOPE)
            chance *= right
            tokens += chance
        return tokens * self.plain.value / self._unseen_cost(n)

    def drafts(self, confidences: list[float], cut: int) -> int:
        """How many drafts are worth their rows, of the first `cut`, which reach the threshold."""
        if self._probing:
            return min(_PROBE, len(confidences))
        return self._worth(confidences[:cut])[0]

    def _worth(self, confidences: list[float]) -> tuple[int, float]:
        """How many drafts of these confidences to verify, and how many will be accepted."""
        tokens, seconds = self._looks
        rate = max(1.0, tokens * self.plain.value / seconds if seconds else 1.0)
        best, most, accepted, chance, expected = 0, 0.0, 0.0, 1.0, 0.0
        for n, c in enumerate(confidences, 1):
            chance *= self._right(c)
            expected += chance
            more = rate * (self._seen_cost(n) - self._seen_cost(0)) / self.plain.value
            if expected - more > most:
                best, most, accepted = n, expected - more, expected
        return best, accepted

    def plain_took(self, seconds: float, filling: bool = False):
        """A plain step of a row of them; `filling`: one of the first, that fill the pipeline.

        Of the first behind a cycle the account pays for what they take longer.
        """
        if self._behind and self.plain.value is not None:
            self._behind -= 1
            # The first is short where a catch-up awaited the step before it: else that is no gain.
            if self._filled:
                self._credit(1 - seconds / self.plain.value)
        elif not filling:
            self.plain.add(seconds)
            self._cycles = 0
        self._filled = True

    def cycle_took(self, cycle: Cycle):
        n, accepted = cycle.drafts, cycle.accepted
        self._told(1 + accepted)
        self._behind = _REFILL
        self._cycles += 1
        self._misses = 0 if accepted else self._misses + (n > 0)
        for i, c in enumerate(cycle.confidences[: min(n, accepted + 1)]):
            for count, expected in ((self.hits[min(9, int(10 * c))], c), (self.places[i], 1.0)):
                count[0] = _KEPT * count[0] + expected
                count[1] = _KEPT * count[1] + (i < accepted)
        if not cycle.traced and cycle.ahead:
            self.ahead[n].add(cycle.draft + cycle.verify)
        elif not cycle.traced:
            self.draft.add(cycle.draft)
            self.lead.add(cycle.lead)
            self.launch.add(cycle.launch)
            self.verify[n].add(cycle.verify)
        if None in (self.plain.value, self.draft.value):
            return
        chosen, expected = self._worth(cycle.confidences[: cycle.cut])
        looks = (1 + expected, self._seen_cost(chosen))
        self._looks = tuple(_LATELY * a + b for a, b in zip(self._looks, looks, strict=True))
        took = self._unseen_cost(n) if cycle.ahead else self._seen_cost(n)
        self._credit(1 + accepted - (took + cycle.catch_up) / self.plain.value)

    def _told(self, tokens: int):
        self._tokens += tokens
        self._credit(_SHARE * tokens)

    def _credit(self, gain: float):
        # A hiccup, in the first sample of a cost, would else be paid for through many texts.
        self._account = max(-_MOST, min(_MOST, self._account + gain))

    def _fade(self, kept: float):
        for counts in (self.hits, self.places):
            counts[:] = [[kept * a, kept * b] for a, b in counts]

    def _right(self, confidence: float) -> float:
        """The chance that a draft is right, its confidence corrected by what came true."""
        expected, accepted = self.hits[min(9, int(10 * confidence))]
        return min(1.0, confidence * (accepted + _HOPE) / (expected + _HOPE))

    def _seen_cost(self, n: int) -> float:
        """Seconds of a cycle that sees confidences first and verifies n."""
        return (self.draft.value or 0.0) + self._verify_cost(n)

    def _unseen_cost(self, n: int) -> float:
        """Seconds of a cycle that verifies n unseen: measured, or a look's less its launch."""
        if (known := self.ahead[n].value) is not None:
            return known
        guess = lambda k: self._seen_cost(k) - (self.launch.value or 0.0)  # noqa: E731
        near = _nearest(self.ahead, n)
        more = self.ahead[near].value - guess(near) if near is not None else 0.0
        return max(self.plain.value, guess(n) + more)

    def _verify_cost(self, n: int) -> float:
        """Measured, or on the line from a plain step, behind a lead, through what was."""
        if (known := self.verify[n].value) is not None:
            return known
        start, near = self.plain.value + (self.lead.value or 0.0), _nearest(self.verify, n)
        return start + (self.verify[near].value - start) * n / near if near else start


def _median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _nearest(costs: list[Cost], n: int) -> int | None:
    known = [k for k, cost in enumerate(costs) if k and cost.samples]
    return min(known, key=lambda k: abs(k - n), default=None)
