import math
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import mlx.core as mx
import pytest

from ds4mlx import bench, sweep
from ds4mlx.cache import Cache
from ds4mlx.errors import Ds4Error, UsageError
from ds4mlx.generate import Speculation, decode, prefill
from ds4mlx.graphs import Graphs
from ds4mlx.ops import metal
from ds4mlx.sampling import Sampler
from ds4mlx.schedule import Schedule
from ds4mlx.sweep import (
    TITLES,
    Forced,
    Sweep,
    alternated,
    break_even,
    built,
    filled,
    timed_tokens,
    token_bytes,
)
from ds4mlx.synthetic import flash
from ds4mlx.target import Target
from tests.golden_data import draft, target


@pytest.mark.parametrize("cost, block, p", [(1.0, 5, 0.0), (6.0, 5, 1.0), (1.5, 1, 0.5)])
def test_break_even_is_the_acceptance_that_pays_for_a_cycle(cost, block, p):
    assert break_even(cost, block) == pytest.approx(p, abs=1e-6)


def test_no_acceptance_pays_for_more_than_a_whole_block():
    assert break_even(6.01, 5) is None


def test_the_first_token_is_not_timed():
    def slow_at_first():
        for id in range(20):
            time.sleep(0.2 if id == 0 else 0)
            yield id

    ids, seconds = timed_tokens(slow_at_first())
    assert ids == [*range(20)] and 0 < seconds < 0.005


@pytest.mark.parametrize("traced, runs", [([0, 0], 2), ([1, 0], 2), ([3, 1, 0], 3), ([1] * 4, 4)])
def test_a_text_is_run_twice_and_until_it_builds_no_graph(traced, runs):
    done = []

    def run():
        Graphs.traces += traced[len(done)]
        done.append(len(done))
        return len(done)

    assert built(run) == len(done) == runs


def test_a_token_of_flash_reads_the_bytes_of_the_economics():
    """kernels.md: 7.73 GB always and 1.83 GB of routed experts."""
    assert token_bytes(flash("q2", seed=None)) / 1e9 == pytest.approx(7.73 + 1.83, rel=0.01)


def test_the_state_that_a_token_reads_grows_with_entries_only():
    cache = Cache(flash("q2", seed=None).config, 4096)
    window = 43 * 128 * 512 * 4
    csa, hca, keys = 21 * 512 * 4, 20 * 512 * 4, 21 * 128 * 4
    assert cache.read_bytes(1023) == window + 256 * csa + 8 * hca + 256 * keys
    assert cache.read_bytes(4095) == window + 512 * csa + 32 * hca + 1024 * keys


def test_a_restored_state_decodes_the_same_again():
    model, cache = target("s1_w16_r8"), Cache(target("s1_w16_r8").config, 128)
    *_, (streams, _) = prefill(model, list(range(30)), cache, chunk=16)
    saved, texts = cache.snapshot(), []
    for _ in range(3):
        texts.append(
            list(decode(model, streams, cache, Sampler(0.0, 1.0, 0.0, 0), limit=20, stop=()))
        )
        cache.restore(saved)
    assert texts[0] == texts[1] == texts[2] and cache.position == 30


@pytest.mark.parametrize("acceptance, own", [(1.0, True), (0.0, False)])
def test_a_forced_draft_proposes_the_text_or_something_else(acceptance, own):
    model = draft("s1_w16_r8")
    context, text = model.cache(), [5, 6, 7, 8, 9, 10, 11, 12]
    forced = Forced(model, text, acceptance, 0)
    tokens = [int(t) for t in forced.propose(mx.array([5], mx.int32), context).tokens]
    assert tokens[0] == 5
    assert all((t == w) == own for t, w in zip(tokens[1:], text[1:], strict=False))


def forced_loop(acceptance, **options):
    """(loop, streams of a prompt's last row, the text after it)"""
    model = draft("s1_w16_r8")
    cache, context = Cache(model.target.config, 128), model.cache()
    parts = prefill(model.target, list(range(30)), cache, chunk=16, draft=model, context=context)
    *_, (streams, _) = parts
    saved = cache.snapshot(), context.snapshot()
    greedy = lambda: Sampler(0.0, 1.0, 0.0, 0)  # noqa: E731
    text = list(decode(model.target, streams, cache, greedy(), limit=60, stop=()))
    cache.restore(saved[0])
    forced = Forced(model, text, acceptance, context.position)
    return Speculation(model.target, forced, cache, context, greedy(), (), **options), streams, text


@pytest.mark.parametrize("acceptance", [1.0, 0.0])
def test_a_forced_draft_stays_with_the_text_under_a_schedule(acceptance):
    records = []
    schedule = Schedule(draft("s1_w16_r8").config.dspark_block_size)
    loop, streams, text = forced_loop(acceptance, schedule=schedule, report=records.append)
    assert list(loop.decode(streams, 50)) == text[:50]
    cycles = [r for r in records if "rows" in r]
    assert cycles
    assert all(r["accepted"] == (r["rows"] - 1 if acceptance else 0) for r in cycles)


