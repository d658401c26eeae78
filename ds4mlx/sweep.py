"""Speed over a growing context: prefill, decode, launches, bytes, and what drafts would gain.

The names of the settings are those of ds4-bench. Steps are timed on the host around an `mx.eval`;
a figure is the median of its repetitions, and the device's copy bandwidth is measured beside them.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median

import mlx.core as mx

from .cache import Cache, Sequence, Step
from .draft import Block, Draft
from .dspark import CONFIDENCE
from .generate import Speculation, decode, prefill
from .graphs import Graphs
from .launches import mean_launches
from .ops import argmax
from .preflight import device, workspace
from .rows import FEW
from .sampling import Sampler
from .schedule import Schedule
from .target import Target, tensors

TITLES = (
    "ctx", "prefill t/s", "decode t/s", "launches/layer", "GB/token", "of copy",
    "prefill GB", "planned GB", "peak GB", "draft ms", "verify ms (1, 2, .. rows)", "break-even",
    "drafted/plain (accepted) at acceptance",
)  # fmt: skip
ACCEPTANCE = (0.85, 0.62, 0.0)  # a position: published for code, published for all, none
_PASSES = 4  # at most, to build the graphs of a text
_ROUNDS = 5  # of plain and drafted text in turn


@dataclass
class Point:
    """Figures at one context; None: not measured. Times are milliseconds."""

    ctx: int
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    step_ms: float | None = None
    launches_per_layer: float | None = None
    token_bytes: int | None = None
    bandwidth_share: float | None = None
    prefill_bytes: int | None = None  # held at once by prefill
    planned_bytes: int | None = None  # what the preflight says of that
    peak_bytes: int | None = None  # of all at this context, copies of the state included
    draft_ms: float | None = None
    verify_ms: list[float] = field(default_factory=list)  # of 1, 2, .. rows
    break_even: float | None = None  # acceptance a position from which drafting pays
    forced: dict[float, float] = field(default_factory=dict)  # acceptance -> drafted over plain
    accepted: dict[float, float] = field(default_factory=dict)  # the same -> accepted a cycle

    def cells(self) -> list[str]:
        """As TITLES has it."""

        def shown(value, digits: int, by: float = 1.0) -> str:
            return "" if value is None else f"{value / by:.{digits}f}"

        return [
            str(self.ctx),
            shown(self.prefill_tokens_per_second, 0),
            shown(self.decode_tokens_per_second, 1),
            shown(self.launches_per_layer, 1),
            shown(self.token_bytes, 2, 1e9),
            shown(self.bandwidth_share, 2),
            shown(self.prefill_bytes, 1, 1e9),
            shown(self.planned_bytes, 1, 1e9),
            shown(self.peak_bytes, 1, 1e9),
            shown(self.draft_ms, 2),
            " ".join(f"{ms:.2f}" for ms in self.verify_ms),
            shown(self.break_even, 2),
            " ".join(f"{p}: {r:.2f} ({self.accepted[p]:.1f})" for p, r in self.forced.items()),
        ]


class Sweep:
    """Measures a target, and a draft for it, at contexts from `start` to `most`; see `points`."""

    def __init__(self, target: Target, draft: Draft | None = None, *, chunk: int = 4096):
        self.target, self.draft, self.chunk = target, draft, chunk
        self._weights = mx.get_active_memory()  # before a copy is timed, whose 2 GB linger
        self.bandwidth = copy_bandwidth()

    def points(
        self,
        start: int,
        most: int,
        *,
        incr: int = 0,
        mul: float = 2.0,
        tokens: int = 64,
        fill: bool = False,
    ) -> Iterator[Point]:
        """Contexts grow by `incr` tokens or `mul` times; at each `tokens` are generated.

        fill: no prompt is read, every state is drawn at random. Else a first chunk, which builds
        kernels, is read twice and counts once.
        """
        target, more = self.target, 3 * tokens + 64
        cache = Cache(target.config, most + more)
        context = self.draft.cache() if self.draft else None
        ids = random.Random(0).choices(range(target.config.vocab_size), k=most)
        if not fill:
            first = ids[: min(start, self.chunk)]
            for _ in prefill(target, first, Cache(target.config, len(first)), chunk=self.chunk):
                pass
        ctx = start
        while ctx <= most:
            point = Point(ctx)
            if fill:
                cache = filled(Cache(target.config, ctx + more), ctx - 1)
                context = context and filled(self.draft.cache(), ctx - 1)
            mx.reset_peak_memory()
            begin, prompt = time.perf_counter(), ids[cache.position : ctx]
            for streams, _ in prefill(  # noqa: B007
                target, prompt, cache, chunk=self.chunk, draft=self.draft, context=context
            ):
                pass
            seconds = time.perf_counter() - begin
            if not fill:
                point.prefill_tokens_per_second = len(prompt) / seconds
                point.prefill_bytes = mx.get_peak_memory()
                point.planned_bytes = self._planned(cache, context)
            self._measure(point, streams, cache, context, tokens)
            yield point
            ctx = ctx + incr if incr else max(ctx + 1, round(ctx * mul))

    def _planned(self, cache: Cache, context) -> int:
        """Bytes that prefill should hold: weights, states, and what a chunk takes meanwhile."""
        matrix = max(math.prod(m.shape[-2:]) for m in tensors(self.target))
        rows = min(self.chunk, cache.ctx)
        held = workspace(self.target.config, cache.ctx, rows, matrix, device().kind)
        states = [*cache.arrays(), *(context.arrays() if context else ())]
        return self._weights + sum(a.nbytes for a in states) + held

    def _measure(self, point: Point, streams, cache: Cache, context, tokens: int):
        target, saved = self.target, (cache.snapshot(), context and context.snapshot())

        def restore():
            cache.restore(saved[0])
            if context:
                context.restore(saved[1])

        def decoded():
            restore()
            limit = tokens + FEW  # the last drafts know what follows
            return timed_tokens(decode(target, streams, cache, _greedy(), limit=limit, stop=()))

        text, _ = built(decoded)
        plain = median(decoded()[1] for _ in range(_ROUNDS))
        point.decode_tokens_per_second, point.step_ms = 1 / plain, 1e3 * plain
        if mx.default_device() != mx.cpu:
            layers = target.config.num_hidden_layers
            point.launches_per_layer = mean_launches(target, 1, point.ctx) / layers
        point.token_bytes = token_bytes(target) + cache.read_bytes(point.ctx)
        point.bandwidth_share = point.token_bytes / plain / self.bandwidth
        restore()
        if self.draft:
            self._build(text, cache, context, restore)
            self._measure_draft(point, text, cache, context, restore)
            for acceptance in ACCEPTANCE:
                drafted = self._forced(acceptance, text, streams, cache, context, restore)
                point.accepted[acceptance], point.forced[acceptance] = alternated(decoded, drafted)
            restore()
        point.peak_bytes = mx.get_peak_memory()

    def _build(self, text, cache: Cache, context, restore):
        """Every graph that a drafted text may need: some come up once in 128 tokens."""
        if not self.target.compiles:
            return
        sizes, kinds = range(1, self.draft.config.dspark_block_size + 2), set()
        for at, rows in product(range(cache.position, cache.position + len(text)), sizes):
            kind = Step.of(self.target.config, at, rows).kind
            if kind not in kinds:
                kinds.add(kind)
                cache.advance(at - cache.position)
                x, taps = self.target(mx.array(text[:rows], mx.int32), cache)
                self.draft.extend(taps, context)
                mx.eval(argmax(self.target.logits(x)), cache.arrays(), context.arrays())
                restore()
        for rows in range(1, FEW + 1):  # plain steps leave as many to catch up with
            self.draft.extend(mx.repeat(taps[:1], rows, axis=0), context)
            mx.eval(context.arrays())
            restore()

    def _measure_draft(self, point: Point, text, cache: Cache, context, restore):
        target, draft = self.target, self.draft
        block = draft.config.dspark_block_size
        anchor = mx.array(text[:1], mx.int32)

        def propose():
            found = draft.propose(anchor, context)
            mx.eval(found.tokens, found.confidence)

        def verify(rows: int):
            ids = mx.array(text[:rows], mx.int32)
            x, _ = target(ids, cache, submit=mx.async_eval)
            mx.eval(argmax(target.logits(x)), cache.arrays())
            cache.rewind(rows)

        point.draft_ms = 1e3 * repeated(propose)
        for rows in range(1, block + 2):
            point.verify_ms.append(1e3 * repeated(lambda rows=rows: verify(rows)))
            restore()
        cost = (point.draft_ms + point.verify_ms[-1]) / point.step_ms
        point.break_even = break_even(cost, block)

    def _forced(self, acceptance: float, text, streams, cache, context, restore) -> Callable:
        """What gives drafts accepted a cycle, and seconds a token, as one session goes on."""
        schedule = Schedule(self.draft.config.dspark_block_size)

        def drafted():
            restore()
            records = []
            loop = Speculation(
                self.target,
                Forced(self.draft, text, acceptance, context.position),
                cache,
                context,
                _greedy(),
                (),
                confidence=CONFIDENCE,
                schedule=schedule,
                report=records.append,
            )
            _, seconds = timed_tokens(loop.decode(streams, len(text) - FEW))
            accepted = [r["accepted"] for r in records if "rows" in r]
            return sum(accepted) / max(1, len(accepted)), seconds

        return drafted


def filled(cache: Sequence, position: int):
    """The same cache with random states of `position` tokens."""
    cache.replace([mx.random.normal(a.shape) for a in cache.arrays()])
    mx.eval(cache.arrays())
    cache.advance(position)
    return cache


def plot(points: list[Point], path: str):
    """Prefill and decode over the context, as an image of the kind that `path` ends with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6))
    ctx = [p.ctx for p in points]
    if points[0].prefill_tokens_per_second:
        axes[0].plot(ctx, [p.prefill_tokens_per_second for p in points], "o-", label="prefill")
    axes[1].plot(ctx, [p.decode_tokens_per_second for p in points], "o-", label="plain")
    for acceptance in ACCEPTANCE if points[0].forced else ():
        speeds = [p.decode_tokens_per_second * p.forced[acceptance] for p in points]
        axes[1].plot(ctx, speeds, "o--", label=f"drafted, acceptance {acceptance}")
    axes[0].set_ylabel("prefill tokens/s")
    axes[1].set_ylabel("decode tokens/s")
    axes[1].set_xlabel("context")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path)


