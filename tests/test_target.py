"""The target against an independent reference, and against itself in other portions."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from unittest.mock import patch
from weakref import ref

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.cache import Cache, Ring, Step
from ds4mlx.errors import UsageError
from ds4mlx.graphs import Graphs
from ds4mlx.ops import metal
from ds4mlx.rows import FEW
from ds4mlx.synthetic import flash
from ds4mlx.target import Attention, Indexer, MoE
from tests.close import assert_close, assert_same
from tests.golden_data import CASES, description, folder, op_vectors, target, vectors

ATOL = 5e-4  # the reference's own noise is 3e-5; more than 3e-4 is a bug


def case_param(name: str, *more):
    missing = pytest.mark.skipif(
        folder(name) is None, reason=f"{name} is not beside this checkout (../shared/golden)"
    )
    return pytest.param(name, *more, marks=missing)


cases = pytest.mark.parametrize("case", [case_param(name) for name in CASES])


def feed(model, cache, ids, plan):
    """Logits and taps of all rows, the ids going in portions as `plan` says."""
    outputs, at = [], 0
    for n in plan:
        streams, taps = model(mx.array(ids[at : at + n], mx.int32), cache)
        outputs.append((model.logits(streams), taps))
        mx.eval(outputs[-1], cache.arrays())
        at += n
    return tuple(mx.concatenate(parts) for parts in zip(*outputs, strict=True))


@cache
def single_rows(case, rounding=False):
    """Logits and taps of the case's first sequence, fed one token at a time."""
    model = target(case, round_kv=rounding, round_index=rounding)
    _, ids = next(batch(case))
    return feed(model, Cache(model.config, len(ids)), ids, [1] * len(ids))


def batch(case):
    for row, ids in enumerate(np.array(vectors(case)["ids"])):
        yield row, [int(i) for i in ids]


@cases
def test_prefill_matches_the_reference_at_every_position(case):
    model, v = target(case), vectors(case)
    for row, ids in batch(case):
        logits, taps = feed(model, Cache(model.config, len(ids)), ids, [len(ids)])
        assert_close(logits, v["full.logits"][row], atol=ATOL)
        assert_close(taps, v["taps"][row], atol=ATOL)


@cases
def test_chunks_match_the_reference_at_every_position(case):
    model, v = target(case), vectors(case)
    for row, ids in batch(case):
        cache = Cache(model.config, len(ids))
        logits, taps = feed(model, cache, ids, description(case)["chunk_plan"])
        assert_close(logits, v["full.logits"][row], atol=ATOL)
        assert_close(logits[v["probe"]], v["chunk.logits"][row], atol=ATOL)
        assert_close(taps, v["taps"][row], atol=ATOL)


@cases
def test_single_tokens_match_the_reference_at_every_position(case):
    model, v = target(case), vectors(case)
    for row, ids in batch(case):
        plan = [1] * len(ids)
        alone = single_rows(case) if row == 0 else feed(model, Cache(model.config, 512), ids, plan)
        logits, taps = alone
        assert_close(logits, v["full.logits"][row], atol=ATOL)
        assert_close(logits[v["probe"]], v["decode.logits"][row], atol=ATOL)
        assert_close(taps, v["taps"][row], atol=ATOL)


class Recorder:
    """Keeps what the modules of each layer take and give during one prefill."""

    def __init__(self, model, case):
        self.seen = {}
        v = vectors(case)
        ids = v["ids"][0]
        with (
            self.spy(Attention, "__call__", "attn"),
            self.spy(MoE, "__call__", "ffn"),
            self.spy(sys.modules["ds4mlx.ops.hc_mix"], "coefficients", "hc"),
            self.spy(sys.modules["ds4mlx.ops.hc_expand"], "hc_expand", "back"),
            self.spy(sys.modules["ds4mlx.ops.experts"], "chosen_by", "route"),
            self.spy(sys.modules["ds4mlx.ops.attention"], "attend", "attention"),
        ):
            self.cache = Cache(model.config, len(ids))
            x, taps = model(ids, self.cache)
            mx.eval(x, taps, self.seen)
        self.streams = x

    def spy(self, owner, name, key):
        original = getattr(owner, name)
        calls = self.seen.setdefault(key, [])

        def wrapped(*args, **kwargs):
            out = original(*args, **kwargs)
            arrays = [a for a in args if isinstance(a, mx.array)]
            calls.append((arrays, out if isinstance(out, tuple) else (out,)))
            return out

        return patch.object(owner, name, wrapped)


