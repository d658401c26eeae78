"""Whether a model fits, told from its header alone: what it needs, against what the device has."""

import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import mlx.core as mx

from .cache import Cache, DraftCache
from .config import TargetConfig
from .download import TARGETS
from .errors import Ds4Error, UsageError
from .ops import QUERIES, SORTED, TILE, WIDENED, scored
from .ops.experts_grouped import held
from .weights import loaded_bytes

GIB = 1 << 30
CTX = 32768  # default context, where the model has as many positions
CHUNKS = (4096, 2048, 512)  # tokens of prefill at a time, the most that fit
_TILES = 4  # of the experts that a GPU holds at a time where MLX submits each launch by itself

# The part of what a device reports that a plan may fill, and what becomes of a larger one.
_SHARES = {"metal": 0.98, "cuda": 0.95, "cpu": 0.80}
_RISKS = {
    "metal": "macOS may page the weights out, at a fortieth of the speed, or freeze",
    "cuda": "an allocation may fail in the middle of the run",
    "cpu": "the system may swap without end, or kill the process",
}


@dataclass(frozen=True)
class Device:
    """Where the model is to run; bytes."""

    kind: str  # "metal", "cuda" or "cpu"
    name: str
    memory: int  # of the machine, or of the card
    limit: int  # what is left of the recommended working set (metal), or free

    @property
    def budget(self) -> int:
        """The bytes that a plan may fill."""
        return int(self.limit * _SHARES[self.kind])

    @property
    def what(self) -> str:
        """The name of the limit."""
        return "the recommended working set" if self.kind == "metal" else "free memory"


@dataclass(frozen=True)
class Need:
    """Bytes that a run takes with a context of `ctx` tokens."""

    ctx: int
    weights: int
    draft: int  # weights and cache
    cache: int
    workspace: int  # at most, while a prompt is read

    @property
    def total(self) -> int:
        return self.weights + self.draft + self.cache + self.workspace


Plan = Callable[..., Need]  # (ctx, rows=the least of CHUNKS): what a run takes


def device() -> Device:
    """The device that MLX computes on, as it is now."""
    info = mx.device_info(mx.default_device())
    name = str(info.get("device_name", info.get("architecture")))
    if mx.default_device() == mx.gpu and mx.metal.is_available():
        limit = info["max_recommended_working_set_size"] - mx.get_active_memory()
        return Device("metal", name, info["memory_size"], limit)
    if mx.default_device() == mx.gpu:
        return Device("cuda", name, info["total_memory"], info["free_memory"])
    return Device("cpu", name, memory(), free_memory())


def memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Bytes that programs may still take without swapping."""
    if (linux := Path("/proc/meminfo")).exists():
        return _meminfo(linux.read_text())
    return _vm_stat(subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout)


def _meminfo(text: str) -> int:
    return int(re.search(r"MemAvailable:\s+(\d+) kB", text)[1]) * 1024


def _vm_stat(text: str) -> int:
    page = int(re.search(r"page size of (\d+) bytes", text)[1])
    kinds = ("free", "inactive", "speculative", "purgeable")
    return page * sum(int(re.search(rf"Pages {kind}:\s+(\d+)", text)[1]) for kind in kinds)


def context(ctx: int | None, most: int) -> int:
    """The context that was asked for, or the default. Raises UsageError beyond the model's."""
    if ctx is not None and (not isinstance(ctx, Integral) or isinstance(ctx, bool) or ctx < 1):
        raise UsageError(f"ctx is {ctx!r:.60}, wanted a whole number, at least 1")
    if ctx is not None and ctx > most:
        raise UsageError(f"ctx is {ctx}, wanted at most the model's {most} positions")
    return ctx or min(CTX, most)


def plan(config: TargetConfig, tensors: dict, draft: dict | None = None) -> Plan:
    """What a target takes with a draft, by context, from `tensors` and `draft` by official name.

    Nothing is read, and nothing allocated: arrays of a cache are lazy.
    """
    stages = len({name.split(".")[1] for name in draft or ()})
    rings = sum(ring.rows.nbytes for ring in DraftCache(config, stages).rings)
    weights, others = loaded_bytes(tensors), loaded_bytes(draft or {}) + rings
    matrix = max(math.prod(t.shape[-2:]) for t in tensors.values())
    # A tensor as it was read and as it was repacked, before MLX has it.
    staging = 2 * max(t.nbytes for t in tensors.values())

    def need(ctx: int, rows: int = CHUNKS[-1]) -> Need:
        meanwhile = max(staging, workspace(config, ctx, min(rows, ctx), matrix, device().kind))
        return Need(ctx, weights, others, Cache(config, ctx).nbytes, meanwhile)

    return need


