"""Fetches ds4's official files: whole and checked under their own name, or not there at all.

Addresses, tokens, mirrors and errors are huggingface_hub's. The bytes are ours to take: its own
download begins again after every interruption, which is a day's work lost at 87 GB.
"""

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from .convert.gguf import foreign, open_gguf
from .errors import Ds4Error, FileError, UsageError

Progress = Callable[[str, int, int], None]  # stage, done, total

REPO = "antirez/deepseek-v4-gguf"
_SPAN = 8 << 30  # bytes asked for at a time: some servers answer for no more than 50 GB
_CHUNK = 1 << 16
_TRIES = 6  # in a row that bring nothing
_PAUSE = 0.25  # seconds, doubled by every try


@dataclass(frozen=True)
class Target:
    """An official file; without size or hash the server's word is taken for it."""

    file: str
    about: str
    memory: int  # GiB of weights, cache for 32,768 tokens and workspace; a draft adds its own
    nbytes: int | None = None
    sha256: str | None = None


_REST = "F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out-chat-v2"
TARGETS = {
    "ds4f-q2": Target(
        "DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731.gguf",
        "experts in 2 bits: for 128 GB machines",
        84,
        86_720_111_488,
        "ca22ae2f838e14077c22bc1c1417b71b45b5e5a3687bd96c2ac6e17fdb6261c0",
    ),
    "ds4f-q2-q4": Target(
        "DeepSeek-V4-Flash-Layers37-42Q4KExperts-OtherExpertLayersIQ2XXSGateUp-Q2KDown-AProjQ8-"
        "SExpQ8-OutQ8-chat-v2-imatrix-fixed-0731.gguf",
        "the experts of the last six layers in 4 bits, the others in 2",
        94,
        97_591_747_456,
        "659e22fbd01c9e13ea37a57c8d9c41e0a8819dffa3473d3c5286ee44b2d3398f",
    ),
    "ds4f-q4": Target(
        f"DeepSeek-V4-Flash-Q4KExperts-{_REST}-imatrix-0731.gguf", "experts in 4 bits", 157
    ),
    "ds4f-mxfp4": Target(
        f"DeepSeek-V4-Flash-MXFP4Experts-{_REST}-mxfp4-0731.gguf",
        "experts bit for bit as they were released",
        148,
    ),
    "ds4f-dspark": Target(
        "DeepSeek-V4-Flash-DSpark-support-0731.gguf",
        "the draft for --mtp, of the same checkpoint",
        6,
        5_989_114_272,
        "7e319924541db3f7a163ed7e11d7532a70d48228ab59d36cb81e1d4511885360",
    ),
}


def lines() -> Iterator[str]:
    """The targets, for people."""
    for name, t in TARGETS.items():
        size = f"{t.nbytes / 1e9:.2f} GB" if t.nbytes else "size told by the server"
        yield f"{name}: {t.about}; {size}, {t.memory} GiB of memory"
        yield f"  {t.file}"


def fetch(name: str, folder: str | os.PathLike, progress: Progress | None = None) -> Path:
    """Fetch the target `name` into `folder` -> its path; what is there and right is kept.

    The bytes gather in a `.part` file, which an interrupted run leaves for the next one to go on
    with, and get their name when size and SHA-256 are right. A file in Hugging Face's own cache
    is linked to. Raises UsageError for an unknown target, FileError for wrong bytes, Ds4Error
    that tells how to fetch the file by hand for a network that does not answer.
    """
    target = _target(name)
    folder = Path(os.path.abspath(os.path.expanduser(folder)))
    final = folder / target.file
    if final.exists() and target.sha256:
        _verify(final, target.nbytes, target.sha256, progress)
        return final
    with _by_hand(name, final):
        folder.mkdir(parents=True, exist_ok=True)
        return _fetch(target, final, progress)


def check(path: str | os.PathLike, progress: Progress | None = None) -> str:
    """Compare a file that came from elsewhere with the official one of its name or size.

    -> a sentence. Raises UsageError for none of the official files, FileError for a wrong one.
    """
    path = Path(os.path.abspath(os.path.expanduser(path)))
    gguf = open_gguf(path)  # tells a web page, a pointer, a short or a long file for what it is
    named = {t.file: n for n, t in TARGETS.items()}
    sized = {t.nbytes: n for n, t in TARGETS.items() if t.nbytes}
    name = named.get(path.name) or named.get(gguf.path.name) or sized.get(gguf.nbytes)
    if name is None:
        raise UsageError(
            f"{path}: {gguf.nbytes} bytes of an intact GGUF, but none of the official files by "
            f"name or size: {', '.join(named)}"
        )
    target = TARGETS[name]
    digest = _verify(path, target.nbytes, target.sha256, progress)
    known = "as published" if target.sha256 else "none is published here to compare it with"
    return f"{path}: {name}, {gguf.nbytes} bytes, intact; SHA-256 {digest}, {known}"


def _target(name: str) -> Target:
    if name in TARGETS:
        return TARGETS[name]
    near = get_close_matches(name, TARGETS, 1)
    hint = f", the nearest is {near[0]}" if near else ""
    raise UsageError(f"{name!r:.60} is no target{hint}; wanted one of {', '.join(TARGETS)}")


class _by_hand:
    """Turns errors of the network into one that tells the address and the place of the file."""

    def __init__(self, name: str, final: Path):
        self.name, self.final = name, final

    def __enter__(self):
        pass

    def __exit__(self, _, error, trace):
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HTTPError

        if not isinstance(error, HTTPError | OSError):
            return
        why = _reason(error)
        url = hf_hub_url(REPO, self.final.name)
        raise Ds4Error(
            f"{self.name} could not be fetched: {why}. By hand: fetch {url} to {self.final}, "
            f"then ds4mlx download --check {self.final}"
        ) from error


