"""Model files: GGUF in and out, and the planes that the ops read. Knows no model code."""

from .config import draft_config, kv_bytes, target_config
from .gguf import GGUF, Tensor, open_gguf
from .inventory import check_draft, check_ids, check_pair, check_target

__all__ = [
    "GGUF",
    "Tensor",
    "check_draft",
    "check_ids",
    "check_pair",
    "check_target",
    "draft_config",
    "kv_bytes",
    "open_gguf",
    "target_config",
]