def chunk(plan: Plan, ctx: int, on: Device) -> int:
    """The tokens of prefill at a time that are fastest of those that fit."""
    few = CHUNKS[-1:] if on.kind == "cpu" else CHUNKS
    return next((n for n in few if plan(ctx, n).total <= on.budget), CHUNKS[-1])


def workspace(c: TargetConfig, ctx: int, rows: int, matrix: int, kind: str) -> int:
    """Bytes that `rows` of prefill hold at most there; `matrix`: elements of the largest."""
    wide = max([0, *(ctx // r for r in c.compress_ratios if r > 4)])  # entries that all are read
    chosen = min(c.index_topk, ctx // 4) if 4 in c.compress_ratios else 0
    attention = 4 * (
        3 * min(WIDENED, matrix)
        + 3 * min(scored(kind), rows * c.index_n_heads * (ctx // 4) * (chosen > 0))
        + rows * chosen * c.head_dim
        + 3 * QUERIES * c.num_attention_heads * (2 * c.sliding_window + max(wide, chosen))
        + 8 * rows * c.num_attention_heads * c.head_dim
    )
    streams = 4 * 6 * rows * c.hc_mult * c.hidden_size
    return streams + max(attention, _experts(c, rows, kind) if rows >= SORTED else 0)


def _experts(c: TargetConfig, rows: int, kind: str) -> int:
    """What the experts of a layer hold where they are widened (ops.experts), in float16."""
    E, F, D = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
    if kind == "cuda":
        return 2 * held(E, F, D, rows * c.num_experts_per_tok)
    met = rows * c.num_experts_per_tok * (6 * F + 4 * D)
    return 2 * (min(3 * E * F * D, _TILES * TILE) + met)


def require(name: str, plan: Plan, ctx: int, on: Device, force: bool = False) -> str | None:
    """Raises Ds4Error, with the numbers and what would help, if `plan(ctx)` does not fit.

    With `force` the same is returned as a warning.
    """
    asked = plan(ctx)
    if asked.total <= on.budget:
        return None
    parts = f"weights {_gib(asked.weights)}, "
    parts += f"draft {_gib(asked.draft)}, " if asked.draft else ""
    parts += f"cache of {ctx} tokens {_gib(asked.cache)}, workspace {_gib(asked.workspace)}"
    short = (
        f"{name} needs {_gib(asked.total)} GiB ({parts}), and {on.what} of {_gib(on.limit)} GiB "
        f"leaves {_gib(on.budget)}: {_gib(asked.total - on.budget)} GiB short"
    )
    if force:
        return f"{short}; loaded by force: {_RISKS[on.kind]}"
    ways = "; or ".join(_ways(plan, asked, on)) or (
        f"a machine with {_gib(asked.total / _SHARES[on.kind])} GiB for it"
    )
    raise Ds4Error(
        f"{short}. It takes {ways}. Experts are not streamed from disk; --force (force=True) "
        f"loads it all the same: {_RISKS[on.kind]}"
    )


def _ways(plan: Plan, asked: Need, on: Device):
    """What would make it fit, the least loss first."""
    missing = asked.total - on.budget
    wanted = math.ceil(asked.total / _SHARES[on.kind])
    if on.kind == "metal" and wanted + 4 * GIB <= on.memory:
        yield f"sudo sysctl iogpu.wired_limit_mb={math.ceil(wanted / 2**20)}"
    if on.kind != "metal" and wanted <= on.memory:
        yield "closing other programs"
    smaller = (asked.ctx >> n for n in range(1, asked.ctx.bit_length() - 9))
    if fits := next((c for c in smaller if plan(c).total <= on.budget), None):
        yield f"a context of {fits} (--ctx {fits})"
    if missing <= asked.draft:
        yield "no draft (without --mtp)"
    q2 = TARGETS["ds4f-q2"].nbytes
    if asked.weights > 1.02 * q2 and missing <= asked.weights - q2:
        yield "weights in 2 bits (ds4mlx download ds4f-q2)"


def _gib(n: float) -> str:
    return f"{n / GIB:.1f}"
