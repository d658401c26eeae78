"""Whether this machine's GPU runs every kernel as it should: a table, and a verdict.

It waits for the GPU where it compares and measures, and after each launch, so that a kernel
that fails is named and the next one gets its turn.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import mlx.core as mx
import numpy as np

from .bench import _commit
from .cache import Cache
from .check import same_bits
from .doctor import machine
from .errors import Ds4Error, UsageError
from .generate import decode, prefill
from .ops import metal
from .preflight import device
from .rows import FEW
from .sampling import Sampler
from .selftest_cases import FLASH, QUICK, Case, Work, cases, copied

PROMPT, TOKENS, BLOCKS = "def fibonacci(n):\n", 24, (5, 2, 8, 3, 7, 4, 6)
MODEL = "model"  # what --op calls the embedded model
NOTE = (
    "error: the greatest of 8 rows, as a share of the reference's greatest value. us: a launch of\n"
    "1 row; GB/s: its weights, inputs and outputs. Above 100% of a copy it came from a cache."
)
_FAULTS = (Ds4Error, RuntimeError, ValueError, AssertionError)  # what a kernel can end in
_WORKING_SET, _MEMORY = 1 << 28, 1 << 29  # bytes read in turn, beyond any cache; held for it
_BATCH, _BATCHES = 1 << 31, 5  # bytes of a timed batch, at most 64 launches; batches


class Selftest:
    """A run that goes on while its texts are read; then `failures` holds what failed.

    quick: small shapes and no measuring, as it is anyway without a GPU. op: the cases of this op
    alone ("model": the embedded model). Raises UsageError for an op that has no kernel.
    """

    def __init__(self, quick: bool = False, op: str | None = None):
        self.quick, self.failures, self._done = quick, [], 0
        self._cases = cases(FLASH if metal.enabled() and not quick else QUICK)
        ops = list(dict.fromkeys(case.op for case in self._cases))
        if op not in (None, MODEL, *ops):
            raise UsageError(f"--op is {op!r:.60}, wanted one of {', '.join((*ops, MODEL))}")
        self._cases = [case for case in self._cases if op in (None, case.op)]
        self._with_model = op in (None, MODEL)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text. A row begins before its kernel runs: a crash names the kernel."""
        yield from (f"{line}\n" for line in machine(device()))
        yield f"commit: {_commit()}\n"
        on = metal.backend()
        self._copy = None
        if not metal.enabled():
            yield "kernels: NONE RUN, for MLX has no GPU here; the references, at small shapes\n"
        elif self.quick:
            yield f"kernels: on {on}, at small shapes, not measured\n"
        else:
            self._copy = copy_bandwidth()
            yield f"kernels: on {on}, at Flash's shapes; a copy in memory: {self._copy:.0f} GB/s\n"
        yield _begun("kernel", "shape")
        yield _ended("error", "allowed", "rows 1-8", "us", "GB/s", "of copy")
        yield _begun("---", "---") + _ended(*["---"] * 6)
        for case in self._cases:
            yield _begun(self._named(case.op), case.shape)
            yield self._judged(f"{case.op} ({case.shape})", partial(self._case, case))
            mx.clear_cache()
        for name, run in EMBEDDED.items() if self._with_model else ():
            yield _begun(self._named(MODEL), name)
            yield self._judged(f"{MODEL} ({name})", run)
        yield "" if self._copy is None else f"\n{NOTE}\n"
        for failure in self.failures:
            yield f"\nFAILED: {failure}\n"
        yield f"\n{self.verdict}\n"

    @property
    def verdict(self) -> str:
        """One line."""
        failed = len(self.failures)
        counted = f"FAILED: {failed} of {self._done}" if failed else f"passed: all {self._done}"
        if metal.enabled():
            return f"selftest: {counted} on {metal.backend()}"
        return f"selftest: NO KERNEL RAN; of the references {counted}"

    def _named(self, op: str) -> str:
        return op if metal.enabled() else f"{op} (reference)"

    def _judged(self, name: str, run: Callable[[], Iterable[str]]) -> str:
        """The rest of a row: cells, or what went wrong."""
        self._done += 1
        try:
            return _ended(*run())
        except _FAULTS as error:
            text = str(error).strip() or type(error).__name__
            self.failures.append(f"{name}: {text}")
            return f"FAILED: {' '.join(text.split()):.160} |\n"

    def _case(self, case: Case) -> Iterator[str]:
        """The cells of a row. Raises one of _FAULTS."""
        work = case.make()
        error = compare(case, work)
        yield (f"{error:.1e}" if error else "0") if metal.enabled() else "-"
        yield f"{case.allowed:.0e}" if case.allowed else "0"
        if case.alone:
            same_rows(work, case.rows)
        yield "exact" if case.alone else "-"
        if self._copy is None:
            yield from ("-", "-", "-")
        else:
            seconds, nbytes = measure(work)
            speed = nbytes / seconds / 1e9
            yield from (f"{1e6 * seconds:.1f}", f"{speed:.0f}", f"{speed / self._copy:.0%}")


