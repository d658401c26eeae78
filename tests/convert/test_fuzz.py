"""Hostile files: seeded mutations of valid ones are read, or refused in one sentence.

All of it: `python -m tests.convert.test_fuzz --count 200000 --seed 1`; a test runs a small part.
A case is named by its kind, seed and number, and `--case NUMBER` runs that one alone.
"""

import argparse
import copy
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ds4mlx.convert import gguf
from ds4mlx.convert.checkpoint import sources
from ds4mlx.convert.config import draft_config, target_config
from ds4mlx.convert.convert import JOURNAL, convert
from ds4mlx.convert.folder import folder_tensors
from ds4mlx.convert.gguf import open_gguf
from ds4mlx.convert.hub import describe
from ds4mlx.convert.imatrix import read_imatrix
from ds4mlx.convert.inspect import lines, report
from ds4mlx.convert.inventory import check_draft
from ds4mlx.convert.plan import layouts, make_plan
from ds4mlx.convert.receipt import reverse, signed, verify
from ds4mlx.convert.released import convert_released
from ds4mlx.convert.safetensors import read_safetensors
from ds4mlx.errors import Ds4Error, UsageError
from ds4mlx.loading import find, find_draft

from .checkpoints import released, write_checkpoint
from .files import string, tiny_draft, tiny_target
from .test_checkpoint import SETTINGS, TOKENIZER, write_imatrix
from .test_config import FAMILIES
from .test_convert import shards, target
from .test_pair import model

ROOT = Path(__file__).parents[2]
SECONDS = 1  # of the processor, for one file
MEMORY = 64 << 20  # bytes beyond the file's own size

NUMBERS = [0, 1, 2, 3, 5, 7, 31, 32, 127, 128, 255, 256, 1023, 65535, 65536, (1 << 20) + 1]
NUMBERS += [n + d for n in (1 << 31, 1 << 32, 1 << 63, 1 << 64) for d in (-1, 0)]


class Kind(NamedTuple):
    """What is mutated, and all that reads it."""

    path: Path  # the file that each case is written to
    mutate: Callable[[random.Random], tuple[bytes, int]]  # its first bytes, and its size
    read: Callable[[], object]
    share: float = 1  # of the cases


# Mutations ----------------------------------------------------------------------------------


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """A few flips, numbers, cuts, repeats."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, size = rng.randrange(len(data) or 1), rng.choice((1, 2, 4, 8, 40))
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1 | 2:
                width = rng.choice((1, 4, 8))
                number = rng.choice(NUMBERS) % (1 << 8 * width)
                data[at : at + width] = number.to_bytes(width, "little")
            case 3:
                del data[at : at + size]
            case 4:
                data[at:at] = rng.randbytes(size)
            case 5:
                data[at:at] = data[at : at + size]
            case 6 if rng.random() < 0.3:
                del data[at:]
    return bytes(data)


class Header:
    """A GGUF's header in its parts: keys with their values, and the entries of tensors."""

    def __init__(self, path: Path):
        file, data = gguf._open_one(path), path.read_bytes()  # a shard without its set
        self.start = min((t.offset for t in file.tensors.values()), default=len(data))
        self.body, self.version = len(data) - self.start, data[4:8]
        names = [*file.metadata, *file.tensors]
        cuts, at = [], 24
        for name in names:  # each in its order, after the one before
            cuts.append(at := data.index(string(name), at))
            at += 8 + len(name.encode())
        ends = [*cuts[1:], self.start]
        entries = [data[a:b] for a, b in zip(cuts, ends, strict=True)]
        self.keys, self.infos = entries[: len(file.metadata)], entries[len(file.metadata) :]
        if self.infos:  # without the padding
            size = 8 + len(names[-1].encode())
            dims = int.from_bytes(self.infos[-1][size : size + 4], "little")
            self.infos[-1] = self.infos[-1][: size + 4 + 8 * dims + 12]

    def mutated(self, rng: random.Random) -> tuple[bytes, int]:
        keys, infos = list(self.keys), list(self.infos)
        counts = [0, 0]
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            entries = rng.choice([part for part in (keys, infos) if part])
            i = rng.randrange(len(entries))
            match rng.randrange(6):
                case 0 | 1 if entries is keys:
                    size = 8 + int.from_bytes(keys[i][:8], "little")
                    keys[i] = keys[i][:size] + value(rng)
                case 1 | 2:
                    entries[i] = bytes_changed(rng, entries[i])
                case 3 if len(entries) > 1:
                    del entries[i]
                case 4:
                    entries.insert(rng.randrange(len(entries)), entries[i])
                case 5:
                    counts[rng.randrange(2)] += rng.choice((-1, 1, 1 << 16, 1 << 40))
        n = [(len(p) + c) % (1 << 64) for p, c in zip((infos, keys), counts, strict=True)]
        head = b"GGUF" + self.version + struct.pack("<QQ", *n) + b"".join(keys + infos)
        if rng.random() < 0.4:
            head = bytes_changed(rng, head)
        head += bytes(-len(head) % 32)
        size = len(head) + self.body
        if rng.random() < 0.1:
            size = max(0, size + rng.choice((-1, 1, -100, 100, -size, -self.body, 1 << 20)))
        return head[:size], size


