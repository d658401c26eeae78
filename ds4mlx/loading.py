"""What lies behind a path: settings, weights and tokenizer of a GGUF file or of a folder."""

import hashlib
import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from . import preflight
from .config import TargetConfig
from .convert.config import (
    check_folder_config,
    draft_config,
    folder_draft_config,
    target_config,
)
from .convert.convert import JOURNAL
from .convert.folder import folder_tensors, stored_tensors
from .convert.gguf import open_gguf
from .convert.hub import DRAFT_TYPE, QUANT_METHOD
from .convert.inventory import (
    check_draft,
    check_draft_folder,
    check_folder,
    check_pair,
    check_target,
)
from .errors import FileError, UsageError, file_errors
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
    plan: preflight.Plan
    ctx: int  # that fits into memory
    risk: str | None  # if it does not, and was loaded by force
    chunk: int  # tokens of prefill at a time that fit


@file_errors()
def load_files(
    path: str | Path | None,
    mtp: str | Path | None = None,
    progress: Progress | None = None,
    ctx: int | None = None,
    force: bool = False,
) -> Files:
    """Open, check and load `path` (None: the embedded model) and a draft for it, `mtp`.

    Nothing is loaded before both are checked and fit into memory with a context of `ctx` tokens.
    Raises UsageError for a path that cannot be meant, FileError for a file that is damaged or a
    draft that cannot draft for this target, Ds4Error for too little memory without `force`.
    """
    data = files(__package__) / "data"
    where = _expanded(data / EMBEDDED if path is None else path)
    found = find(where)
    config, name, experts = found["config"], found["name"], found["config"]["n_routed_experts"]
    draft = None
    if mtp is not None:
        other = _expanded(data / EMBEDDED_DRAFT if mtp == "embedded" else mtp)
        draft = find_draft(other, config)
        warning = check_pair(draft["config"], {"lineage": None} | config)
    ctx = preflight.context(ctx, positions(found))
    needs = plan(found, draft)
    on = preflight.device()
    risk = preflight.require(name, needs, ctx, on, force)
    chunk = preflight.chunk(needs, ctx, on)
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
    return Files(**found, weights=weights, draft=draft, plan=needs, ctx=ctx, risk=risk, chunk=chunk)


@file_errors()
def find(path: str | Path) -> dict:
    """A target, opened and checked; its `tensors` are not read."""
    where = _expanded(path)
    found = (_folder if (where / "config.json").is_file() else _gguf)(where)
    found["chat"] = found["chat"] and found["tokenizer"].has_chat_roles
    return found


@file_errors()
def find_draft(path: str | Path, target: dict) -> dict:
    """The same of a draft, for a target's `config`."""
    where = _expanded(path)
    return (_draft_folder if where.is_dir() else _draft_gguf)(where, target)


def positions(found: dict) -> int:
    """The longest context of a target that was found."""
    return TargetConfig.from_dict(found["config"], found["name"]).max_position_embeddings


def plan(found: dict, draft: dict | None = None) -> preflight.Plan:
    """What a target and a draft that were found need, by context."""
    settings = TargetConfig.from_dict(found["config"], found["name"])
    return preflight.plan(settings, found["tensors"], draft and draft["tensors"])


def _expanded(path) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"the path is {path!r:.60}, wanted a text or a pathlib.Path")
    where = Path(os.path.expandvars(os.path.expanduser(path)))
    if (where / JOURNAL).is_file() and not (where / "config.json").is_file():
        raise UsageError(
            f"{where}: a conversion that is not finished; run the same ds4mlx convert again"
        )
    return where


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
    if config.get("model_type") == DRAFT_TYPE:
        raise UsageError(f"{path}: this is a DSpark draft, wanted a DeepSeek V4 target model")
    if not (path / "tokenizer.json").is_file():
        raise UsageError(f"{path}: there is no tokenizer.json beside config.json")
    check_folder_config(config, str(path / "config.json"))
    TargetConfig.from_dict(config, str(path / "config.json"))  # complains of another model's
    return {
        "name": path.name,
        "config": config,
        "tensors": check_folder(path, _folder_tensors(path, config, draft=False), config),
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
    """A converted draft, or config.json and draft*.safetensors under the official names."""
    path = path.resolve()
    if not (path / "config.json").is_file():
        raise UsageError(f"{path}: wanted config.json and safetensors for a draft")
    settings = _json(path / "config.json")
    if settings.get("model_type") == "deepseek_v4" and "dspark_block_size" not in settings:
        raise UsageError(f"{path}: this is a DeepSeek V4 target model, wanted a DSpark draft")
    config = folder_draft_config(settings, str(path / "config.json"))
    tensors = _folder_tensors(path, settings, draft=True)
    tensors = check_draft_folder(path, tensors, config, target)
    return {"name": path.name, "config": config, "tensors": tensors}


def _folder_tensors(path: Path, config: dict, draft: bool) -> dict:
    """The tensors of a folder that `convert` has written, or of the safetensors files in it."""
    method = config.get("quantization_config")
    if isinstance(method, dict) and method.get("quant_method") == QUANT_METHOD:
        if not isinstance(tensors := method.get("tensors"), dict):
            raise FileError(f"{path / 'config.json'}: quantization_config names no tensors")
        return stored_tensors(path, tensors)
    shards = [p for p in path.glob("*.safetensors") if p.name.startswith("draft") == draft]
    if not shards:
        what = "draft*.safetensors" if draft else ".safetensors"
        raise UsageError(f"{path}: there is no {what} file beside config.json")
    return folder_tensors(sorted(shards))


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileError(f"{path} is not a JSON object")
    return value


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