def _reason(error) -> str:
    response = getattr(error, "response", None)
    hints = {401: "log in with `hf auth login`", 403: "this account may not read it", 404: "gone"}
    if response is not None:
        code = response.status_code
        return f"the server answers {code}" + (f" ({hints[code]})" if code in hints else "")
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")


def _fetch(target: Target, final: Path, progress: Progress | None) -> Path:
    from huggingface_hub import hf_hub_url, try_to_load_from_cache

    told, sha256 = _told(target)
    if final.exists():
        _verify(final, told.size, sha256, progress)
        return final
    cached = try_to_load_from_cache(REPO, target.file)
    if isinstance(cached, str):
        _verify(Path(cached), told.size, sha256, progress)
        final.symlink_to(cached)
        return final
    # Named after the content: bytes of another version are never gone on with.
    part = final.with_name(f"{final.name}.{told.etag[:8]}.part")
    url = hf_hub_url(REPO, target.file, revision=told.commit_hash)
    with open(part, "ab") as file:
        _lock(file, part)
        try:
            _check_room(final.parent, told.size - file.tell())
            _fill(file, url, told.size, progress)
            os.fsync(file.fileno())
        finally:
            if file.tell() == 0:
                part.unlink()
    try:
        open_gguf(part)
        _verify(part, told.size, sha256, progress)
    except Ds4Error:
        part.unlink()  # which of its bytes are wrong, nobody can tell
        raise
    os.replace(part, final)
    return final


def _told(target: Target):
    """What the server says of a file (size, etag, commit_hash), and the SHA-256 it must have."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(REPO, target.file)
    for left in reversed(range(_TRIES)):
        try:
            told = get_hf_file_metadata(
                url, timeout=constants.HF_HUB_ETAG_TIMEOUT, headers=build_hf_headers()
            )
            break
        except HfHubHTTPError as error:
            if not (left and _passing(error)):
                raise
            time.sleep(_pause(_TRIES - left))
    if not (told.commit_hash and told.etag and told.size):
        raise FileError(
            f"{url}: the answer is not Hugging Face's, but perhaps that of a proxy or a login page"
        )
    sha256 = told.etag if re.fullmatch("[0-9a-f]{64}", told.etag) else target.sha256
    wanted = (target.nbytes or told.size, target.sha256 or sha256)
    if wanted != (told.size, sha256):
        raise FileError(
            f"{url}: the server has {told.size} bytes with SHA-256 {sha256}, wanted {wanted[0]} "
            f"with {wanted[1]}: another file under the same name"
        )
    return told, sha256


def _lock(file, part: Path):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(f"{part}: another download of this file is at work") from None


def _check_room(folder: Path, nbytes: int):
    if (free := shutil.disk_usage(folder).free) < nbytes:
        raise FileError(f"{folder}: {nbytes} bytes are still to come, and {free} are free")


def _fill(file, url: str, size: int, progress: Progress | None):
    """Take what `file` lacks of `size` bytes, again after every break while there is headway."""
    from huggingface_hub.errors import HTTPError

    best, tries = file.tell(), 0
    while file.tell() < size:
        error = ConnectionError("the server sends no bytes")
        try:
            _take(file, url, size, progress)
        except HTTPError as broken:
            if not _passing(broken):
                raise
            error = broken
        if file.tell() > best:
            best, tries = file.tell(), 0
            continue
        tries += 1
        if tries == _TRIES:
            raise error
        time.sleep(_pause(tries))


def _passing(error) -> bool:
    """Whether an error of HTTP is worth another try: a break, or a server that is busy."""
    response = getattr(error, "response", None)
    return response is None or response.status_code in (408, 429) or response.status_code >= 500


def _pause(tries: int) -> float:
    return _PAUSE * 2**tries


def _take(file, url: str, size: int, progress: Progress | None):
    """One request for the next bytes; they are appended only where they belong."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    have = file.tell()
    last = min(size, have + _SPAN) - 1
    headers = {"Range": f"bytes={have}-{last}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream(
        "GET", url, headers=build_hf_headers() | headers, timeout=timeout
    ) as response:
        hf_raise_for_status(response)
        if response.status_code == 206:
            _check_range(response.headers.get("Content-Range", "none"), url, have, size)
        else:  # the whole file, whatever was asked for
            have, last = 0, size - 1
        for chunk in response.iter_bytes(_CHUNK):
            if have == 0:
                if chunk[:4] != b"GGUF":
                    raise FileError(f"{url}: the server sent {foreign(chunk[:512])}")
                file.truncate(0)
                file.seek(0)
            have += len(chunk)
            if have > last + 1:
                raise FileError(f"{url}: the server sent more than the {size} bytes it told of")
            file.write(chunk)
            if progress:
                progress("download", have, size)


def _check_range(range: str, url: str, have: int, size: int):
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", range)
    if not match or int(match[1]) != have or match[2] not in ("*", str(size)):
        raise FileError(f"{url}: the server sent range {range!r:.60}, wanted {have}- of {size}")


def _verify(path: Path, nbytes: int | None, sha256: str | None, progress: Progress | None) -> str:
    """The SHA-256 of a file; raises FileError if it or the size is another than wanted."""
    size, done, digest = path.stat().st_size, 0, hashlib.sha256()
    if nbytes not in (None, size):
        raise FileError(f"{path}: {size} bytes, wanted {nbytes}; move it away, fetch it again")
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress("check", done, size)
    if sha256 not in (None, digest.hexdigest()):
        raise FileError(
            f"{path}: SHA-256 {digest.hexdigest()}, wanted {sha256}; move it away, fetch it again"
        )
    return digest.hexdigest()
