"""Proof on this machine: drafted greedy text is the plain text, tokens and caches bit for bit."""

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from . import __version__
from .api import CHUNK, Model
from .cache import Cache, Step
from .generate import Speculation, decode, prefill
from .loading import EMBEDDED, EMBEDDED_DRAFT
from .sampling import Sampler
from .target import Target

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
    "The quick brown fox",
)


class Check:
    """Compares both ways of decoding `prompts`; iterating gives a line for each.

    Afterwards `receipt` holds all that was compared, as plain values.
    """

    def __init__(self, model: Model, prompts, *, tokens: int = 64, confidence: float = 0.0):
        self.model, self.tokens, self.confidence = model, tokens, confidence
        self.prompts = list(prompts) or list(PROMPTS)
        self.receipt = {
            "versions": {
                "ds4mlx": __version__,
                "mlx": version("mlx"),
                "python": platform.python_version(),
            },
            "device": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
            "tokens": tokens,
            "confidence": confidence,
            "prompts": [],
            "passed": False,
        }

    def __iter__(self) -> Iterator[str]:
        for prompt in self.prompts:
            result = {"prompt": prompt} | self._compare(prompt)
            self.receipt["prompts"].append(result)
            yield _line(result)
        self.receipt["passed"] = self.failures == 0

    @property
    def failures(self) -> int:
        return sum(not r["same"] for r in self.receipt["prompts"])

    def _compare(self, prompt: str) -> dict:
        ids, parser = self.model._prompt(prompt, None, "off", None, None, [])
        stop = self.model.tokenizer.stop_ids if parser else {self.model.tokenizer.eos}
        target, draft = self.model._open(), self.model._draft
        plain, drafted = (_State(target, draft, ids, self.tokens) for _ in range(2))

        recorder = Recorder(target)
        rows = plain.streams, plain.cache, _greedy()
        want = list(decode(recorder, *rows, limit=self.tokens, stop=stop))
        for taps in recorder.taps[: plain.cache.position - len(ids)]:
            draft.extend(taps, plain.context)

        records = []
        loop = Speculation(
            target=target,
            draft=draft,
            cache=drafted.cache,
            context=drafted.context,
            sampler=_greedy(),
            stop=stop,
            confidence=self.confidence,
            report=records.append,
        )
        got = list(loop.decode(drafted.streams, self.tokens))
        loop.caught_up()
        caches = plain.same(drafted)
        cycles = [r for r in records if "rows" in r]
        return {
            "same": got == want and caches,
            "same_tokens": got == want,
            "same_caches": caches,
            "tokens": want,
            "cycles": len(cycles),
            "accepted": sum(r["accepted"] for r in cycles),
            "divergence": None if got == want else divergence(target, ids, want, got, cycles),
        }


class Recorder:
    """A target that keeps the taps of the rows it is given."""

    def __init__(self, target: Target):
        self.target, self.logits, self.taps = target, target.logits, []

    def __call__(self, ids: mx.array, cache: Cache, submit=None):
        streams, taps = self.target(ids, cache, submit=submit)
        self.taps.append(taps)
        return streams, taps


class _State:
    """Both caches after a prompt, and its last row."""

    def __init__(self, target: Target, draft, ids: list[int], tokens: int):
        self.cache, self.context = Cache(target.config, len(ids) + tokens), draft.cache()
        more = {"draft": draft, "context": self.context}
        *_, (self.streams, _) = prefill(target, ids, self.cache, chunk=CHUNK, **more)

    def same(self, other: "_State") -> bool:
        mine, its = (s.cache.live() + s.context.live() for s in (self, other))
        if (self.cache.position, self.context.position) != (
            other.cache.position,
            other.context.position,
        ):
            return False
        return all(same_bits(a, b) for a, b in zip(mine, its, strict=True))


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and mx.array_equal(a.view(mx.uint32), b.view(mx.uint32)).item()


def divergence(target: Target, ids, want: list[int], got: list[int], cycles: list[dict]) -> dict:
    """Where two texts part: the token, the margin of the plain choice, the first unlike layer.

    The block of the cycle that made the token is run again beside single rows.
    """
    pairs = zip(want, got, strict=False)
    at = next((i for i, (w, g) in enumerate(pairs) if w != g), min(len(want), len(got)))
    text = [*ids, *want[:at]]
    cache = Cache(target.config, len(text) + 8)
    *_, (streams, _) = prefill(target, text, cache, chunk=CHUNK)
    top = mx.sort(target.logits(streams[-1:])[0])[-2:]
    found = {"token": at, "plain": want[at : at + 1], "drafted": got[at : at + 1]}
    found |= {"margin": (top[1] - top[0]).item(), "layer": None, "op": None, "row": None}
    cycle = next((c for c in reversed(cycles) if c["position"] < len(text)), None)
    if cycle is None:
        return found
    block = [cycle["anchor"], *cycle["drafts"]]
    states = [Cache(target.config, len(text) + 16) for _ in range(2)]
    for state in states:
        for _ in prefill(target, text[: cycle["position"]], state, chunk=CHUNK):
            pass
    whole = list(sublayers(target, block, states[0]))
    alone = [list(sublayers(target, [id], states[1])) for id in block]
    for i, (layer, op, x) in enumerate(whole):
        for row, parts in enumerate(alone):
            if not same_bits(x[row : row + 1], parts[i][2]):
                return found | {"layer": layer, "op": op, "row": row}
    return found


def sublayers(target: Target, ids: list[int], cache: Cache) -> Iterator[tuple[int, str, mx.array]]:
    """(layer, "attn" or "ffn", streams after it) of one forward pass."""
    step = Step.of(target.config, cache.position, len(ids))
    yield from target.sublayers(mx.array(ids, mx.int32), step, cache)
    cache.advance(len(ids))


def hashes(model: str | None, mtp: str | None) -> dict[str, str]:
    """SHA-256 of every weight file of a pair, by name."""
    data = files(__package__) / "data"
    found = {}
    for given, own in ((model, EMBEDDED), (mtp, EMBEDDED_DRAFT)):
        embedded = given is None or (own == EMBEDDED_DRAFT and given == "embedded")
        path = Path(data / own if embedded else os.path.expandvars(os.path.expanduser(given)))
        split = re.sub(r"-[0-9]{5}-of-", "-?????-of-", path.name)
        parts = path.glob("*.safetensors") if path.is_dir() else path.parent.glob(split)
        for part in sorted(parts):
            with part.open("rb") as file:
                found[part.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _line(result: dict) -> str:
    name = f"{result['prompt']!r:.40}"
    told = f"{len(result['tokens'])} tokens, {result['cycles']} cycles, "
    told += f"{result['accepted']} drafts accepted"
    if result["same"]:
        return f"same: {name}: {told}"
    if result["same_tokens"]:
        return f"DIFFERENT: {name}: the tokens are the same, the caches are not; {told}"
    d = result["divergence"]
    where = f"layer {d['layer']}, {d['op']}, row {d['row']}" if d["op"] else "no unlike layer"
    return (
        f"DIFFERENT: {name}: token {d['token']} is {d['drafted']}, plain {d['plain']} "
        f"(margin {d['margin']:.3g}; {where}); {told}"
    )


def _greedy() -> Sampler:
    return Sampler(0.0, 1.0, 0.0, 0)
