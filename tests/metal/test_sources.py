"""Where the CUDA compiler finds a kernel's text."""

import os
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

from ds4mlx.ops import metal


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
