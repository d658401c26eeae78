"""What a GGUF holds and what would be used of it, from its header alone."""

import os
import re
from collections import defaultdict

import numpy as np
from gguf.constants import LlamaFileType

from ..errors import Ds4Error
from .config import draft_config, kv_bytes, target_config
from .gguf import GGUF, TYPES, open_gguf, some
from .inventory import SUPPORTED, check_draft, check_pair, check_target
from .names import draft_name, kind, target_name

# Class of a tensor: the first pattern that its official name holds.
_CLASSES = {
    "experts gate/up": r"\.ffn\.experts\.w[13]\.",
    "experts down": r"\.ffn\.experts\.w2\.",
    "shared experts": r"shared_experts",
    "router": r"\.ffn\.gate\.",
    "hyper-connections": r"hc_",
    "indexer": r"indexer",
    "compressor": r"compressor",
    "attention": r"\.attn\.",
    "norms": r"norm",
    "embedding and head": r"^(embed|head)\.",
    "draft heads": r"main_proj|markov|confidence",
}


def report(path: str | os.PathLike, draft: str | os.PathLike | None = None) -> dict:
    """All that `lines` prints, as plain values; no tensor is read. With a draft, the pair's too.

    Raises UsageError or FileError if a file cannot be opened; what is wrong with a model that
    can be is in its `problems`.
    """
    gguf = open_gguf(path)
    if draft is None:
        return _report(gguf, kind(gguf))[0]
    other = open_gguf(draft)
    out, config = _report(gguf, "target")
    out["draft"], settings = _report(other, "draft")
    out["pair"] = _pair(config, other, settings)
    return out


def lines(report: dict) -> list[str]:
    """A report for people."""
    out = [report["path"] + (f" (given as {report['given']})" if report["given"] else "")]
    shards = f" in {report['shards']} shards" if report["shards"] > 1 else ""
    out.append(f"{_kind(report['kind'])}, {_bytes(report['bytes'])}{shards}")
    out += ["", "metadata"] + [f"  {k} = {v}" for k, v in report["metadata"].items()]
    out += ["", "tensors by type"]
    out += [_census(kind, n) for kind, n in report["types"].items()]
    out += ["", "tensors by class"]
    for name, types in report["classes"].items():
        out += [_census(f"{name}, {kind}", n) for kind, n in types.items()]
    if report["use"]:
        out += ["", "would be used"] + [f"  {k}: {v}" for k, v in report["use"].items()]
    for title in ("problems", "warnings"):
        if report[title]:
            out += ["", title] + [f"  {text}" for text in report[title]]
    if "draft" in report:
        out += ["", "draft: " + lines(report["draft"])[0], *lines(report["draft"])[1:]]
        out += ["", f"pair: {report['pair']}"]
    return out


def _report(gguf: GGUF, role: str) -> tuple[dict, dict | None]:
    """The report on one file, and its settings if they make sense for its role."""
    what, problems, config = kind(gguf), [], None
    try:
        if role == "draft":
            config = draft_config(gguf)
        else:
            config = target_config(gguf)
            check_target(gguf, config)
    except Ds4Error as error:
        problems.append(str(error).removeprefix(f"{gguf.path}: "))
    types = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    classes = defaultdict(lambda: defaultdict(lambda: {"tensors": 0, "bytes": 0}))
    unsupported = defaultdict(list)
    for t in gguf.tensors.values():
        for count in (types[t.type], classes[_class(t.name, what)][t.type]):
            count["tensors"] += 1
            count["bytes"] += t.nbytes
        if t.type not in SUPPORTED:
            unsupported[t.type].append(t.name)
    problems += [f"{k} is not supported: {some(names)}" for k, names in unsupported.items()]
    return {
        "path": str(gguf.path),
        "given": str(gguf.given) if gguf.given != gguf.path else None,
        "kind": what,
        "bytes": gguf.nbytes,
        "shards": gguf.shards,
        "metadata": {key: _value(gguf, key) for key in gguf.metadata},
        "types": dict(types),
        "classes": {name: dict(classes[name]) for name in (*_CLASSES, "other") if name in classes},
        "unsupported": dict(unsupported),
        "use": _use(config) if config else None,
        "problems": problems,
        "warnings": _mislabelled(gguf, types),
    }, config


