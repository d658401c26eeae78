"""Our answers beside ds4's, on the aliased GGUF of Flash's shapes: log-probabilities, step by step.

python -m tests.flash.ds4_answers FLASH.gguf [--rounded] [--nudge] [--save FILE] [--against FILE]
"""

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # as tests/conftest.py

import argparse  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import ExitStack, contextmanager, nullcontext  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from unittest.mock import patch  # noqa: E402

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

import ds4mlx  # noqa: E402
import ds4mlx.ops  # noqa: E402
from ds4mlx.bench import _commit  # noqa: E402
from ds4mlx.chat import render  # noqa: E402
from ds4mlx.doctor import machine  # noqa: E402
from ds4mlx.ops import metal  # noqa: E402
from ds4mlx.packed import Packed  # noqa: E402
from ds4mlx.preflight import device  # noqa: E402
from ds4mlx.rows import FEW  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden" / "ds4_haiku.json"
SYSTEM, PROMPT = "You are a helpful assistant", "Write a haiku about rivers."
BEST = 10


@dataclass(frozen=True)
class Agreement:
    """How far two lists of log-probabilities agree, those of the other's best tokens."""

    correlation: float
    overlap: int  # of the BEST best
    mean: float  # of the differences' magnitudes
    most: float
    rank: int  # that we give to the other's best token, from 1

    @classmethod
    def of(cls, theirs: dict[int, float], ours: np.ndarray) -> "Agreement":
        """theirs: token -> log-probability, the best first; ours: that of every token."""
        ids = list(theirs)
        a, b = np.array([*theirs.values()]), ours[ids]
        off = np.abs(a - b)
        return cls(
            float(np.corrcoef(a, b)[0, 1]),
            len({*ids[:BEST]} & {*best(ours, BEST)}),
            float(off.mean()),
            float(off.max()),
            int((ours > ours[ids[0]]).sum()) + 1,
        )

    def __str__(self):
        return (
            f"{self.correlation:.4f} | {self.overlap:2} of {BEST} | {self.mean:.4f} | "
            f"{self.most:.4f} | {self.rank}"
        )


def steps(path: Path = GOLDEN) -> tuple[int, list[dict[int, float]]]:
    """The number of prompt tokens, and the log-probabilities of each greedy step, best first."""
    found = json.loads(path.read_text())
    tops = [
        {top["token"]["id"]: top["logprob"] for top in step["top_logprobs"]}
        for step in found["steps"]
    ]
    assert [next(iter(top)) for top in tops] == [s["selected"]["id"] for s in found["steps"]]
    return found["prompt_tokens"], tops


def best(row: np.ndarray, n: int) -> dict[int, float]:
    """The n best tokens of log-probabilities [V], best first."""
    return {int(token): float(row[token]) for token in np.argsort(-row)[:n]}


def log_probabilities(logits: mx.array) -> np.ndarray:
    """Float32 logits [n, V] -> float64 [n, V]."""
    x = np.array(logits).astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


PRODUCTS = (  # the references that multiply by a weight, wherever they are called
    *((module, "linear_reference") for module in ("linear", "grouped_linear")),
    *((module, "gather") for module in ("experts", "experts_down")),
)


# What ds4's CPU path does to the inputs of its products -----------------------------------------


def round_q8_0(x: mx.array) -> mx.array:
    """x [..., K] float32 to 8 bits by blocks of 32 and back, the scale from the greatest value."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    d = mx.abs(blocks).max(axis=-1, keepdims=True) / 127
    return (mx.round(blocks / mx.where(d > 0, d, 1)) * d).reshape(x.shape)


def round_q8_k(x: mx.array) -> mx.array:
    """The same by blocks of 256: the value of greatest magnitude, with its sign, becomes -127."""
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    at = mx.argmax(mx.abs(blocks), axis=-1, keepdims=True)
    extreme = mx.take_along_axis(blocks, at, axis=-1)
    inverse = -127 / mx.where(extreme == 0, 1, extreme)
    q = mx.minimum(mx.round(inverse * blocks), 127)
    return mx.where(extreme == 0, 0, q / inverse).reshape(x.shape)


def rounded_for(x: mx.array, w) -> mx.array:
    """What ds4's CPU path multiplies by `w`: with float weights, x as it is."""
    if not isinstance(w, Packed):
        return x
    return round_q8_0(x) if w.type in ("Q8_0", "Q4_0") else round_q8_k(x)


