"""A model of V4 Flash's exact shapes and types with random values, made in device memory.

Shapes, formats, memory and speed do not depend on the values of weights. These keep activations
in a trained model's range and spread the routing over all experts; the text means nothing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

import mlx.core as mx

from .config import TargetConfig
from .convert.inventory import wanted_draft, wanted_target
from .draft import Draft, DraftConfig
from .packed import Matrix, Packed
from .target import Target, tensors
from .weights import Weights

FLASH = TargetConfig(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    num_hash_layers=3,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    sliding_window=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    compress_rope_theta=1.6e5,
    rope_scaling={
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    dspark_target_layer_ids=(40, 41, 42),
)
DSPARK = DraftConfig(3, 5, 128799, (40, 41, 42))
RECIPES = {  # of the routed experts: gate and up, down (gguf-and-dspark 1.6)
    "q2": ("IQ2_XXS", "Q2_K"),
    "q4": ("Q4_K", "Q4_K"),
    "mxfp4": ("MXFP4", "MXFP4"),
}
_HALF = ("embed", "_fn", ".compressor.", ".indexer.", "ffn.gate.weight")  # F16 in ds4's files


def flash(recipe: str = "q2", layers: int = 43, seed: int | None = 0) -> Target:
    """The first `layers` layers of a Flash target, its tensors not yet evaluated.

    recipe: of RECIPES, or "q2-q4", the last six layers' experts in Q4_K. Without a `seed` the
    tensors are hollow: they have shapes and types, and take no memory.
    """
    return made_target(shortened(FLASH, layers), recipe, seed)


def made_target(config: TargetConfig, recipe: str, seed: int | None) -> Target:
    """The same of any shapes; rows of matrices are whole 256 channels."""
    weights = _made(target_types(config, recipe), config, seed)
    return Target(config, Weights(weights, f"synthetic {recipe}"))


def flash_draft(target: Target, seed: int | None = 1) -> Draft:
    """A DSpark draft of the official file's shapes for a `flash` target, in the same way."""
    return made_draft(dspark_of(target.config), target, seed)


def dspark_of(config: TargetConfig) -> DraftConfig:
    """The settings of a draft for the first layers of a Flash."""
    return replace(DSPARK, dspark_target_layer_ids=config.dspark_target_layer_ids)


def made_draft(config: DraftConfig, target: Target, seed: int | None) -> Draft:
    """The same of any shapes."""
    weights = _made(draft_types(config, target.config), target.config, seed)
    return Draft(config, target, Weights(weights, "synthetic draft"))


def evaluated(module):
    """The same target or draft, its tensors in memory, made one after the other."""
    for tensor in tensors(module):
        held(tensor)
    mx.clear_cache()
    return module


def held(matrix: Matrix) -> Matrix:
    """The same matrix, in memory."""
    mx.eval(matrix.planes if isinstance(matrix, Packed) else matrix)
    return matrix


def _made(wanted, config: TargetConfig, seed: int | None) -> dict[str, Matrix]:
    hollow = _hollow if seed is None else lambda matrix: matrix
    return {name: hollow(make()) for name, _, _, make in makers(wanted, config, seed or 0)}


def makers(wanted, config: TargetConfig, seed: int) -> Iterator[tuple[str, str, tuple, Callable]]:
    """With a function to make it, for each of the `wanted` (name, type, shape).

    What a function returns is not yet evaluated.
    """
    keys = mx.random.split(mx.random.key(seed), 2000)
    for (name, type, shape), key in zip(wanted, keys, strict=False):
        yield name, type, shape, partial(random_matrix, type, shape, config, key)


def _hollow(matrix: Matrix) -> Matrix:
    if isinstance(matrix, mx.array):
        return mx.broadcast_to(mx.array(0, matrix.dtype), matrix.shape)
    planes = {name: _hollow(plane) for name, plane in matrix.planes.items()}
    return Packed(matrix.type, matrix.shape, planes)


def shortened(config: TargetConfig, layers: int) -> TargetConfig:
    """The first layers of a model; the draft reads the last three."""
    kept = asdict(config) | {
        "num_hidden_layers": layers,
        "compress_ratios": config.compress_ratios[:layers],
        "dspark_target_layer_ids": tuple(range(max(0, layers - 3), layers)),
    }
    return TargetConfig(**kept)


