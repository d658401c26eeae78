"""`ds4mlx selftest`: complete, and not to be fooled by a kernel that is wrong."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import cli, ops, selftest
from ds4mlx.convert.blocks import LAYOUTS, decode
from ds4mlx.convert.repack import unpack
from ds4mlx.errors import Ds4Error, UsageError
from ds4mlx.ops import metal
from ds4mlx.ops.dequantize import dequantize
from ds4mlx.ops.embed import takes
from ds4mlx.ops.experts_down import PLANES
from ds4mlx.ops.hc_collapse import hc_collapse_reference
from ds4mlx.selftest import Selftest
from ds4mlx.selftest_cases import QUICK, cases, matrix
from ds4mlx.target import Target
from tests.close import assert_close
from tests.metal.bench import executed

ROOT = Path(__file__).parents[1]
CASES = cases(QUICK)
# The module: the package's attribute of this name is the op.
COLLAPSE = sys.modules["ds4mlx.ops.hc_collapse"]


@contextmanager
def away_from_the_gpu():
    """As where there is a GPU: on the CPU there is no backend for kernels."""
    with patch.object(metal, "backend", lambda: None):
        yield


def told(*ops, quick=True):
    """The self-test of some ops with kernels on the CPU executor -> the run, and its text."""
    with executed("guard"), patch.object(selftest, "on_cpu", away_from_the_gpu):
        run = Selftest(quick)
        run._cases, run._with_model = [case for case in run._cases if case.op in ops], False
        return run, "".join(run)


def rows(text, op):
    return [line for line in text.splitlines() if line.startswith(f"| {op} ")]


@pytest.fixture
def collapse(monkeypatch):
    """Changes the kernel body of hc_collapse."""

    def change(old, new):
        kernel = COLLAPSE._kernel
        assert old in kernel.call
        monkeypatch.setattr(kernel, "call", kernel.call.replace(old, new))

    return change


WRITE = "out[thread_position_in_grid.y * x_shape[2] + thread_position_in_grid.x]"


def test_the_table_covers_every_kernel():
    assert {case.op for case in CASES} == {p.stem for p in ROOT.glob("metal/*.metal")}


def test_the_table_covers_every_weight_type_that_a_kernel_reads():
    named = lambda op: {case.shape.split()[0].strip(",") for case in CASES if case.op == op}  # noqa: E731
    assert set(LAYOUTS) - {"I32"} <= named("linear")
    assert set(PLANES) <= named("experts") and set(PLANES) <= named("experts_down")
    with patch.object(metal, "backend", lambda: "cpu"):
        tables = {type for type in named("linear") & set(LAYOUTS) if takes(matrix(type, 64, 256))}
    assert tables and tables <= named("embed")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.shape}")
def test_a_case_launches_the_kernel_whose_name_it_bears(case):
    names = []

    def launch(kernel, inputs, template, grid, group, shapes, dtypes):
        names.append(kernel.name)
        return [mx.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]

    work = case.make()
    with patch.object(metal, "backend", lambda: "cpu"), patch.object(metal, "launch", launch):
        work.run(work.weights, 0, 1 if case.alone else case.rows)
    assert case.op in names


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "MXFP4", "IQ2_XXS", "Q2_K"])
def test_packed_matrices_are_valid_blocks_of_finite_values(type):
    w = matrix(type, 3, 2, 256)
    values = np.array(dequantize(w))
    planes = {name: np.array(p).reshape(6, *p.shape[2:]) for name, p in w.planes.items()}
    assert np.array_equal(values.reshape(6, 256), decode(type, unpack(type, planes)))
    assert np.isfinite(values).all() and values.std() > 0


@pytest.mark.parametrize("op", ["rms_norm", "latents", "attention", "index_best", "embed"])
def test_kernels_pass(op):
    run, text = told(op)
    assert run.failures == [] and text.endswith(f"\nselftest: passed: all {run._done} on cpu\n")
    found = [[cell.strip() for cell in row.split("|")[3:6]] for row in rows(text, op)]
    assert len(found) == sum(case.op == op for case in CASES)
    for error, allowed, exact in found:
        assert float(error) <= float(allowed) and exact in ("exact", "-")


def test_a_report_begins_with_the_machine_the_versions_and_the_commit():
    _, text = told("rope")
    head = [line.partition(":")[0] for line in text.splitlines()[:7]]
    assert head == ["machine", "memory", "device", "disk", "software", "commit", "kernels"]


def test_a_wrong_kernel_fails_and_the_next_still_runs(collapse):
    collapse(";", f";\n{WRITE} *= 1.001f;")
    run, text = told("hc_collapse", "hc_expand", "argmax")
    (failure,) = run.failures
    assert failure.startswith("hc_collapse (4 x 512): output 0: error 1.0e-03, allowed 2e-06")
    assert len(rows(text, "hc_collapse")) == 1 and "FAILED: output 0" in text
    assert "exact" in rows(text, "hc_expand")[0] and "exact" in rows(text, "argmax")[0]
    assert text.endswith(f"\nFAILED: {failure}\n\nselftest: FAILED: 1 of 3 on cpu\n")


def test_rows_that_depend_on_their_block_fail(collapse):
    collapse(";", f";\n{WRITE} *= 1 + 3e-7f * thread_position_in_grid.y;")
    run, _ = told("hc_collapse")
    assert run.failures == [
        "hc_collapse (4 x 512): output 0: a row differs in a block of 2 and alone"
    ]


def test_a_kernel_that_is_not_built_fails(collapse):
    collapse("hc_collapse<HC>", "no_such_function<HC>")
    run, text = told("hc_collapse")
    assert "no_such_function" in run.failures[0]
    assert "FAILED" in rows(text, "hc_collapse")[0]


def test_a_launch_that_is_refused_fails(monkeypatch):
    monkeypatch.setattr(COLLAPSE._kernel, "inputs", ["x"])
    run, _ = told("hc_collapse")
    assert "kernel hc_collapse" in run.failures[0] and "takes 1 inputs" in run.failures[0]


def test_an_op_that_takes_its_reference_fails(monkeypatch):
    monkeypatch.setattr(ops, "hc_collapse", hc_collapse_reference)
    run, _ = told("hc_collapse")
    assert run.failures == [
        "hc_collapse (4 x 512): no kernel was launched: the op took its reference"
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_no_small_error(value):
    case = next(case for case in CASES if case.op == "hc_collapse")
    want = mx.ones((8, 4))
    with pytest.raises(Ds4Error, match=r"error inf, allowed 2e-06; at \(3, 1\)"):
        got = mx.ones((8, 4))
        got[3, 1] = value
        selftest._error(case, 0, got, want)


def test_infinities_of_the_reference_are_no_error():
    case = next(case for case in CASES if case.op == "index_scores")
    scores = mx.array([[2.0, -mx.inf]])
    assert selftest._error(case, 0, scores, scores) == 0


@pytest.mark.parametrize("many", [False, True])
def test_few_values_only_may_go_to_the_other_side_of_a_step(many):
    case = next(case for case in CASES if case.step)
    want, got = np.ones(4000, np.float32), np.ones(4000, np.float32)
    got[: 40 if many else 3] += 1 / 8
    if many:
        with pytest.raises(Ds4Error, match="error 1.2e-01"):
            selftest._error(case, 0, mx.array(got), mx.array(want))
    else:
        assert selftest._error(case, 0, mx.array(got), mx.array(want)) == 0


def test_whole_numbers_must_be_equal():
    case = next(case for case in CASES if case.op == "argmax")
    with pytest.raises(Ds4Error, match="1 of 2 integers differ"):
        selftest._error(case, 0, mx.array([3, 4]), mx.array([3, 5]))


def test_a_row_begins_before_its_kernel_runs():
    started = []
    with executed("guard"), patch.object(selftest, "compare", lambda *_: started.append(1) or 0):
        run = iter(Selftest(True, "hc_collapse"))
        for text in run:
            if text.startswith("| hc_collapse"):
                break
        assert text.rstrip().endswith("|") and not text.endswith("\n") and not started


def test_launches_are_measured(monkeypatch):
    monkeypatch.setattr(selftest, "_WORKING_SET", 1 << 20)
    monkeypatch.setattr(selftest, "_BATCH", 1 << 20)
    run, text = told("hc_expand", quick=False)
    assert run.failures == [] and "GB/s\n" in text and selftest.NOTE in text
    us, speed, share = (cell.strip() for cell in rows(text, "hc_expand")[0].split("|")[6:9])
    assert float(us) > 0 and float(speed) > 0 and float(share.rstrip("%")) >= 0


def test_on_a_cpu_the_references_run_and_it_says_so(capsys):
    assert cli.main(["selftest", "--quick", "--op", "argmax"]) == 0
    out = capsys.readouterr().out
    assert "kernels: NONE RUN" in out and "| argmax (reference)" in out
    assert out.endswith("selftest: NO KERNEL RAN; of the references passed: all 1\n")


def test_a_reference_whose_rows_see_each_other_is_a_failure_of_the_command(monkeypatch, capsys):
    wrong = lambda x, pre: hc_collapse_reference(x, pre) + 1e-3 * x.shape[0]  # noqa: E731
    monkeypatch.setattr(ops, "hc_collapse", wrong)
    assert cli.main(["selftest", "--quick", "--op", "hc_collapse"]) == 1
    out, err = capsys.readouterr()
    assert "NO KERNEL RAN; of the references FAILED: 1 of 1" in out
    assert err == "ds4mlx: the self-test found 1 failures\n"


def test_the_references_run_on_the_cpu_and_without_kernels():
    with executed("guard"), selftest.on_cpu():
        assert not metal.enabled() and mx.default_device() == mx.cpu


QUICKER = [case for case in CASES if case.op in ("experts", "experts_grouped")]
QUICKER += [case for case in CASES if case.shape.startswith("experts of")]


@pytest.mark.parametrize("case", QUICKER, ids=lambda case: f"{case.op}-{case.shape}")
def test_the_quicker_way_of_a_reference_gives_what_the_reference_gives(case):
    work = case.make()
    want = work.run(work.weights, 0, 8)
    assert_close(work.reference(work.weights, 0, 8), want, atol=1e-6 * mx.abs(want).max().item())


def test_a_kernel_is_compared_with_the_quicker_way():
    """A reference that is wrong alone cannot agree."""
    case = next(case for case in QUICKER if case.op == "experts")
    work = case.make()
    wrong = replace(work, reference=lambda *a: 1.001 * work.reference(*a))
    with executed("guard"), patch.object(selftest, "on_cpu", away_from_the_gpu):
        assert selftest.compare(case, work) <= case.allowed
        with pytest.raises(Ds4Error, match="error 1.0e-03, allowed 1e-05"):
            selftest.compare(case, wrong)


def test_an_unknown_op_is_bad_usage(capsys):
    with pytest.raises(UsageError, match="--op is 'linea', wanted one of linear, embed"):
        Selftest(True, "linea")
    assert cli.main(["selftest", "--op", "linea"]) == 2


def test_the_embedded_model_is_tried_at_the_end(capsys):
    assert cli.main(["selftest", "--op", "model"]) == 0
    greedy, blocks = rows(capsys.readouterr().out, "model")
    assert "24 tokens are those of the reference" in greedy and "35 rows are exact" in blocks


def test_another_text_of_the_embedded_model_fails(monkeypatch):
    """The way through kernels gets a head whose rows are shifted by one."""
    right = Target.logits

    def wrong(self, x):
        logits = right(self, x)
        return logits if metal._reference.get() else mx.roll(logits, 1, axis=-1)

    monkeypatch.setattr(Target, "logits", wrong)
    monkeypatch.setattr(selftest, "TOKENS", 1)
    with pytest.raises(Ds4Error, match="token 0 of 1 is .*, the reference's "):
        list(selftest._greedy_text())


def test_blocks_of_the_embedded_model_that_see_their_neighbours_fail(monkeypatch):
    right = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, x: right(self, x) + 1e-3 * x.shape[0])
    monkeypatch.setattr(selftest, "BLOCKS", (1, 2))
    with pytest.raises(Ds4Error, match=r"rows of blocks of \(1, 2\) differ from rows alone"):
        list(selftest._blocks())
