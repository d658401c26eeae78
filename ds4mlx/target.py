"""The target: DeepSeek V4's forward pass, for one token, a block or a chunk of prefill."""

import mlx.core as mx

from . import ops
from .cache import Cache, CompressorCache, LayerCache
from .config import TargetConfig
from .weights import Weights


class Target:
    """DeepSeek V4 (model 3). Takes every tensor of `weights`; leftovers are an error."""

    def __init__(self, config: TargetConfig, weights: Weights):
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
        weights.finish()

    def __call__(self, ids: mx.array, cache: Cache) -> tuple[mx.array, mx.array]:
        """ids [N] int32, the tokens after `cache.position` -> (streams [N, HC, D], taps).

        taps [N, T * D]: the mean over the streams of each tap layer's output, which the draft
        reads. The cache advances by N. Both are float32.
        """
        config = self.config
        N = ids.shape[0]
        positions = mx.arange(cache.position, cache.position + N)
        rotations = {r: ops.rotation(positions, f) for r, f in self.freqs.items()}
        e = ops.embed(ids, self.embed)
        x = mx.repeat(e[:, None], config.hc_mult, axis=1)
        taps = []
        for i, (layer, state) in enumerate(zip(self.layers, cache.layers, strict=True)):
            x = layer(x, ids, cache.position, state, rotations)
            if i in config.dspark_target_layer_ids:
                taps.append(ops.hc_collapse(x, mx.full(x.shape[:2], 1 / config.hc_mult)))
        cache.advance(N)
        return x, mx.concatenate(taps, axis=-1)

    def logits(self, x: mx.array) -> mx.array:
        """Streams [N, HC, D] -> float32 logits [N, V]."""
        return ops.linear(self.normed(self.collapse(x)), self.head)

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


class Layer:
    """Attention and experts, each behind a hyper-connection."""

    def __init__(self, config: TargetConfig, index: int, weights: Weights):
        self.hc_attn = HyperConnection(config, "attn", weights)
        self.attn = Attention(config, config.compress_ratios[index], weights.at("attn"))
        self.hc_ffn = HyperConnection(config, "ffn", weights)
        self.ffn = MoE(config, index < config.num_hash_layers, weights.at("ffn"))

    def __call__(self, x, ids, position: int, cache: LayerCache, rotations: dict):  # [N, HC, D]
        x = self.hc_attn(x, lambda y: self.attn(y, position, cache, rotations))
        return self.hc_ffn(x, lambda y: self.ffn(y, ids))