@cases
def test_intermediate_tensors_match_the_reference(case):
    model, v = target(case), vectors(case)
    record, probe, at = Recorder(model, case), v["probe"], {}
    seen = record.seen
    for i in range(model.config.num_hidden_layers):
        for k, part in enumerate(("attn", "ffn")):
            (inputs, _), mix = seen[part][i], seen["hc"][2 * i + k][1]
            _, y, *_ = seen["back"][2 * i + k][0]
            at[f"int.{i}.{part}_in"] = inputs[0][probe]
            at[f"int.{i}.{part}_out"] = y[probe]
            for name, value in zip(("pre", "post", "comb"), mix, strict=True):
                at[f"int.{i}.{part}_{name}"] = value[probe]
        q, raw = seen["attention"][i][0][:2]
        at[f"int.{i}.q"], at[f"int.{i}.kv"] = q[probe[-3:]], raw[probe]
        state = record.cache.layers[i]
        for name, entries in zip(("centries", "idx_keys"), state.entries, strict=False):
            at[f"int.{i}.{name}"] = entries
    elsewhere = ("route_ix", "route_w", "idx_score", "idx_sel")  # other tests look at these
    for name in (n for n in v if n.startswith("int.") and not n.endswith(elsewhere)):
        assert_close(at[name][: v[name].shape[0]], v[name], atol=ATOL)
    z = model.collapse(record.streams)
    assert_close(z[probe], v["final.collapsed"][0], atol=ATOL)
    assert_close(model.normed(z)[probe], v["final.normed"][0], atol=ATOL)


@cases
def test_streams_after_every_layer_match_the_reference(case):
    model, v = target(case), vectors(case)
    ids = v["ids"][0]
    step, cache = Step.of(model.config, 0, len(ids)), Cache(model.config, len(ids))
    layers = 0
    for i, op, x in model.sublayers(ids, step, cache):
        if op == "ffn":
            assert_close(x[v["probe"]], v[f"hidden.{i}"][0], atol=ATOL)
            layers += 1
    assert layers == model.config.num_hidden_layers


@cases
def test_routing_matches_the_reference(case):
    model, v = target(case), vectors(case)
    record, probe = Recorder(model, case), np.array(v["probe"])
    for i in range(model.config.num_hidden_layers):
        ids, weights = (np.array(a)[probe] for a in record.seen["route"][i][1])
        want, order = np.array(v[f"int.{i}.route_ix"]), np.argsort(ids, axis=1)
        want_order = np.argsort(want, axis=1)
        assert np.array_equal(
            np.take_along_axis(ids, order, 1), np.take_along_axis(want, want_order, 1)
        )
        got = mx.array(np.take_along_axis(weights, order, 1))
        reference = np.take_along_axis(np.array(v[f"int.{i}.route_w"]), want_order, 1)
        assert_close(got, reference, atol=ATOL)