def test_a_forced_draft_adds_no_wait_to_a_cycle():
    waits, at = [], []
    loop, streams, _ = forced_loop(0.62, report=lambda record: at.append(len(waits)))
    original = mx.eval
    with patch.object(mx, "eval", lambda *arrays: waits.append(arrays) or original(*arrays)):
        list(loop.decode(streams, 30))
    assert at[:5] == [2, 3, 4, 5, 6]  # the first anchor is awaited before the first cycle


def test_plain_and_drafted_text_are_timed_in_turn():
    order, seconds = [], iter([9.0, 6.0, 3.0, 5.0, 7.0])

    def plain():
        order.append("plain")
        return [], next(seconds)

    def drafted():
        order.append("drafted")
        return 2.5, 4.0

    assert alternated(plain, drafted) == (2.5, 1.5)
    assert order == ["drafted"] * 2 + ["plain", "drafted"] * 5


def test_a_restored_state_rewinds_no_further_than_the_saved_one():
    cache = Cache(target("s1_w16_r8").config, 64)
    cache.advance(40)
    cache.rewind(6)
    cache.restore(cache.snapshot())
    with pytest.raises(UsageError, match="wanted 0 to 2"):
        cache.rewind(3)


def test_every_figure_of_a_point_is_measured():
    model = draft("s1_w16_r8")
    points = list(Sweep(model.target, model, chunk=16).points(16, 40, mul=2.0, tokens=12))
    assert [p.ctx for p in points] == [16, 32]
    for p in points:
        assert p.prefill_tokens_per_second > 0 and p.decode_tokens_per_second > 0
        assert len(p.verify_ms) == model.config.dspark_block_size + 1
        assert p.forced.keys() == p.accepted.keys() == {0.85, 0.62, 0.0}
        assert p.accepted[0.0] == 0 and p.cells()[-1].endswith("(0.0)")
        assert 0 < p.bandwidth_share < 1 and p.draft_ms > 0
        assert 0 < p.prefill_bytes <= p.peak_bytes and p.prefill_bytes < p.planned_bytes
        assert all(math.isfinite(ratio) and ratio > 0.01 for ratio in p.forced.values())


def test_a_block_is_timed_as_a_cycle_hands_it_over():
    seen, call = [], Target.__call__

    def spied(self, ids, cache, pace=None, submit=None):
        seen.append((ids.shape[0], submit))
        return call(self, ids, cache, pace, submit)

    model = draft("s1_w16_r8")
    with patch.object(Target, "__call__", spied):
        next(Sweep(model.target, model, chunk=16).points(16, 16, mul=2.0, tokens=4))
    assert {n for n, submit in seen if submit is mx.async_eval} == set(range(1, 7))


def test_contexts_can_be_filled_with_random_states():
    measured = Sweep(target("s1_w16_r8"), chunk=16)
    points = list(measured.points(16, 40, mul=2.0, tokens=12, fill=True))
    assert [p.ctx for p in points] == [16, 32]
    assert all(p.prefill_tokens_per_second is None is p.planned_bytes for p in points)
    cells = dict(zip(TITLES, points[0].cells(), strict=True))
    assert {cells[name] for name in ("prefill t/s", "prefill GB", "planned GB")} == {""}
    assert all(p.decode_tokens_per_second > 0 for p in points)
    cache = filled(Cache(target("s1_w16_r8").config, 40), 31)
    assert cache.position == 31
    assert all(mx.abs(a).max() > 0 for a in cache.live())


def test_every_graph_of_a_drafted_text_is_built_before_it_is_timed():
    model = flash(layers=5, seed=None)
    cache = Cache(model.config, 200)
    cache.advance(110)
    saved, text = cache.snapshot(), [1] * 24
    with patch.object(sweep, "copy_bandwidth", return_value=1.0), metal.traced(Counter()):
        extended = []
        draft = SimpleNamespace(
            config=SimpleNamespace(dspark_block_size=5),
            extend=lambda taps, _: extended.append(taps.shape[0]),
        )
        context = SimpleNamespace(arrays=list)
        Sweep(model, draft)._build(text, cache, context, lambda: cache.restore(saved))
        assert {*extended} == {*range(1, 9)}
        assert cache.position == 110
        traces = Graphs.traces
        for at in range(110, 134):
            for rows in range(1, 7):
                cache.advance(at - cache.position)
                model(mx.array(text[:rows], mx.int32), cache)
                cache.restore(saved)
    assert Graphs.traces == traces > 10


@pytest.mark.parametrize("option", ["csv", "plot"])
def test_a_figure_file_that_fails_at_last_is_named_and_loses_no_figure(
    tmp_path, option, monkeypatch
):
    path = tmp_path / "figures.png"
    monkeypatch.setattr(bench, "find_spec", lambda name: True)  # it may not be here
    monkeypatch.setattr(sweep, "plot", lambda points, path: Path(path).write_text(""))
    lines = bench.sweep_rows(ctx_start=8, ctx_max=8, gen_tokens=8, **{option: str(path)})
    told = [next(lines)]
    path.mkdir()
    with pytest.raises(Ds4Error, match=r"figures\.png: .*; the figures stand above"):
        told.extend(lines)
    assert told[-1].startswith("| 8 |")
