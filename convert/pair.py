"""Make the embedded pair: a folder of safetensors under official names -> two GGUF files.

    python -m ds4mlx.convert.pair NANO_DIR OUT_DIR [--experts mxfp4|q4_k|iq2_xxs]

Keys, names and types are those of ds4's own files (the format's description, 1.3 to 1.7 and 2).
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

from ..errors import Ds4Error, FileError
from .blocks import decode
from .checkpoint import Source, read_json, sources
from .encode import encode
from .gguf import Tensor, open_gguf
from .metadata import draft_metadata, target_metadata, tokenizer_metadata
from .quantize import EXPERTS, Image, image, write
from .write import typed, write_gguf

NAME = "DeepSeek V4"


def make_pair(source, out, experts: str = "mxfp4") -> str:
    """Write `nano.gguf` and `nano-dspark.gguf` into `out`; the report says what was rounded.

    Raises FileError if a tensor has no place there, or if MXFP4 cannot hold an expert exactly.
    """
    source, out = Path(source), Path(out)
    config = read_json(source / "config.json")
    target = target_metadata(config, f"{NAME} nano", chat=False)  # roles were never trained
    target |= tokenizer_metadata(read_json(source / "tokenizer.json"), config)
    draft = draft_metadata(config, f"{NAME} nano DSpark support", config["n_mtp_layers"])
    rounded = Counter()
    for name, prefix, metadata in (
        ("nano.gguf", "target", target),
        ("nano-dspark.gguf", "draft", draft),
    ):
        made = image(source, metadata, _sources(source, prefix), experts)
        rounded += _rounded(made, write(made, out / name, overwrite=True))
    return "".join(f"{count} values rounded in {kind}\n" for kind, count in sorted(rounded.items()))


def transcode(path, out, experts: str):
    """Write a GGUF again with its routed experts encoded anew, all else as it was."""
    gguf = open_gguf(path)
    write_gguf(out, typed(gguf.metadata), [_transcoded(t, experts) for t in gguf.tensors.values()])


def _transcoded(t: Tensor, experts: str) -> tuple:
    if "_exps." not in t.name:
        return t.name, t.type, t.shape, t.read
    type = EXPERTS[experts]["_down_" in t.name]
    return t.name, type, t.shape, lambda: encode(type, decode(t.type, t.read()))


def _sources(folder: Path, prefix: str) -> dict[str, tuple[Source, ...]]:
    paths = sorted(folder.glob(f"{prefix}_weights*.safetensors"))
    if not (found := sources(paths)):
        raise FileError(f"{folder}: no tensors in {prefix}_weights*.safetensors")
    return found


def _rounded(image: Image, costs: dict[str, Counter]) -> Counter:
    """How many values each kind of float16 tensor could not hold, by kind and source dtype."""
    rounded = Counter()
    for t in image.tensors.values():
        if t.type == "F16":
            kind = re.sub(r"\.[0-9]+\.", ".N.", t.name) + f" ({t.sources[0].format} to F16)"
            rounded[kind] += costs[t.name]["rounded"]
    return rounded


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m ds4mlx.convert.pair", description=__doc__)
    parser.add_argument("source", metavar="NANO_DIR")
    parser.add_argument("out", metavar="OUT_DIR")
    parser.add_argument("--experts", choices=EXPERTS, default="mxfp4")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(make_pair(options.source, options.out, options.experts))
    except (Ds4Error, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return getattr(error, "status", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