def value(rng: random.Random) -> bytes:
    """A metadata value of any type."""
    letters = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q"}
    letters |= {11: "q", 12: "d"}
    code = rng.choice((*letters, 8, 9, 13))
    if code == 13:
        return struct.pack("<I", rng.choice((13, 1 << 31))) + rng.randbytes(8)
    if code == 9:
        inner, n = rng.choice((*letters, 8, 9)), rng.choice((0, 1, 3, 6, 48, 1 << 40))
        some = rng.choice((0, 1, rng.randrange(256)))
        items = b"".join(scalar(rng, inner, letters, some) for _ in range(min(n, 100)))
        return struct.pack("<IIQ", 9, inner, n) + items
    return struct.pack("<I", code) + scalar(rng, code, letters, None)


def scalar(rng: random.Random, code: int, letters: dict, like: int | None) -> bytes:
    if code == 8:
        text = rng.choice(
            ("", "x", "yarn", "gpt2", "0731", "\x1b[2J", "a\nb", "\u202e", "x" * 5000)
        )
        return string(text) if rng.random() < 0.9 else struct.pack("<Q", 2) + b"\xff\xfe"
    if code == 9:
        return struct.pack("<IQ", 4, 0)
    letter = letters[code]
    if letter in "fd":
        floats = (0.0, -0.0, 1.0, -1.0, 1e-30, 3e38, float("inf"), float("nan"), 1e300)
        number = rng.choice(floats[: 8 if letter == "f" else 9])
        return struct.pack(f"<{letter}", number)
    number = rng.choice(NUMBERS) if like is None else like
    return (number % (1 << 64)).to_bytes(8, "little")[: struct.calcsize(letter)]


ODD = [None, True, -1, 0, 1, 3, 1 << 31, 1 << 63, 1 << 200, 0.5, -0.0, 1e308, float("nan")]
ODD += [float("inf"), "", "x", "../x", "/", "\ud800", "\x1b[2J", "a\nb", "0" * 64, "x" * 5000]
ODD += [[], {}, [[]], [0, 0], [-1, 1 << 70], {"a": 1}, [None], "F32", "Q4_K", ["x"] * 50]


