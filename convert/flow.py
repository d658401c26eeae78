"""Bytes through a few threads, in order and in bounded memory: read, hash, change, hash again.

NumPy and hashlib let other threads run, so that two cores are busy.
"""

import fcntl
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import FileError, UsageError

CHUNK = 1 << 21  # bytes at a time
_AHEAD = 6  # chunks that are held at once


class Flow:
    """A context manager whose threads end with it; by default a few, as disks are the limit."""

    def __init__(self, workers: int | None = None):
        workers = workers or max(2, min(4, os.cpu_count() or 2))
        self._ahead = max(_AHEAD, workers + 2)
        self._pools = [ThreadPoolExecutor(n) for n in (workers, 1, 1)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)

    def run(
        self,
        chunks: Iterable,
        before: Callable,
        work: Callable,
        after: Callable,
        done: Callable[[int], None],
    ):
        """For each (size, chunk): before(chunk) and after(work(chunk)), each in order.

        `chunks` is drawn, and `done(size)` called, in the caller's thread. Raises what any of
        them raises.
        """
        pool, first, last = self._pools
        held = deque()

        def finish():
            size, *futures = held.popleft()
            for future in futures:
                future.result()
            done(size)

        for size, chunk in chunks:
            worked = pool.submit(work, chunk)
            then = last.submit(lambda f: after(f.result()), worked)
            held.append((size, first.submit(before, chunk), then))
            if len(held) >= self._ahead:
                finish()
        while held:
            finish()


def read_at(file: int, start: int, size: int, name) -> np.ndarray:
    """`size` bytes of an open file, uint8. Raises FileError that names the file."""
    out = np.empty(size, np.uint8)
    view, got = memoryview(out), 0
    try:
        while got < size and (n := os.preadv(file, [view[got:]], start + got)):
            got += n
    except OSError as error:
        raise FileError(f"{name}: {error.strerror}") from error
    if got < size:
        raise FileError(
            f"{name}: ends at byte {start + got}, wanted {start + size}: "
            "the file has become shorter since it was opened"
        )
    return out


def write_at(file: int, start: int, data: np.ndarray):
    """All bytes of an array to a place in an open file. Raises OSError."""
    view = memoryview(data).cast("B")
    while view:
        n = os.pwrite(file, view, start)
        view, start = view[n:], start + n


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when all went well, and else leaves nothing.

    Raises UsageError if another run is writing it, OSError.
    """
    part = path.with_name(path.name + ".part")
    with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other run may have ended between the two calls.
            free = part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat())
        except BlockingIOError:
            free = False
        if not free:
            raise UsageError(f"{path}: another run is writing this file")
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink()
            raise


def check_room(folder: Path, wanted: int):
    """Raises FileError if `folder` has no room for so many bytes, and some small files."""
    wanted += 1 << 25
    if wanted > (free := shutil.disk_usage(folder).free):
        raise FileError(
            f"{folder}: {wanted / 1e9:.2f} GB are to be written, {free / 1e9:.2f} GB are free; "
            "make room, or choose another disk"
        )
