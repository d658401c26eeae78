"""What lies behind a path: settings, weights and tokenizer of a GGUF file or of a folder."""

import hashlib
import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from .config import TargetConfig
from .convert.config import draft_config, folder_draft_config, target_config
from .convert.folder import folder_tensors
from .convert.gguf import open_gguf
from .convert.inventory import (
    check_draft,
    check_draft_folder,
    check_folder,
    check_pair,
    check_target,
)
from .errors import FileError, UsageError
from .tokenizer import Tokenizer
from .weights import Progress, Weights, load_weights

EMBEDDED = "nano.gguf"  # the small trained model that comes with the package
EMBEDDED_DRAFT = "nano-dspark.gguf"  # and its draft, which is called "embedded"


@dataclass(frozen=True)
class DraftFiles:
    """A draft as it was found, its weights loaded."""

    name: str
    config: dict
    weights: Weights
    warning: str | None  # if it cannot be told that it belongs to the target
    fingerprint: str  # of the pair


@dataclass(frozen=True)
class Files:
    """A model as it was found, its weights loaded."""

    name: str
    config: dict  # the fields of the official config.json
    weights: Weights
    tokenizer: Tokenizer
    release: str | None  # "preview" or "0731", where the file tells
    chat: bool  # trained on chat roles; without, a prompt is completed
    draft: DraftFiles | None


def load_files(
    path: str | Path | None, mtp: str | Path | None = None, progress: Progress | None = None
) -> Files:
    """Open, check and load `path` (None: the embedded model) and a draft for it, `mtp`.

    Nothing is loaded before both are checked. Raises UsageError for a path that cannot be meant,
    FileError for a file that is damaged or a draft that cannot draft for this target.
    """
    data = files(__package__) / "data"
    where = _expanded(data / EMBEDDED if path is None else path)
    found = (_folder if (where / "config.json").is_file() else _gguf)(where)
    found["chat"] = found["chat"] and found["tokenizer"].has_chat_roles
    config, name, experts = found["config"], found["name"], found["config"]["n_routed_experts"]
    draft = None
    if mtp is not None:
        other = _expanded(data / EMBEDDED_DRAFT if mtp == "embedded" else mtp)
        draft = (_draft_folder if other.is_dir() else _draft_gguf)(other, config)
        warning = check_pair(draft["config"], {"lineage": None} | config)
    weights = load_weights(found.pop("tensors"), experts, name, progress)
    if draft:
        tensors = draft.pop("tensors")
        loaded = load_weights(tensors, experts, draft["name"], progress)
        draft = DraftFiles(
            **draft,
            weights=loaded,
            warning=warning,
            fingerprint=_fingerprint(where, other),
        )
    return Files(**found, weights=weights, draft=draft)


def _expanded(path) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))


def _gguf(path: Path) -> dict:
    gguf = open_gguf(path)
    config = target_config(gguf)
    return {
        "name": gguf.path.name,
        "config": config,
        "tensors": check_target(gguf, config),
        "tokenizer": Tokenizer.from_gguf(gguf.metadata),
        "release": config["release"],
        "chat": bool(gguf.metadata.get("ds4mlx.chat", True)),
    }


def _folder(path: Path) -> dict:
    """A folder with config.json, tokenizer.json and safetensors under the official names."""
    path = path.resolve()
    config = _json(path / "config.json")
    shards = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("draft"))
    if not shards:
        raise UsageError(f"{path}: there is no .safetensors file beside config.json")
    if not (path / "tokenizer.json").is_file():
        raise UsageError(f"{path}: there is no tokenizer.json beside config.json")
    TargetConfig.from_dict(config, str(path / "config.json"))  # complains of all missing fields
    return {
        "name": path.name,
        "config": config,
        "tensors": check_folder(path, folder_tensors(shards), config),
        "tokenizer": Tokenizer.from_json(path / "tokenizer.json"),
        "release": config.get("release"),
        "chat": config.get("chat", True),
    }


def _draft_gguf(path: Path, target: dict) -> dict:
    gguf = open_gguf(path)
    config = draft_config(gguf)
    tensors = check_draft(gguf, config, target)
    return {"name": gguf.path.name, "config": config, "tensors": tensors}


def _draft_folder(path: Path, target: dict) -> dict:
    """A folder with config.json and draft*.safetensors under the official names."""
    path = path.resolve()
    shards = sorted(path.glob("draft*.safetensors"))
    if not shards or not (path / "config.json").is_file():
        raise UsageError(f"{path}: wanted config.json and draft*.safetensors for a draft")
    config = folder_draft_config(_json(path / "config.json"), str(path / "config.json"))
    tensors = check_draft_folder(path, folder_tensors(shards), config, target)
    return {"name": path.name, "config": config, "tensors": tensors}


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise FileError(f"{path} is not JSON: {error}") from None


def _fingerprint(*paths: Path) -> str:
    """Sizes and ends of the files: cheap, and other for another pair in all likelihood."""
    digest, end = hashlib.sha256(), 1 << 20
    for path in paths:
        for part in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            size = part.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with part.open("rb") as file:
                digest.update(file.read(end))
                file.seek(max(0, size - end))
                digest.update(file.read(end))
    return digest.hexdigest()[:16]
