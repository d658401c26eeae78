"""What a user can put right: one sentence that names the thing, what was found and wanted."""

from collections.abc import Iterator
from contextlib import contextmanager


class Ds4Error(Exception):
    """A model file or a run that cannot go on; the command line exits with `status`."""

    status = 1

    def __str__(self) -> str:
        """One line that any terminal can show, whatever names a hostile file has."""
        text = super().__str__()
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class UsageError(Ds4Error):
    """A command or an option that cannot be meant: wrong path, wrong flag, wrong range."""

    status = 2


class FileError(Ds4Error):
    """A model file that is damaged, incomplete or inconsistent."""


@contextmanager
def file_errors() -> Iterator[None]:
    """Around code, or a function, that reads files: an OSError becomes a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{error.filename or 'a file'}: {error.strerror or error}") from error
