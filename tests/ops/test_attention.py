import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.attention import attention, attention_reference
from tests.close import assert_close, assert_same
from tests.golden_data import op_vectors
from tests.metal.bench import executed
from tests.metal.cases import Case

H, DH, WINDOW = 3, 32, 5


def make(n, before=WINDOW, entries=9, seed=0):
    mx.random.seed(seed)
    q = mx.random.normal((n, H, DH))
    raw = mx.random.normal((before + n, DH))
    some = mx.random.normal((entries, DH))
    sink = mx.array([-20.0, 0.5, 60.0])
    ready = [min(entries, (before + i + 1) // 2) for i in range(n)]
    return q, raw, some, sink, ready


def make_selected(H, Dh, C, K):
    """Each row reads its own row of raw and K of C entries."""
    rng = np.random.default_rng(3)
    entries, sink = mx.array(rng.normal(size=(C, Dh)), mx.float32), mx.arange(H) / 4.0
    picks = mx.array(np.stack([rng.permutation(C)[:K] for _ in range(8)]), mx.uint32)

    def op(q, raw, picks):
        n = q.shape[0]
        listed = dict(entries=entries, ready=[C] * n, selected=list(picks))
        return attention(q, raw, sink, window=1, **listed)

    q, raw = (mx.array(rng.normal(size=s), mx.float32) for s in ((8, H, Dh), (8, Dh)))
    return op, [q, raw, picks]


def make_block(H, Dh, S):
    """Every row reads all of raw, as in the block of a draft."""
    rng = np.random.default_rng(4)
    raw, q = (mx.array(rng.normal(size=s), mx.float32) for s in ((S, Dh), (8, H, Dh)))
    sink = mx.arange(H) / 4.0
    return lambda q: attention(q, raw, sink, window=1, causal=False), [q]


CASES = {
    "one key": Case(lambda: make_block(1, 128, 1), "check", atol=2e-6),
    "odd": Case(lambda: make_block(3, 128, 37), "check", atol=2e-6),
    "splits of several tiles": Case(lambda: make_block(1, 128, 1100), "check", atol=2e-6),
    "odd selected": Case(lambda: make_selected(3, 128, 45, 34), "check", atol=2e-6),
    "flash draft": Case(lambda: make_block(64, 512, 133), "guard", atol=2e-6),
    "flash selected": Case(lambda: make_selected(64, 512, 600, 512), "guard", atol=2e-6),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_matches_reference_and_rows_equal_rows_alone(case):
    case.verify()


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
        out = attention_reference(v["q"][i : i + 1], keys, v["sink"], window=len(keys))
        assert_close(out[0], v["o"][i], atol=3e-6)


@pytest.mark.parametrize("n", [1, 2, 8, 9, 131])
def test_each_query_sees_its_own_window_and_ready_entries(n):
    q, raw, some, sink, ready = make(n)
    out = attention_reference(q, raw, sink, window=WINDOW, entries=some, ready=ready)
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
    out = attention_reference(
        q, raw, sink, window=WINDOW, entries=some, ready=ready, selected=selected
    )
    for i in range(n):
        end = raw.shape[0] - n + i + 1
        keys = mx.concatenate([raw[end - WINDOW : end], some[picks[i]]])
        assert_close(out[i], exact(q[i], keys, sink), atol=2e-6)


@pytest.mark.parametrize("before", [0, 1, WINDOW])
def test_the_first_tokens_have_shorter_windows(before):
    q, raw, _, sink, _ = make(12, before=before)
    out = attention_reference(q, raw, sink, window=WINDOW)
    for i in range(12):
        end = before + i + 1
        assert_close(out[i], exact(q[i], raw[max(0, end - WINDOW) : end], sink), atol=2e-6)


def test_rows_of_a_block_equal_rows_alone():
    q, raw, some, sink, ready = make(8)
    selected = [None, None, None] + [mx.array([0, 2], mx.uint32)] * 5
    block = attention_reference(
        q, raw, sink, window=WINDOW, entries=some, ready=ready, selected=selected
    )
    for i in range(8):
        alone = attention_reference(
            q[i : i + 1],
            raw[: WINDOW + i + 1],
            sink,
            window=WINDOW,
            entries=some,
            ready=ready[i : i + 1],
            selected=selected[i : i + 1],
        )
        assert_same(block[i], alone[0])


def test_kernel_rows_of_a_causal_block_equal_the_reference_and_rows_alone():
    mx.random.seed(2)
    q, raw = mx.random.normal((8, H, 128)), mx.random.normal((11, 128))
    some, sink = mx.random.normal((70, 128)), mx.array([-20.0, 0.5, 60.0])
    ready = [0, 1, 1, 2, 2, 70, 70, 70]
    selected = [None] * 6 + [mx.array([0, 2], mx.uint32), mx.array([69, 3, 9], mx.uint32)]

    def rows(op, i, j):
        listed = dict(entries=some, ready=ready[i:j], selected=selected[i:j])
        return op(q[i:j], raw[: 3 + j], sink, window=WINDOW, **listed)

    with executed("check"):
        block = rows(attention, 0, 8)
        for i in range(8):
            assert_same(block[i : i + 1], rows(attention, i, i + 1))
    assert_close(block, rows(attention_reference, 0, 8), atol=2e-6)


@pytest.mark.parametrize("n", [1, 5, 9])
def test_without_a_causal_mask_every_query_sees_all_rows(n):
    q, raw, _, sink, _ = make(n)
    out = attention_reference(q, raw, sink, window=WINDOW, causal=False)
    for i in range(n):
        assert_close(out[i], exact(q[i], raw, sink), atol=2e-6)
