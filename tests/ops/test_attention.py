from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.cache import Ring
from ds4mlx.ops import metal
from ds4mlx.ops.attention import attend, attention, attention_reference
from ds4mlx.ops.rms_norm import rms_norm_reference
from ds4mlx.ops.rope import rope_reference, rotation
from ds4mlx.rows import FEW
from tests.close import assert_close, assert_same
from tests.golden_data import op_vectors
from tests.metal.bench import executed

H, DH, WINDOW = 3, 32, 5


def make(n, before=WINDOW, entries=9, seed=0):
    mx.random.seed(seed)
    q = mx.random.normal((n, H, DH))
    raw = mx.random.normal((before + n, DH))
    some = mx.random.normal((entries, DH))
    sink = mx.array([-20.0, 0.5, 60.0])
    ready = [min(entries, (before + i + 1) // 2) for i in range(n)]
    return q, raw, some, sink, ready


EPS = 1e-6


class Sequence:
    """A layer's queries, rows and entries, of which a block is evaluated at any position."""

    def __init__(self, tokens, H, Dh, R, window, ratio=0, topk=0, causal=True, extra=0):
        rng = np.random.default_rng(3)
        normal = lambda *s: mx.array(rng.normal(size=s), mx.float32)  # noqa: E731
        self.q, self.rows = normal(tokens, H * Dh), normal(tokens, Dh + extra)
        self.sink = mx.array(np.resize([-20.0, 0.5, 3.0, 60.0], H), mx.float32)
        self.turns = rotation(mx.arange(tokens), 0.5 ** mx.arange(R // 2))
        self.settings = dict(window=window, eps=EPS, causal=causal, ratio=ratio)
        self.topk, self.ratio = topk, ratio
        if ratio:
            self.settings["entries"] = normal(tokens // ratio + 1, Dh)
        if topk:
            self.picks = [rng.permutation(max(topk, (t + 1) // ratio)) for t in range(tokens)]

    def run(self, op, position, n):
        ring = Ring(self.settings["window"] + 8, self.rows.shape[1])
        for at in range(max(0, position - ring.rows.shape[0]), position):
            ring.write(at, self.rows[at : at + 1])
        selected = None
        if self.topk and (position + n) // self.ratio > self.topk:
            picks = [np.sort(self.picks[t][: self.topk]) for t in range(position, position + n)]
            selected = mx.array(np.stack(picks), mx.uint32)
        part = slice(position, position + n)
        return op(
            self.q[part],
            self.rows[part] if n > FEW else ring.written(position, self.rows[part]),
            ring,
            self.sink,
            self.turns[part],
            position,
            selected=selected,
            **self.settings,
        )


@dataclass(frozen=True)
class Block:
    """`n` rows from `position` on, as a case of tests/metal/cases.py."""

    make: Callable
    mode: str
    position: int
    n: int

    def launched(self, rows):
        sequence = self.make()
        run = partial(sequence.run, attention, self.position)
        return lambda _: run(min(rows, self.n)), [mx.zeros(1)]

    def verify(self, place=None):
        place, sequence = place or partial(executed, self.mode), self.make()
        with place():
            block = sequence.run(attention, self.position, self.n)
            for i in range(self.n if sequence.settings["causal"] else 0):
                alone = sequence.run(attention, self.position + i, 1)
                assert_same(block[i : i + 1], alone)
        with metal.reference():
            want = sequence.run(attention, self.position, self.n)
        assert_close(block, np.array(want), atol=4e-6)


CASES = {
    "first": Block(lambda: Sequence(9, 1, 128, 4, 5), "check", 0, 1),
    "window": Block(lambda: Sequence(40, 3, 128, 64, 5, extra=4), "check", 11, 8),
    "no entry yet": Block(lambda: Sequence(80, 3, 128, 8, 5, ratio=2), "check", 0, 5),
    "entries": Block(lambda: Sequence(80, 3, 128, 8, 5, ratio=2), "check", 70, 3),
    "some rows select": Block(lambda: Sequence(80, 3, 128, 8, 5, 2, topk=34), "check", 66, 6),
    "splits of several tiles": Block(lambda: Sequence(1200, 1, 128, 8, 1100), "check", 1130, 1),
    "draft, short": Block(lambda: Sequence(20, 3, 128, 8, 7, causal=False), "check", 3, 5),
    "draft": Block(lambda: Sequence(20, 3, 128, 8, 7, causal=False), "check", 12, 5),
    "flash": Block(lambda: Sequence(2070, 64, 512, 64, 128, 4, 512, extra=64), "guard", 2049, 4),
    "flash draft": Block(lambda: Sequence(300, 64, 512, 64, 128, causal=False), "guard", 290, 5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


@pytest.mark.parametrize("op", [attention, attention_reference])
@pytest.mark.parametrize("position, n", [(40, 1), (40, 3), (37, 9)])
def test_queries_and_results_are_turned_and_keys_come_from_the_ring(op, position, n):
    s = Sequence(60, 3, 32, 8, 5, ratio=4)
    q = rope_reference(rms_norm_reference(s.q.reshape(60, 3, 32), None, EPS), s.turns)
    want = []
    for t in range(position, position + n):
        keys = mx.concatenate([s.rows[t - 4 : t + 1], s.settings["entries"][: (t + 1) // 4]])
        want.append(exact(q[t], keys, s.sink))
    want = rope_reference(
        mx.array(np.stack(want), mx.float32), s.turns[position : position + n], True
    )
    assert_close(s.run(op, position, n), np.array(want), atol=4e-6)


def exact(q, keys, sink):
    """One query over its visible rows, in float64."""
    q, keys, sink = (np.array(a, dtype=np.float64) for a in (q, keys, sink))
    scores = q @ keys.T * q.shape[-1] ** -0.5
    top = np.maximum(scores.max(-1), sink)
    weights = np.exp(scores - top[:, None])
    return weights @ keys / (weights.sum(-1) + np.exp(sink - top))[:, None]


def test_reference_matches_golden_vectors():
    v = {k: op_vectors()[f"sink_attention.{k}"] for k in ("q", "k", "mask", "sink", "o")}
    for i, mask in enumerate(np.array(v["mask"], dtype=bool)):
        keys = mx.array(np.array(v["k"])[mask])
        out = attend(v["q"][i : i + 1], keys, v["sink"], window=len(keys))
        assert_close(out[0], v["o"][i], atol=3e-6)


@pytest.mark.parametrize("n", [1, 2, 8, 9, 131])
def test_each_query_sees_its_own_window_and_ready_entries(n):
    q, raw, some, sink, ready = make(n)
    out = attend(q, raw, sink, window=WINDOW, entries=some, ready=ready)
    for i in range(n):
        end = raw.shape[0] - n + i + 1
        keys = mx.concatenate([raw[end - WINDOW : end], some[: ready[i]]])
        assert_close(out[i], exact(q[i], keys, sink), atol=2e-6)


@pytest.mark.parametrize("n", [1, 8, 9, 131])
def test_each_query_reads_only_the_selected_entries(n):
    q, raw, some, sink, _ = make(n)
    ready = [9] * n
    rng = np.random.default_rng(1)
    picks = mx.array(np.stack([np.sort(rng.permutation(9)[:4]) for _ in range(n)]), mx.uint32)
    selected = list(picks) if n <= 8 else picks
    out = attend(q, raw, sink, window=WINDOW, entries=some, ready=ready, selected=selected)
    for i in range(n):
        end = raw.shape[0] - n + i + 1
        keys = mx.concatenate([raw[end - WINDOW : end], some[picks[i]]])
        assert_close(out[i], exact(q[i], keys, sink), atol=2e-6)


@pytest.mark.parametrize("before", [0, 1, WINDOW])
def test_the_first_tokens_have_shorter_windows(before):
    q, raw, _, sink, _ = make(12, before=before)
    out = attend(q, raw, sink, window=WINDOW)
    for i in range(12):
        end = before + i + 1
        assert_close(out[i], exact(q[i], raw[max(0, end - WINDOW) : end], sink), atol=2e-6)


def test_entries_that_are_none_weigh_nothing():
    """Where fewer than k entries are ready, a query's list is filled up with NONE."""
    q, raw, some, sink, _ = make(9)
    ready, picks = [3] * 9, np.array([[0, 2, 2**32 - 1]] * 9, np.uint32)
    with executed("guard"):
        out = attend(
            q, raw, sink, window=WINDOW, entries=some, ready=ready, selected=mx.array(picks)
        )
    for i in range(9):
        end = raw.shape[0] - 9 + i + 1
        keys = mx.concatenate([raw[end - WINDOW : end], some[:3][mx.array([0, 2])]])
        assert_close(out[i], exact(q[i], keys, sink), atol=2e-6)


def test_rows_of_a_block_equal_rows_alone():
    q, raw, some, sink, ready = make(8)
    selected = [None, None, None] + [mx.array([0, 2], mx.uint32)] * 5
    block = attend(q, raw, sink, window=WINDOW, entries=some, ready=ready, selected=selected)
    for i in range(8):
        alone = attend(
            q[i : i + 1],
            raw[: WINDOW + i + 1],
            sink,
            window=WINDOW,
            entries=some,
            ready=ready[i : i + 1],
            selected=selected[i : i + 1],
        )
        assert_same(block[i], alone[0])


@pytest.mark.parametrize("n", [1, 5, 9])
def test_without_a_causal_mask_every_query_sees_all_rows(n):
    q, raw, _, sink, _ = make(n)
    out = attend(q, raw, sink, window=WINDOW, causal=False)
    for i in range(n):
        assert_close(out[i], exact(q[i], raw, sink), atol=2e-6)
