import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.ops.attention import attention_reference
from tests.close import assert_close, assert_same
from tests.golden_data import op_vectors

H, DH, WINDOW = 3, 32, 5


def make(n, before=WINDOW, entries=9, seed=0):
    mx.random.seed(seed)
    q = mx.random.normal((n, H, DH))
    raw = mx.random.normal((before + n, DH))
    some = mx.random.normal((entries, DH))
    sink = mx.array([-20.0, 0.5, 60.0])
    ready = [min(entries, (before + i + 1) // 2) for i in range(n)]
    return q, raw, some, sink, ready


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