class Forced:
    """A draft whose tokens are those of `text`, from position `start` on, with a given probability.

    All of its work is done: random weights would accept nothing, and the speed at a published
    acceptance could not be measured.
    """

    def __init__(self, draft: Draft, text: list[int], acceptance: float, start: int):
        self.draft, self.config, self.text = draft, draft.config, text
        self.acceptance, self._luck, self._start = acceptance, random.Random(0), start

    def extend(self, taps: mx.array, context):
        self.draft.extend(taps, context)

    def propose(self, anchor: mx.array, context) -> Block:
        block = self.draft.propose(anchor, context)
        first = context.position - self._start + 1
        own = self.text[first : first + block.confidence.shape[0]]
        vocab = self.draft.target.config.vocab_size
        tokens = [t if self._luck.random() < self.acceptance else (t + 1) % vocab for t in own]
        (tokens,) = mx.depends([mx.array(tokens, mx.int32)], [block.tokens])
        sure = min(max(self.acceptance, 0.01), 0.99)
        (confidence,) = mx.depends(
            [mx.full(block.confidence.shape, math.log(sure / (1 - sure)))], [block.confidence]
        )
        tokens = mx.concatenate([anchor, tokens])
        return replace(block, tokens=tokens, confidence=confidence)


def break_even(cost: float, block: int) -> float | None:
    """The acceptance a position at which a cycle of `cost` plain steps gives as many tokens.

    A cycle gives 1 + p + .. + p^block tokens. None: no acceptance is enough.
    """
    if cost > block + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        enough = sum(p**i for i in range(block + 1)) >= cost
        low, high = (low, p) if enough else (p, high)
    return high


