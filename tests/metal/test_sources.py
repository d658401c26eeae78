"""Where the CUDA compiler finds a kernel's text, and what it is told of registers."""

import os
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest

from ds4mlx.msl import cuda
from ds4mlx.ops import metal
from ds4mlx.ops.experts import Shared, experts
from ds4mlx.ops.linear import Gated, linears
from tests.ops.matrices import matrix


def included(name: str, text: str) -> Path:
    return Path(re.fullmatch(r'#include "(.+)"\n', metal.included(name, text))[1])


def test_a_source_is_what_includes_the_text():
    path = included("planted_0", "int seven;\n")
    assert path.is_absolute() and path.read_text() == "int seven;\n"
    assert included("planted_1", "").parent == path.parent


def test_a_forked_child_has_a_folder_of_its_own_and_leaves_that_of_its_parent():
    mine = included("planted_0", "").parent
    with patch.object(os, "getpid", lambda: 1):
        other = included("planted_0", "").parent
        assert other != mine
        metal._remove(1, other)
        metal._remove(2, mine)
    assert mine.exists() and not other.exists()
    del metal._made[1]


def test_a_folder_that_cuda_could_not_include_from_is_refused(tmp_path, monkeypatch):
    (tmp_path / 'qu"ote').mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / 'qu"ote'))
    with patch.object(metal, "_made", {}), pytest.raises(ValueError, match="with a quote in it"):
        included("planted_0", "")


@pytest.mark.parametrize(
    "type, rows, shared, bounds",
    [
        ("IQ2_XXS", 1, False, ["(32, 28)", None]),
        ("IQ2_XXS", 3, False, ["(32, 28)", "(64, 14)"]),
        ("Q8_0", 1, True, [None, "(32, 25)", None]),
        ("Q8_0", 3, True, ["(256, 2)", "(32, 25)", "(64, 14)"]),
        ("F16", 3, True, [None, None, None]),
    ],
)
def test_experts_of_packed_weights_tell_cuda_how_many_threadgroups_shall_fit(
    type, rows, shared, bounds
):
    w, found, x = matrix(type, 8, 256, 256), [], mx.zeros((rows, 256))

    def launch(kernel, inputs, template, grid, group, shapes, dtypes):
        header, _ = cuda.translate(kernel, inputs, template, dtypes)
        told = re.search(r"\n#define __global__ .*__launch_bounds__(.*)\n", header)
        found.append(told and told[1])
        assert told is None or told[1].startswith(f"({group[0]},")
        return [mx.zeros(s, d) for s, d in zip(shapes, dtypes, strict=True)]

    with patch.object(metal, "launch", launch), patch.object(metal, "enabled", lambda: True):
        met = Shared(*linears(x, [Gated(w[0], w[1], 1)]), w[2]) if shared else None
        experts(x, mx.zeros((rows, 2), mx.uint32), mx.ones((rows, 2)), w, w, w, 1, met)
    assert found == bounds