@cases
def test_indexer_selections_match_the_reference(case):
    model, v = target(case), vectors(case)
    ids, probe = v["ids"][0], np.array(v["probe"])
    calls = []
    original = Indexer.__call__

    def wrapped(self, q, w, step, keys, turn):
        ready = [(i + 1) // 4 for i in range(step.rows)]
        calls.append((original(self, q, w, step, keys, turn), ready))
        return calls[-1][0]

    with patch.object(Indexer, "__call__", wrapped):
        model(ids, Cache(model.config, len(ids)))
    layers = [i for i, r in enumerate(model.config.compress_ratios) if r == 4]
    recorded = [(i, c) for i, c in zip(layers, calls, strict=True) if f"int.{i}.idx_sel" in v]
    assert recorded
    for i, (selected, ready) in recorded:
        want = np.array(v[f"int.{i}.idx_sel"])
        got = np.zeros_like(want)
        for row, p in enumerate(probe):
            chosen = np.array(selected[int(p)])
            got[row, chosen[chosen < ready[p]]] = 1
        assert np.array_equal(got, want)


@cases
def test_rejected_tokens_leave_no_trace_in_the_logits(case):
    """Keep ids[:at], take back up to 5 later tokens, then go on with others."""
    model, v = target(case), vectors(case)
    ids = [int(i) for i in v["ids"][0]]
    for k, at in enumerate(int(a) for a in v["rollback.at"]):
        dropped = ids[at : at + 5]
        alt = [int(i) for i in v["rollback.alt"][k]]
        cache = Cache(model.config, len(ids) + len(alt))
        feed(model, cache, ids[:at], [at])
        feed(model, cache, dropped, [len(dropped)])
        cache.rewind(len(dropped))
        logits, _ = feed(model, cache, alt, [len(alt)])
        assert_close(logits, v["rollback.logits"][k], atol=ATOL)


@pytest.mark.parametrize("case", [case_param("s3_flashlike")])
@pytest.mark.parametrize("kv, index", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("single", [False, True])
def test_rounding_agrees_within_the_steps_of_its_grid(case, kv, index, single):
    model, v = target(case, round_kv=kv, round_index=index), vectors(case)
    ids = [int(i) for i in v["ids"][0]]
    plan = [1] * len(ids) if single else [len(ids)]
    logits, _ = feed(model, Cache(model.config, len(ids)), ids, plan)
    name = {(1, 0): "kv", (0, 1): "idx", (1, 1): "both"}[(kv, index)]
    want = np.array(v[f"qat.{name}.logits"]).reshape(-1, logits.shape[-1])
    rows = slice(None) if len(want) == len(ids) else np.array(v["probe"])
    error = np.abs(np.array(logits)[rows] - want)
    assert error.mean() < 3e-3
    assert np.quantile(error, 0.999) < 5e-2
    moved = np.abs(np.array(logits)[rows] - np.array(v["full.logits"][0])[rows]).mean()
    assert 0.02 < moved < 0.07


def random_plan(rng, total, largest=8):
    plan = []
    while sum(plan) < total:
        plan.append(int(min(rng.integers(1, largest + 1), total - sum(plan))))
    return plan


@pytest.mark.parametrize(
    "case, rounding",  # only s3 is as wide as a block of the rounding
    [case_param(name, False) for name in CASES] + [case_param("s3_flashlike", True)],
)
def test_blocks_of_2_to_8_rows_equal_single_rows_bit_for_bit(case, rounding):
    model = target(case, round_kv=rounding, round_index=rounding)
    _, ids = next(batch(case))
    plan = random_plan(np.random.default_rng(0), len(ids))
    logits, taps = feed(model, Cache(model.config, len(ids)), ids, plan)
    alone, taps_alone = single_rows(case, rounding)
    assert_same(logits, alone)
    assert_same(taps, taps_alone)


@cases
def test_decoding_after_a_rewind_equals_decoding_that_never_saw_the_rejected_bit_for_bit(case):
    model = target(case)
    _, ids = next(batch(case))
    rng, vocab = np.random.default_rng(3), model.config.vocab_size
    alone, _ = single_rows(case)
    cache, rows = Cache(model.config, len(ids) + 8), []
    while len(rows) < len(ids):
        kept = ids[len(rows) : len(rows) + int(rng.integers(1, 5))]
        rejected = [int(i) for i in rng.integers(0, vocab, rng.integers(0, 9 - len(kept)))]
        logits, _ = feed(model, cache, kept + rejected, [len(kept) + len(rejected)])
        cache.rewind(len(rejected))
        rows.extend(logits[: len(kept)])
    assert_same(mx.stack(rows), alone)


def test_pooled_entries_match_golden_pools():
    v = op_vectors()
    for ratio in (4, 8, 128):
        kv, gate, ape, norm, want = (
            v[f"pool{ratio}.{n}"] for n in ("kv", "gate", "ape", "norm", "entries")
        )
        config = target("s1_w16_r8").config
        freqs, Dh = config.rope_freqs(compressed=True), 64
        for size in (len(kv), 1, 3, 9):
            ring, entries = Ring(max(len(kv), 2 * ratio) + 8, Dh + 2 * kv.shape[1]), []
            for at in range(0, len(kv), size):
                n = min(size, len(kv) - at)
                first, last = at // ratio, (at + n) // ratio
                windows = ops.rotation(mx.arange(first, last) * ratio, freqs)
                windows = windows if last > first else None
                pool = ops.Pool(
                    kv[at : at + n], gate[at : at + n], ape, norm, windows, ratio, False
                )
                q, turns = mx.zeros((n, Dh)), ops.rotation(mx.arange(n), freqs)
                ones, eps = mx.ones(Dh), config.rms_norm_eps
                _, rows, new = ops.latents(
                    q,
                    mx.zeros((n, 64)),
                    ones,
                    mx.ones(64),
                    turns,
                    [pool],
                    ring,
                    at,
                    rounded=False,
                    eps=eps,
                )
                if n <= FEW:
                    ring = ring.holding(rows)
                else:
                    ring.write(at, rows)
                entries += new
            assert_close(mx.concatenate(entries)[: len(want)], want, atol=2e-5)


def test_experts_of_a_chunk_are_given_its_pace():
    model, seen, original = target("s1_w16_r8"), [], ops.routed

    def pace(*arrays, within=False):
        pass

    def routed(*arguments, **more):
        seen.append(more["pace"] is pace)
        return original(*arguments, **more)

    with patch.object(ops, "routed", routed):
        model(mx.arange(20, dtype=mx.int32), Cache(model.config, 40), pace)
    assert seen == [True] * model.config.num_hidden_layers


def test_an_unfinished_window_writes_no_entry():
    model = target("s1_w16_r8")
    _, ids = next(batch("s1_w16_r8"))
    whole, single = Cache(model.config, 48), Cache(model.config, 48)
    feed(model, whole, ids[:40], [40])
    for n in range(1, 41):
        feed(model, single, ids[n - 1 : n], [1])
        for a, b, ratio in zip(
            single.layers, whole.layers, model.config.compress_ratios, strict=True
        ):
            if ratio:
                done = n // ratio
                got, want = a.entries[0], b.entries[0]
                if done:
                    assert_close(got[:done], want[:done], atol=1e-4)
                assert_same(got[done:], mx.zeros_like(got[done:]))


def test_steps_of_a_kind_share_their_graphs_within_a_thread():
    """Nothing is evaluated: the launches of a traced graph cannot run."""
    model = flash(layers=5, seed=None)
    built = []

    def steps():
        with metal.traced(Counter()):
            cache = Cache(model.config, 400)
            for _ in range(9):  # kinds: no window closes, one of 4 does
                model(mx.array([1]), cache)

    original = mx.compile
    with patch.object(mx, "compile", lambda run: built.append(run) or original(run)):
        steps()
        steps()
        assert len(built) == 2 * (1 + len(model.stretches))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(steps).result()
    assert len(built) == 4 * (1 + len(model.stretches))


def test_logits_of_few_rows_are_one_graph_a_number_of_rows():
    model, kernels = flash(layers=3, seed=None), Counter()
    x = mx.zeros((2, 4, 4096))
    with metal.traced(kernels):
        traces = Graphs.traces
        for rows in (1, 2, 1, 2):
            assert model.logits(x[:rows]).shape == (rows, 129280)
        assert Graphs.traces == traces + 2
        assert kernels == {"hc_head": 4, "rms_norm": 2, "linear": 2}
        model.logits(mx.zeros((9, 4, 4096)))
    assert Graphs.traces == traces + 2


def test_a_chunk_is_evaluated_sublayer_by_sublayer_and_comes_out_the_same():
    case = next(iter(CASES))
    model = target(case)
    _, ids = next(batch(case))
    part, held = mx.array(ids[:40], mx.int32), []
    want, _ = model(part, Cache(model.config, 64))
    got, _ = model(part, Cache(model.config, 64), lambda *arrays: held.append(arrays))
    assert_same(got, want)
    assert len(held) == 2 * model.config.num_hidden_layers


def test_a_step_of_graphs_is_handed_over_stretch_by_stretch():
    model, handed = flash(layers=8, seed=None), []
    assert [len(layers) for layers in model.stretches] == [2, 4, 2]
    with metal.traced(Counter()):
        x, taps = model(mx.array([1]), Cache(model.config, 8), submit=handed.append)
    assert len(handed) == 3
    assert handed[-1] is x
    assert taps.shape == (1, 3 * 4096)  # layers 5, 6 and 7: of two stretches
    assert [len(layers) for layers in flash(layers=6, seed=None).stretches] == [2, 4]


def test_a_stretch_lets_go_of_the_state_before_it_is_handed_over():
    """What somebody holds a scatter copies: all entries, for one."""
    model = flash(layers=8, seed=None)
    cache = Cache(model.config, 8)
    cache.advance(3)  # a window of 4 closes
    old, left = [[ref(a) for a in layer.arrays()] for layer in cache.layers], []

    def submit(_):
        left.append(sum(any(a() is not None for a in layer) for layer in old))

    with metal.traced(Counter()):
        model(mx.array([1]), cache, submit=submit)
    assert left == [6, 2, 0]


def test_a_step_that_breaks_leaves_a_cache_that_goes_on_but_rewinds_nothing_it_overwrote():
    model, ids = target("s1_w16_r8"), mx.arange(48, dtype=mx.int32)
    whole, torn, sublayers = Cache(model.config, 64), Cache(model.config, 64), count(1)

    def broken(*_, **__):
        if next(sublayers) == 2 * model.config.num_hidden_layers - 1:
            raise KeyboardInterrupt

    for state in (whole, torn):
        model(ids[:40], state)
    with pytest.raises(KeyboardInterrupt):
        model(ids[40:48], torn, broken)
    with pytest.raises(UsageError, match="wanted 0 to 0 at position 40"):
        torn.rewind(8)
    assert_same(model(ids[40:48], torn)[0], model(ids[40:48], whole)[0])
