"""`ds4mlx check` and `ds4mlx bench-dspark` on the embedded pair."""

import csv
import hashlib
import json
from importlib.resources import files
from unittest.mock import patch

import mlx.core as mx
import pytest

from ds4mlx import bench, cli, ops
from ds4mlx.check import Check, hashes
from ds4mlx.errors import Ds4Error
from tests.test_dspark import PROMPT, model

DATA = files("ds4mlx") / "data"


def test_the_embedded_pair_passes_and_the_receipt_says_what_was_compared():
    check = Check(model(), [PROMPT], tokens=6)
    (line,) = check
    assert line.startswith("same: 'def gcd") and "6 tokens" in line
    (result,) = check.receipt["prompts"]
    assert check.receipt["passed"] and result["same_tokens"] and result["same_caches"]
    assert result["tokens"] == model().generate(PROMPT, tokens=6).tokens
    assert check.receipt["versions"].keys() == {"ds4mlx", "mlx", "python"}


def test_rows_that_see_their_neighbours_are_found_with_layer_and_op():
    """Each row of a block of several gets a little of the one before, in the experts of layer 2."""
    original, second = ops.routed, model()._target.layers[2].ffn.w1

    def leaking(x, choice, w1, *rest, **more):
        streams, part = original(x, choice, w1, *rest, **more)
        if w1 is second and 1 < x.shape[0] <= 8:
            before = mx.concatenate([mx.zeros_like(streams[:1]), streams[:-1]])
            streams = streams + 30 * before
        return streams, part

    check = Check(model(), [PROMPT], tokens=10)
    with patch.object(ops, "routed", leaking):
        (line,) = check
    (result,) = check.receipt["prompts"]
    assert not check.receipt["passed"] and check.failures == 1
    assert line.startswith("DIFFERENT") and "layer 2, ffn, row 1" in line
    assert result["divergence"]["margin"] > 0


def test_hashes_are_those_of_the_weight_files():
    found = hashes(None, "embedded")
    assert found.keys() == {"nano.gguf", "nano-dspark.gguf"}
    for name, digest in found.items():
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest


def test_the_command_writes_its_receipt_and_its_status_says_the_result(tmp_path, capsys):
    words = ["check", "-n", "3", "--receipt", str(tmp_path / "r.json"), "x = ", "import "]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.count("same: ") == 2
    receipt = json.loads((tmp_path / "r.json").read_text())
    assert receipt["passed"] and [p["prompt"] for p in receipt["prompts"]] == ["x = ", "import "]
    assert receipt["files"].keys() == {"nano.gguf", "nano-dspark.gguf"}
    with patch("ds4mlx.check.same_bits", lambda a, b: False):
        assert cli.main(words) == 1
    assert "2 of 2 prompts differ with drafts" in capsys.readouterr().err


def test_bench_alternates_both_ways_and_drops_the_first_of_each():
    asked = []
    original = type(model()).generate

    def generate(self, prompt, **options):
        asked.append(options.get("dspark_strict", False))
        return original(self, prompt, **options)

    with patch.object(type(model()), "generate", generate):
        *_, header, row = bench.dspark_rows([PROMPT], tokens=3, runs=2, csv=True)
    assert asked == [True, False] * 3
    names, values = csv.reader([header, row])
    assert len(names) == len(values) == 7
    assert values[0].startswith("'def gcd")
    assert values[6] in ("faster", "slower", "no difference")


class Run:
    def __init__(self, speed, drafted=4):
        told = {"accepted_share": 0.5, "drafted": drafted, "tokens_per_pass": 2.0}
        self.stats = {"generate_tokens_per_second": speed, "dspark": told}


@pytest.mark.parametrize(
    "ratio, verdict", [(1.1, "faster"), (1.0, "no difference"), (0.5, "slower")]
)
def test_the_verdict_is_that_of_the_ratio_of_medians(ratio, verdict):
    strict = [Run(s) for s in (10.0, 20.0, 1000.0)]
    drafted = [Run(s) for s in (1.0, 20.0 * ratio, 3000.0)]
    row = bench._compared("p", strict, drafted)
    assert row[1:] == [
        "20.0",
        f"{20 * ratio:.1f}",
        f"{ratio:.2f}",
        "2.00",
        "50% of 4",
        verdict,
    ]


@pytest.mark.parametrize("speeds, drafted", [((9.0, 5.0, 7.0), 2), ((9.0, 5.0, 7.0, 8.0), 2)])
def test_drafts_are_told_of_the_run_with_the_median_speed(speeds, drafted):
    runs = [Run(s, i) for i, s in enumerate(speeds)]
    assert bench._compared("p", [Run(7.0)] * len(runs), runs)[5] == f"50% of {drafted}"


def test_text_of_which_nothing_was_drafted_is_not_faster():
    drafted = [Run(30.0) for _ in range(3)]
    for run in drafted:
        run.stats["dspark"]["accepted_share"] = None
    row = bench._compared("p", [Run(20.0)] * 3, drafted)
    assert row[-2:] == ["none drafted", "no difference"]


@pytest.mark.parametrize("better", [22.0, 18.0])
def test_a_ratio_that_two_of_three_pairs_do_not_bear_out_is_no_difference(better):
    drafted = [Run(s) for s in (better, better, better, 40.0 - better, 40.0 - better)]
    assert bench._compared("p", [Run(20.0)] * 5, drafted)[-1] == "no difference"


def test_bench_fails_where_the_texts_differ():
    with (
        patch("ds4mlx.generate.leading", lambda truths: len(list(truths))),
        pytest.raises(Ds4Error, match="the drafted text is not the plain text"),
    ):
        drafting = {"dspark_confidence": 0.0, "dspark_schedule": False}
        list(bench.dspark_rows([PROMPT], tokens=12, runs=1, **drafting))
