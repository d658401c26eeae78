"""The target's settings, once for everything below: `config.json` in, a frozen dataclass out."""

import math
from dataclasses import dataclass, fields, replace

import mlx.core as mx

from .errors import FileError


@dataclass(frozen=True)
class TargetConfig:
    """DeepSeek V4 as its `config.json` describes it, under the official names (model 1)."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    compress_ratios: tuple[int, ...]  # one per layer: 0 window only, 4 CSA, other HCA
    num_hash_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: dict
    max_position_embeddings: int = 1 << 20
    dspark_target_layer_ids: tuple[int, ...] = ()  # the layers that a draft reads
    # The simulated fp8/fp4 rounding of training; off to compare with code that has none.
    round_kv: bool = True
    round_index: bool = True

    @classmethod
    def from_dict(cls, config: dict, source: str = "config.json") -> "TargetConfig":
        """Raises FileError that names every missing field, or one that this code cannot honour."""
        known = {f.name: f for f in fields(cls)}
        wanted = [n for n, f in known.items() if f.default is f.default_factory and n not in config]
        if wanted:
            raise FileError(f"{source}: these fields are missing: {', '.join(wanted)}")
        model = config.get("model_type", "deepseek_v4")
        if model != "deepseek_v4":
            raise FileError(f'{source}: model_type is "{model}", wanted "deepseek_v4"')
        values = {n: config[n] for n in known if n in config}
        layers = values["num_hidden_layers"]
        ratios = tuple(values["compress_ratios"][:layers])
        if len(ratios) < layers:
            raise FileError(f"{source}: {len(ratios)} compress_ratios for {layers} layers")
        taps = tuple(values.get("dspark_target_layer_ids") or range(max(0, layers - 3), layers))
        return cls(**(values | {"compress_ratios": ratios, "dspark_target_layer_ids": taps}))

    def rounded(self, on: bool) -> "TargetConfig":
        """The same settings with the simulated rounding on or off."""
        return replace(self, round_kv=on, round_index=on)

    def rope_freqs(self, compressed: bool) -> mx.array:
        """Angle per position of each channel pair, float32 [R / 2] (model 6)."""
        R = self.qk_rope_head_dim
        base = self.compress_rope_theta if compressed else self.rope_theta
        plain = [base ** (-2 * i / R) for i in range(R // 2)]
        if not compressed:
            return mx.array(plain, mx.float32)
        scaling = self.rope_scaling
        factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

        def dim(turns: float) -> float:
            return R * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

        low = max(math.floor(dim(scaling["beta_fast"])), 0)
        high = min(math.ceil(dim(scaling["beta_slow"])), R - 1)
        span = (high - low) or 1e-3
        ramps = [min(max((i - low) / span, 0.0), 1.0) for i in range(R // 2)]
        freqs = [f * (1 - r) + f / factor * r for f, r in zip(plain, ramps, strict=True)]
        return mx.array(freqs, mx.float32)
