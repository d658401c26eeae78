"""The target: DeepSeek V4's forward pass, for one token, a block or a chunk of prefill."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple
from weakref import proxy

import mlx.core as mx

from . import ops
from .cache import Cache, LayerCache, Step, replace
from .config import TargetConfig
from .graphs import Graphs, compiled
from .packed import Matrix, Packed
from .rows import FEW
from .weights import Weights

# Layers at which a step's graphs end; one more has the rest. A device that waits for the step is
# busy with one while the next, longer one is built.
_ENDS = (2, 6, 18)


class Target:
    """DeepSeek V4 (model 3). Takes every tensor of `weights`; leftovers are an error."""

    def __init__(self, config: TargetConfig, weights: Weights):
        tapped, layers = config.dspark_target_layer_ids, range(config.num_hidden_layers)
        assert tapped and set(tapped) <= {*layers}, (tapped, layers)
        self.config = config
        self.embed = weights["embed.weight"]
        self.layers = [
            Layer(config, i, weights.at(f"layers.{i}")) for i in range(config.num_hidden_layers)
        ]
        self.hc_head_fn = weights["hc_head_fn"]
        self.hc_head_scale = weights["hc_head_scale"]
        self.hc_head_base = weights["hc_head_base"]
        self.norm = weights["norm.weight"]
        self.head = weights["head.weight"]
        self.freqs = {r: config.rope_freqs(compressed=r) for r in (False, True)}
        ends = [0, *(n for n in _ENDS if n < len(layers)), len(layers)]
        self.stretches = [range(*pair) for pair in pairwise(ends)]
        self._steps, self._readers = Graphs(self.graph), Graphs(self.reader)
        weights.finish()

    def __call__(
        self,
        ids: mx.array,
        cache: Cache,
        pace: Callable | None = None,
        submit: Callable | None = None,
    ) -> tuple[mx.array, mx.array]:
        """ids [N] int32, the tokens after `cache.position` -> (streams [N, HC, D], taps).

        taps [N, T * D]: the mean over the streams of each tap layer's output, which the draft
        reads. The cache advances by N. Both are float32. pace: called with the arrays that each
        sublayer of a step that is not made of graphs leaves, to be evaluated, and `within=True`
        with those that a piece of one leaves. submit: called with the streams after each stretch
        of layers of one that is: a device which waits for it begins while the rest is built.
        """
        step = Step.of(self.config, cache.position, ids.shape[0])
        # A scatter on a GPU would write beyond the entries.
        assert step.position + step.rows <= cache.ctx, (step.position, step.rows, cache.ctx)
        cache.reach(step.rows)
        if step.rows <= FEW and self.compiles:
            x, taps = self.by_graphs(ids, step, cache, submit)
        else:
            x, taps = self.forward(ids, step, cache, pace)
        cache.advance(step.rows)
        return x, taps

    def by_graphs(
        self, ids, step: Step, cache: Cache, submit=None, graphs: Graphs | None = None
    ) -> tuple[mx.array, mx.array]:
        """As `forward`, by the kept graphs, or by others of `graph`: a few for a step."""
        graphs = graphs or self._steps
        x, turns = graphs(None, *step.kind)(ids, mx.array(step.position))
        part, taps = None, []
        for layers in self.stretches:
            held = cache.layers[layers.start : layers.stop]
            # No name for the old state: what nobody holds is written in place.
            x, part, taps, arrays = graphs(layers, *step.kind)(
                ids, turns, x, part, taps, [a for layer in held for a in layer.arrays()]
            )
            replace(held, arrays)
            if submit:
                submit(x)
        return x, taps

    @property
    def compiles(self) -> bool:
        """Whether steps can be graphs: attention's reference has to know its position."""
        config = self.config
        return ops.compiles() and ops.attends(config.head_dim, config.qk_rope_head_dim)

    def forward(self, ids, step: Step, cache: Cache, pace=None) -> tuple[mx.array, mx.array]:
        """As a call, but the cache's position stays."""
        taps = []
        for i, op, x in self.sublayers(ids, step, cache, pace):
            if pace:
                pace(x, cache.layers[i].arrays())
            if self._tapped(i, op):
                taps.append(x)
        return x, self._mean(taps)

    def sublayers(self, ids, step: Step, cache: Cache, pace=None) -> Iterator[tuple]:
        """The forward pass: (layer, "attn" or "ffn", the streams [N, HC, D] after it)."""
        start, every = self.streams(ids), range(len(self.layers))
        turns = Turns.of(step, self.freqs)
        found = self._sublayers(every, ids, turns, start, None, step, cache.layers, pace)
        yield from ((i, op, x) for i, op, x, _ in found)

    def _sublayers(self, layers: range, ids, turns, x, part, step, states, pace=None):
        """Those of some layers, after x and part; with the part that each leaves (`ops.Back`)."""
        for i, state in zip(layers, states, strict=True):
            layer, after = self.layers[i], self.layers[i + 1 : i + 2]
            y, back = layer.hc_attn(x, part, layer.hc_ffn)
            x, part = layer.attn(y, step, state, turns, back)
            yield i, "attn", x, part
            y, back = layer.hc_ffn(x, part, after[0].hc_attn if after else None)
            x, part = layer.ffn(y, ids, back, pace)
            yield i, "ffn", x, part

    def streams(self, ids: mx.array) -> mx.array:
        """ids [N] -> the streams [N, HC, D] before the first layer."""
        return mx.repeat(ops.embed(ids, self.embed)[:, None], self.config.hc_mult, axis=1)

    def _tapped(self, i: int, op: str) -> bool:
        return op == "ffn" and i in self.config.dspark_target_layer_ids

    def _mean(self, taps: list[mx.array]) -> mx.array:
        mean = mx.full(taps[0].shape[:2], 1 / taps[0].shape[1])
        return ops.hc_collapse(mx.concatenate(taps, axis=-1), mean)

    def graph(self, layers: range | None, *kind) -> Callable:
        """Of steps of a kind (`Step.kind`): how they begin, or some of their layers."""
        return self.start(*kind) if layers is None else self.stretch(layers, *kind)

    def start(self, *kind) -> Callable:
        """How all steps of a kind begin: (ids, position) -> the streams, and their Turns."""
        me = proxy(self)

        def run(ids, position):
            step = Step.of_kind(position, *kind)
            return me.streams(ids), Turns.of(step, me.freqs)

        return compiled(run)

    def stretch(self, layers: range, *kind) -> Callable:
        """Some layers of all steps of a kind, as one graph.

        (ids, turns, x, part, taps, arrays) -> x, part, taps, arrays; x and part as an op with
        `ops.Back` gives them, arrays those of the layers' state. taps: a list of the tap layers'
        streams [N, HC, D] so far; the last stretch gives [N, T * D], as `forward`.
        """
        me = proxy(self)

        def run(ids, turns, x, part, taps, arrays):
            ratios = me.config.compress_ratios
            states = [LayerCache(me.config, ratios[i], 1) for i in layers]
            replace(states, arrays)
            step = Step.of_kind(None, *kind)
            found = [*me._sublayers(layers, ids, Turns(*turns), x, part, step, states)]
            taps = [*taps, *(x for i, op, x, _ in found if me._tapped(i, op))]
            _, _, x, part = found[-1]
            last = layers.stop == len(me.layers)
            arrays = [a for state in states for a in state.arrays()]
            return x, part, me._mean(taps) if last else taps, arrays

        return compiled(run)

    def logits(self, x: mx.array) -> mx.array:
        """Streams [N, HC, D] -> float32 logits [N, V]."""
        if x.shape[0] <= FEW and self.compiles:
            return self._readers(x.shape[0])(x)
        return ops.linear(self.normed(self.collapse(x)), self.head)

    def reader(self, rows: int) -> Callable:
        """The logits of that many rows as one graph."""
        me = proxy(self)
        return compiled(lambda x: ops.linear(me.normed(me.collapse(x)), me.head))

    def collapse(self, x: mx.array) -> mx.array:
        """Streams [N, HC, D] -> the read-out row [N, D] before the last norm."""
        config = self.config
        return ops.hc_head(
            x,
            self.hc_head_fn,
            self.hc_head_scale,
            self.hc_head_base,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )

    def normed(self, z: mx.array) -> mx.array:
        return ops.rms_norm(z, self.norm, self.config.rms_norm_eps)