def _pair(target: dict | None, draft: GGUF, settings: dict | None) -> str:
    """Whether a draft belongs to a target, in a sentence."""
    if target is None or settings is None:
        return "cannot be judged: the target or the draft is not usable by itself"
    try:
        check_draft(draft, settings, target)
        warning = check_pair(settings, target)
    except Ds4Error as error:
        return f"does not belong together: {error}"
    if warning:
        return f"fits in shape; {warning}"
    if target["lineage"]:
        return f'belongs together: both are of checkpoint "{target["lineage"]}"'
    return "fits in shape; neither file tells its checkpoint"


def _use(c: dict) -> dict:
    """What a run would take from the settings."""
    use = {"checkpoint": c["lineage"] or "not told"}
    if "n_mtp_layers" in c:
        return use | {
            "stages": c["n_mtp_layers"],
            "block": c["dspark_block_size"],
            "markov rank": c["dspark_markov_rank"],
            "noise token": c["dspark_noise_token_id"],
            "reads target layers": ", ".join(map(str, c["dspark_target_layer_ids"])),
        }
    layers, ctx = c["num_hidden_layers"], c["max_position_embeddings"]
    ratios = [int(r) for r in c["compress_ratios"][:layers]]
    by_ratio = (f"{ratios.count(r)} of ratio {r}" for r in sorted(set(ratios)))
    cache = sum(n for layer in kv_bytes(c, ctx).values() for n in layer.values())
    return use | {
        "layers": f"{layers} ({', '.join(by_ratio)}), {c['num_hash_layers']} hash routed",
        "context": f"{ctx} tokens ({_bytes(cache)} of cache)",
        "experts": f"{c['num_experts_per_tok']} of {c['n_routed_experts']}, and "
        f"{c['n_shared_experts']} shared",
        "width": f"{c['hidden_size']}, {c['num_attention_heads']} heads of {c['head_dim']}",
        "vocabulary": c["vocab_size"],
    }


def _class(name: str, what: str) -> str:
    official = (draft_name(name, 1) if what == "draft" else target_name(name)) or ""
    return next((c for c, pattern in _CLASSES.items() if re.search(pattern, official)), "other")


def _mislabelled(gguf: GGUF, types: dict) -> list[str]:
    """Labels that name another type than the one with the most bytes."""
    if not types:
        return []
    majority = max(types, key=lambda kind: types[kind]["bytes"])
    out, code = [], gguf.metadata.get("general.file_type")
    if type(code) is int and code in set(LlamaFileType) and code != LlamaFileType.GUESSED:
        label = LlamaFileType(code).name
        if majority not in _types_in(label):
            out.append(f"general.file_type says {label}, but most bytes are {majority}")
    for name in dict.fromkeys((gguf.path.name, gguf.given.name)):
        if (named := _types_in(name)) and majority not in named:
            out.append(f"the name {name} says {' and '.join(named)}, but most bytes are {majority}")
    return out


def _types_in(text: str) -> list[str]:
    """Tensor types that a label names, however it spells them: Q4_K_M, IQ2XXS, MXFP4_MOE."""
    kinds = [k for k, *_ in TYPES.values() if not re.match("I[0-9]", k)]
    pattern = "|".join(k.replace("_", "_?") for k in sorted(kinds, key=len, reverse=True))
    bare = {k.replace("_", ""): k for k in kinds}
    found = re.findall(pattern, text.upper())
    return list(dict.fromkeys(bare[f.replace("_", "")] for f in found))


def _value(gguf: GGUF, key: str) -> str:
    """A metadata value in a line, arrays by their first elements."""
    n = gguf.metadata.length(key)
    if n is None:
        text = _scalar(gguf.metadata[key])
        return text if len(text) <= 100 else f"{text[:100]}.. ({len(text)} characters)"
    first = ", ".join(_scalar(v)[:40] for v in gguf.metadata.first(key, 8))
    return f"[{first}]" if n <= 8 else f"[{first}, ..] ({n})"


def _scalar(value) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return f"{value:.7g}" if isinstance(value, float) else repr(value)


def _census(name: str, n: dict) -> str:
    return f"  {name:<30}{n['tensors']:>6} {_bytes(n['bytes']):>12}"


def _kind(kind: str) -> str:
    names = {"target": "target model", "draft": "DSpark draft", "mtp": "one-stage MTP drafter"}
    return names.get(kind, "no DeepSeek V4 model")


def _bytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.2f} MB"