def target_types(config: TargetConfig, recipe: str) -> Iterator[tuple[str, str, tuple]]:
    """(official name, ggml type, shape) of every tensor, as in ds4's files."""
    for name, (kind, shape) in wanted_target(published(config)):
        late = name.startswith("layers.") and int(name.split(".")[1]) >= 37
        experts = RECIPES["q4" if late else "q2"] if recipe == "q2-q4" else RECIPES[recipe]
        yield name, _type(name, kind, experts, _HALF), shape


def draft_types(draft: DraftConfig, config: TargetConfig) -> Iterator[tuple[str, str, tuple]]:
    """The same of a draft; its router is Q8_0."""
    for name, (kind, shape) in wanted_draft(published_draft(draft), published(config)):
        yield name, _type(name, kind, RECIPES["q2"], ("_fn",)), shape


def published(config: TargetConfig) -> dict:
    """The settings as the official config.json has them."""
    return asdict(config) | {
        "compress_ratios": [*config.compress_ratios],
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
    }


def published_draft(config: DraftConfig) -> dict:
    """The same of a draft."""
    ids = [*config.dspark_target_layer_ids]
    return asdict(config) | {"dspark_target_layer_ids": ids, "dspark_markov_rank": 256}


def _type(name: str, kind: str, experts: tuple[str, str], half: tuple[str, ...]) -> str:
    if kind != "matrix":
        return {"vector": "F32", "ids": "I32"}[kind]
    if ".experts." in name:
        return experts[".w2." in name]
    return "F16" if any(part in name for part in half) else "Q8_0"


def random_matrix(type: str, shape: tuple, config: TargetConfig, key: mx.array) -> Matrix:
    """A tensor as loading gives it: rows of a matrix turn normed rows into normed ones."""
    if type == "I32":
        ids = mx.random.randint(0, config.n_routed_experts, (shape[0], 1), key=key)
        spread = 37 * mx.arange(shape[1])  # of one token no two are equal
        return ((ids + spread) % config.n_routed_experts).astype(mx.int32)
    if type == "F32":
        return 1 + 0.1 * mx.random.normal(shape, key=key)
    std = shape[-1] ** -0.5
    if type == "F16":
        return (std * mx.random.normal(shape, mx.float16, key=key)).astype(mx.float16)
    return Packed(type, tuple(shape), _PLANES[type](shape[:-1], shape[-1], std, key))


def _words(key: mx.array, *shape: int) -> mx.array:
    return mx.random.split(key, math.prod(shape) // 2).reshape(shape)  # keys are random bits


def _bytes(key: mx.array, *shape: int) -> mx.array:
    return _words(key, *shape[:-1], shape[-1] // 4).view(mx.uint8)


def _q8_0(rows, K, std, key):
    return {
        "codes": _words(key, *rows, K // 4),
        "scales": mx.full((*rows, K // 32), std / 73.9, mx.float16),
    }


def _mxfp4(rows, K, std, key):
    exponent = 127 + round(math.log2(std / 2.93))
    return {
        "codes": _words(key, *rows, K // 8),
        "scales": mx.full((*rows, K // 32), exponent, mx.uint8),
    }


def _q4_k(rows, K, std, key):
    d = std / 255.6  # of codes times scales less 7.5 minima, all drawn evenly
    return {
        "codes": _words(key, *rows, K // 8),
        "scales": _bytes(key, *rows, K // 256 * 12).reshape(*rows, K // 256, 12),
        "d": _pair(rows, K, d, 7.5 * d),
    }


def _q2_k(rows, K, std, key):
    d = std / 13.87  # the same, less 1.5 minima
    return {
        "codes": _words(key, *rows, K // 16),
        "scales": _bytes(key, *rows, K // 16),
        "d": _pair(rows, K, d, 1.5 * d),
    }


def _iq2_xxs(rows, K, std, key):
    first, second = mx.random.split(key)
    return {
        "grid": _bytes(first, *rows, K // 8),
        "signs": _words(second, *rows, K // 32),
        "d": mx.full((*rows, K // 256), std / 40, mx.float16),
    }


def _pair(rows, K, d: float, dmin: float) -> mx.array:
    both = mx.array([d, dmin], mx.float16)
    return mx.contiguous(mx.broadcast_to(both, (*rows, K // 256, 2)))


_PLANES = {"Q8_0": _q8_0, "MXFP4": _mxfp4, "Q4_K": _q4_k, "Q2_K": _q2_k, "IQ2_XXS": _iq2_xxs}