def _begun(*cells: str) -> str:
    """The first cells of a row."""
    return "| " + "".join(f"{c:{w}} | " for c, w in zip(cells, (24, 43), strict=True))


def _ended(*cells: str) -> str:
    """Its others; without measures there are fewer."""
    widths = (7, 7, 8, 7, 5, 7)
    return " | ".join(f"{c:{w}}" for c, w in zip(cells, widths, strict=False)) + " |\n"


# Kernels ----------------------------------------------------------------------------------------


@contextmanager
def watched():
    """Kernels are awaited one by one; where there are kernels, none being launched is an error."""
    launched = []

    def wait(results):
        launched.append(len(results))
        mx.eval(results)

    with metal.eager(wait):
        yield
    if metal.enabled() and not launched:
        raise Ds4Error("no kernel was launched: the op took its reference")


@contextmanager
def on_cpu():
    """The references in full float32: a GPU's products may round their inputs."""
    with mx.stream(mx.cpu), metal.reference():
        yield


def compare(case: Case, work: Work) -> float:
    """The greatest error of all rows against the reference, as a share of its greatest element.

    Raises Ds4Error for what is not allowed.
    """
    with watched():
        got = want = _results(work, 0, case.rows)
    if metal.enabled():
        with on_cpu():
            want = _results(work, 0, case.rows, work.reference)
            mx.eval(want)
    if [g.shape for g in got] != [w.shape for w in want]:
        raise Ds4Error(f"shapes are {[g.shape for g in got]}, wanted {[w.shape for w in want]}")
    return max(_error(case, i, *pair) for i, pair in enumerate(zip(got, want, strict=True)))


def _error(case: Case, output: int, got: mx.array, want: mx.array) -> float:
    whole = not mx.issubdtype(want.dtype, mx.floating)
    g, w = (np.array(a).astype(np.float64) for a in (got, want))
    with np.errstate(invalid="ignore"):
        off = np.where(g == w, 0, np.abs(g - w))  # of two infinities too
    off = np.where(np.isnan(off), np.inf, off)
    if whole and off.any():
        raise Ds4Error(f"output {output}: {np.count_nonzero(off)} of {off.size} integers differ")
    greatest = np.abs(w, where=np.isfinite(w), out=np.zeros_like(w)).max(initial=0)
    if case.step:  # the other side of a step is no error, where it is rare
        over = off > case.allowed * greatest
        near = off <= case.step * np.abs(w) + case.allowed * greatest
        off = np.where(over & near & (over.mean() < 1e-3), 0, off)
    error = off.max(initial=0) / (greatest or 1)
    if error > case.allowed:
        at = tuple(int(i) for i in np.unravel_index(np.argmax(off), off.shape))
        told = f"{g[at]:.6g}, the reference has {w[at]:.6g}"
        raise Ds4Error(
            f"output {output}: error {error:.1e}, allowed {case.allowed:.0e}; at {at}: {told}"
        )
    return error


