"""A conversion that is killed, or whose disk fills up, goes on as if nothing had happened."""

import errno
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds4mlx.convert import convert as module
from ds4mlx.convert import plan
from ds4mlx.convert.convert import JOURNAL, convert
from ds4mlx.convert.receipt import verify
from ds4mlx.errors import FileError, UsageError

from .files import tiny_draft
from .test_convert import content, target

KILLS = 30
ROOT = Path(__file__).parents[2]


def small_steps(set):
    """Several files, and entries of the journal and chunks of a few kilobytes."""
    set(plan, "FILE_BYTES", 150_000)
    set(module, "COMMIT", 20_000)
    set(module, "CHUNK", 4_000)
    set(os, "fsync", lambda file: None)  # a killed process loses nothing without it


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    small_steps(monkeypatch.setattr)
    return target(tmp_path / "t.gguf")


def each_step(act):
    """Calls `act` before everything that changes the disk."""
    for owner, name in (
        *((module, name) for name in ("write_at", "_sync", "_sync_folder", "_write_whole")),
        *((os, name) for name in ("ftruncate", "fsync", "open")),
        *((Path, name) for name in ("mkdir", "open", "replace", "unlink")),
    ):
        before = getattr(owner, name)

        def wrapped(*args, before=before, **kwargs):
            act()
            return before(*args, **kwargs)

        setattr(owner, name, wrapped)


def random_kills(folder: Path):
    """Prints how often a run was killed, and with entries in its journal; raises what is wrong."""
    source, rng = folder / "t.gguf", random.Random(5)
    whole = content(convert(source, folder / "whole"))
    assert in_a_child(counted, source, folder / "counted", folder / "steps") == 0
    steps, start = int((folder / "steps").read_text()), time.perf_counter()
    assert in_a_child(slowly, source, folder / "slow") == 0
    seconds = time.perf_counter() - start
    kills = resumed = 0
    for i in range(KILLS):
        out = folder / f"out{i}"
        for _ in range(1 + i % 3):  # a run that goes on may be killed too
            if i % 2:
                ended = in_a_child(dying, source, out, rng.randint(1, steps))
            else:
                wait = rng.uniform(0, seconds)
                ended = in_a_child(slowly, source, out, kill_after=wait)
            assert ended in (0, -signal.SIGKILL), (i, ended)
            kills += ended != 0
            if (out / "config.json").exists():
                found = content(out)
                found.pop(JOURNAL, None)
                assert found == whole, f"{out} looks complete, and is not"
            if ended == 0 or not (out / JOURNAL).exists():
                break
            resumed += (out / JOURNAL).read_bytes().count(b"\n") > 1
        if not (out / "config.json").exists() or (out / JOURNAL).exists():
            assert in_a_child(convert, source, out) == 0
        assert content(out) == whole, f"{out} differs from an undisturbed one"
    print(kills, resumed)


def killed_replacements(folder: Path):
    source, draft = folder / "t.gguf", folder / "d.gguf"
    new = content(convert(draft, folder / "new"))
    old = content(convert(source, folder / "old"))
    for step in range(1, 60, 3):
        out = convert(source, folder / f"out{step}")
        assert in_a_child(dying, draft, out, step, True) in (0, -signal.SIGKILL)
        found = content(out)
        found.pop(JOURNAL, None)
        assert "config.json" not in found or found in (old, new)
        if found != new or (out / JOURNAL).exists():
            convert(draft, out, overwrite=True)
        assert content(out) == new


