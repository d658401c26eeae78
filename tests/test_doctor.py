"""`ds4mlx doctor`: the machine, and what files would need, without loading them."""

from importlib.metadata import version
from importlib.resources import files

import numpy as np
import pytest

from ds4mlx import __version__, cli, doctor, preflight
from ds4mlx.convert.gguf import Tensor, open_gguf
from ds4mlx.convert.write import typed, write_gguf
from ds4mlx.preflight import GIB, Device

NANO = str(files("ds4mlx") / "data" / "nano.gguf")
DRAFT = str(files("ds4mlx") / "data" / "nano-dspark.gguf")


@pytest.fixture(autouse=True)
def mac(monkeypatch):
    """A Mac, and no way to read a weight."""
    mac = Device("metal", "Apple M9", 128 * GIB, 107 * GIB)
    monkeypatch.setattr(preflight, "device", lambda: mac)

    def never(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Tensor, "read", never)


@pytest.fixture
def run(capsys):
    def run(*words):
        status = cli.main(["doctor", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_the_machine_is_told(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    assert "metal, Apple M9" in out and "the recommended working set 107.00 GiB" in out
    assert " free in " in out and " free\n" in out
    assert f"ds4mlx {__version__}" in out and f"mlx {version('mlx')}" in out


def test_a_target_is_judged_at_some_contexts_up_to_its_own(run):
    status, out, _ = run(NANO)
    rows = [line.split() for line in out.splitlines() if line.endswith("fits")]
    assert status == 0 and [row[0] for row in rows] == ["4096", "8192"]
    assert f"{NANO}: a target model, 0.02 GiB" in out


def test_a_draft_is_added_to_the_target(run):
    status, out, _ = run(DRAFT, NANO)
    alone, _, both = out.partition(f"with the draft {DRAFT}")
    assert status == 0 and f"{DRAFT}: a DSpark draft, 0.01 GiB" in alone
    draft = [line.split()[2] for line in both.splitlines() if line.endswith("fits")]
    assert draft == ["0.01", "0.01"]


def test_a_draft_alone_asks_for_its_target(run):
    status, out, _ = run(DRAFT)
    assert status == 0 and "name its target too" in out


def test_what_does_not_fit_comes_with_the_ways_that_help(run, monkeypatch):
    small = Device("metal", "Apple M9", 16 * GIB, GIB // 20)
    monkeypatch.setattr(preflight, "device", lambda: small)
    status, out, _ = run(NANO)
    assert status == 0 and out.count("does not fit") == 2
    assert "GiB short" in out and "iogpu.wired_limit_mb" in out


@pytest.mark.parametrize("text", [b"", b"<!DOCTYPE html>", b"version https://git-lfs.github.com"])
def test_a_file_of_no_use_is_named_and_the_others_are_still_examined(run, tmp_path, text):
    """MF-07."""
    (tmp_path / "bad.gguf").write_bytes(text)
    status, out, err = run(tmp_path / "bad.gguf", NANO)
    assert status == 1 and "1 of 2 files are of no use" in err
    assert f"{tmp_path / 'bad.gguf'}: of no use: " in out and out.count("fits") == 2


def test_a_pair_that_does_not_belong_together_is_told(run, tmp_path):
    """MF-14."""
    renamed = []
    for path, release in ((NANO, "0731"), (DRAFT, "preview")):
        source = open_gguf(path)
        # The header alone decides: every tensor is written as zeros.
        tensors = [
            (t.name, t.type, t.shape, np.zeros(t.nbytes, np.uint8)) for t in source.tensors.values()
        ]
        renamed.append(tmp_path / f"m-{release}.gguf")
        keys = typed(source.metadata) | {"general.version": ("STRING", release)}
        write_gguf(renamed[-1], keys, tensors)
    status, out, _ = run(*renamed)
    assert status == 1 and 'the draft is of checkpoint "preview", the target of "0731"' in out


def test_a_folder_of_safetensors_is_a_target(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    status, out, _ = run(tmp_path)
    assert status == 1 and f"{tmp_path}: of no use: {tmp_path}: there is no tokenizer.json" in out
    assert not doctor.is_draft(tmp_path)
