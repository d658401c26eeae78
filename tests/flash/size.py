"""The whole of Flash's exactness at its real size, on one GPU with 100 GB or more.

python -m tests.flash.size [--blocks] [--drafted] [--rewind] [--kernels] [--layers N]
    [--tokens N] [--contexts N ..]
"""

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # as tests/conftest.py

import argparse  # noqa: E402
import copy  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterable, Iterator, Sequence  # noqa: E402

import mlx.core as mx  # noqa: E402

from ds4mlx.bench import _commit  # noqa: E402
from ds4mlx.cache import Cache, Step  # noqa: E402
from ds4mlx.check import Recorder  # noqa: E402
from ds4mlx.doctor import machine  # noqa: E402
from ds4mlx.draft import Draft  # noqa: E402
from ds4mlx.generate import Speculation, decode, prefill  # noqa: E402
from ds4mlx.ops import metal  # noqa: E402
from ds4mlx.preflight import device  # noqa: E402
from ds4mlx.sampling import Sampler  # noqa: E402
from ds4mlx.sweep import Forced  # noqa: E402
from ds4mlx.synthetic import evaluated, flash, flash_draft  # noqa: E402
from ds4mlx.target import Target, Turns  # noqa: E402

SIZES = range(1, 7)  # rows of a block: an anchor and up to five drafts
CHUNK = 4096  # tokens of prefill at a time
SPAN = 60  # rows that blocks of each size divide
ACCEPTANCE = 0.6
CONTEXTS = (100, 2000, 40_000)
ALLOWED = 1e-3  # error of a sublayer's output, as a share of its norm
KINDS = 7  # layers that have two of each kind: window, CSA and HCA; hashed and routed
Fact = tuple[str, bool]  # what was compared, and whether it is as it should be


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flash.size")
    for part, what in PARTS.items():
        parser.add_argument(f"--{part}", action="store_true", help=what.__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--tokens", type=int, default=512, help="that are drafted")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="of those")
    asked = parser.parse_args(arguments)
    if not 3 <= asked.layers <= 43:
        parser.error(f"--layers is {asked.layers}, wanted 3 to 43")
    chosen = [p for p in PARTS if getattr(asked, p)] or [*PARTS]
    start = time.perf_counter()
    target = evaluated(flash("q2", asked.layers))
    draft = evaluated(flash_draft(target))
    print(*machine(device()), f"commit: {_commit()}", sep="\n")
    kernels = metal.backend() or "NONE, references"
    seconds = time.perf_counter() - start
    print(f"kernels: {kernels}; q2, {asked.layers} layers, made in {seconds:.0f} s", flush=True)
    failed = 0
    for part in chosen:
        drafted = {"tokens": asked.tokens, "contexts": sorted(asked.contexts)}
        settings = drafted if part == "drafted" else {}
        failed += report(part, PARTS[part](draft, **settings))
    print(f"{failed} differ; peak {mx.get_peak_memory() / 1e9:.1f} GB")
    return failed > 0


def report(part: str, facts: Iterable[Fact]) -> int:
    """Print a line for each fact as it is known -> how many are not as they should be."""
    failed, start = 0, time.perf_counter()
    for what, same in facts:
        now = time.perf_counter()
        verdict = "same" if same else "DIFFERENT"
        print(f"{part}: {verdict}: {what} ({now - start:.1f} s)", flush=True)
        failed, start = failed + (not same), now
    return failed


# The parts --------------------------------------------------------------------------------------


def blocks(draft: Draft, context: int = 2000, span: int = SPAN) -> Iterator[Fact]:
    """One row after the other against blocks of 2 to 6 rows: logits, taps and live cache."""
    text = Text(draft.target, context + span)
    text.read(context)
    saved, ids = text.cache.snapshot(), text.ids[context:]
    alone = text.feed(ids, 1)
    state = live(text.cache)
    finite = mx.isfinite(mx.concatenate(alone, axis=-1)).all().item()
    yield f"{span} rows after {context} tokens are finite", finite
    for n in SIZES[1:]:
        text.cache.restore(saved)
        rows = text.feed(ids, n)
        what = f"{span} rows after {context} tokens, one by one and in blocks of {n}"
        yield f"{what}, logits and taps", same(rows, alone)
        yield f"{what}, live cache", same(live(text.cache), state)


def drafted(draft: Draft, contexts: Sequence[int] = CONTEXTS, tokens: int = 512) -> Iterator[Fact]:
    """Drafted greedy text against plain: tokens and both live caches."""
    text, context = Text(draft.target, max(contexts), room=tokens + 16), draft.cache()
    for length in contexts:
        streams = text.read(length, draft=draft, context=context)
        saved = text.cache.snapshot(), context.snapshot()
        recorder, start = Recorder(draft.target), time.perf_counter()
        rows = decode(recorder, streams, text.cache, greedy(), limit=tokens, stop=())
        want = list(rows)
        mx.eval(text.cache.arrays())
        plain = time.perf_counter() - start
        for taps in recorder.taps[: text.cache.position - length]:
            draft.extend(taps, context)
        states = live(text.cache), live(context)
        mx.eval(states)
        text.cache.restore(saved[0])
        context.restore(saved[1])
        # No draft beyond the text is verified.
        forced = Forced(draft, want + [0] * 8, ACCEPTANCE, length)
        records, start = [], time.perf_counter()
        loop = Speculation(
            draft.target, forced, text.cache, context, greedy(), (), report=records.append
        )
        got = list(loop.decode(streams, tokens))
        seconds = time.perf_counter() - start
        loop.caught_up()
        cycles = [r for r in records if "rows" in r]
        accepted = sum(r["accepted"] for r in cycles)
        proposed = sum(len(r["drafts"]) for r in cycles)
        what = f"{tokens} tokens after {length}, drafted and plain"
        told = f"{len({*want})} unlike tokens, "
        told += f"{len(cycles)} cycles, {accepted} of {proposed} drafts accepted"
        told += f", {tokens / seconds:.1f} and {tokens / plain:.1f} tokens/s"
        yield f"{what}: {told}", got == want
        yield f"{what}, live cache", same(live(text.cache), states[0])
        yield f"{what}, live context of the draft", same(live(context), states[1])
        text.cache.restore(saved[0])
        context.restore(saved[1])


def rewind(draft: Draft, borders: Sequence[int] = (128, 2048), around: int = 4) -> Iterator[Fact]:
    """Rows rejected at the borders of windows of 4 and 128: the rows after, as if never seen."""
    vocab = draft.target.config.vocab_size
    text = Text(draft.target, max(borders) + around + SIZES[-1])
    for border in borders:
        first, last = border - around, border + around + SIZES[-1]
        text.read(first)
        saved, rows, states = {}, {}, {}
        for at in range(first, last):
            saved[at], states[at] = text.cache.snapshot(), live(text.cache)
            rows[at] = text.feed(text.ids[at : at + 1], 1)
            mx.eval(saved[at][2], states[at])
        states[last] = live(text.cache)
        for n in SIZES:
            wrong = []
            for at in range(first, border + around + 1):
                for kept in range(n):
                    text.cache.restore(saved[at])
                    ids = text.ids[at : at + n]
                    rejected = [(id + 1) % vocab for id in ids[kept:]]
                    got = text.feed(ids[:kept] + rejected, n)
                    text.cache.rewind(n - kept)
                    agree = [same(live(text.cache), states[at + kept])]
                    agree += [same(part(got, i), rows[at + i]) for i in range(kept)]
                    got = text.feed(ids[kept:], n)
                    agree += [same(part(got, i), rows[at + kept + i]) for i in range(n - kept)]
                    agree.append(same(live(text.cache), states[at + n]))
                    if not all(agree):
                        wrong.append(f"{kept} kept at {at}")
            what = f"{n} rows from {first} to {border + around} on, 0 to {n - 1} of them kept"
            yield what + "".join(f"; NOT {w}" for w in wrong[:3]), not wrong
        text.cache.restore(saved[last - 1])


def kernels(
    draft: Draft, contexts: Sequence[int] = (200, 2300), layers: int = KINDS
) -> Iterator[Fact]:
    """The first layers, each sublayer by kernels and by its reference from the same streams."""
    target = draft.target
    text = Text(target, max(contexts), room=SIZES[-1])
    for context in contexts:
        text.read(context)
        for n in (1, SIZES[-1]):
            ids = mx.array(text.any(n), mx.int32)
            for i, op, error in errors(target, ids, text.cache, layers):
                ratio = target.config.compress_ratios[i]
                what = f"layer {i} (ratio {ratio}), {op}, {n} rows after {context} tokens"
                yield f"{what}: error {error:.1e}, allowed {ALLOWED:.0e}", error <= ALLOWED


PARTS = {"blocks": blocks, "drafted": drafted, "rewind": rewind, "kernels": kernels}


# What they share --------------------------------------------------------------------------------


class Text:
    """Random tokens, and the state of a target that has read some of them."""

    def __init__(self, target: Target, most: int, room: int = 0):
        self.target, self._random = target, random.Random(0)
        self.ids, self.cache = self.any(most), Cache(target.config, most + room)

    def any(self, n: int) -> list[int]:
        return self._random.choices(range(self.target.config.vocab_size), k=n)

    def read(self, until: int, **drafting) -> mx.array:
        """Prefill up to that position -> the last streams."""
        ids = self.ids[self.cache.position : until]
        for streams, _ in prefill(self.target, ids, self.cache, chunk=CHUNK, **drafting):  # noqa: B007
            pass
        return streams

    def feed(self, ids: Sequence[int], n: int) -> list[mx.array]:
        """Logits and taps [rows, .] of `ids` in blocks of `n`."""
        found = []
        for at in range(0, len(ids), n):
            x, taps = self.target(mx.array(ids[at : at + n], mx.int32), self.cache)
            found.append((self.target.logits(x), taps))
            mx.eval(found[-1], self.cache.arrays())
        return [mx.concatenate(parts) for parts in zip(*found, strict=True)]


def live(cache) -> list[mx.array]:
    """What can still be read, copied: what a later step writes leaves it as it is."""
    return [mx.array(a) for a in cache.live()]


def part(rows: list[mx.array], i: int) -> list[mx.array]:
    return [r[i : i + 1] for r in rows]


def same(mine: Sequence[mx.array], its: Sequence[mx.array]) -> bool:
    """Whether all arrays are equal, bit for bit."""
    if [a.shape for a in mine] != [a.shape for a in its]:
        return False
    pairs = zip(mine, its, strict=True)
    equal = [mx.array_equal(a.view(mx.uint32), b.view(mx.uint32)) for a, b in pairs]
    return mx.stack(equal).all().item()


def errors(
    target: Target, ids: mx.array, cache: Cache, layers: int
) -> Iterator[tuple[int, str, float]]:
    """(layer, "attn" or "ffn", error) of kernels against the reference; the cache stays.

    Both have the kernels' streams before a sublayer, and the error is that of the streams after
    it, as a share of the norm of what the reference's sublayer has added to them.
    """
    step = Step.of(target.config, cache.position, ids.shape[0])
    turns = Turns.of(step, target.freqs)
    x = target.streams(ids)
    part, mixtures = None, (m for layer in target.layers for m in (layer.hc_attn, layer.hc_ffn))
    next(mixtures)
    for i, (layer, state) in enumerate(zip(target.layers[:layers], cache.layers, strict=False)):
        state = copy.deepcopy(state)
        for op in ("attn", "ffn"):
            following = next(mixtures, None)

            def run(layer=layer, op=op, x=x, part=part, state=state, following=following):
                y, back = getattr(layer, f"hc_{op}")(x, part, following)
                more = (step, copy.deepcopy(state), turns) if op == "attn" else (ids,)
                return getattr(layer, op)(y, *more, back)

            after, part = run()
            mx.eval(after, part)
            with metal.reference():
                wanted, _ = run()
                change = wanted - x
                mx.eval(wanted, change)
            x, error = after, mx.linalg.norm(after - wanted) / mx.linalg.norm(change)
            yield i, op, error.item()


def greedy() -> Sampler:
    return Sampler(0.0, 1.0, 0.0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