class HyperConnection:
    """mHC around one sublayer: collapse the residual streams, run it, expand again (model 4)."""

    def __init__(self, config: TargetConfig, name: str, weights: Weights):
        self.config = config
        self.fn = weights[f"hc_{name}_fn"]
        self.scale = weights[f"hc_{name}_scale"]
        self.base = weights[f"hc_{name}_base"]
        self.norm = weights[f"{name}_norm.weight"]

    def __call__(self, x, sublayer):  # x [N, HC, D]
        config = self.config
        pre, post, comb = ops.hc_mix(
            x,
            self.fn,
            self.scale,
            self.base,
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        y = ops.rms_norm(ops.hc_collapse(x, pre), self.norm, config.rms_norm_eps)
        return ops.hc_expand(x, sublayer(y), post, comb)


class Attention:
    """Window attention with a sink (model 5); HCA adds a Compressor, CSA an Indexer too."""

    def __init__(self, config: TargetConfig, ratio: int, weights: Weights):
        self.config, self.ratio = config, ratio
        self.wq_a, self.q_norm = weights["wq_a.weight"], weights["q_norm.weight"]
        self.wq_b = weights["wq_b.weight"]
        self.wkv, self.kv_norm = weights["wkv.weight"], weights["kv_norm.weight"]
        self.attn_sink = weights["attn_sink"]
        self.wo_a, self.wo_b = weights["wo_a.weight"], weights["wo_b.weight"]
        self.compressor = self.indexer = None
        if ratio:
            self.compressor = Compressor(config, ratio, weights.at("compressor"))
        if ratio == 4:
            self.indexer = Indexer(config, ratio, weights.at("indexer"))

    def __call__(self, x, position: int, cache: LayerCache, rotations: dict):  # x [N, D]
        config, N = self.config, x.shape[0]
        rotation = rotations[bool(self.ratio)]
        qr, q = self.queries(x, rotation)
        kv = self.keys(x, rotation)
        start = max(0, position - config.sliding_window + 1)
        raw = kv
        if start < position:
            raw = mx.concatenate([cache.window.read(start, position), kv])
        cache.window.write(position, kv)

        entries, ready, selected = None, (), None
        if self.compressor:
            self.compressor(x, position, cache.compressor)
            ready = [(position + i + 1) // self.ratio for i in range(N)]
            entries = cache.compressor.entries[: ready[-1]] if ready[-1] else None
        if self.indexer:
            selected = self.indexer(x, qr, position, cache.indexer, rotation, ready)
        o = ops.attention(
            q,
            raw,
            self.attn_sink,
            window=config.sliding_window,
            entries=entries,
            ready=ready,
            selected=selected,
        )
        return self.project(o, rotation)

    def queries(self, x, rotation) -> tuple[mx.array, mx.array]:
        """x [N, D] -> the low-rank query [N, Rq], which the indexer reads too, and q [N, H, Dh]."""
        config, eps = self.config, self.config.rms_norm_eps
        qr = ops.rms_norm(ops.linear(x, self.wq_a), self.q_norm, eps)
        q = ops.linear(qr, self.wq_b).reshape(-1, config.num_attention_heads, config.head_dim)
        return qr, ops.rope(ops.rms_norm(q, None, eps), rotation)

    def keys(self, x, rotation) -> mx.array:
        """x [N, D] -> the rows [N, Dh] that are keys and values of all heads."""
        config = self.config
        kv = ops.rms_norm(ops.linear(x, self.wkv), self.kv_norm, config.rms_norm_eps)
        kv = ops.rope(kv, rotation)
        return ops.round_kv(kv, config.qk_rope_head_dim) if config.round_kv else kv

    def project(self, o, rotation) -> mx.array:
        """The heads' outputs o [N, H, Dh] -> [N, D]."""
        o = ops.rope(o, rotation, inverse=True)  # values carried the keys' rotation
        groups = o.reshape(o.shape[0], self.config.o_groups, -1)
        return ops.linear(ops.grouped_linear(groups, self.wo_a), self.wo_b)


class Compressor:
    """Pools each window of `ratio` tokens into one entry (model 7); ratio 4 overlaps."""

    def __init__(self, config: TargetConfig, ratio: int, weights: Weights, index: bool = False):
        self.config, self.ratio, self.index = config, ratio, index
        self.wkv, self.wgate = weights["wkv.weight"], weights["wgate.weight"]
        self.ape = weights["ape"]
        self.norm = weights["norm.weight"]
        self.freqs = config.rope_freqs(compressed=True)

    def __call__(self, x, position: int, cache: CompressorCache):  # x [N, D]
        """Remember the rows of `x`, and write the entries of the windows that they close."""
        r, N = self.ratio, x.shape[0]
        c = ops.linear(x, self.wkv)
        s = ops.linear(x, self.wgate) + ops.embed((position + mx.arange(N)) % r, self.ape)
        first, last = position // r, (position + N) // r  # windows that close here
        if first < last:
            start = max(0, first - (r == 4)) * r
            all_c, all_s = c, s
            if start < position:
                all_c = mx.concatenate([cache.c.read(start, position), c])
                all_s = mx.concatenate([cache.s.read(start, position), s])
            stop = last * r - start
            entries = self._entries(all_c[:stop], all_s[:stop], first, last)
            cache.write_entries(first, entries)
        cache.c.write(position, c)
        cache.s.write(position, s)

    def _entries(self, c, s, first: int, last: int):
        config, r, n = self.config, self.ratio, last - first
        if r == 4:
            c, s = _overlap(c, 0.0, first, n), _overlap(s, -mx.inf, first, n)
        else:
            c, s = c.reshape(n, r, -1), s.reshape(n, r, -1)
        entries = ops.rms_norm(ops.pool(c, s), self.norm, config.rms_norm_eps)
        # An entry rotates at the first token of its window.
        entries = ops.rope(entries, ops.rotation(mx.arange(first, last) * r, self.freqs))
        if self.index:
            return ops.round_index(entries) if config.round_index else entries
        return ops.round_kv(entries, config.qk_rope_head_dim) if config.round_kv else entries


def _overlap(rows: mx.array, missing: float, first: int, n: int) -> mx.array:
    """Candidates of n windows of 4: `a` halves of the window before, `b` halves of its own.

    rows [4 (n + 1), 2 D] from the window before `first` on (it is missing when first = 0)
    -> [n, 8, D].
    """
    D = rows.shape[-1] // 2
    if first == 0:
        rows = mx.concatenate([mx.full((4, 2 * D), missing), rows])
    windows = rows.reshape(n + 1, 4, 2 * D)
    return mx.concatenate([windows[:-1, :, :D], windows[1:, :, D:]], axis=1)


class Indexer:
    """Chooses the entries that each query of a CSA layer reads (model 8)."""

    def __init__(self, config: TargetConfig, ratio: int, weights: Weights):
        self.config = config
        self.wq_b, self.weights_proj = weights["wq_b.weight"], weights["weights_proj.weight"]
        self.compressor = Compressor(config, ratio, weights.at("compressor"), index=True)

    def __call__(self, x, qr, position: int, cache: CompressorCache, rotation, ready):
        """x [N, D], qr [N, Rq] -> what `ops.index_select` gives; None: all are read."""
        config = self.config
        self.compressor(x, position, cache)
        if ready[-1] <= config.index_topk:
            return None
        H, d = config.index_n_heads, config.index_head_dim
        q = ops.rope(ops.linear(qr, self.wq_b).reshape(-1, H, d), rotation)
        if config.round_index:
            q = ops.round_index(q)
        w = ops.linear(x, self.weights_proj) * (d**-0.5 * H**-0.5)
        return ops.index_select(q, w, cache.entries[: ready[-1]], ready, config.index_topk)


class MoE:
    """Routed experts, chosen by hash or by score, and the shared one (model 11, 12)."""

    def __init__(self, config: TargetConfig, hashed: bool, weights: Weights):
        self.config = config
        self.gate = weights["gate.weight"]
        self.tid2eid = weights["gate.tid2eid"] if hashed else None
        self.bias = None if hashed else weights["gate.bias"]
        self.w1, self.w3, self.w2 = (weights[f"experts.{n}.weight"] for n in ("w1", "w3", "w2"))
        self.shared = [weights[f"shared_experts.{n}.weight"] for n in ("w1", "w3", "w2")]

    def __call__(self, x, ids):  # x [N, D], ids [N]
        config = self.config
        chosen, weights = ops.route(
            x,
            self.gate,
            k=config.num_experts_per_tok,
            scale=config.routed_scaling_factor,
            bias=self.bias,
            chosen=None if self.tid2eid is None else self.tid2eid[ids],
        )
        limit = config.swiglu_limit
        routed = ops.experts(x, chosen, weights, self.w1, self.w3, self.w2, limit)
        return routed + ops.mlp(x, *self.shared, limit)
