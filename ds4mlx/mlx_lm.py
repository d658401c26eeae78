"""mlx-lm runs the folders that `ds4mlx convert` wrote, once this module has been imported.

>>> import ds4mlx.mlx_lm, mlx_lm
>>> model, tokenizer = mlx_lm.load("flash/")

`python -m ds4mlx.mlx_lm VERB ..` is `mlx_lm.VERB ..` with that import.
"""

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache
import mlx_lm.utils

from .api import CHUNK
from .cache import Cache
from .chat import RELEASES, prompt_text, render
from .config import TargetConfig
from .convert.hub import QUANT_METHOD
from .errors import UsageError
from .generate import prefill
from .loading import load_files
from .packed import Packed
from .parse import OutputParser
from .rows import FEW
from .target import Target, tensors
from .tokenizer import DSML

MODEL_TYPE = "ds4mlx"  # what mlx-lm is told instead of deepseek_v4, so that its own stays its own
STEP = 4096  # tokens that a cache grows by


@dataclass(frozen=True)
class ModelArgs:
    """What mlx-lm's loader knows of a model before it is built."""

    path: str
    ctx: int | None  # tokens that must fit into memory; None: as `ds4mlx.load`
    force: bool

    @classmethod
    def from_dict(cls, config: dict) -> "ModelArgs":
        return cls(config["ds4mlx_path"], config.get("ctx"), config.get("force", False))


class Model(nn.Module):
    """A target as mlx-lm calls it. To mlx-lm it is one layer, with one cache for all.

    Raises what `ds4mlx.load` raises: for a damaged folder, or too little memory.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        files = load_files(args.path, ctx=args.ctx, force=args.force)
        self.target = Target(TargetConfig.from_dict(files.config, files.name), files.weights)
        found = [w.planes.values() if isinstance(w, Packed) else [w] for w in tensors(self.target)]
        self.planes = [plane for planes in found for plane in planes]  # mlx-lm counts the bytes

    def __call__(self, inputs: mx.array, cache: list["TargetCache"] | None = None) -> mx.array:
        """Token ids [B, N] -> float32 logits [B, N, V]; without a cache, of new sequences.

        Sequences of a batch run one after another: each gets what it gets alone.
        """
        return (cache or self.make_cache())[0].feed(self.target, inputs)

    def make_cache(self) -> list["TargetCache"]:
        return [TargetCache()]

    @property
    def layers(self) -> list[Target]:
        return [self.target]

    def sanitize(self, weights: dict) -> dict:
        """mlx-lm has opened the files, and read nothing; the model has its weights already."""
        return {}

    def load_weights(self, weights: str | Sequence, strict: bool = True) -> "Model":
        """Raises UsageError for weights from elsewhere, such as an adapter's."""
        if weights:
            raise UsageError("a converted folder takes no other weights, and no adapters")
        return self


class TargetCache:
    """What the target remembers of each sequence of a batch, grown as it is filled.

    mlx-lm calls a cache trimmable if it can forget any number of tokens. This one forgets at most
    FEW (8), see `trim`, so it says no: then mlx-lm goes on from states that it kept at the ends of
    messages, and refuses a draft model.
    """

    def __init__(self, rows: list | None = None):
        # Per sequence a Cache; None before the first token, a list as it came from a file.
        self.rows: list[Cache | list | None] = rows or [None]
        self._left: list[int] | None = None  # of a padded batch: tokens that are still to come
        self._torn = False  # in the middle of a feed

    def feed(self, target: Target, inputs: mx.array) -> mx.array:
        """Token ids [B, N] -> float32 logits [B, N, V], 0 after the end of a padded sequence."""
        B, N = inputs.shape
        if self.rows == [None]:
            self.rows *= B
        if len(self.rows) != B:
            raise UsageError(f"{B} sequences of tokens for a cache of {len(self.rows)}")
        if self._torn:
            raise UsageError("a feed of this cache was interrupted, wanted a new cache")
        left, logits, self._torn = self._left or [N] * B, [], True
        for i, ids in enumerate(inputs):
            self.rows[i] = _bound(self.rows[i], target.config)
            n = min(N, left[i])
            out = [_feed(target, self.rows[i], ids[:n])] if n else []
            out += [mx.zeros((N - n, target.config.vocab_size))] if n < N else []
            logits.append(mx.concatenate(out))
        self._left = self._left and [max(0, n - N) for n in self._left]
        self._torn = False
        return mx.stack(logits)

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        """Forget the newest `n` tokens of every sequence, as if never seen.

        Raises UsageError for more than FEW (8) behind the furthest, or of a cache from a file.
        """
        if not all(isinstance(row, Cache) for row in self.rows):
            raise UsageError(f"trim({n}): the cache is empty, or as it was read from a file")
        for row in self.rows:
            row.rewind(n)
        return n

    @property
    def state(self) -> list[list]:
        """Per sequence its position, the tokens it has room for, and its arrays."""
        return [
            [row.position, row.ctx, *row.arrays()] if isinstance(row, Cache) else row or []
            for row in self.rows
        ]

    @classmethod
    def from_state(cls, state: list[list]) -> "TargetCache":
        return cls(state)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for row in self.state for a in row[2:])

    # What mlx-lm's batches ask for.

    @classmethod
    def merge(cls, caches: Sequence["TargetCache"]) -> "TargetCache":
        return cls([deepcopy(row) for cache in caches for row in cache.rows])

    def extend(self, other: "TargetCache"):
        self.rows += other.rows

    def filter(self, keep: Sequence[int]):
        self.rows = [self.rows[i] for i in keep]

    def extract(self, i: int) -> "TargetCache":
        return TargetCache([deepcopy(self.rows[i])])

    def prepare(self, *, lengths: Sequence[int], right_padding: Sequence[int]):
        """The tokens to come are padded to the longest: only `lengths` of them count."""
        self._left = list(lengths)

    def finalize(self):
        self._left = None


