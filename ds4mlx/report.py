"""What a drafted run has to tell: records of its cycles, and what they come to."""

from collections import Counter

SILENT = 32  # cycles without one draft, or steps that skip it, after which the user is told


class DraftReport:
    """Collects the records of `Speculation.report` and sums them up."""

    def __init__(self, settings: dict):
        self.settings = settings  # what the run was asked for, as it goes into the statistics
        self.records: list[dict] = []

    def __call__(self, record: dict):
        self.records.append(record)

    @property
    def warning(self) -> str | None:
        """A sentence if drafting was asked for and nothing, or hardly anything, is drafted."""
        idle = sum(r.get("skipped") == "no gain" for r in self.records)
        if idle >= SILENT and 2 * idle > len(self.records):
            return (
                f"drafting did not pay and was left off in {idle} of {len(self.records)} steps; "
                "--dspark-schedule off drafts all the same"
            )
        cycles = [r for r in self.records if "rows" in r]
        if len(cycles) < SILENT or any(r["drafts"] for r in cycles):
            return None
        best = max(r["confidences"][0] for r in cycles)
        return (
            f"nothing was drafted in {len(cycles)} cycles: the highest confidence of a first draft "
            f"was {best:.2f}, the threshold is {self.settings['confidence']:g}"
        )

    def summary(self) -> dict:
        """Counts, rates, times in ms, histograms and all records, as plain values."""
        cycles = [r for r in self.records if "rows" in r]
        skipped = Counter(r["skipped"] for r in self.records if "skipped" in r)
        drafted = sum(len(r["drafts"]) for r in cycles)
        accepted = sum(r["accepted"] for r in cycles)
        passes = len(self.records)
        block = self.settings["block"]
        return self.settings | {
            "cycles": len(cycles),
            "skipped": dict(skipped),
            "drafted": drafted,
            "accepted": accepted,
            "accepted_per_cycle": accepted / len(cycles) if cycles else None,
            "accepted_share": accepted / drafted if drafted else None,
            "tokens_per_pass": (passes + accepted) / passes if passes else None,
            "accepted_histogram": [
                sum(r["accepted"] == n for r in cycles) for n in range(block + 1)
            ],
            "by_position": [self._position(cycles, i) for i in range(block)],
            "calibration": [_calibration(cycles, i) for i in range(10)],
            "ms": {
                part: sum(r[f"{part}_ms"] for r in cycles) for part in ("draft", "verify", "rest")
            },
            "warning": self.warning,
            "records": self.records,
        }

    def _position(self, cycles: list[dict], i: int) -> dict:
        drafted = sum(len(r["drafts"]) > i for r in cycles)
        accepted = sum(r["accepted"] > i for r in cycles)
        return {"drafted": drafted, "accepted": accepted}


def _calibration(cycles: list[dict], tenth: int) -> dict:
    """Drafts that were judged (all before them right) with a confidence in this tenth."""
    judged = [
        (c, i < r["accepted"])
        for r in cycles
        for i, c in enumerate(r["confidences"][: min(len(r["drafts"]), r["accepted"] + 1)])
        if min(9, int(10 * c)) == tenth
    ]
    n = len(judged)
    return {
        "from": tenth / 10,
        "drafts": n,
        "confidence": sum(c for c, _ in judged) / n if n else None,
        "accepted": sum(right for _, right in judged) / n if n else None,
    }