def built(run: Callable):
    """What `run()` gives the second time, or when it builds no graph at last."""
    for number in range(_PASSES):
        traces = Graphs.traces
        found = run()
        if number and Graphs.traces == traces:
            break
    return found


def alternated(plain: Callable, drafted: Callable) -> tuple[float, float]:
    """The median drafts accepted a cycle, and how many times as fast as plain drafted text is.

    Both run in turn: what a machine does meanwhile, and its clocks, meet both.
    """
    built(drafted)
    rounds = [(plain()[1], *drafted()) for _ in range(_ROUNDS)]
    before, accepted, after = (median(column) for column in zip(*rounds, strict=True))
    return accepted, before / after


def timed_tokens(ids: Iterator[int]) -> tuple[list[int], float]:
    """All ids, and the seconds that one took after the first."""
    found, start = [], time.perf_counter()
    for id in ids:
        if not found:
            start = time.perf_counter()
        found.append(id)
    return found, (time.perf_counter() - start) / (len(found) - 1)


def repeated(run, times: int = 7) -> float:
    """Median seconds of `run()`, after two that are not counted."""
    seconds = []
    for _ in range(times + 2):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the default device, read and written ones counted."""
    x = mx.zeros(1 << (28 if mx.default_device() == mx.gpu else 25), mx.float32)
    mx.eval(x)
    return 2 * x.nbytes / repeated(lambda: mx.eval(x + 1))


def token_bytes(target: Target) -> int:
    """Bytes of weights that a token reads: of the routed experts its own, of the embedding a row.

    A matrix that is not packed counts as it lies in memory.
    """
    config = target.config
    share = config.num_experts_per_tok / config.n_routed_experts
    total = target.head.nbytes + target.embed.nbytes // config.vocab_size
    total += sum(a.nbytes for a in (target.hc_head_fn, target.norm))
    for layer in target.layers:
        routed = [layer.ffn.w1, layer.ffn.w3, layer.ffn.w2]
        total += sum(m.nbytes for m in tensors(layer)) - sum(m.nbytes for m in routed)
        total += round(share * sum(m.nbytes for m in routed))
        if layer.ffn.tid2eid is not None:
            total -= layer.ffn.tid2eid.nbytes
    return total


def _greedy() -> Sampler:
    return Sampler(0.0, 1.0, 0.0, 0)
