"""The draft: DeepSeek's DSpark module, which guesses a block of tokens from the target's rows."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import proxy

import mlx.core as mx

from . import ops
from .cache import DraftCache, Ring
from .graphs import Graphs, compiled
from .rows import FEW
from .target import Attention, HyperConnection, MoE, Target
from .weights import Weights


@dataclass(frozen=True)
class DraftConfig:
    """A draft's own settings, under the names of the official `config.json` (model 16)."""

    n_mtp_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, config: dict) -> "DraftConfig":
        values = {name: config[name] for name in cls.__dataclass_fields__}
        return cls(**values | {"dspark_target_layer_ids": tuple(config["dspark_target_layer_ids"])})


@dataclass(frozen=True)
class Block:
    """What a draft proposes after an anchor; arrays that are not yet evaluated."""

    tokens: mx.array  # [1 + N] int32: the anchor, then the drafts
    logits: mx.array  # [N, V] float32, the Markov term included
    confidence: mx.array  # [N] float32, before the sigmoid: is this draft right if those before are


class Draft:
    """Three stages over a noise block, which share the target's embedding and head (model 16)."""

    def __init__(self, config: DraftConfig, target: Target, weights: Weights):
        assert config.dspark_target_layer_ids == target.config.dspark_target_layer_ids
        self.config, self.target = config, target
        last = weights.at(f"mtp.{config.n_mtp_layers - 1}")
        self.main_proj = weights["mtp.0.main_proj.weight"]
        self.main_norm = weights["mtp.0.main_norm.weight"]
        self.stages = [
            Stage(target.config, weights.at(f"mtp.{s}")) for s in range(config.n_mtp_layers)
        ]
        self.hc_head_fn = last["hc_head_fn"]
        self.hc_head_scale = last["hc_head_scale"]
        self.hc_head_base = last["hc_head_base"]
        self.norm = last["norm.weight"]
        self.markov_w1 = last["markov_head.markov_w1.weight"]
        self.markov_w2 = last["markov_head.markov_w2.weight"]
        self.confidence_proj = last["confidence_head.proj.weight"]
        self.freqs = target.config.rope_freqs(compressed=False)
        self._graphs = Graphs(self.graph)
        weights.finish()

    def cache(self) -> DraftCache:
        return DraftCache(self.target.config, self.config.n_mtp_layers)

    def extend(self, taps: mx.array, cache: DraftCache):
        """The target's taps [N, T * D] of the positions after `cache.position` become context."""
        kept = taps[-(cache.window + FEW) :]  # older rows would leave the rings at once
        cache.advance(taps.shape[0] - kept.shape[0])
        N = kept.shape[0]
        run = self._graphs("context", N) if N <= FEW and self.target.compiles else self.context
        cache.replace(run(kept, mx.array(cache.position), *cache.arrays()))
        cache.advance(N)

    def propose(self, anchor: mx.array, cache: DraftCache) -> Block:
        """anchor [1] int32, the token at `cache.position` -> a block of guesses after it."""
        # Attention's reference, which takes more rows than FEW, has to know its position.
        if self.target.compiles and self.config.dspark_block_size <= FEW:
            run, position = self._graphs("block"), mx.array(cache.position)
        else:
            run, position = self.block, cache.position
        return Block(*run(anchor, position, *cache.arrays()))

    def graph(self, name: str, *_) -> Callable:
        """`context` or `block` as one graph; of contexts each number of rows has its own."""
        me = proxy(self)
        return compiled(lambda *arrays: getattr(me, name)(*arrays))

    def context(self, taps: mx.array, position: mx.array, *rings: mx.array) -> list[mx.array]:
        """taps [N, T * D] of the positions from `position` on -> the rings with their rows."""
        main_x, positions = self.main_x(taps), position + mx.arange(taps.shape[0])
        turn = ops.rotation(positions, self.freqs)
        places = positions % rings[0].shape[0]
        for stage, rows in zip(self.stages, rings, strict=True):
            rows[places] = stage.attn.keys(main_x, turn)
        return [*rings]

    def block(self, anchor: mx.array, position: int | mx.array, *rings: mx.array) -> list[mx.array]:
        """The parts of a Block after `anchor` at `position`, which the reference takes as int."""
        ids, x = self.embed(anchor)
        part, turn = None, ops.rotation(position + mx.arange(ids.shape[0]), self.freqs)
        if isinstance(position, mx.array):
            position = ops.placed(position)
        cache = self.cache()
        cache.replace(rings)
        after = [stage.hc_attn for stage in self.stages[1:]] + [None]
        for stage, ring, following in zip(self.stages, cache.rings, after, strict=True):
            x, part = stage(x, part, ring, position, turn, following)
        z = self.collapse(x)
        u = ops.linear(ops.rms_norm(z, self.norm, self._eps), self.target.head)
        tokens, logits, e = ops.markov(u, anchor, self.markov_w1, self.markov_w2)
        confidence = ops.linear(mx.concatenate([z, e], axis=-1), self.confidence_proj)
        return [mx.concatenate([anchor, tokens]), logits, confidence[:, 0]]

    def main_x(self, taps: mx.array) -> mx.array:
        """taps [N, T * D] -> the row [N, D] that all stages read (model 16.1)."""
        return ops.rms_norm(ops.linear(taps, self.main_proj), self.main_norm, self._eps)

    def embed(self, anchor: mx.array) -> tuple[mx.array, mx.array]:
        """anchor [1] -> ids [N] of the anchor and noise, and their streams [N, HC, D]."""
        noise = [self.config.dspark_noise_token_id] * (self.config.dspark_block_size - 1)
        ids = mx.concatenate([anchor, mx.array(noise, mx.int32)])
        return ids, self.target.streams(ids)

    def collapse(self, x: mx.array) -> mx.array:
        """Streams [N, HC, D] -> [N, D] before the last norm."""
        return ops.hc_head(
            x,
            self.hc_head_fn,
            self.hc_head_scale,
            self.hc_head_base,
            eps=self.target.config.hc_eps,
            norm_eps=self._eps,
        )

    @property
    def _eps(self) -> float:
        return self.target.config.rms_norm_eps


class Stage:
    """A layer of the target whose attention sees the context and all rows of the block."""

    def __init__(self, config, weights: Weights):
        self.window = config.sliding_window
        self.hc_attn = HyperConnection(config, "attn", weights)
        self.attn = Attention(config, 0, weights.at("attn"))
        self.hc_ffn = HyperConnection(config, "ffn", weights)
        self.ffn = MoE(config, False, weights.at("ffn"))

    def __call__(self, x, part, ring: Ring, position, turn, following: HyperConnection | None):
        """A block at `position`, whose context is in the ring; it leaves nothing there.

        x, part: the streams [N, HC, D] before and after it, as an op with `ops.Back` gives them;
        following: of the next stage.
        """
        y, back = self.hc_attn(x, part, self.hc_ffn)
        qr, kv = ops.beside(y, [self.attn.wq_a, self.attn.wkv])
        qr, rows, _ = self.attn.latents(qr, kv, turn, [], ring, position)
        q = ops.linear(qr, self.attn.wq_b)
        x, part = self.attn.attend(q, rows, ring, turn, position, back, causal=False)
        y, back = self.hc_ffn(x, part, following)
        return self.ffn(y, None, back)
