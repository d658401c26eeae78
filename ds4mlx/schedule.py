"""Which way to take the next tokens: costs and gains as measured. It changes speed, never text."""

from dataclasses import dataclass

_WARM_UP = ("plain", "plain", "probe")  # builds kernels
_MEASURE = ("plain",) * 4
_PROBE = 2  # drafts that are verified to learn what a row costs
_SAMPLES, _SURE = 5, 3  # a cost is the median of the newest 5; below 3 it may be a hiccup
_GRANT, _SHARE = 2.0, 0.01  # what drafts may lose: plain steps, and a share of the text's
_SHORTEST, _LONGEST = 16, 256  # steps without drafts after drafts that did not pay
_REFRESH = 64  # cycles in a row until the plain step is measured again
_PRIOR, _WEIGHT = 0.7, 2.0  # the chance of a draft that nothing is known of, and its weight


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
    launch: float  # to launch the verification: while it waits for that, the device idles
    verify: float  # the rest, with `launch`


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

    A cycle gains what plain decoding of its tokens would have cost, less what it cost. Where
    the best way promises no gain, or the gains of late are negative, drafting pauses, each time
    longer, and tries again; what all tries lose is bounded by a share of the text. The first
    use of a number of rows builds kernels and is not counted. Costs go by the number of rows:
    the experts that rows share show only in them.
    """

    def __init__(self, block: int):
        self.plain, self.draft, self.launch = Cost(), Cost(), Cost()
        sizes = range(max(block, _PROBE) + 1)
        self.verify = [Cost() for _ in sizes]  # by drafts, their confidences seen
        self.ahead = [Cost() for _ in sizes]  # whole cycles, drafts unseen
        self.hits = [[0.0, 0.0] for _ in range(10)]  # by confidence: expected, accepted
        self.places = [[0.0, 0.0] for _ in range(block)]  # judged, accepted if those before were
        self._built = set()  # numbers of drafts whose kernels are there
        self._looks = (0.0, 0.0)  # tokens and seconds of cycles that see confidences
        self._script, self._probing = list(_WARM_UP), False
        self._pause, self._wait, self._trial = 0, _SHORTEST, False
        self._most, self._hopeless = 0, False  # the longest block; not even that could pay
        # In plain steps: gains of all cycles, and of those since the last pause.
        self._gain = self._lately = 0.0
        self._tokens = self._cycles = 0

    def begin(self):
        """A new text: it may pay where the last one did not."""
        if not self._hopeless:
            self._pause, self._wait = min(self._pause, _SHORTEST), _SHORTEST

    def plan(self, most: int, fixed: bool = False) -> Plan:
        """The next step, of at most `most` drafts; `fixed`: a cycle verifies that many."""
        self._most = max(self._most, most)
        plan = self._plan(most, fixed)
        self._tokens += plan.skip is not None
        return plan

    def _plan(self, most: int, fixed: bool) -> Plan:
        self._probing = False
        if not self._script and None in (self.plain.value, self.draft.value):
            self._script = [*_MEASURE, "probe"]
        if self._script:
            self._probing = self._script.pop(0) == "probe"
            return Plan() if self._probing else Plan("measure")
        if self._pause > 0:
            self._pause -= 1
            self._trial = self._pause == 0
            return Plan("no gain")
        if self._gain < -_GRANT - _SHARE * self._tokens:
            self._rest()
            return Plan("no gain")
        if self._cycles >= _REFRESH:
            self._cycles, self._script = 0, list(_MEASURE[1:])
            return Plan("measure")
        rate, plan = self._best(most, fixed)
        if rate > 1:
            self._trial = False
            return plan
        if most < self._most:
            return Plan("limit")  # of too few tokens nothing is learnt
        trial, self._trial = self._trial, False
        if trial:
            self._probing = True
            return Plan()
        self._rest()
        return Plan("no gain")

    def _best(self, most: int, fixed: bool) -> tuple[float, Plan]:
        """The way with the most tokens a plain step's time, and how many those are."""
        # Few lengths, since each has kernels of its own to be built.
        unseen = [most] if fixed else range(most, 0, -2)
        ways = [(self._unseen_rate(n), Plan(drafts=n)) for n in unseen]
        if not fixed:
            tokens, seconds = self._looks
            ways.append((tokens * self.plain.value / seconds if seconds else 0.0, Plan()))
        return max(ways, key=lambda way: way[0])

    def _unseen_rate(self, n: int) -> float:
        right, tokens = _PRIOR, 1.0
        chance = 1.0
        for judged, accepted in self.places[:n]:
            # Nothing known of a place: as the one before.
            right = (accepted + _WEIGHT * right) / (judged + _WEIGHT)
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

    def plain_took(self, seconds: list[float]):
        """Plain steps in a row, without those that fill the pipeline."""
        self.plain.add(_median(seconds))
        self._cycles = 0

    def cycle_took(self, cycle: Cycle):
        n, accepted = cycle.drafts, cycle.accepted
        self._tokens += 1 + accepted
        self._cycles += 1
        for i, c in enumerate(cycle.confidences[: min(n, accepted + 1)]):
            for count, expected in ((self.hits[min(9, int(10 * c))], c), (self.places[i], 1.0)):
                count[0] = 0.95 * count[0] + expected
                count[1] = 0.95 * count[1] + (i < accepted)
        if n not in self._built:
            self._built.add(n)
        elif cycle.ahead:
            self.ahead[n].add(cycle.draft + cycle.verify)
        else:
            self.draft.add(cycle.draft)
            self.launch.add(cycle.launch)
            self.verify[n].add(cycle.verify)
        if None in (self.plain.value, self.draft.value):
            return
        chosen, expected = self._worth(cycle.confidences[: cycle.cut])
        looks = (1 + expected, self._seen_cost(chosen))
        self._looks = tuple(0.9 * a + b for a, b in zip(self._looks, looks, strict=True))
        took = self._unseen_cost(n) if cycle.ahead else self._seen_cost(n)
        self._settle(1 + accepted - took / self.plain.value)

    def _settle(self, gain: float):
        self._gain = min(2 * _GRANT, self._gain + gain)
        self._lately += gain
        if self._lately >= _GRANT:
            self._wait = _SHORTEST

    def _rest(self):
        """Pause; what was learnt fades, or a try after the pause would verify nothing."""
        self._pause, self._wait = self._wait, min(2 * self._wait, _LONGEST)
        self._lately = 0.0
        costs = [self._unseen_cost(n) / (1 + n) for n in range(1, self._most + 1)]
        sure = len(self.verify[_PROBE].samples) > 1
        self._hopeless = sure and min(costs) >= self.plain.value  # even with all drafts right
        if self._hopeless:
            self._pause = _LONGEST
        for counts in (self.hits, self.places):
            counts[:] = [[a / 2, b / 2] for a, b in counts]
        self._looks = (0.0, 0.0)
        probed = self.verify[_PROBE]  # of which there will be more
        for cost in (*self.ahead, *self.verify):
            if cost is not probed and len(cost.samples) < _SURE:
                cost.samples = []

    def _right(self, confidence: float) -> float:
        """The chance that a draft is right, its confidence corrected by what came true."""
        expected, accepted = self.hits[min(9, int(10 * confidence))]
        return min(1.0, confidence * (accepted + 4.0) / (expected + 4.0))

    def _seen_cost(self, n: int) -> float:
        """Seconds of a cycle that sees confidences first and verifies n."""
        return (self.draft.value or 0.0) + self._verify_cost(n)

    def _unseen_cost(self, n: int) -> float:
        """Seconds of a cycle that verifies n unseen: measured, or what it saves is no launch."""
        if (known := self.ahead[n].value) is not None:
            return known
        guess = lambda k: self._seen_cost(k) - (self.launch.value or 0.0)  # noqa: E731
        near = _nearest(self.ahead, n)
        return guess(n) + (self.ahead[near].value - guess(near) if near is not None else 0.0)

    def _verify_cost(self, n: int) -> float:
        """Measured, or on the line from a plain step, with its launch, through what was."""
        if (known := self.verify[n].value) is not None:
            return known
        start, near = self.plain.value + (self.launch.value or 0.0), _nearest(self.verify, n)
        return start + (self.verify[near].value - start) * n / near if near else start


def _median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _nearest(costs: list[Cost], n: int) -> int | None:
    known = [k for k, cost in enumerate(costs) if k and cost.samples]
    return min(known, key=lambda k: abs(k - n), default=None)