class Turns(NamedTuple):
    """What all layers compute of a step's position, once: rotations (model 6) and places.

    Rotations are complex64 [., R / 2]; a window that closes is rotated as its first position.
    """

    position: int | mx.array  # of the first row; in a graph as ops.placed gives it
    rows: dict[bool, mx.array]  # whether a layer is compressed -> rotations of the N rows
    windows: dict[int, mx.array | None]  # ratio -> those of the n windows that close; None: none
    closed: dict[int, slice | mx.array]  # ratio -> where their entries go, [n] int32
    ready: mx.array  # [N] int32, in a graph 4 or more: entries of ratio 4 that each row may read

    @classmethod
    def of(cls, step: Step, freqs: dict[bool, mx.array]) -> "Turns":
        at = step.position
        positions = at + mx.arange(step.rows)
        firsts = {ratio: step.windows(ratio) for ratio in step.closing}
        return cls(
            at if isinstance(at, int) else ops.placed(at),
            {compressed: ops.rotation(positions, f) for compressed, f in freqs.items()},
            {r: None if f is None else ops.rotation(f, freqs[True]) for r, f in firsts.items()},
            {ratio: step.closed(ratio) for ratio in step.closing},
            step.ready(4),
        )


class Layer:
    """Attention and experts, each behind a hyper-connection."""

    def __init__(self, config: TargetConfig, index: int, weights: Weights):
        self.hc_attn = HyperConnection(config, "attn", weights)
        self.attn = Attention(config, config.compress_ratios[index], weights.at("attn"))
        self.hc_ffn = HyperConnection(config, "ffn", weights)
        self.ffn = MoE(config, index < config.num_hash_layers, weights.at("ffn"))


