"""How many launches a decoded token costs: counted in the graph that MLX would run."""

import io
import re
from collections import Counter

import mlx.core as mx

from .cache import Cache, Step
from .graphs import Graphs
from .ops import metal
from .target import Target

# Nothing runs for a view; a link between a launch and its inputs stands for the launch.
_VIEWS = {
    "AsStrided", "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "StopGradient", "Transpose", "Unflatten", "View",
}  # fmt: skip


def launches(target: Target, rows: int = 1, position: int = 2048) -> Counter:
    """Launches of a step of `rows` rows at `position`, streams to state, by kind.

    Kinds are kernels and MLX's own primitives; a concatenation is a launch for each part. The
    graphs are as `Target` keeps them, so no GPU is needed, and weights may be hollow.
    """
    cache, kernels = Cache(target.config, position + rows), Counter()
    cache.replace([mx.broadcast_to(mx.array(0.0), a.shape) for a in cache.arrays()])
    ids = mx.broadcast_to(mx.array(0, mx.int32), (rows,))
    step = Step.of(target.config, position, rows)
    fresh = Graphs(target.graph)  # launches are counted while a graph is traced
    with metal.traced(kernels):
        results = target.by_graphs(ids, step, cache, graphs=fresh)
    return kernels + graph_primitives([*results, *cache.arrays()])


def mean_launches(target: Target, rows: int = 1, position: int = 2048) -> float:
    """Launches of a step, the mean of 128 steps from `position` on: some close windows."""
    kinds = Counter(
        Step.of(target.config, at, rows).kind for at in range(position, position + 128 * rows, rows)
    )
    firsts = {
        Step.of(target.config, at, rows).kind: at
        for at in range(position, position + 128 * rows, rows)
    }
    total = sum(n * launches(target, rows, firsts[kind]).total() for kind, n in kinds.items())
    return total / 128


def graph_primitives(arrays) -> Counter:
    """MLX's own primitives of a graph that launch, by name."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    nodes = re.findall(r'(\d+) \[label ?="(\w+)[^"]*", shape=rectangle', text.getvalue())
    parts = Counter(re.findall(r'"\w+" -> (\d+)', text.getvalue()))
    found = Counter()
    for node, name in nodes:
        if name not in _VIEWS and name != "Depends":
            found[name] += parts[node] if name == "Concatenate" else 1
    return found
