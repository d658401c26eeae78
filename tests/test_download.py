"""Downloads against a server that cuts, ignores ranges, or sends something else (MF-05 to 07)."""

import hashlib
import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from ds4mlx import cli, download
from ds4mlx.errors import Ds4Error, FileError, UsageError
from tests.convert.files import write_gguf

ROOT = Path(__file__).parent.parent
HTML = b"<!DOCTYPE html><html><body>Please log in</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 86720111488\n"
NAME = "model.gguf"


class Hub(ThreadingHTTPServer):
    """As much of Hugging Face as a download meets; `plan` says how it misbehaves, per GET."""

    def __init__(self, data: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.plan, self.heads, self.status = data, [], [], None
        self.gets, self.asked, self.tokens = [], [], []
        self.hash, self.size = hashlib.sha256(data).hexdigest(), len(data)
        self.commit = "0" * 40

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        """A client that leaves is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        hub = self.server
        status = hub.heads.pop(0) if hub.heads else 200
        headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{hub.hash}"'} if hub.commit else {}
        self._answer(status, headers | {"Content-Length": str(hub.size)})

    def do_GET(self):
        hub, asked = self.server, self.headers.get("Range")
        if "/resolve/" not in self.path:  # the library asks for other things too
            return self._answer(404, {"Content-Length": "0"})
        hub.asked.append(asked)
        hub.gets.append(self.path)
        hub.tokens.append(self.headers.get("Authorization"))
        what = hub.plan.pop(0) if hub.plan else "serve"
        if what == "elsewhere":
            there = f"http://localhost:{hub.server_port}/resolve/there"
            return self._answer(302, {"Location": there, "Content-Length": "0"})
        if isinstance(what, int):
            return self._answer(what, {"Content-Length": "0"})
        if isinstance(what, bytes):
            return self._send(200, what, len(what), {"Content-Type": "text/html"})
        first, last = (int(n) for n in re.fullmatch(r"bytes=(\d+)-(\d+)", asked).groups())
        body = hub.data[first : last + 1]
        said = f"bytes {first}-{last}/{len(hub.data)}"
        if what == "serve":
            self._send(206, body, len(body), {"Content-Range": said})
        elif what == "cut":
            self._send(206, body[: len(body) // 2], len(body), {"Content-Range": said})
        elif what == "nothing":
            self._send(206, b"", len(body), {"Content-Range": said})
        elif what == "shifted":
            said = f"bytes {first + 1}-{last}/{len(hub.data)}"
            self._send(206, body[1:], len(body) - 1, {"Content-Range": said})
        elif what == "ignore range":
            self._send(200, hub.data, len(hub.data), {})
        elif what == "ignore range and cut":
            self._send(200, hub.data[: len(hub.data) // 3], len(hub.data), {})
        elif what == "too much":
            self._send(206, body + b"xx", len(body) + 2, {"Content-Range": said})

    def _send(self, status, body, length, headers):
        self._answer(status, headers | {"Content-Length": str(length)})
        self.wfile.write(body)
        if len(body) < length:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _answer(self, status, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / NAME
    return write_gguf(path, {"general.name": "x"}, {"t": ("F32", (1000, 300))}).read_bytes()


@pytest.fixture
def hub(data, monkeypatch, tmp_path):
    """A server of one file, which the target `tiny` names; its size and hash are known."""
    server = Hub(data)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_PAUSE", 0.001)
    tiny = download.Target(NAME, "a test", 1, len(data), server.hash)
    monkeypatch.setitem(download.TARGETS, "tiny", tiny)
    yield server
    server.shutdown()
    server.server_close()


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def fetched(tmp_path, data) -> bool:
    """The file is there, whole, and nothing else."""
    path = download.fetch("tiny", tmp_path / "gguf")
    assert path == tmp_path / "gguf" / NAME
    assert names(path.parent) == [NAME]
    return path.read_bytes() == data


def test_a_file_arrives_whole(hub, data, tmp_path):
    assert fetched(tmp_path, data)
    assert hub.gets[0].endswith(f"/{download.REPO}/resolve/{hub.commit}/{NAME}")


def test_a_file_that_is_there_and_right_is_not_fetched_again(hub, data, tmp_path):
    assert fetched(tmp_path, data)
    assert fetched(tmp_path, data)
    assert len(hub.gets) == 1


def test_a_cut_connection_is_resumed_where_it_broke(hub, data, tmp_path):
    """MF-05."""
    hub.plan = ["cut", "cut", "cut"]
    assert fetched(tmp_path, data)
    starts = [int(r.split("=")[1].split("-")[0]) for r in hub.asked]
    assert starts[0] == 0 and sorted(set(starts)) == starts and len(starts) == 4


def test_a_server_that_ignores_the_range_does_not_append_to_what_is_there(hub, data, tmp_path):
    """MF-06."""
    hub.plan = ["cut", "ignore range"]
    assert fetched(tmp_path, data)
    assert len(hub.gets) == 2


def test_a_range_that_begins_elsewhere_is_refused_and_the_bytes_so_far_stay(hub, data, tmp_path):
    """MF-06."""
    hub.plan = ["cut", "shifted"]
    with pytest.raises(FileError, match="the server sent range 'bytes"):
        fetched(tmp_path, data)
    (part,) = names(tmp_path / "gguf")
    assert part.endswith(".part")
    kept = (tmp_path / "gguf" / part).read_bytes()
    assert kept and data.startswith(kept)


def test_more_bytes_than_announced_are_refused(hub, data, tmp_path):
    hub.plan = ["too much"]
    with pytest.raises(FileError, match=f"more than the {len(data)} bytes"):
        fetched(tmp_path, data)
    assert NAME not in names(tmp_path / "gguf")


@pytest.mark.parametrize("body, what", [(HTML, "a web page"), (POINTER, "git-LFS pointer")])
@pytest.mark.parametrize("before", [[], ["cut"]])
def test_a_page_or_a_pointer_is_named_and_nothing_of_it_is_kept(
    hub, data, tmp_path, body, what, before
):
    """MF-07."""
    hub.plan = [*before, body]
    with pytest.raises(FileError, match=what):
        fetched(tmp_path, data)
    kept = names(tmp_path / "gguf")
    assert [n.endswith(".part") for n in kept] == [True] * len(before)
    assert all(data.startswith((tmp_path / "gguf" / n).read_bytes()) for n in kept)


def test_another_file_of_the_same_size_is_refused_and_not_kept(hub, data, tmp_path):
    hub.data = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(FileError, match=f"wanted {hub.hash}"):
        fetched(tmp_path, data)
    assert names(tmp_path / "gguf") == []


@pytest.mark.parametrize("change", [{"size": 99}, {"hash": "f" * 64}])
def test_another_file_under_the_name_is_refused_before_a_byte_is_fetched(
    hub, data, tmp_path, change
):
    vars(hub).update(change)
    with pytest.raises(FileError, match="another file under the same name"):
        fetched(tmp_path, data)
    assert hub.gets == []


def test_a_hash_that_only_the_server_knows_is_checked(hub, data, tmp_path, monkeypatch):
    monkeypatch.setitem(download.TARGETS, "tiny", download.Target(NAME, "a test", 1))
    hub.data = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(FileError, match=f"wanted {hub.hash}"):
        fetched(tmp_path, data)
    hub.data = data
    assert fetched(tmp_path, data)


def test_a_wrong_file_under_the_name_is_named_and_left_alone(hub, data, tmp_path):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / NAME).write_bytes(data[:-1])
    with pytest.raises(FileError, match=f"{len(data) - 1} bytes, wanted {len(data)}"):
        fetched(tmp_path, data)
    assert (tmp_path / "gguf" / NAME).read_bytes() == data[:-1]


def test_an_answer_without_the_hubs_headers_is_a_proxys(hub, data, tmp_path):
    hub.commit = None
    with pytest.raises(FileError, match="not Hugging Face's"):
        fetched(tmp_path, data)


@pytest.mark.parametrize("code", [401, 403, 404])
@pytest.mark.parametrize("at", ["heads", "plan"])
def test_what_will_not_change_stops_at_once(hub, data, tmp_path, code, at):
    """CL-11."""
    setattr(hub, at, [code])
    with pytest.raises(Ds4Error, match=f"the server answers {code}"):
        fetched(tmp_path, data)
    assert len(hub.gets) == (at == "plan")
    assert names(tmp_path / "gguf") == []


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server_is_asked_again(hub, data, tmp_path, code):
    """CL-11."""
    hub.heads, hub.plan = [code], ["cut", code, code]
    assert fetched(tmp_path, data)
    assert len(hub.gets) == 4


@pytest.mark.parametrize("what", ["nothing", "ignore range and cut", 503])
def test_a_server_that_brings_nothing_more_is_given_up(hub, data, tmp_path, what):
    hub.plan = [what] * 100
    with pytest.raises(Ds4Error, match=r"could not be fetched: .* By hand: fetch http"):
        fetched(tmp_path, data)
    assert len(hub.gets) <= 8
    assert NAME not in names(tmp_path / "gguf")


def test_what_an_interrupted_run_left_is_gone_on_with(hub, data, tmp_path):
    def stop(stage, done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.fetch("tiny", tmp_path / "gguf", stop)
    (part,) = (tmp_path / "gguf").iterdir()
    have = part.stat().st_size
    assert len(data) // 2 < have < len(data) and data.startswith(part.read_bytes())
    assert fetched(tmp_path, data)
    assert hub.asked[1] == f"bytes={have}-{len(data) - 1}"


def test_bytes_of_another_version_are_not_gone_on_with(hub, data, tmp_path):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / f"{NAME}.00000000.part").write_bytes(b"GGUF" * 100)
    download.fetch("tiny", tmp_path / "gguf")
    assert (tmp_path / "gguf" / NAME).read_bytes() == data


def test_two_downloads_of_one_file_do_not_write_into_each_other(hub, data, tmp_path):
    met = []

    def second(stage, done, total):
        if stage == "download" and not met:
            with pytest.raises(FileError, match="another download of this file is at work"):
                download.fetch("tiny", tmp_path / "gguf")
            met.append(done)

    download.fetch("tiny", tmp_path / "gguf", second)
    assert met and (tmp_path / "gguf" / NAME).read_bytes() == data


def test_a_full_disk_is_seen_before_the_first_byte(hub, data, tmp_path, monkeypatch):
    free = SimpleNamespace(free=len(data) - 1)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: free)
    with pytest.raises(FileError, match=f"{len(data)} bytes are still to come"):
        fetched(tmp_path, data)
    assert hub.gets == []


def test_a_file_in_hugging_faces_cache_is_linked_to(hub, data, tmp_path):
    repo = tmp_path / "cache" / f"models--{download.REPO.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(hub.commit)
    (repo / "snapshots" / hub.commit).mkdir(parents=True)
    (repo / "snapshots" / hub.commit / NAME).write_bytes(data)
    assert fetched(tmp_path, data)
    assert (tmp_path / "gguf" / NAME).is_symlink() and hub.gets == []


@pytest.mark.parametrize("listening", [False, True], ids=["nobody", "nobody who answers"])
def test_without_network_the_error_names_address_and_place_within_seconds(tmp_path, listening):
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if listening:
            port.listen()
        here = f"http://127.0.0.1:{port.getsockname()[1]}"
        words = ["download", "ds4f-dspark", "--dir", tmp_path / "g"]
        env = os.environ | {"HF_ENDPOINT": here, "HF_HUB_ETAG_TIMEOUT": "1"}
        options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 15}
        done = subprocess.run([sys.executable, "-m", "ds4mlx", *words], **options)
    file = download.TARGETS["ds4f-dspark"].file
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert f"{here}/{download.REPO}/resolve/main/{file} to " in done.stderr
    assert f"{tmp_path / 'g' / file}" in done.stderr and "--check" in done.stderr


def test_a_token_and_a_mirror_are_those_of_hugging_face(hub, data, tmp_path):
    code = (
        "import sys; from ds4mlx import download as d; name, size, hash, folder = sys.argv[1:];"
        "d.TARGETS['tiny'] = d.Target(name, '', 1, int(size), hash); d.fetch('tiny', folder)"
    )
    words = [NAME, str(len(data)), hub.hash, str(tmp_path)]
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret"}
    subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, env=env, check=True, timeout=60)
    assert (tmp_path / NAME).read_bytes() == data
    assert hub.tokens == ["Bearer hf_secret"]


def test_a_token_is_not_told_to_the_server_that_holds_the_bytes(hub, data, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.plan = ["elsewhere", "cut", "elsewhere"]
    assert fetched(tmp_path, data)
    assert hub.tokens == ["Bearer hf_secret", None] * 2


def test_a_download_that_is_killed_at_any_moment_leaves_no_half_file_and_is_gone_on_with(
    hub, data, tmp_path
):
    code = (
        "import os, sys; from ds4mlx import download as d"
        "\nname, size, hash, folder, at = sys.argv[1:]"
        "\nd.TARGETS['tiny'] = d.Target(name, '', 1, int(size), hash)"
        "\ndef die(stage, done, total):"
        "\n    if f'{stage} {done * 4 // total}' == at: os.kill(os.getpid(), 9)"
        "\nd.fetch('tiny', folder, die)"
    )
    env = os.environ | {"HF_ENDPOINT": hub.url}
    for at in ("download 0", "download 2", "download 4", "check 4"):
        words = [NAME, str(len(data)), hub.hash, str(tmp_path / "gguf"), at]
        done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, env=env, timeout=60)
        assert done.returncode == -9 and NAME not in names(tmp_path / "gguf")
    assert fetched(tmp_path, data)


# A file from elsewhere ------------------------------------------------------------------------


def test_an_official_file_passes_by_name_or_by_size(hub, data, tmp_path):
    for name in (NAME, "renamed.gguf"):
        (tmp_path / name).write_bytes(data)
        told = download.check(tmp_path / name)
        assert "tiny" in told and hub.hash in told and "as published" in told


def test_a_file_with_one_wrong_bit_is_told_by_its_hash(hub, data, tmp_path):
    """MF-06."""
    (tmp_path / NAME).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(FileError, match=f"wanted {hub.hash}"):
        download.check(tmp_path / NAME)


def test_a_file_short_by_one_byte_is_an_incomplete_download(hub, data, tmp_path):
    """MF-05."""
    (tmp_path / NAME).write_bytes(data[:-1])
    with pytest.raises(FileError, match="incomplete download"):
        download.check(tmp_path / NAME)


@pytest.mark.parametrize("body, what", [(HTML, "web page"), (POINTER, "LFS"), (b"", "empty file")])
def test_a_file_that_is_no_model_is_named(hub, tmp_path, body, what):
    """MF-07."""
    (tmp_path / NAME).write_bytes(body)
    with pytest.raises(UsageError, match=what):
        download.check(tmp_path / NAME)


def test_a_file_of_no_target_is_told_so(hub, tmp_path):
    path = write_gguf(tmp_path / "own.gguf", {}, {"t": ("F32", (8,))})
    with pytest.raises(UsageError, match="none of the official files"):
        download.check(path)


# The command line -----------------------------------------------------------------------------


def run(capsys, *words):
    return cli.main(["download", *words]), *capsys.readouterr()


def test_the_list_names_every_target_with_its_size_and_memory(capsys):
    status, out, _ = run(capsys, "--list")
    assert status == 0
    for name, target in download.TARGETS.items():
        assert name in out and target.file in out and f"{target.memory} GiB of memory" in out
    assert "86.72 GB" in out


def test_the_command_prints_the_path(hub, data, capsys, tmp_path):
    assert run(capsys, "tiny", "--dir", str(tmp_path)) == (0, f"{tmp_path / NAME}\n", "")


def test_the_command_checks_a_file(hub, data, capsys, tmp_path):
    (tmp_path / NAME).write_bytes(data)
    status, out, _ = run(capsys, "--check", str(tmp_path / NAME))
    assert status == 0 and "as published" in out


@pytest.mark.parametrize("words", [[], ["ds4f-q2", "--list"], ["--list", "--check", "x"]])
def test_neither_nothing_nor_two_things_at_once_can_be_meant(capsys, words):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "") and "wanted a target, --list or --check FILE" in err


def test_an_unknown_target_is_refused_with_the_nearest(capsys, tmp_path):
    status, _, err = run(capsys, "ds4f-q3", "--dir", str(tmp_path))
    assert status == 2 and "the nearest is ds4f-q" in err and "ds4f-mxfp4" in err


def test_neither_the_package_nor_the_list_waits_for_huggingface_hub():
    code = (
        "import sys; from ds4mlx import cli; cli.main(['download', '--list']);"
        "assert not {'huggingface_hub', 'mlx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_sizes_of_the_published_files_agree_with_their_tensors():
    """Spec of the files: tensors, and 5,333,824 or 5,440 bytes of header before them."""
    sizes = {name: t.nbytes for name, t in download.TARGETS.items() if t.nbytes}
    assert sizes == {
        "ds4f-q2": 86_714_777_664 + 5_333_824,
        "ds4f-q2-q4": 97_586_413_632 + 5_333_824,
        "ds4f-dspark": 5_989_108_832 + 5_440,
    }
    hashes = [t.sha256 for t in download.TARGETS.values() if t.nbytes]
    assert all(re.fullmatch("[0-9a-f]{64}", h) for h in hashes)