class HyperConnection:
    """mHC around one sublayer: mix the streams, and tell how it is written back (model 4)."""

    def __init__(self, config: TargetConfig, name: str, weights: Weights):
        self.config = config
        self.fn = weights[f"hc_{name}_fn"]
        self.scale = weights[f"hc_{name}_scale"]
        self.base = weights[f"hc_{name}_base"]
        self.norm = weights[f"{name}_norm.weight"]

    def __call__(self, x, part, following: "HyperConnection | None"):
        """x, part: as ops.hc_mix; following: of the next sublayer -> its row y, and ops.Back."""
        config = self.config
        y, post, comb = ops.hc_mix(
            x,
            part,
            self.fn,
            self.scale,
            self.base,
            self.norm,
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        return y, ops.Back(x, post, comb, following and following.fn)


class Attention:
    """Window attention with a sink (model 5); HCA adds a Compressor, CSA an Indexer too."""

    def __init__(self, config: TargetConfig, ratio: int, weights: Weights):
        self.config, self.ratio = config, ratio
        self.wq_a, self.q_norm = weights["wq_a.weight"], weights["q_norm.weight"]
        self.wq_b = weights["wq_b.weight"]
        self.wkv, self.kv_norm = weights["wkv.weight"], weights["kv_norm.weight"]
        self.attn_sink = weights["attn_sink"]
        self.wo_a, self.wo_b = weights["wo_a.weight"], weights["wo_b.weight"]
        self.compressors, self.indexer = [], None
        if ratio:
            self.compressors.append(Compressor(weights.at("compressor"), config.round_kv))
        if ratio == 4:
            self.indexer = Indexer(config, weights.at("indexer"))
            self.compressors.append(Compressor(weights.at("indexer.compressor"), False))

    def __call__(self, x, step: Step, cache: LayerCache, turns: Turns, back: ops.Back):
        """The row x [N, D] -> the streams after attention, and perhaps their part: `ops.Back`."""
        turn, position, indexer = turns.rows[bool(self.ratio)], turns.position, self.indexer
        queries = [self.wq_b]
        inputs = [self.wq_a, self.wkv, *(w for c in self.compressors for w in (c.wkv, c.wgate))]
        if indexer and step.selecting:
            queries.append(indexer.wq_b)
            inputs.append(indexer.weights_proj)
        qr, kv, *products = ops.beside(x, inputs)
        pools = [
            ops.Pool(
                *products[2 * i : 2 * i + 2],
                c.ape,
                c.norm,
                turns.windows[self.ratio],
                self.ratio,
                c.rounded,
            )
            for i, c in enumerate(self.compressors)
        ]
        qr, rows, entries = self.latents(qr, kv, turn, pools, cache.ring, position)
        if indexer and len(entries) > 1 and self.config.round_index:
            entries[1] = ops.round_index(entries[1])
        if entries:
            cache.write_entries(turns.closed[self.ratio], entries)
        q, *index_q = ops.beside(qr, queries)
        selected = None
        if indexer and step.selecting:
            selected = indexer(*index_q, products[-1], step, cache.entries[1], turns)
        out = self.attend(q, rows, cache.ring, turn, position, back, cache.entries, selected)
        cache.write(step, rows)
        return out

    def latents(self, q, kv, turn, pools, ring, position):
        """As `ops.latents`: the products [N, Rq] and [N, Dh] -> qr, rows and entries."""
        config = self.config
        return ops.latents(
            q,
            kv,
            self.q_norm,
            self.kv_norm,
            turn,
            pools,
            ring,
            position,
            rounded=config.round_kv,
            eps=config.rms_norm_eps,
        )

    def attend(self, q, rows, ring, turn, position, back, entries=(), selected=None, causal=True):
        """The products q [N, H * Dh] of the queries, and `ops.latents`' rows -> as a call."""
        config = self.config
        o = ops.attention(
            q,
            rows,
            ring,
            self.attn_sink,
            turn,
            position,
            window=config.sliding_window,
            eps=config.rms_norm_eps,
            entries=entries[0] if entries else None,
            ratio=self.ratio,
            selected=selected,
            causal=causal,
        )
        return ops.linear(ops.grouped_linear(o, self.wo_a, config.o_groups), self.wo_b, back)

    def keys(self, x, turn) -> mx.array:
        """x [N, D] -> the rows [N, Dh] that are keys and values of all heads."""
        config = self.config
        kv = ops.rms_norm(ops.linear(x, self.wkv), self.kv_norm, config.rms_norm_eps)
        kv = ops.rope(kv, turn)
        return ops.round_kv(kv, config.qk_rope_head_dim) if config.round_kv else kv


class Compressor:
    """What pools each window of tokens into one entry (model 7); see `ops.latents`."""

    def __init__(self, weights: Weights, rounded: bool):
        self.wkv, self.wgate = weights["wkv.weight"], weights["wgate.weight"]
        self.ape, self.norm = weights["ape"], weights["norm.weight"]
        self.rounded = rounded


class Indexer:
    """Chooses the entries that each query of a CSA layer reads (model 8)."""

    def __init__(self, config: TargetConfig, weights: Weights):
        self.config = config
        self.wq_b, self.weights_proj = weights["wq_b.weight"], weights["weights_proj.weight"]

    def __call__(self, q, w, step: Step, keys: mx.array, turns: Turns):
        """The products q [N, Hi * Di] and w [N, Hi] -> what `ops.index_select` gives."""
        config, k = self.config, self.config.index_topk
        turn = turns.rows[True]
        # Of the published scale d^-1/2 H^-1/2 no choice depends.
        if step.rows > FEW:
            q = ops.rope(q.reshape(*w.shape, -1), turn)
            q = ops.round_index(q) if config.round_index else q
            ready = [(step.position + i + 1) // 4 for i in range(step.rows)]
            return ops.index_select(q, w, keys[: ready[-1]], ready, k)
        scores = ops.index_scores(q, turn, w, keys, turns.ready, rounded=config.round_index)
        return ops.index_best(scores, turns.ready, k)


class MoE:
    """Routed experts, chosen by hash or by score, and the shared one (model 11, 12)."""

    def __init__(self, config: TargetConfig, hashed: bool, weights: Weights):
        self.config = config
        self.gate = weights["gate.weight"]
        self.tid2eid = weights["gate.tid2eid"] if hashed else None
        self.bias = None if hashed else weights["gate.bias"]
        self.w1, self.w3, self.w2 = (weights[f"experts.{n}.weight"] for n in ("w1", "w3", "w2"))
        self.shared = [weights[f"shared_experts.{n}.weight"] for n in ("w1", "w3", "w2")]

    def __call__(self, x, ids, back: ops.Back, pace=None):  # x [N, D], ids [N] -> as Attention
        config, limit = self.config, self.config.swiglu_limit
        w1, w3, w2 = self.shared
        logits, h = ops.beside(x, [self.gate, ops.Gated(w1, w3, limit)])
        choice = ops.Choice(
            logits,
            k=config.num_experts_per_tok,
            scale=config.routed_scaling_factor,
            bias=self.bias,
            chosen=None if self.tid2eid is None else self.tid2eid[ids],
        )
        rest = {"shared": ops.Shared(h, w2), "pace": pace, "back": back}
        return ops.routed(x, choice, self.w1, self.w3, self.w2, limit, **rest)


def tensors(module) -> Iterator[Matrix]:
    """Every tensor of a module of this file or of a draft, and of those below it."""
    for value in vars(module).values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, mx.array | Packed):
                yield part
            elif hasattr(part, "__dict__") and part.__class__.__module__.startswith(__package__):
                yield from tensors(part)
