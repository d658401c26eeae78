"""Drafted greedy decoding is plain greedy decoding, tokens and live caches, bit for bit.

The tests run a part of the comparisons; all of them, a quarter of an hour on two cores, and through
the kernels where there is a GPU, or those of some types of experts:
python -m tests.test_identity --all [mxfp4] [q4_k] [iq2_xxs]
"""

import copy
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import ds4mlx
from ds4mlx import ops
from ds4mlx.cache import Cache
from ds4mlx.check import Recorder
from ds4mlx.convert.pair import transcode
from ds4mlx.draft import Block
from ds4mlx.generate import Speculation, decode, prefill
from ds4mlx.loading import EMBEDDED, EMBEDDED_DRAFT
from ds4mlx.sampling import Sampler
from ds4mlx.schedule import Schedule
from tests.close import assert_same
from tests.golden_data import HERE
from tests.metal.bench import executed

PROMPTS = [prompt["prompt"] for prompt in json.loads((HERE / "nano.json").read_text())]
EXPERTS = ("mxfp4", "q4_k", "iq2_xxs")  # iq2_xxs with Q2_K down, as in ds4's q2 file
THRESHOLDS = (0.0, 0.5, 0.7, 1.0)
LENGTHS = (1, 127, 128, 129)  # the window holds 128; windows of 4 and of 128 close there
KINDS = ("random", "all wrong", "all right", "alternating")
TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One continuation: of which pair and prompt, how it is drafted and how it ends."""

    experts: str
    length: int
    text: int = 0  # which prompt
    threshold: float = 0.0
    kind: str = "trained"  # who drafts
    stop_at: int | None = None  # the plain text's token of this number is a stop token
    leave_at: int | None = None  # the loop is left after so many tokens
    schedule: bool = False

    def __str__(self):
        changed = {k: v for k, v in vars(self).items() if v != getattr(Case, k, None)}
        return ", ".join(f"{name} {value}" for name, value in changed.items())


def all_cases() -> list[Case]:
    cases = [
        Case(experts, length, text, threshold)
        for experts, length, text, threshold in product(EXPERTS, LENGTHS, (0, 1), THRESHOLDS)
    ]
    cases += [Case(e, 250, 2, threshold) for e, threshold in product(EXPERTS, THRESHOLDS)]
    for experts, length in product(EXPERTS, LENGTHS):
        cases += [Case(experts, length, kind=kind) for kind in KINDS]
        cases += [Case(experts, length, kind="all right", stop_at=at) for at in (1, 3, 5)]
        cases += [Case(experts, length, text=1, stop_at=4, threshold=0.5)]
        cases += [Case(experts, length, kind="all right", leave_at=8)]
        cases += [Case(experts, length, text=1, threshold=0.7, schedule=True)]
    return cases


@cache
def pair(experts: str):
    """The embedded pair's draft with its target, the experts of both encoded so."""
    if experts == "mxfp4":
        return ds4mlx.load(mtp="embedded")._draft
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in (EMBEDDED, EMBEDDED_DRAFT)]
        for path in paths:
            transcode(files("ds4mlx") / "data" / path.name, path, experts)
        return ds4mlx.load(paths[0], mtp=paths[1])._draft


class Plain:
    """A prompt, and its plain continuation of TOKENS tokens."""

    def __init__(self, model, ids: list[int], tokens: int = TOKENS):
        self.model, self.ids = model, ids
        self.state, self.rings = Cache(model.target.config, len(ids) + 90), model.cache()
        rows = prefill(model.target, ids, self.state, chunk=50, draft=model, context=self.rings)
        *_, (self.streams, _) = rows
        self.tokens, *_ = self.decode(tokens)

    def decode(self, n: int = TOKENS, stop=(), leave_at: int | None = None):
        """-> (tokens, cache, context), the context fed row by row."""
        state, rings = copy.deepcopy((self.state, self.rings))
        recorder = Recorder(self.model.target)
        tokens = decode(recorder, self.streams, state, greedy(), limit=n, stop=stop)
        got = taken(tokens, leave_at)
        for taps in recorder.taps[: state.position - len(self.ids)]:
            self.model.extend(taps, rings)
        return got, state, rings

    def drafted(self, drafter, n: int = TOKENS, stop=(), leave_at: int | None = None, **options):
        """The same with drafts -> (tokens, cache, context, records)."""
        records = []
        loop = Speculation(
            self.model.target,
            drafter,
            *copy.deepcopy((self.state, self.rings)),
            greedy(),
            stop,
            report=records.append,
            **options,
        )
        got = taken(loop.decode(self.streams, n), leave_at)
        return got, loop.cache, loop.caught_up(), records


def greedy():
    return Sampler(0.0, 1.0, 0.0, 0)


def taken(tokens, leave_at: int | None) -> list[int]:
    """Tokens of a loop that is left after `leave_at` of them (None: read to its end)."""
    out = []
    for id in tokens:
        out.append(id)
        if len(out) == leave_at:
            break
    tokens.close()
    return out


