"""What lies behind a path: settings, weights and tokenizer of a GGUF file or of a folder."""

import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from .config import TargetConfig
from .convert.config import target_config
from .convert.folder import folder_tensors
from .convert.gguf import open_gguf
from .convert.inventory import check_folder, check_target
from .errors import FileError, UsageError
from .tokenizer import Tokenizer
from .weights import Progress, Weights, load_weights

EMBEDDED = "nano.gguf"  # the small trained model that comes with the package


@dataclass(frozen=True)
class Files:
    """A model as it was found, its weights loaded."""

    name: str
    config: dict  # the fields of the official config.json
    weights: Weights
    tokenizer: Tokenizer
    release: str | None  # "preview" or "0731", where the file tells
    chat: bool  # trained on chat roles; without, a prompt is completed


def load_files(path: str | Path | None, progress: Progress | None = None) -> Files:
    """Open, check and load `path` (None: the embedded model).

    Raises UsageError for a path that cannot be meant, FileError for a file that is damaged.
    """
    if path is None:
        path = files(__package__) / "data" / EMBEDDED
    folder = Path(os.path.expandvars(os.path.expanduser(path)))
    return (_folder if (folder / "config.json").is_file() else _gguf)(folder, progress)


def _gguf(path, progress) -> Files:
    gguf = open_gguf(path)
    config = target_config(gguf)
    tensors = check_target(gguf, config)
    tokenizer = Tokenizer.from_gguf(gguf.metadata)
    return Files(
        name=gguf.path.name,
        config=config,
        weights=load_weights(tensors, config["n_routed_experts"], gguf.path.name, progress),
        tokenizer=tokenizer,
        release=config["release"],
        chat=bool(gguf.metadata.get("ds4mlx.chat", True)),
    )


def _folder(path: Path, progress) -> Files:
    """A folder with config.json, tokenizer.json and safetensors under the official names."""
    path = path.resolve()
    try:
        config = json.loads((path / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise FileError(f"{path / 'config.json'} is not JSON: {error}") from None
    shards = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("draft"))
    if not shards:
        raise UsageError(f"{path}: there is no .safetensors file beside config.json")
    if not (path / "tokenizer.json").is_file():
        raise UsageError(f"{path}: there is no tokenizer.json beside config.json")
    TargetConfig.from_dict(config, str(path / "config.json"))  # complains of all missing fields
    tensors = check_folder(path, folder_tensors(shards), config)
    return Files(
        name=path.name,
        config=config,
        weights=load_weights(tensors, config["n_routed_experts"], path.name, progress),
        tokenizer=Tokenizer.from_json(path / "tokenizer.json"),
        release=config.get("release"),
        chat=config.get("chat", True),
    )