def limited(folder: Path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(FileError, match="File too large.*same command again"):
        convert(folder / "t.gguf", folder / "out")


def dying(source: Path, out: Path, step: int, overwrite: bool = False):
    """Convert, and end by SIGKILL at the n-th step."""
    left = [step]

    def count():
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    each_step(count)
    convert(source, out, overwrite=overwrite)


def counted(source: Path, out: Path, to: Path):
    n = [0]

    def count():
        n[0] += 1

    each_step(count)
    convert(source, out)
    to.write_text(str(n[0]))


def slowly(source: Path, out: Path):
    each_step(lambda: time.sleep(0.0005))
    convert(source, out)


def in_a_child(act, *args, kill_after: float | None = None) -> int:
    """The exit status of a forked process, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act(*args)
            status = 0
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# Tests --------------------------------------------------------------------------------------


def in_a_process(name: str, folder: Path) -> str:
    """A function of this file in a new process, which may fork: it has no threads and no GPU."""
    command = [sys.executable, "-m", "tests.convert.test_resume", name, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversion_killed_at_random_moments_goes_on_to_the_same_bytes(tmp_path):
    target(tmp_path / "t.gguf")
    kills, resumed = map(int, in_a_process("random_kills", tmp_path).split())
    assert kills >= KILLS and resumed >= 10  # or the moments were badly chosen


def stop_after(monkeypatch, writes: int, error: OSError):
    left, write_at = [writes], module.write_at

    def failing(*args):
        left[0] -= 1
        if left[0] < 0:
            raise error
        write_at(*args)

    monkeypatch.setattr(module, "write_at", failing)


def test_a_disk_that_fills_up_is_one_sentence_and_the_next_run_goes_on(
    tmp_path, source, monkeypatch
):
    """CV-06."""
    whole, out = content(convert(source, tmp_path / "whole")), tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 100, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(FileError, match="No space left on device.*same command again"):
            convert(source, out)
    assert (out / JOURNAL).read_bytes().count(b"\n") > 1
    assert not (out / "config.json").exists()
    assert content(convert(source, out)) == whole


def test_a_limit_on_the_size_of_files_is_one_sentence_and_the_next_run_goes_on(tmp_path, source):
    out = tmp_path / "out"
    in_a_process("limited", tmp_path)
    assert not (out / "config.json").exists()
    assert content(convert(source, out)) == content(convert(source, tmp_path / "whole"))


def test_an_interrupted_conversion_goes_on_to_the_same_bytes(tmp_path, source):
    """CL-10."""

    def progress(stage, done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, progress=progress)
    assert content(convert(source, out)) == content(convert(source, tmp_path / "whole"))


def unfinished(source, out, monkeypatch, writes: int = 100):
    with monkeypatch.context() as patch:
        stop_after(patch, writes, OSError(errno.EIO, "broken"))
        with pytest.raises(FileError, match="broken"):
            convert(source, out)
    return out


def test_what_is_on_disk_is_not_written_again(tmp_path, source, monkeypatch):
    out = unfinished(source, tmp_path / "out", monkeypatch)
    left = []
    write_at = module.write_at
    monkeypatch.setattr(module, "write_at", lambda *args: (left.append(0), write_at(*args)))
    convert(source, out)
    again = len(left)
    left.clear()
    convert(source, tmp_path / "whole")
    assert again < len(left) - 50


def test_another_or_a_changed_file_does_not_go_on_unasked(tmp_path, source, monkeypatch):
    out = unfinished(source, tmp_path / "out", monkeypatch)
    other = tiny_draft(tmp_path / "d.gguf")
    with pytest.raises(UsageError, match="unfinished conversion of another file"):
        convert(other, out)
    os.utime(source, (1, 1))
    with pytest.raises(UsageError, match="has changed since; --overwrite"):
        convert(source, out)
    convert(other, out, overwrite=True)
    assert content(out) == content(convert(other, tmp_path / "whole"))


def test_a_lost_or_shortened_file_is_written_again(tmp_path, source, monkeypatch):
    whole = content(convert(source, tmp_path / "whole"))
    for harm in (Path.unlink, lambda path: os.truncate(path, 1000)):
        out = unfinished(source, tmp_path / f"out{harm}", monkeypatch)
        harm(out / sorted(name for name in whole if name.startswith("model-"))[0])
        assert content(convert(source, out)) == whole


def test_a_lost_file_is_not_taken_as_written_after_a_second_stop(tmp_path, source, monkeypatch):
    out = unfinished(source, tmp_path / "out", monkeypatch)
    (out / sorted(p.name for p in out.glob("model-*"))[0]).unlink()
    unfinished(source, out, monkeypatch, writes=5)
    assert content(convert(source, out)) == content(convert(source, tmp_path / "whole"))


def test_a_damaged_journal_is_not_followed(tmp_path, source, monkeypatch):
    out = unfinished(source, tmp_path / "out", monkeypatch)
    (out / JOURNAL).write_text("{]\n")
    with pytest.raises(UsageError, match="holds other files.*--overwrite"):
        convert(source, out)
    convert(source, out, overwrite=True)
    assert content(out) == content(convert(source, tmp_path / "whole"))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: 5,
        lambda entry: {"name": {}, "part": 0},
        lambda entry: {k: v for k, v in entry.items() if k != "planes"},
        lambda entry: entry | {"planes": {}},
        lambda entry: entry | {"sha256": "\ud800"},
        lambda entry: entry | {"error": "x"},
        lambda entry: entry | {"name": "another"},
    ],
)
def test_an_entry_that_no_run_has_written_makes_a_journal_damaged(
    tmp_path, source, monkeypatch, change
):
    out = unfinished(source, tmp_path / "out", monkeypatch)
    first, entry, *rest = map(json.loads, (out / JOURNAL).read_text().splitlines())
    lines = map(json.dumps, (first, change(entry), *rest))
    (out / JOURNAL).write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(UsageError, match="holds other files.*--overwrite"):
        convert(source, out)


def test_a_foreign_file_of_the_journals_name_is_not_written_over(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_text("my notes\n")
    with pytest.raises(UsageError, match=r"holds other files \(convert.journal\)"):
        convert(source, out)
    assert (out / JOURNAL).read_text() == "my notes\n"


def test_a_first_line_that_a_kill_cut_off_is_begun_anew(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_text('{"version": "')
    assert content(convert(source, out)) == content(convert(source, tmp_path / "whole"))


def test_a_journal_cut_off_in_its_last_line_is_used_up_to_there(tmp_path, source, monkeypatch):
    out = unfinished(source, tmp_path / "out", monkeypatch)
    with (out / JOURNAL).open("r+b") as file:
        file.truncate((out / JOURNAL).stat().st_size - 5)
    assert content(convert(source, out)) == content(convert(source, tmp_path / "whole"))


def test_a_killed_replacement_of_a_model_never_shows_a_mixed_one(tmp_path):
    target(tmp_path / "t.gguf")
    tiny_draft(tmp_path / "d.gguf")
    in_a_process("killed_replacements", tmp_path)


def test_an_unfinished_folder_is_not_verified(tmp_path, source, monkeypatch):
    out = unfinished(source, tmp_path / "out", monkeypatch)
    with pytest.raises(FileError, match="not a finished conversion"):
        verify(out)


if __name__ == "__main__":
    small_steps(setattr)
    globals()[sys.argv[1]](Path(sys.argv[2]))
