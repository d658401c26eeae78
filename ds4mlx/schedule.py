"""When drafting pays: measured costs against measured gains. It changes speed, never text."""

_WARM_UP = ("plain", "draft", "plain", "plain", "plain")  # the first of each is not counted
_GRANT, _SHARE = 2.0, 0.015  # what drafts may lose: plain steps, and a share of the text's
_SHORTEST, _LONGEST = 16, 128  # steps without drafts after drafts that did not pay
_REFRESH = 64  # cycles until the plain step is measured again


class Schedule:
    """Decides before every step whether to draft, and how many drafts to verify.

    All costs are seconds of the injected clock. A draft cycle gains what plain decoding of its
    tokens would have cost, less what it cost. While the gains of late are negative it pauses,
    each time longer, and tries again; what all tries lose is bounded by a share of the text.
    """

    def __init__(self, block: int):
        self.plain: float | None = None  # seconds of a plain step
        self.draft: float | None = None  # of a proposal
        self.verify: list[float | None] = [None] * (block + 1)  # by number of drafts
        self.hits = [[0.0, 0.0] for _ in range(10)]  # by confidence: expected, accepted
        self._script = list(_WARM_UP)
        self._pause, self._wait = 0, _SHORTEST
        # In plain steps: gains of late, gains of the whole text, what the last try lost.
        self._credit, self._gain, self._loss = _GRANT, 0.0, 0.0
        self._tokens = self._cycles = 0
        self._unpriced: list[tuple[int, float]] = []

    def skip(self) -> str | None:
        """Why the next step takes no draft; None: it does."""
        reason = self._reason()
        self._tokens += reason is not None
        return reason

    def _reason(self) -> str | None:
        if self._script:
            return "measure" if self._script.pop(0) == "plain" else None
        if self._pause > 0:
            self._pause -= 1
            return "no gain"
        if self._credit <= 0 and self._loss - self._gain > _GRANT + _SHARE * self._tokens:
            return "no gain"
        if self._cycles >= _REFRESH:
            self._cycles = 0
            return "measure"
        return None

    def drafts(self, confidences: list[float]) -> int:
        """How many of the drafts with these confidences are worth their rows."""
        if self.plain is None:
            return min(1, len(confidences))
        if self._credit >= 2 * _GRANT and self.verify[len(confidences)] is None:
            return len(confidences)  # there is room to learn what a longer block costs
        best, most, chance, expected = 0, 0.0, 1.0, 0.0
        for n, c in enumerate(confidences, 1):
            chance *= self._right(c)
            expected += chance
            gain = expected * self.plain - (self._cost(n) - self._cost(0))
            if gain > most:
                best, most = n, gain
        return best

    def plain_took(self, steps: int, seconds: float):
        """`steps` plain steps in a row."""
        if len(self._script) >= 3:  # the first step builds kernels
            return
        self.plain = _mean(self.plain, seconds / steps)
        while self._unpriced:
            self._settle(*self._unpriced.pop())

    def cycle_took(self, confidences: list[float], n: int, accepted: int, draft, verify):
        """A cycle: seconds of the proposal and of the verification of `n` drafts."""
        self._tokens += 1 + accepted
        self._cycles += 1
        for i, c in enumerate(confidences[: min(n, accepted + 1)]):
            bucket = self.hits[min(9, int(10 * c))]
            bucket[0] = 0.95 * bucket[0] + c
            bucket[1] = 0.95 * bucket[1] + (i < accepted)
        if self.plain is None:
            self._unpriced.append((1 + accepted, draft + verify))
            return
        self.draft = _mean(self.draft, draft)
        self.verify[n] = _mean(self.verify[n], verify)
        self._settle(1 + accepted, draft + verify)

    def _settle(self, tokens: int, seconds: float):
        gain = tokens - seconds / self.plain
        self._gain += gain
        self._credit = min(2 * _GRANT, 0.9 * self._credit + gain)
        if self._credit >= _GRANT:
            self._wait = _SHORTEST
        if self._credit < 0:
            self._credit, self._loss = 0.0, max(0.0, -gain)
            self._pause, self._wait = self._wait, min(2 * self._wait, _LONGEST)
            # What was learnt fades, or a try after the pause would verify nothing.
            self.hits = [[e / 2, a / 2] for e, a in self.hits]

    def _right(self, confidence: float) -> float:
        """The chance that a draft is right, its confidence corrected by what came true."""
        expected, accepted = self.hits[min(9, int(10 * confidence))]
        return min(1.0, confidence * (accepted + 4.0) / (expected + 4.0))

    def _cost(self, n: int) -> float:
        """Seconds of a verification of n drafts: measured, or on the line through what was."""
        if self.verify[n] is not None:
            return self.verify[n]
        known = [(k, v) for k, v in enumerate(self.verify) if k and v is not None]
        if not known:
            return self.plain
        k, v = min(known, key=lambda pair: abs(pair[0] - n))
        return self.plain + (v - self.plain) * n / k


def _mean(old: float | None, new: float) -> float:
    return new if old is None else 0.7 * old + 0.3 * new
