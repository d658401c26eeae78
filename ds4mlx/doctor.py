"""What this machine is and what would fit on it, of files from their headers alone."""

import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from . import __version__, preflight
from .convert.gguf import open_gguf
from .convert.hub import DRAFT_TYPE
from .convert.inventory import check_pair
from .convert.names import kind
from .errors import Ds4Error
from .loading import find, find_draft, plan, positions
from .ops import metal
from .preflight import GIB, Device

CONTEXTS = (4096, preflight.CTX, 131_072, 1 << 20)  # and the model's limit, where it is less
_PACKAGES = ("mlx", "numpy", "gguf", "tokenizers", "huggingface_hub")


class Doctor:
    """An examination that runs while its lines are read; then `ill` counts what is of no use."""

    def __init__(self, paths=()):
        self.paths, self.ill = [Path(os.path.expanduser(p)) for p in paths], 0
        self._device = preflight.device()

    def __iter__(self) -> Iterator[str]:
        yield from machine(self._device)
        drafts = [p for p in self.paths if is_draft(p)]
        for path in self.paths:
            yield ""
            if path in drafts:
                yield from self._seen(path, _draft(path, alone=drafts == self.paths))
            else:
                yield from self._seen(path, self._target(path, drafts))

    def _seen(self, path: Path, found: Iterator[str]) -> Iterator[str]:
        """Lines about a file, or about what is wrong with it."""
        try:
            yield from found
        except Ds4Error as error:
            self.ill += 1
            yield f"{path}: of no use: {error}"

    def _target(self, path: Path, drafts: list[Path]) -> Iterator[str]:
        found = find(path)
        size = sum({t.place: t.nbytes for t in found["tensors"].values()}.values())
        checkpoint = found["config"].get("lineage") or "not told"
        yield f"{path}: a target model, {_gib(size)} of tensors, checkpoint {checkpoint}"
        yield from _needs(found, None, self._device)
        for draft in drafts:
            yield f"  with the draft {draft}"
            yield from self._seen(draft, _pair(found, draft, self._device))


def machine(on: Device) -> Iterator[str]:
    """Lines about the machine, the device and the software."""
    yield f"machine: {platform.platform()}, {platform.machine()}, {os.cpu_count()} cores"
    yield f"memory: {_gib(preflight.memory())}, {_gib(preflight.free_memory())} free"
    kernels = "kernels" if metal.enabled() else "no kernels, plain MLX"
    what = f"{on.what} {_gib(on.limit)}, of which a plan may fill {_gib(on.budget)}"
    yield f"device: {on.kind}, {on.name}, {kernels}; {what}"
    yield f"disk: {_gib(shutil.disk_usage('.').free)} free in {os.getcwd()}"
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    yield f"software: ds4mlx {__version__}, Python {platform.python_version()}, {packages}"


def is_draft(path: Path) -> bool:
    """Whether a path holds a draft and no target; damaged files hold none."""
    try:
        if not path.is_dir():
            return kind(open_gguf(path)) == "draft"
        weights = {p.name.startswith("draft") for p in path.glob("*.safetensors")}
        settings = json.loads((path / "config.json").read_text("utf-8"))
        return settings.get("model_type") == DRAFT_TYPE or weights == {True}
    except (Ds4Error, OSError, ValueError):
        return False


def _draft(path: Path, alone: bool) -> Iterator[str]:
    size = sum(p.stat().st_size for p in path.glob("*.safetensors")) if path.is_dir() else 0
    yield f"{path}: a DSpark draft, {_gib(size or open_gguf(path).nbytes)}"
    if alone:
        yield "  name its target too, to see whether they belong together and fit"


def _pair(found: dict, path: Path, on: Device) -> Iterator[str]:
    draft = find_draft(path, found["config"])
    if warning := check_pair(draft["config"], {"lineage": None} | found["config"]):
        yield f"  {warning}"
    yield from _needs(found, draft, on)


def _needs(found: dict, draft: dict | None, on: Device) -> Iterator[str]:
    """A table of what contexts take, and what is to be done for the default one."""
    need, most = plan(found, draft), positions(found)
    yield f"  {'context':>9} {'weights':>9} {'draft':>9} {'cache':>9} {'workspace':>9} {'GiB':>9}"
    for ctx in sorted({min(c, most) for c in CONTEXTS}):
        n = need(ctx)
        parts = (n.weights, n.draft, n.cache, n.workspace, n.total)
        row = " ".join(f"{part / GIB:9.2f}" for part in parts)
        yield f"  {ctx:9} {row}  {'fits' if n.total <= on.budget else 'does not fit'}"
    try:
        preflight.require(found["name"], need, preflight.context(None, most), on)
    except Ds4Error as error:
        yield f"  {error}"


def _gib(n: int) -> str:
    return f"{n / GIB:.2f} GiB"
