"""The comparisons of size.py on the embedded pair, and that they see what is wrong."""

import sys
from functools import cache
from itertools import product
from unittest.mock import patch

import mlx.core as mx
import pytest

import ds4mlx
from ds4mlx.cache import Cache
from ds4mlx.target import Target
from tests.flash import size
from tests.metal.bench import executed

SMALL = {  # at the borders of windows of 4 and of 128
    "blocks": {"context": 118, "span": 12},
    "drafted": {"contexts": (5, 126), "tokens": 12},
    "rewind": {"borders": (127,), "around": 0},
}


@cache
def draft():
    return ds4mlx.load(mtp="embedded")._draft


def facts(part: str) -> list[size.Fact]:
    return list(size.PARTS[part](draft(), **SMALL[part]))


@pytest.mark.parametrize("part, count", [("blocks", 11), ("drafted", 6), ("rewind", 6)])
def test_the_embedded_pair_is_exact_in_every_comparison(part, count):
    found = facts(part)
    assert len(found) == count and all(same for _, same in found), found
    if part == "drafted":
        told = found[0][0].split("cycles, ")[1].split(" drafts")[0]
        accepted, proposed = map(int, told.split(" of "))
        assert 0 < accepted < proposed


@pytest.mark.parametrize("part", ["blocks", "drafted"])
def test_a_block_whose_rows_are_not_rows_alone_is_seen(part):
    right = Target.logits

    def wrong(self, x):
        return right(self, x) if len(x) == 1 else right(self, x)[:, ::-1]

    with patch.object(Target, "logits", wrong):
        assert not all(same for _, same in facts(part))


def test_a_rewind_that_leaves_a_trace_is_seen():
    right = Cache.rewind

    def wrong(self, n):
        right(self, n)
        if n:
            for layer in self.layers:
                layer.ring.rows = layer.ring.rows + 1e-6

    with patch.object(Cache, "rewind", wrong):
        assert not any(same for _, same in facts("rewind"))


def test_kernels_agree_with_their_references_and_a_wrong_one_is_seen():
    """Of two window layers and a CSA layer, executed on the CPU."""
    text = size.Text(draft().target, 9)
    text.read(9)
    arguments = draft().target, mx.array([5], mx.int32), text.cache
    experts = sys.modules["ds4mlx.ops.experts"]
    right = experts.experts_reference
    with executed("guard"):
        found = list(size.errors(*arguments, layers=3))
        with patch.object(experts, "experts_reference", lambda *a: right(*a) * 1.01):
            wrong = list(size.errors(*arguments, layers=1))
    assert [(i, op) for i, op, _ in found] == list(product(range(3), ("attn", "ffn")))
    assert all(0 < error < size.ALLOWED / 10 for *_, error in found), found
    assert [error > size.ALLOWED for *_, error in wrong] == [False, True], wrong


def test_two_layers_of_each_kind_are_compared_at_each_context_and_number_of_rows():
    found = list(size.kernels(draft(), contexts=(3, 130)))
    assert len(found) == 2 * 2 * 2 * size.KINDS and all(same for _, same in found)
    told = " ".join(what for what, _ in found)
    assert all(told.count(f"(ratio {r}), attn") >= 2 * 2 * 2 for r in (0, 4, 128))
    assert all(f"{n} rows after {c} tokens" in told for n in (1, 6) for c in (3, 130))


def test_each_fact_is_a_line_and_differences_are_counted(capsys):
    assert size.report("blocks", [("a", True), ("b", False), ("c", False)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line[: line.rindex(" (")] for line in lines] == [
        "blocks: same: a",
        "blocks: DIFFERENT: b",
        "blocks: DIFFERENT: c",
    ]


@pytest.mark.parametrize("same, status", [(True, 0), (False, 1)])
def test_the_command_runs_the_parts_that_are_asked_for(capsys, same, status):
    def stub(part):
        def compare(draft, **settings):
            """One fact."""
            return [(f"{part} of {settings}", same)]

        return compare

    with (
        patch.object(size, "flash", lambda recipe, layers: draft().target),
        patch.object(size, "flash_draft", lambda target: draft()),
        patch.dict(size.PARTS, {part: stub(part) for part in size.PARTS}),
    ):
        assert size.main(["--blocks", "--kernels", "--layers", "7"]) == status
        out = capsys.readouterr().out
        assert size.main(["--tokens", "9", "--contexts", "50", "7"]) == status
        every = capsys.readouterr().out
    assert [part for part in size.PARTS if f"{part} of" in out] == ["blocks", "kernels"]
    assert all(f"{part} of" in every for part in size.PARTS)
    assert "drafted of {'tokens': 9, 'contexts': [7, 50]}" in every


@pytest.mark.parametrize("layers", [-3, 0, 44])
def test_layers_that_flash_does_not_have_are_refused(capsys, layers):
    with pytest.raises(SystemExit):
        size.main([f"--layers={layers}"])
    assert f"--layers is {layers}, wanted 3 to 43" in capsys.readouterr().err
