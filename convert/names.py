"""Tensor names: the official name behind each spelling that GGUF files use (spec 1.7, 1.8, 2.4).

In each table the first spelling of an official name is ds4's own; `.weight` is left away.
"""

import re
from collections.abc import Callable, Iterable

from .gguf import GGUF, Tensor

GLOBAL = {
    "token_embd": "embed.weight",
    "output": "head.weight",
    "output_norm": "norm.weight",
    **{f"output_hc_{x}": f"hc_head_{x}" for x in ("fn", "base", "scale")},
    **{f"hc_head_{x}": f"hc_head_{x}" for x in ("fn", "base", "scale")},
}
_COMPRESSOR = {"kv": "wkv.weight", "gate": "wgate.weight", "ape": "ape", "norm": "norm.weight"}
_BY_OFFICIAL = {"wkv": "wkv.weight", "wgate": "wgate.weight", "ape": "ape", "norm": "norm.weight"}
BLOCK = {  # below blk.N, mtp.N or dspark.N
    **{f"hc_{s}_{x}": f"hc_{s}_{x}" for s in ("attn", "ffn") for x in ("fn", "base", "scale")},
    "attn_norm": "attn_norm.weight",
    "attn_q_a": "attn.wq_a.weight",
    "attn_q_a_norm": "attn.q_norm.weight",
    "attn_q_norm": "attn.q_norm.weight",
    "attn_q_b": "attn.wq_b.weight",
    "attn_kv": "attn.wkv.weight",
    "attn_kv_a_mqa": "attn.wkv.weight",
    "attn_kv_a_norm": "attn.kv_norm.weight",
    "attn_kv_norm": "attn.kv_norm.weight",
    "attn_sinks": "attn.attn_sink",
    "attn_sink": "attn.attn_sink",
    "attn_output_a": "attn.wo_a.weight",
    "attn_o_a": "attn.wo_a.weight",
    "attn_output_b": "attn.wo_b.weight",
    "attn_o_b": "attn.wo_b.weight",
    **{f"attn_compressor_{x}": f"attn.compressor.{y}" for x, y in _COMPRESSOR.items()},
    **{f"attn_compressor.{x}": f"attn.compressor.{y}" for x, y in _BY_OFFICIAL.items()},
    "indexer.attn_q_b": "attn.indexer.wq_b.weight",
    "indexer.proj": "attn.indexer.weights_proj.weight",
    **{f"indexer_compressor_{x}": f"attn.indexer.compressor.{y}" for x, y in _COMPRESSOR.items()},
    **{f"indexer.compressor.{x}": f"attn.indexer.compressor.{y}" for x, y in _BY_OFFICIAL.items()},
    "ffn_norm": "ffn_norm.weight",
    "ffn_gate_inp": "ffn.gate.weight",
    "exp_probs_b.bias": "ffn.gate.bias",
    "exp_probs_b": "ffn.gate.bias",
    "ffn_gate_tid2eid": "ffn.gate.tid2eid",
    "ffn_gate_exps": "ffn.experts.w1.weight",
    "ffn_up_exps": "ffn.experts.w3.weight",
    "ffn_down_exps": "ffn.experts.w2.weight",
    "ffn_gate_shexp": "ffn.shared_experts.w1.weight",
    "ffn_up_shexp": "ffn.shared_experts.w3.weight",
    "ffn_down_shexp": "ffn.shared_experts.w2.weight",
}
DRAFT = {  # of the first stage (main_*) and of the last one
    "main_proj": "main_proj.weight",
    "fc": "main_proj.weight",
    "main_norm": "main_norm.weight",
    "enc.output_norm": "main_norm.weight",
    "norm": "norm.weight",
    "output_norm": "norm.weight",
    **{f"hc_head_{x}": f"hc_head_{x}" for x in ("fn", "base", "scale")},
    **{f"output_hc_{x}": f"hc_head_{x}" for x in ("fn", "base", "scale")},
    "markov_head.markov_w1": "markov_head.markov_w1.weight",
    "markov_head.embed": "markov_head.markov_w1.weight",
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_head.markov_w2": "markov_head.markov_w2.weight",
    "markov_head.head": "markov_head.markov_w2.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "confidence_head.proj": "confidence_head.proj.weight",
    "confidence_head": "confidence_head.proj.weight",
    "conf_proj": "confidence_head.proj.weight",
}
_INDEXED = re.compile(r"(blk|mtp|dspark)\.(0|[1-9][0-9]{0,4})\.(.+)")


def kind(gguf: GGUF) -> str:
    """What the tensors say a file is: "target", "draft", "mtp" (older, one stage), or ""."""
    names = {name.removesuffix(".weight") for name in gguf.tensors}
    if {"mtp.0.e_proj", "mtp.0.h_proj"} <= names:
        return "mtp"
    if any("main_proj" in n or "markov_" in n for n in names):
        return "draft"
    v4 = gguf.metadata.expect("general.architecture", str) == "deepseek4"
    return "target" if v4 or any(n.startswith("blk.0.hc_attn_") for n in names) else ""


def target_name(name: str) -> str | None:
    """`blk.3.attn_q_a.weight` -> `layers.3.attn.wq_a.weight`; None for an unknown name."""
    stem = name.removesuffix(".weight")
    if match := _INDEXED.fullmatch(stem):
        prefix, layer, leaf = match.groups()
        return f"layers.{layer}.{BLOCK[leaf]}" if prefix == "blk" and leaf in BLOCK else None
    return GLOBAL.get(stem)


def draft_name(name: str, stages: int) -> str | None:
    """`mtp.0.attn_q_a.weight`, or another family's name of it -> `mtp.0.attn.wq_a.weight`."""
    stem = name.removesuffix(".weight")
    if match := _INDEXED.fullmatch(stem):
        _, stage, leaf = match.groups()
        below = BLOCK.get(leaf) or DRAFT.get(leaf)
        return below and f"mtp.{stage}.{below}"
    below = DRAFT.get(stem.removeprefix("dspark."))
    return below and f"mtp.{0 if below.startswith('main_') else stages - 1}.{below}"


def gguf_name(official: str) -> str:
    """ds4's spelling of an official name, for messages."""
    match = re.fullmatch(r"(layers|mtp)\.([0-9]+)\.(.+)", official)
    table, below = (BLOCK | DRAFT, match[3]) if match else (GLOBAL, official)
    leaf = next((leaf for leaf, name in table.items() if name == below), below)
    leaf += "" if leaf.endswith(".bias") else ".weight"
    return f"{match[1].replace('layers', 'blk')}.{match[2]}.{leaf}" if match else leaf


def by_official_name(
    tensors: Iterable[Tensor], official: Callable[[str], str | None]
) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by their official name, and what is wrong: names unknown or given twice."""
    found, problems = {}, []
    for t in tensors:
        name = official(t.name)
        if name is None:
            problems.append(f"unexpected {t.name}")
        elif name in found:
            problems.append(f"{t.name} and {found[name].name} are the same tensor")
        else:
            found[name] = t
    return found, problems


def layer_of(name: str, prefixes: tuple[str, ...] = ("blk",)) -> int | None:
    """The layer (or stage) that a tensor name carries."""
    match = _INDEXED.fullmatch(name)
    return int(match[2]) if match and match[1] in prefixes else None


def spare_layers(gguf: GGUF) -> set[int]:
    """Layers that are next-token drafters of the older kind, which some files carry at the end."""
    return {layer_of(name) for name in gguf.tensors if ".nextn." in name} - {None}