def json_changed(rng: random.Random, tree):
    """A tree with some of its values replaced, removed, exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place = node = tree
        key = None
        while isinstance(node, dict | list) and node and (key is None or rng.random() < 0.85):
            place = node
            key = rng.choice([*place] if isinstance(place, dict) else range(len(place)))
            node = place[key]
        if key is None:
            return rng.choice(ODD)
        match rng.randrange(6):
            case 0:
                del place[key]
            case 1 if isinstance(node, int | float):
                place[key] = node + rng.choice((-1, 1, 0.5, 1 << 33))
            case 2 if isinstance(place, dict):
                place[rng.choice(("", "x", "\ud800", "a\x07", str(key) + "0"))] = node
            case 3 if isinstance(place, list):
                place.append(copy.deepcopy(node))
            case _:
                place[key] = copy.deepcopy(rng.choice(ODD))
    return tree


def json_mutated(rng: random.Random, tree, finish=lambda tree: tree) -> bytes:
    if rng.random() < 0.02:
        return rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"1" * 100_000, b"", b"\xff"))
    if isinstance(changed := json_changed(rng, tree), dict):
        changed = finish(changed)
    text = json.dumps(changed).encode()
    return bytes_changed(rng, text) if rng.random() < 0.2 else text


def whole(data: bytes) -> tuple[bytes, int]:
    return data, len(data)


def safetensors_mutated(rng: random.Random, header: dict, body: int) -> tuple[bytes, int]:
    text = json_mutated(rng, header)
    length = rng.choice(NUMBERS) if rng.random() < 0.05 else len(text)
    data = (length % (1 << 64)).to_bytes(8, "little") + text
    size = len(data) + body + (rng.choice((-1, 1, -body, 100)) if rng.random() < 0.1 else 0)
    return data[:size], max(size, 0)


# What is read -------------------------------------------------------------------------------


def kinds(folder: Path) -> dict[str, Kind]:
    """Every kind of file, each in a folder of its own below `folder`."""
    base = folder / "seeds"
    base.mkdir()
    settings = target_config(open_gguf(tiny_target(base / "t.gguf")))
    out = {
        "target": gguf_kind(folder, target(base / "target.gguf"), read_target),
        "draft": gguf_kind(
            folder, tiny_draft(base / "draft.gguf"), lambda path: read_draft(path, settings)
        ),
    }
    keys, rename, types = FAMILIES["dflash"]
    path = tiny_draft(base / "dflash.gguf", keys, rename=rename, **types)
    out["dflash"] = gguf_kind(folder, path, lambda path: read_draft(path, settings))
    (folder / "shards").mkdir()
    paths = shards(folder / "shards")
    for i in (0, 1):
        head = Header(paths[i])
        (folder / f"set{i}").mkdir()
        own = [Path(shutil.copy(p, folder / f"set{i}")) for p in paths]
        out[f"shard {i + 1}"] = Kind(own[i], head.mutated, lambda p=own[0]: read_target(p))
    folders = {
        "folder": (convert(base / "target.gguf", folder / "folder"), find),
        "draft folder": (
            convert(base / "draft.gguf", folder / "draft folder"),
            lambda path: find_draft(path, settings),
        ),
    }
    for name, (path, read) in folders.items():
        out[name] = json_kind(path / "config.json", lambda path=path, read=read: read(path))
    out["tokenizer"] = json_kind(
        Path(shutil.copytree(folders["folder"][0], folder / "tokenizer")) / "tokenizer.json",
        lambda: find(folder / "tokenizer"),
    )
    out |= safetensors_kind(folder, folders["draft folder"][0])
    out |= receipt_kind(folder, base / "draft.gguf")
    out |= journal_kind(folder, base / "target.gguf")
    return out | checkpoint_kinds(folder)


def gguf_kind(folder: Path, path: Path, read) -> Kind:
    place = folder / path.name
    return Kind(place, Header(path).mutated, lambda: read(place))


def read_target(path: Path):
    lines(report(path))
    layouts(make_plan(file := open_gguf(path), describe(file)[1]))


def read_draft(path: Path, settings: dict):
    lines(report(path))
    file = open_gguf(path)
    check_draft(file, draft_config(file), settings)
    layouts(make_plan(file, describe(file)[1]))


def json_kind(path: Path, read, finish=lambda tree: tree) -> Kind:
    tree = json.loads(path.read_bytes())
    return Kind(path, lambda rng: whole(json_mutated(rng, tree, finish)), read)


def safetensors_kind(folder: Path, converted: Path) -> dict[str, Kind]:
    path = Path(shutil.copytree(converted, folder / "safetensors"))
    (file,) = path.glob("model-*")
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), len(data) - 8 - size
    settings = target_config(open_gguf(folder / "seeds" / "t.gguf"))

    def read():
        read_safetensors(file)
        find_draft(path, settings)

    def read_official():
        folder_tensors([official])
        sources([official])

    tensors = {n: s for n, s in released(model()[1]).items() if n.startswith("mtp.0.")}
    header2, at = {}, 0
    for name, (dtype, x) in tensors.items():
        header2[name] = {"dtype": dtype, "shape": list(x.shape)}
        header2[name]["data_offsets"] = [at, at + x.nbytes]
        at += x.nbytes
    official = folder / "official.safetensors"
    return {
        "safetensors": Kind(file, lambda rng: safetensors_mutated(rng, header, body), read),
        "official safetensors": Kind(
            official, lambda rng: safetensors_mutated(rng, header2, at), read_official
        ),
    }


def receipt_kind(folder: Path, source: Path) -> dict[str, Kind]:
    path = convert(source, folder / "receipt")
    rng, back = random.Random(0), folder / "back.gguf"

    def finish(receipt: dict) -> dict:
        """Most are signed anew: a changed one is not looked into."""
        if rng.random() < 0.9 and receipt.pop("sha256", None) is not None:
            try:
                return signed(receipt)
            except UnicodeEncodeError:  # of a lone surrogate
                pass
        return receipt

    def read():
        if rng.random() < 0.1:
            reverse(path, back, overwrite=True)
        verify(path)

    return {"receipt": json_kind(path / "receipt.json", read, finish)._replace(share=0.2)}


def journal_kind(folder: Path, source: Path) -> dict[str, Kind]:
    """A conversion whose last step, and every fourth tensor, is yet to be done."""
    out = folder / "journal"
    unlink = Path.unlink
    Path.unlink = lambda path, **_: None  # the journal stays
    try:
        convert(source, out)
    finally:
        Path.unlink = unlink
    (out / "config.json").unlink()
    data = (out / JOURNAL).read_bytes().splitlines()
    entries = [json.loads(line) for line in data]
    entries = [entry for i, entry in enumerate(entries) if i % 4 or not i]

    def mutate(rng: random.Random) -> tuple[bytes, int]:
        trees = list(entries)
        i = rng.randrange(len(trees)) if rng.random() < 0.9 else 0
        trees[i] = json_changed(rng, trees[i])
        data = b"".join(json.dumps(tree).encode() + b"\n" for tree in trees)
        return whole(bytes_changed(rng, data) if rng.random() < 0.2 else data)

    def read():
        try:
            convert(source, out)
        finally:
            (out / "config.json").unlink(missing_ok=True)

    return {"journal": Kind(out / JOURNAL, mutate, read, 0.2)}


def unmade(path: Path, place: Path, **options):
    """All of a checkpoint's conversion but the making, as its place is taken."""
    try:
        list(convert_released(path, place, **options))
    except UsageError as error:
        if "exists already" not in str(error):
            raise


