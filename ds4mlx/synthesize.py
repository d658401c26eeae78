"""Writes a synthetic Flash, and a draft for it, as GGUF files that load like ds4's own.

The tensors are those that `synthetic` makes in memory, made one after the other: the disk has to
hold the model, the memory does not.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from .config import TargetConfig
from .convert.flow import CHUNK, check_room, new_file
from .convert.metadata import draft_metadata, target_metadata, tokenizer_metadata
from .convert.names import gguf_name
from .convert.repack import unpack
from .convert.write import header, tensor_bytes
from .draft import DraftConfig
from .errors import FileError, UsageError, file_errors
from .packed import Matrix, Packed
from .synthetic import (
    FLASH,
    RECIPES,
    draft_types,
    dspark_of,
    held,
    makers,
    published,
    published_draft,
    shortened,
    target_types,
)
from .tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, PAD, THINK, USER
from .weights import Progress

NAME = "DeepSeek V4 Flash synthetic"
# The vocabulary ends with this many added tokens; those that have a role stand where they do in
# the real one, all others are place holders.
_ADDED = 1280
_ROLES = {803: USER, 804: ASSISTANT, 821: THINK, 822: END_THINK, 825: DSML}


def synthesize(
    path,
    recipe: str = "q2",
    layers: int = 43,
    *,
    mtp=None,
    alias: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Iterator[Path]:
    """Write the first `layers` layers of a synthetic Flash, and a draft for them to `mtp`.

    Yields each file as it is done. The tensors are, bit for bit, those of `synthetic.flash(recipe,
    layers)` and `flash_draft` on the same kind of device; with `alias` each layer's routed experts
    are those of the first layer that has them in the same type, stored once. Token texts are made
    up, as many as in the real vocabulary.

    Raises UsageError for what cannot be meant, FileError for a disk without room; both before
    anything is written.
    """
    if recipe not in (recipes := (*RECIPES, "q2-q4")):
        raise UsageError(f"recipe is {recipe!r:.60}, wanted one of {', '.join(recipes)}")
    least, most = FLASH.num_hash_layers, FLASH.num_hidden_layers
    if not isinstance(layers, int) or layers not in range(least, most + 1):
        raise UsageError(f"layers is {layers!r:.60}, wanted a whole number from {least} to {most}")
    config = shortened(FLASH, layers)
    files = [(_expanded(path), target_file(config, recipe, alias=alias))]
    if mtp is not None:
        files.append((_expanded(mtp), draft_file(dspark_of(config), config, alias=alias)))
    _check_places([place for place, _ in files], overwrite)
    _check_rooms(files)
    total, done = sum(file.nbytes for _, file in files), 0

    def written(size: int):
        if progress:
            progress("write", done + size, total)

    for place, file in files:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            file.write(place, written)
        except OSError as error:
            raise FileError(f"{error.filename or place}: {error.strerror}") from error
        done += file.nbytes
        yield place


def target_file(config: TargetConfig, recipe: str, seed: int = 0, *, alias: bool = False) -> "File":
    """What `synthetic.made_target` makes, as a file."""
    settings = published(config) | {"bos_token_id": 0, "eos_token_id": 1}
    metadata = target_metadata(settings, f"{NAME} {recipe}", chat=False)  # it knows no roles
    metadata |= tokenizer_metadata(vocabulary(config.vocab_size), settings)
    return File.of(metadata, makers(target_types(config, recipe), config, seed), alias)


def draft_file(
    draft: DraftConfig, config: TargetConfig, seed: int = 1, *, alias: bool = False
) -> "File":
    """What `synthetic.made_draft` makes for a target of `config`, as a file."""
    name = f"{NAME} DSpark support"
    metadata = draft_metadata(published_draft(draft), name, draft.n_mtp_layers)
    return File.of(metadata, makers(draft_types(draft, config), config, seed), alias)


def vocabulary(size: int) -> dict:
    """A tokenizer.json of made-up texts that can encode all text, `size` tokens in all.

    Three control tokens, the bytes, merges of two and three printable ones, and added tokens: of
    each as many as in the real one, if the size is that one's.
    """
    letters = sorted(ByteLevel.alphabet())  # printable ASCII comes first, as in the real one
    plain = letters[:94]
    merges = chain(product(plain, plain), ((a + b, c) for a, b, c in product(plain, repeat=3)))
    merges = list(islice(merges, size - 3 - len(letters) - _ADDED))
    texts = [BOS, EOS, PAD, *letters, *map("".join, merges)]
    first = len(texts)
    texts += [_ROLES.get(i, f"<｜place▁holder▁no▁{i}｜>") for i in range(_ADDED)]
    added = [*range(3), *range(first, size)]
    return {
        "added_tokens": [{"id": i, "content": texts[i], "special": i < 3} for i in added],
        "model": {
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }


class File(NamedTuple):
    """A GGUF that can be written: what comes before its tensors, and how its tensors are made."""

    head: bytes
    tensors: list[tuple[int, str, Callable[[], Matrix]]]  # start, type, maker; no bytes twice
    nbytes: int

    @classmethod
    def of(cls, metadata: dict[str, tuple], made, alias: bool) -> "File":
        """made: (official name, type, shape, maker) of every tensor."""
        made = sorted((gguf_name(name), *rest) for name, *rest in made)
        shared = _shared(made) if alias else {}
        head, starts, size = header(metadata, [t[:3] for t in made], shared)
        own = [
            (start, type, make)
            for start, (name, type, _, make) in zip(starts, made, strict=True)
            if name not in shared
        ]
        return cls(head, own, size)

    def write(self, path: Path, written: Callable[[int], None]):
        """Write `path`, whole or not there; `written` is told how many bytes there are so far."""
        with new_file(path) as file:
            file.write(self.head)
            for start, type, make in self.tensors:
                file.write(bytes(start - file.tell()))
                for raw in _blocks(type, make()):
                    file.write(raw)
                    written(file.tell())
            file.write(bytes(self.nbytes - file.tell()))
            written(self.nbytes)


def _shared(made: list[tuple]) -> dict[str, str]:
    """Experts of each layer -> those of the first layer that has them in the same type."""
    first, shared = {}, {}
    for name, type, *_ in made:
        if "_exps." in name:
            one = first.setdefault((name.split(".", 2)[2], type), name)
            shared |= {name: one} if one != name else {}
    return shared


def _blocks(type: str, matrix: Matrix) -> Iterator[np.ndarray]:
    """The bytes of a tensor as they lie in a file, uint8 [rows, row bytes], some rows at a time."""
    planes = held(matrix).planes if isinstance(matrix, Packed) else {"data": held(matrix)}
    mx.clear_cache()  # of what making it took
    lead = len(matrix.shape) - 1
    planes = {n: np.asarray(p).reshape(-1, *p.shape[lead:]) for n, p in planes.items()}
    step = max(1, CHUNK // tensor_bytes(type, matrix.shape[-1:]))
    for start in range(0, len(next(iter(planes.values()))), step):
        yield unpack(type, {n: p[start : start + step] for n, p in planes.items()})


@file_errors()
def _check_places(places: list[Path], overwrite: bool):
    """Raises UsageError for a place that is in use, FileError for one that no file can have."""
    for path in places:
        if path.is_dir():
            raise UsageError(f"{path}: a folder, wanted a file to write")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: not a regular file, wanted a file to write")
        if not (nearest := next(p for p in path.parents if p.exists())).is_dir():
            raise FileError(f"{nearest}: not a folder, wanted one for {path.name}")
        if path.exists() and not overwrite:
            raise UsageError(f"{path} exists already; name another file, or --overwrite")
    if len({place.resolve() for place in places}) < len(places):
        raise UsageError(f"{path}: the target and the draft cannot be written to one place")


@file_errors()
def _check_rooms(files: list[tuple[Path, File]]):
    """Raises FileError unless each disk has room for all that goes there."""
    wanted, folders = Counter(), {}
    for path, file in files:
        folder = next(p for p in path.parents if p.is_dir())
        wanted[folder.stat().st_dev] += file.nbytes
        folders[folder.stat().st_dev] = folder
    for device, folder in folders.items():
        check_room(folder, wanted[device])


def _expanded(path) -> Path:
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise UsageError(f"{path!r:.60}: no path of a file to write")
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))
