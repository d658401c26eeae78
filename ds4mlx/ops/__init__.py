"""One function per operation that sees weights or sums; each has a pure-MLX reference."""

from .argmax import argmax
from .attention import QUERIES, attends, attention
from .dequantize import dequantize
from .embed import embed
from .experts import SORTED, TILE, Shared, experts, routed
from .grouped_linear import grouped_linear
from .hc_collapse import hc_collapse
from .hc_expand import Back, hc_expand
from .hc_head import hc_head
from .hc_mix import hc_mix
from .index_best import index_best
from .index_scores import index_scores
from .index_select import index_select, scored
from .latents import Pool, latents
from .linear import WIDENED, Gated, beside, linear, linears
from .markov import markov
from .metal import compiles, placed
from .mlp import mlp
from .pool import pool
from .rms_norm import rms_norm
from .rope import rope, rotation
from .round_index import round_index
from .round_kv import round_kv
from .route import Choice, route

__all__ = [
    "QUERIES",
    "SORTED",
    "TILE",
    "WIDENED",
    "Back",
    "Choice",
    "Gated",
    "Pool",
    "Shared",
    "argmax",
    "attends",
    "attention",
    "beside",
    "compiles",
    "dequantize",
    "embed",
    "experts",
    "grouped_linear",
    "hc_collapse",
    "hc_expand",
    "hc_head",
    "hc_mix",
    "index_best",
    "index_scores",
    "index_select",
    "latents",
    "linear",
    "linears",
    "markov",
    "mlp",
    "placed",
    "pool",
    "rms_norm",
    "rope",
    "rotation",
    "round_index",
    "round_kv",
    "route",
    "routed",
    "scored",
]