def checkpoint_kinds(folder: Path) -> dict[str, Kind]:
    target, draft = model()
    tensors = released(target | draft)
    place = folder / "taken"
    place.mkdir()
    (place / "config.json").write_text("{}")
    out = {}
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        path = write_checkpoint(folder / f"hf {name}", tensors, SETTINGS, TOKENIZER)

        def read(path=path):
            unmade(path, place, dspark_support=folder / "no such")

        out[f"checkpoint {name}"] = json_kind(path / name, read)
    path = write_checkpoint(folder / "hf", tensors, SETTINGS, TOKENIZER)
    vectors = {f"blk.{i}.ffn_gate_exps.weight": np.ones(256, np.float32) for i in range(3)}
    data = write_imatrix(folder / "i.dat", vectors).read_bytes()

    def read_importance():
        read_imatrix(folder / "i.dat")
        unmade(path, place, imatrix=folder / "i.dat")

    return out | {
        "imatrix": Kind(
            folder / "i.dat", lambda rng: whole(bytes_changed(rng, data)), read_importance
        )
    }


# Running ------------------------------------------------------------------------------------


class Hang(Exception):
    """A file took more than its second."""


def judge(kind: Kind, data: bytes, size: int) -> str:
    """How a case ended: "read" or "refused"; anything else that it raises is a find."""
    with kind.path.open("wb") as file:
        file.write(data)
        file.truncate(size)
    before, limited = time.process_time(), sys.platform == "linux"
    if limited:  # elsewhere the address space has no limit
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        most = pages * resource.getpagesize() + size + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS + 1)
    try:
        kind.read()
        outcome = "read"
    except Ds4Error as error:
        outcome, text = "refused", str(error)
        assert text and text.isprintable() and len(text) < 20_000, f"the message {text!r:.300}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    if (spent := time.process_time() - before) > SECONDS:
        raise Hang(f"{spent:.1f} s")
    return outcome


def fuzz(folder: Path, count: int, seed: int, only: str | None, case: int | None) -> int:
    """Run `count` cases, shared between the kinds; prints the finds -> how many."""

    def late(*_):
        raise Hang("stopped")

    signal.signal(signal.SIGPROF, late)
    os.fsync = lambda file: None  # which tells nothing here, and takes most of the time
    finds, chosen = 0, kinds(folder)
    chosen = {only: chosen[only]} if only else chosen
    for name, kind in chosen.items():
        ends, seen, start = Counter(), Counter(), time.perf_counter()
        own = math.ceil(count * kind.share / sum(kind.share for kind in chosen.values()))
        numbers = range(own) if case is None else [case]
        for number in numbers:
            data, size = kind.mutate(random.Random(f"{name} {seed} {number}"))
            try:
                ends[judge(kind, data, size)] += 1
            except (Exception, MemoryError) as error:
                ends["found"] += 1
                trace = error.__traceback__
                while trace.tb_next:
                    trace = trace.tb_next
                where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
                what = f"{type(error).__name__} at {where}"
                if seen[what] < 2:
                    print(f"{name}, seed {seed}, case {number}: {what}: {error!s:.300}", flush=True)
                if case is not None:
                    raise
                seen[what] += 1
        spent = time.perf_counter() - start
        told = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
        print(f"{name}: {told}, {spent:.0f} s", flush=True)
        finds += ends["found"]
    return finds


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.convert.test_fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind")
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder).resolve()
        return fuzz(where, options.count, options.seed, options.kind, options.case) > 0


def test_mutated_files_are_read_or_refused_in_a_second_and_in_bounded_memory():
    command = [sys.executable, "-m", "tests.convert.test_fuzz", "--count", "3000"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


if __name__ == "__main__":
    os.environ["PYTHONFAULTHANDLER"] = "1"
    sys.exit(main())