def same_rows(work: Work, rows: int):
    """Raises Ds4Error unless the rows of blocks of 2 to `rows` are, bit for bit, rows alone."""
    with watched():
        alone = [_results(work, i, 1) for i in range(rows)]
        blocks = {n: _results(work, 0, n) for n in range(2, rows + 1)}
    for n, block in blocks.items():
        for output, got in enumerate(block):
            if not same_bits(got, mx.concatenate([results[output] for results in alone[:n]])):
                raise Ds4Error(f"output {output}: a row differs in a block of {n} and alone")


def _results(work: Work, i: int, n: int, run: Callable | None = None) -> tuple[mx.array, ...]:
    results = (run or work.run)(work.weights, i, n)
    return results if isinstance(results, tuple) else (results,)


def measure(work: Work) -> tuple[float, int]:
    """Seconds of one launch of one row, median of batches, and the bytes that it moves.

    The launches of a batch take copies of the weights in turn, more than a cache holds.
    """
    out = _results(work, 0, 1)
    mx.eval(out)
    nbytes = work.read + sum(a.nbytes for a in out)
    held = sum(w.nbytes for w in work.weights)
    copies = max(1, min(64, _WORKING_SET // nbytes, _MEMORY // max(held, 1)))
    sets = [work.weights, *([copied(w) for w in work.weights] for _ in range(copies - 1))]
    launches = max(4, min(64, _BATCH // nbytes))

    def batch() -> float:
        outs = [work.run(sets[i % copies], 0, 1) for i in range(launches)]
        start = time.perf_counter()
        mx.eval(outs)
        return (time.perf_counter() - start) / launches

    batch()
    return median(batch() for _ in range(_BATCHES)), nbytes


def copy_bandwidth() -> float:
    """GB/s, read and written, of an elementwise pass over 256 MB."""
    x = mx.zeros(_WORKING_SET // 4)

    def batch() -> float:
        outs = [x + i for i in range(4)]
        start = time.perf_counter()
        mx.eval(outs)
        return (time.perf_counter() - start) / len(outs)

    mx.eval(x)
    batch()
    return 2 * x.nbytes / median(batch() for _ in range(_BATCHES)) / 1e9


# The embedded model -----------------------------------------------------------------------------


def _greedy_text() -> Iterator[str]:
    """Prompt and text go through the kernels, for blocks of 8 are not prefill's."""
    from .api import load

    def tokens(target) -> list[int]:
        cache = Cache(target.config, len(ids) + TOKENS)
        *_, (streams, _) = prefill(target, ids, cache, chunk=FEW)
        greedy = Sampler(0.0, 1.0, 0.0, 0)
        return list(decode(target, streams, cache, greedy, limit=TOKENS, stop=()))

    with load() as model:
        ids = model.tokenizer.encode(PROMPT)
        got = tokens(model._target)
        with on_cpu():
            want = tokens(model._target)
    if got != want:
        at = [g == w for g, w in zip(got, want, strict=True)].index(False)
        raise Ds4Error(f"token {at} of {TOKENS} is {got[at]}, the reference's {want[at]}")
    yield f"{TOKENS} tokens are those of the reference"


def _blocks() -> Iterator[str]:
    from .api import load

    def rows(target, plan: Sequence[int]) -> mx.array:
        cache, out = Cache(target.config, len(ids)), []
        for _ in prefill(target, ids[: -sum(plan)], cache, chunk=len(ids)):
            pass
        for n in plan:
            part = mx.array(ids[cache.position : cache.position + n], mx.int32)
            streams, taps = target(part, cache)
            out.append(mx.concatenate([target.logits(streams), taps], axis=-1))
            mx.eval(out[-1], cache.arrays())
        return mx.concatenate(out)

    with load() as model:
        ids = (model.tokenizer.encode(PROMPT) * 64)[:285]  # over the borders of window and entries
        if not same_bits(rows(model._target, BLOCKS), rows(model._target, [1] * sum(BLOCKS))):
            raise Ds4Error(f"rows of blocks of {BLOCKS} differ from rows alone")
    yield f"{sum(BLOCKS)} rows are exact"


EMBEDDED = {"greedy text": _greedy_text, "blocks of 2 to 8 rows, and rows alone": _blocks}
