"""From the released checkpoint to GGUF files as ds4 has them, or to MLX folders of the same."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..errors import FileError, UsageError, file_errors
from .checkpoint import Checkpoint, open_checkpoint, read_json
from .config import draft_config, lineage
from .convert import convert
from .flow import check_room
from .hub import describe, path_text, to_json
from .imatrix import read_imatrix
from .inventory import check_draft
from .metadata import draft_metadata, target_metadata, tokenizer_metadata
from .quantize import Image, Progress, image, relative, summary, write
from .receipt import RECEIPT

# What ds4 calls its files, by the type of the experts.
_NAMES = {
    "mxfp4": "MXFP4Experts-F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out",
    "q4_k": "Q4KExperts-F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out",
    "iq2_xxs": "IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8",
}


def convert_released(
    source,
    out=None,
    *,
    gguf: bool = False,
    experts: str = "mxfp4",
    imatrix=None,
    dspark_support=None,
    dspark_manifest=None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Iterator[str]:
    """Convert the folder of the released checkpoint; lines that say what was written.

    The target goes to `out` and its DSpark stages to `dspark_support`, either of which may be
    absent: MLX folders, or with `gguf` files (in a folder they get ds4's names). Dense matrices
    become Q8_0; `experts` names the type of the routed ones, `imatrix` a file that tells which
    inputs matter. `dspark_manifest` names a JSON file that lists what the draft was made of.

    Raises UsageError or FileError, before anything is written if a header can tell.
    """
    if out is None and dspark_support is None:
        raise UsageError("nothing is to be written: wanted a place for the target, or for a draft")
    if dspark_manifest is not None and dspark_support is None:
        raise UsageError("--dspark-manifest lists what --dspark-support wrote: give both")
    checkpoint = open_checkpoint(
        source,
        lambda name: (dspark_support if name.startswith("mtp.") else out) is not None,
    )
    importance = read_imatrix(imatrix) if imatrix is not None else {}
    jobs: list[tuple[Image, Path]] = []
    if out is not None:
        made = _target(checkpoint, experts, importance)
        stem = f"{_NAMES[experts]}{'-imatrix' if importance else ''}"
        jobs.append((made, _place(checkpoint, out, gguf, stem)))
    if dspark_support is not None:
        made = _draft(checkpoint, experts, importance)
        jobs.append((made, _place(checkpoint, dspark_support, gguf, "DSpark-support")))
    places = [path for _, path in jobs]
    manifest = None if dspark_manifest is None else _expanded(dspark_manifest)
    _check_places(checkpoint, places, manifest, overwrite)
    _check_rooms(jobs)
    for made, path in jobs:
        if gguf:
            costs = write(made, path, overwrite=overwrite, progress=progress)
            errors = {name: relative(cost) for name, cost in costs.items()}
        else:
            convert(made, path, overwrite=overwrite, progress=progress)
            tensors = read_json(path / RECEIPT)["tensors"]
            errors = {t["name"]: t.get("relative_error", 0.0) for t in tensors}
        yield str(path)
        yield from (f"  {line}" for line in summary(made, errors))
        if manifest and path == places[-1]:
            _write_manifest(manifest, checkpoint, made, path, errors)
            yield str(manifest)


def _target(checkpoint: Checkpoint, experts: str, importance: dict) -> Image:
    title = f"{_title(checkpoint)} {_lineage(checkpoint) or ''}".strip()
    metadata = target_metadata(checkpoint.config, title)
    metadata |= tokenizer_metadata(checkpoint.tokenizer, checkpoint.config)
    if importance:
        metadata["quantize.imatrix.entries_count"] = ("UINT32", len(importance))
    tensors = {n: s for n, s in checkpoint.tensors.items() if not n.startswith("mtp.")}
    own = {n: w for n, w in importance.items() if not n.startswith("mtp.")}
    made = image(checkpoint.path, metadata, tensors, experts, own)
    describe(made)  # complains of tensors and settings that do not fit together
    return made


def _draft(checkpoint: Checkpoint, experts: str, importance: dict) -> Image:
    tensors = {n: s for n, s in checkpoint.tensors.items() if n.startswith("mtp.")}
    if not any(".main_proj." in name for name in tensors):
        what = "an older one-stage MTP drafter" if tensors else "no mtp.* tensors"
        raise FileError(f"{checkpoint.path}: holds {what}, wanted the stages of a DSpark draft")
    title = f"{_title(checkpoint)} {_lineage(checkpoint) or ''}".strip()
    target_metadata(checkpoint.config, title)  # complains of missing settings
    metadata = draft_metadata(checkpoint.config, f"{title} DSpark support", checkpoint.stages)
    own = {n: w for n, w in importance.items() if n.startswith("mtp.")}
    made = image(checkpoint.path, metadata, tensors, experts, own)
    check_draft(made, draft_config(made), checkpoint.config)
    return made


@file_errors()
def _check_places(checkpoint: Checkpoint, places: list[Path], manifest: Path | None, overwrite):
    """Raises UsageError for a place that is in use, or that the checkpoint lies in."""
    own = checkpoint.path.resolve()
    for path in (*places, *([manifest] if manifest else [])):
        if own in (path.resolve(), *path.resolve().parents):
            raise UsageError(f"{path}: lies in the checkpoint's own folder, wanted another place")
        whole = path / "config.json" if path.is_dir() else path
        if path.suffix == ".gguf" and path.is_dir():
            raise UsageError(f"{path}: a folder, wanted a file to write")
        if whole.exists() and not overwrite:
            raise UsageError(f"{path} exists already; name another place, or --overwrite")
    if twice := [p for p in places if places.count(p) > 1]:
        raise UsageError(f"{twice[0]}: the target and the draft cannot be written to one place")
    if manifest and not manifest.parent.is_dir():
        raise UsageError(f"{manifest}: there is no folder {manifest.parent}")
    if manifest and not os.access(manifest.parent, os.W_OK):
        raise UsageError(f"{manifest}: {manifest.parent} cannot be written")


def _check_rooms(jobs: list[tuple[Image, Path]]):
    """Raises FileError unless a disk has room for all that goes there and was not begun."""
    wanted, folders = Counter(), {}
    for made, path in jobs:
        folder = next(p for p in path.parents if p.is_dir())
        if not path.exists():
            wanted[folder.stat().st_dev] += made.nbytes
            folders[folder.stat().st_dev] = folder
    for device, folder in folders.items():
        check_room(folder, wanted[device])


def _expanded(path) -> Path:
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))


def _place(checkpoint: Checkpoint, out, gguf: bool, stem: str) -> Path:
    """Where an image goes: a folder, or a file that is named as ds4 would if `out` is a folder."""
    path = _expanded(out)
    if not gguf and path.suffix == ".gguf":
        raise UsageError(f"{path}: an MLX folder is written without --gguf, wanted its name")
    if not gguf or path.suffix == ".gguf":
        return path
    parts = [_title(checkpoint).replace(" ", "-"), stem, _lineage(checkpoint) or ""]
    return path / ("-".join(filter(None, parts)) + ".gguf")


def _title(checkpoint: Checkpoint) -> str:
    """The model's name, without the lineage."""
    name = _names(checkpoint)[0]
    name = re.sub(r"[-_ ]*(0731|preview)$", "", name, flags=re.IGNORECASE)
    return name.replace("-", " ")


def _lineage(checkpoint: Checkpoint) -> str | None:
    return checkpoint.config.get("lineage") or lineage(_names(checkpoint))


def _names(checkpoint: Checkpoint) -> list[str]:
    """Names of the repository: as huggingface_hub's cache has it, or the folder's."""
    cached = [p.split("--")[-1] for p in checkpoint.path.parts if p.startswith("models--")]
    return [*cached, checkpoint.path.name]


def _write_manifest(
    file: Path, checkpoint: Checkpoint, made: Image, out: Path, errors: dict[str, float]
):
    tensors = [
        {
            "name": t.name,
            "type": t.type,
            "shape": t.shape,
            "bytes": t.nbytes,
            "format": t.sources[0].format,
            "sources": [{"name": s.name, "file": s.file} for s in t.sources],
            "relative_error": errors[t.name],
        }
        for t in made.tensors.values()
    ]
    paths = {"checkpoint": path_text(checkpoint.path), "written": path_text(out)}
    value = paths | {"stages": checkpoint.stages, "tensors": tensors}
    try:
        file.write_bytes(to_json(value))
    except OSError as error:
        raise FileError(f"{file}: {error.strerror}") from error