@contextmanager
def rounded() -> Iterator[None]:
    """Products as on ds4's CPU path: the references, their inputs rounded to 8 bits."""
    with ExitStack() as stack:
        stack.enter_context(metal.reference())
        for module, name in PRODUCTS:
            owner = sys.modules[f"ds4mlx.ops.{module}"]
            stack.enter_context(patch.object(owner, name, rounding(getattr(owner, name))))
        yield


def rounding(product: Callable) -> Callable:
    """product(x, w, ..) with x rounded for w."""
    return lambda x, w, *rest: product(rounded_for(x, w), w, *rest)


@contextmanager
def nudged(share: float = 1e-6) -> Iterator[None]:
    """Embeddings off by that share of themselves, about as another order of a sum would have it."""
    plain = ds4mlx.ops.embed

    def embed(ids, w):
        x = plain(ids, w)
        return x * (1 + share * mx.random.normal(x.shape, key=mx.random.key(0)))

    with patch.object(ds4mlx.ops, "embed", embed):
        yield


# The command ------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.flash.ds4_answers")
    parser.add_argument("flash", help="of make_flash_gguf.py --alias --seed 0")
    parser.add_argument("--rounded", action="store_true", help="inputs of products in 8 bits")
    parser.add_argument("--nudge", action="store_true", help="embeddings off by a millionth")
    parser.add_argument("--save", help="log-probabilities as .npy, for --against")
    parser.add_argument("--against", help="what another run has saved: a second table")
    asked = parser.parse_args(arguments)
    print(*machine(device()), f"commit: {_commit()}", sep="\n", flush=True)
    start = time.perf_counter()
    with ds4mlx.load(asked.flash, ctx=64) as model:
        print(f"loaded in {time.perf_counter() - start:.0f} s, peak {peak():.1f} GB", flush=True)
        count, tops = steps()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
        prompt = model.tokenizer.encode_parts(render(messages, think="off", release="preview"))
        print(f"prompt: {len(prompt)} tokens, ds4's has {count}: {prompt}")
        assert len(prompt) == count
        ids = [*prompt, *(next(iter(top)) for top in tops[:-1])]
        session, logits, start = model.session(ctx=64), [], time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(rounded() if asked.rounded else nullcontext())
            stack.enter_context(nudged() if asked.nudge else nullcontext())
            for at in range(0, len(ids), FEW):
                logits.append(session.feed(ids[at : at + FEW], chunk=FEW))
                mx.eval(logits[-1])
                seconds = time.perf_counter() - start
                print(f"{session.position} of {len(ids)} tokens, {seconds:.0f} s", flush=True)
        ours = log_probabilities(mx.concatenate(logits)[count - 1 :])
    show(tops, ours)
    if asked.save:
        np.save(asked.save, ours.astype(np.float32))
    if asked.against:
        print(f"against {Path(asked.against).name}, its {len(tops[0])} best:")
        show([best(row, len(tops[0])) for row in np.load(asked.against)], ours)
    print(f"peak {peak():.1f} GB")


def show(tops: list[dict[int, float]], ours: np.ndarray):
    print(f"| step | correlation | top {BEST} | mean | most | rank of ds4's token |")
    print("| --- | --- | --- | --- | --- | --- |")
    found = [Agreement.of(*pair) for pair in zip(tops, ours, strict=True)]
    for step, agreement in enumerate(found):
        print(f"| {step} | {agreement} |")
    means = {n: np.mean([getattr(a, n) for a in found]) for n in ("correlation", "overlap", "mean")}
    most, first = max(a.most for a in found), sum(a.rank == 1 for a in found)
    print(
        f"| all | {means['correlation']:.4f} | {means['overlap']:.1f} of {BEST} | "
        f"{means['mean']:.4f} | {most:.4f} | {first} of {len(found)} first |"
    )


def peak() -> float:
    """GB of the process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main(sys.argv[1:])