def _feed(target: Target, cache: Cache, ids: mx.array) -> mx.array:
    """The tokens [n] after those of `cache` -> logits [n, V], not yet computed."""
    _grow(cache, cache.position + ids.shape[0], target.config)
    if ids.shape[0] > FEW:
        chunks = prefill(target, ids, cache, chunk=CHUNK)
        return mx.concatenate([target.logits(streams) for streams, _ in chunks])
    logits = target.logits(target(ids.astype(mx.int32), cache)[0])
    # What no later step reads at once would pile up as a graph.
    return mx.depends([logits], cache.arrays())[0]


def _grow(cache: Cache, tokens: int, config: TargetConfig):
    """Room for `tokens`. Raises UsageError for more than the model has positions."""
    most = config.max_position_embeddings
    if tokens > most:
        raise UsageError(f"{tokens} tokens, wanted at most the model's {most} positions")
    if tokens > cache.ctx:
        ctx = min(most, -(-tokens // STEP) * STEP)
        larger = zip(cache.arrays(), Cache(config, ctx).arrays(), strict=True)
        cache.replace([mx.concatenate([old, new[old.shape[0] :]]) for old, new in larger])
        cache.ctx = ctx


def _bound(row: Cache | list | None, config: TargetConfig) -> Cache:
    """The state of a sequence, now that the model is known."""
    if isinstance(row, Cache):
        return row
    position, ctx, *arrays = row or (0, min(STEP, config.max_position_embeddings))
    cache = Cache(config, ctx)
    if row:
        if [a.shape for a in arrays] != [a.shape for a in cache.arrays()]:
            raise UsageError("the prompt cache is that of another model")
        cache.replace(arrays)
        cache.advance(position + FEW)  # how much could be rewound was not written
        cache.rewind(FEW)
    return cache


# Chat: mlx-lm finds these two by names that `convert` writes into tokenizer_config.json.

tool_call_start, tool_call_end = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"


def apply_chat_template(
    messages: Sequence[dict],
    *,
    release: str,
    tools: Sequence[dict] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    enable_thinking: bool = True,
    reasoning_effort: str = "high",
    return_dict: bool = False,
) -> str:
    """The prompt that `render` makes of messages. mlx-lm tokenises it as one text, in which a
    control token that a message spells out is a control token.

    reasoning_effort: low, high or max. Raises UsageError for messages that make no prompt.
    """
    # What mlx-lm's server calls `reasoning`, `render` calls as the official encoder does.
    messages = [{"reasoning_content": m.get("reasoning"), **m} for m in messages]
    think = reasoning_effort if enable_thinking else "off"
    options = {"think": think, "tools": tools, "continue_last": continue_final_message}
    parts = render(messages, release=release, **options)
    if not (add_generation_prompt or continue_final_message):
        parts = parts[:-2]  # of the assistant's turn, its marker and the think token
    return prompt_text(parts)


def parse_tool_call(text: str, tools: Sequence[dict] | None = None) -> list[dict]:
    """The calls (name and arguments) of a block. Raises ValueError for one without any."""
    parser = OutputParser(thinking=False, tools=tools or True, in_block=True)
    parser.push(text + tool_call_end)
    parser.finish("stop")
    if not parser.calls:
        raise ValueError("; ".join(broken.problem for broken in parser.broken) or "no call")
    return parser.calls


def _register():
    """Make mlx-lm's loaders find `Model` for converted folders, and for those alone."""
    sys.modules[f"mlx_lm.models.{MODEL_TYPE}"] = sys.modules[__name__]
    sys.modules[f"mlx_lm.tool_parsers.{MODEL_TYPE}"] = sys.modules[__name__]
    for release in RELEASES:
        template = SimpleNamespace(
            apply_chat_template=partial(apply_chat_template, release=release)
        )
        sys.modules[f"mlx_lm.chat_templates.{MODEL_TYPE}_{release}"] = template
    mlx_lm.models.cache.TargetCache = TargetCache  # by this name a file tells what it holds
    mlx_lm.utils.load_config = _tells_converted_folders(mlx_lm.utils.load_config)


def _tells_converted_folders(load_config: Callable[[Path], dict]) -> Callable[[Path], dict]:
    @wraps(load_config)
    def load(path: Path) -> dict:
        config = load_config(path)
        method = config.get("quantization_config")
        if isinstance(method, dict) and method.get("quant_method") == QUANT_METHOD:
            config |= {"model_type": MODEL_TYPE, "ds4mlx_path": str(path)}
        return config

    return load


_register()

if __name__ == "__main__":
    from mlx_lm import cli

    cli.main()
