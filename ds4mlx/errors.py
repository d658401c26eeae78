"""What a user can put right: one sentence that names the thing, what was found and wanted."""


class Ds4Error(Exception):
    """A model file or a run that cannot go on; the command line exits with `status`."""

    status = 1


class UsageError(Ds4Error):
    """A command or an option that cannot be meant: wrong path, wrong flag, wrong range."""

    status = 2


class FileError(Ds4Error):
    """A model file that is damaged, incomplete or inconsistent."""