class Adversary:
    """Drafts that know the plain text, and use it."""

    def __init__(self, plain: Plain, kind: str):
        self.model, self.config, self.extend = plain.model, plain.model.config, plain.model.extend
        self.text, self.kind = plain.ids + plain.tokens, kind
        self.rng = np.random.default_rng(1)

    def propose(self, anchor, context):
        n, vocab = self.config.dspark_block_size, self.model.target.config.vocab_size
        at = context.position + 1
        drafts = np.array((self.text + [0] * n)[at : at + n])
        if self.kind == "random":
            drafts = self.rng.integers(-5, vocab + 5, n)
        wrong = {"all wrong": slice(None), "alternating": slice(at % 2, None, 2)}
        if self.kind in wrong:
            drafts[wrong[self.kind]] += 1
        tokens = mx.concatenate([anchor, mx.array(drafts.astype(np.int32))])
        return Block(tokens, None, mx.array(self.rng.normal(1.0, 2.0, n).astype(np.float32)))


@cache
def plain(experts: str, length: int, text: int) -> Plain:
    ids = [id for prompt in PROMPTS[text:] + PROMPTS for id in prompt]
    return Plain(pair(experts), ids[:length])


def compared(case: Case) -> list[dict]:
    """Asserts that both ways agree -> records of the cycles."""
    base = plain(case.experts, case.length, case.text)
    drafter = base.model if case.kind == "trained" else Adversary(base, case.kind)
    stop = () if case.stop_at is None else {base.tokens[case.stop_at]}
    want, *states = base.decode(stop=stop, leave_at=case.leave_at)
    schedule = Schedule(drafter.config.dspark_block_size) if case.schedule else None
    got, *ends, records = base.drafted(
        drafter,
        stop=stop,
        leave_at=case.leave_at,
        confidence=case.threshold,
        schedule=schedule,
    )
    assert got == want
    for mine, its in zip(ends, states, strict=True):
        assert_same_state(mine, its)
    return [r for r in records if "rows" in r]


def assert_same_state(got, want):
    assert got.position == want.position
    for a, b in zip(got.live(), want.live(), strict=True):
        assert_same(a, b)


PART = [
    *(Case(e, n, 1) for e, n in zip(EXPERTS, (127, 129, 128), strict=True)),
    *(Case(e, n, 1, 0.5) for e, n in zip(EXPERTS, (1, 128, 127), strict=True)),
    *(Case("mxfp4", 129, kind=kind) for kind in KINDS),
    *(Case("mxfp4", 128, kind="all right", stop_at=at) for at in (1, 3)),
    *(Case("mxfp4", 1, text=1, threshold=t) for t in (0.7, 1.0)),
    Case("mxfp4", 250, 2),
    Case("mxfp4", 127, kind="all right", leave_at=8),
    Case("mxfp4", 128, 1, 0.7, schedule=True),
]


@pytest.mark.parametrize("case", PART, ids=str)
def test_a_drafted_continuation_is_the_plain_one(case):
    records = compared(case)
    if case.kind in ("all right", "all wrong") and case.stop_at is None:
        assert records[0]["accepted"] == (5 if case.kind == "all right" else 0)


def test_the_whole_comparison_is_of_200_continuations_and_more():
    cases = all_cases()
    assert len(set(cases)) == len(cases) >= 200 and set(PART) <= {*cases}


def test_kernels_draft_and_verify_what_they_decode_plainly():
    """A cycle that closes windows of 4 and of 128, every kernel executed on the CPU."""
    with executed("guard"):
        base = Plain(pair("mxfp4"), (PROMPTS[1] + PROMPTS[2])[:126], tokens=0)
        want, *states = base.decode(3)
        got, *ends, records = base.drafted(base.model, 3)
    assert got == want and records[0]["rows"] == 2
    for mine, its in zip(ends, states, strict=True):
        assert_same_state(mine, its)


def main(experts: Sequence[str]) -> int:
    counts, failed, start = Counter(), 0, time.perf_counter()
    cases = [case for case in all_cases() if case.experts in experts]
    for number, case in enumerate(cases):
        if number and number % 19 == 0:
            print(f"{number} of {len(cases)}, {failed} differ", flush=True)
        try:
            records = compared(case)
        except AssertionError as error:
            failed += 1
            print(f"DIFFERENT: {case}: {str(error).splitlines()[0]}", flush=True)
            continue
        counts["cycles"] += len(records)
        counts["drafted"] += sum(len(r["drafts"]) for r in records)
        counts["accepted"] += sum(r["accepted"] for r in records)
    told = ", ".join(f"{n} {name}" for name, n in counts.items())
    seconds = time.perf_counter() - start
    where = f"{mx.default_device()}, {ops.metal.backend() or 'references'}"
    print(f"{where}: {len(cases)} continuations, {failed} differ; {told}; {seconds:.0f} s")
    return failed > 0


if __name__ == "__main__":
    flag, *experts = sys.argv[1:] or [""]
    if flag != "--all" or not set(experts) <= set(EXPERTS):
        sys.exit(
            f"usage: python -m tests.test_identity --all {' '.join(f'[{e}]' for e in EXPERTS)}"
        )
    sys.exit(main(experts or EXPERTS))
