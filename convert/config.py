"""Settings as the official `config.json` names them, from the metadata of a GGUF.

What a file leaves out and its tensors tell is derived; what only a key can tell is asked for.
"""

import math
import re
from collections.abc import Iterable

import numpy as np

from ..errors import FileError, UsageError
from .gguf import GGUF, Tensor, some
from .names import by_official_name, draft_name, kind, layer_of, spare_layers, target_name

# Official field -> its keys below `deepseek4.`; ds4 and llama.cpp write the first one.
_INTS = {
    "num_hidden_layers": ("block_count",),
    "hidden_size": ("embedding_length",),
    "vocab_size": ("vocab_size",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length",),
    "qk_rope_head_dim": ("rope.dimension_count",),
    "q_lora_rank": ("attention.q_lora_rank",),
    "o_groups": ("attention.output_group_count",),
    "o_lora_rank": ("attention.output_lora_rank", "attention.o_lora_rank"),
    "n_routed_experts": ("expert_count",),
    "num_experts_per_tok": ("expert_used_count",),
    "moe_intermediate_size": ("expert_feed_forward_length",),
    "n_shared_experts": ("expert_shared_count",),
    "num_hash_layers": ("hash_layer_count",),
    "sliding_window": ("attention.sliding_window",),
    "index_n_heads": ("attention.indexer.head_count",),
    "index_head_dim": ("attention.indexer.key_length",),
    "index_topk": ("attention.indexer.top_k",),
    "hc_mult": ("hyper_connection.count", "hyper_connection.mult"),
    "hc_sinkhorn_iters": (
        "hyper_connection.sinkhorn_iterations",
        "hyper_connection.sinkhorn_iters",
    ),
}
_FLOATS = {
    "routed_scaling_factor": ("expert_weights_scale",),
    "hc_eps": ("hyper_connection.epsilon", "hyper_connection.eps"),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon",),
    "rope_theta": ("rope.freq_base",),
    "compress_rope_theta": ("attention.compress_rope_freq_base", "rope.freq_base_compress"),
}
_RATIOS = ("attention.compress_ratios", "attention.layer_compress_ratio")
# Keys that may be absent, and must say this where they are not.
_FIXED = {
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_gating_func": 4,  # square root of softplus
    "expert_weights_norm": True,
    "rope.scaling.type": "yarn",
}
_MAX_INT = 2**31 - 1


def target_config(gguf: GGUF) -> dict:
    """The target's settings under the names of the official config.json (model 1).

    `compress_ratios` is as long as the file has it. `lineage` is "0731", "preview",
    "vision-exp" or None, from the metadata or the file's name; `release` is it if it is one of
    the first two.

    Raises UsageError if the file is no target, FileError for keys that are missing and cannot
    be derived, or that contradict each other or the tensors.
    """
    _require(gguf, "target")
    found, _ = by_official_name(gguf.tensors.values(), target_name)
    keys = _Keys(gguf, ("deepseek4.",))
    spare = spare_layers(gguf)
    derived = _derived(gguf, found, spare)
    c = {
        f: keys.number(names, int, derived.get(f), least=0 if f == "num_hash_layers" else 1)
        for f, names in _INTS.items()
    }
    c |= {f: keys.number(names, float) for f, names in _FLOATS.items()}
    keys.fixed(_FIXED)
    original = keys.number(("rope.scaling.original_context_length",), int, 65536)
    # ds4 too takes V4's own numbers where a file is silent about YaRN.
    factor = keys.number(("rope.scaling.factor",), float, 16.0)
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number(("rope.scaling.yarn_beta_fast",), float, 32.0),
        "beta_slow": keys.number(("rope.scaling.yarn_beta_slow",), float, 1.0),
    }
    longest = keys.number(("context_length",), int, int((factor or 1) * (original or 1)))
    ratios = keys.numbers(*_RATIOS)
    limits = keys.numbers("swiglu_clamp_exp", kinds="iuf")
    if limits is None:
        keys.missing.append("deepseek4.swiglu_clamp_exp")
    keys.finish()

    if keys.find("block_count"):
        c["num_hidden_layers"] -= sum(i < c["num_hidden_layers"] for i in spare)
    layers = c["num_hidden_layers"]
    c["compress_ratios"] = _ratios(layers, found) if ratios is None else ratios
    shared = keys.numbers("swiglu_clamp_shexp", kinds="iuf") or []
    limits = limits[:layers] + shared[:layers]
    keys.wrong += _contradictions(c, found, limits, gguf)
    keys.finish()
    tokens = _Keys(gguf, ("tokenizer.ggml.",))
    ids = [name for name in ("bos_token_id", "eos_token_id") if tokens.find(name)]
    c |= {name: tokens.number((name,), int, least=0, most=c["vocab_size"] - 1) for name in ids}
    tokens.finish()
    return c | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "swiglu_limit": _decimal(limits[0]),
        "rope_scaling": scaling,
        "max_position_embeddings": longest,
        "tie_word_embeddings": "head.weight" not in found,
        **_origin(gguf),
    }


def draft_config(gguf: GGUF) -> dict:
    """A DSpark draft's settings under the names of the official config.json, for all families.

    Raises UsageError if the file is no DSpark draft, FileError for what is missing or senseless.
    """
    _require(gguf, "draft")
    keys = _Keys(gguf, ("deepseek4.dspark.", "deepseek4.dspark_", "dspark.", "dflash."))
    dflash = gguf.metadata.expect("general.architecture", str) == "dflash"
    stages = 1 + max(layer_of(n, ("mtp", "dspark", "blk")) or 0 for n in gguf.tensors)
    if stages > 8:
        keys.wrong.append(f"{stages} stages, wanted 1 to 8")
    found, _ = by_official_name(gguf.tensors.values(), lambda name: draft_name(name, stages))
    w1 = found.get(f"mtp.{stages - 1}.markov_head.markov_w1.weight")
    rank = w1.shape[-1] if w1 else None
    mask = gguf.metadata.get("tokenizer.ggml.mask_token_id") if dflash else None
    c = {
        "n_mtp_layers": stages,
        "dspark_block_size": keys.number(("block_size",), int, most=16),
        "dspark_noise_token_id": keys.number(("noise_token_id",), int, mask, least=0),
        "dspark_markov_rank": keys.number(("markov_rank",), int, rank),
    }
    ids = keys.numbers("target_layer_ids", "target_layers")
    if ids is None:
        keys.missing.append("dspark.target_layer_ids")
    elif keys.find("target_layer_ids", "target_layers").startswith("dflash."):
        # llama.cpp names the layer that a state enters, not the one that it leaves.
        ids = [i - 1 for i in ids]
    if ids is not None and (not ids or ids != sorted(set(ids)) or ids[0] < 0):
        keys.wrong.append(f"target layers are {_brief(ids)}, wanted increasing layers")
    c["dspark_target_layer_ids"] = ids
    for name in ("stage_count", "n_layers", "layer_count"):
        if keys.find(name) and (n := keys.number((name,), int)) not in (None, stages):
            keys.wrong.append(f"{keys.find(name)} is {n}, the tensors are of {stages} stages")
    if dflash:
        keys.fixed({"expert_gating_func": 4, "sample_from_anchor": True, "hash_layer_count": 0})
        if any(keys.numbers("attention.compress_ratios") or []):
            keys.wrong.append("dflash.attention.compress_ratios are not all 0")
    keys.finish()
    return c | _origin(gguf)


def check_folder_config(config: dict, source: str):
    """Raises FileError that names every field of a target folder's `config.json` that is missing
    or senseless; what `target_config` returns has none.
    """
    ranges = dict.fromkeys(_INTS, (1, _MAX_INT)) | {"num_hash_layers": (0, _MAX_INT)}
    optional = dict.fromkeys(("num_key_value_heads", "max_position_embeddings"), (1, _MAX_INT))
    floats = [*_FLOATS, "swiglu_limit"]
    yarn = config.get("rope_scaling")
    scaling = {f"rope_scaling.{k}": v for k, v in yarn.items()} if isinstance(yarn, dict) else {}
    ranges["rope_scaling.original_max_position_embeddings"] = (1, _MAX_INT)
    floats += [f"rope_scaling.{k}" for k in ("factor", "beta_fast", "beta_slow")]
    values = config | scaling
    wanted = [n for n in (*ranges, *floats, "compress_ratios") if n not in optional]
    missing = [name for name in wanted if values.get(name) is None]
    problems = [f"these fields are missing: {', '.join(missing)}"] if missing else []
    problems += _odd_wholes(values, ranges | optional)
    for name in floats:
        value = values.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            problems.append(f"{name} is {value!r:.60}, wanted a number above 0")
    for name in ("compress_ratios", "dspark_target_layer_ids"):
        value = [] if (found := values.get(name)) is None else found
        if not isinstance(value, list) or any(
            type(n) is not int or not 0 <= n <= _MAX_INT for n in value
        ):
            problems.append(f"{name} is {value!r:.60}, wanted a list of integers from 0")
    if not problems:
        narrow, R = min(config["head_dim"], config["index_head_dim"]), config["qk_rope_head_dim"]
        if R % 2 or narrow < R:
            problems.append(f"qk_rope_head_dim is {R}, wanted an even one up to {narrow}")
    if problems:
        raise FileError(f"{source}: {some(problems)}")


def folder_draft_config(config: dict, source: str) -> dict:
    """The same from the `config.json` of a folder.

    Raises FileError for what is missing or senseless.
    """
    ranges = {
        "n_mtp_layers": (1, 8),
        "dspark_block_size": (1, 16),
        "dspark_noise_token_id": (0, _MAX_INT),
        "dspark_markov_rank": (1, _MAX_INT),
    }
    ids = config.get("dspark_target_layer_ids")
    missing = [name for name in (*ranges, "dspark_target_layer_ids") if config.get(name) is None]
    problems = [f"these fields are missing: {', '.join(missing)}"] if missing else []
    problems += _odd_wholes(config, ranges)
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    if ids is not None and not (whole and ids and ids == sorted(set(ids)) and ids[0] >= 0):
        problems.append(f"dspark_target_layer_ids is {ids!r:.60}, wanted increasing layers")
    if problems:
        raise FileError(f"{source}: {some(problems)}")
    lineage = config.get("lineage")
    return {n: config[n] for n in (*ranges, "dspark_target_layer_ids")} | {"lineage": lineage}


def _odd_wholes(values: dict, ranges: dict[str, tuple[int, int]]) -> list[str]:
    """What is wrong with fields that are there, and must be integers of a range."""
    return [
        f"{name} is {value!r:.60}, wanted an integer from {low} to {high}"
        for name, (low, high) in ranges.items()
        if (value := values.get(name)) is not None
        and (type(value) is not int or not low <= value <= high)
    ]


def kv_bytes(config: dict, ctx: int) -> dict[int, dict[str, int]]:
    """Bytes of the float32 caches for `ctx` tokens, by the layers' ratio (model 13)."""
    spare, d, di = 8, config["head_dim"], config["index_head_dim"]
    out = {}
    for r in config["compress_ratios"][: config["num_hidden_layers"]]:
        wide, window = (2, 2 * r) if r == 4 else (1, r)  # ratio 4 overlaps
        widths = (d, di) if r == 4 else (d,) if r else ()
        rows = max(config["sliding_window"], window) + spare
        layer = {
            "raw rows": rows * d,
            "entries": (ctx // r + 1) * d if r else 0,
            "index keys": (ctx // r + 1) * di if r == 4 else 0,
            "open windows": sum(2 * rows * wide * w for w in widths),
        }
        total = out.setdefault(int(r), dict.fromkeys(layer, 0))
        for name, n in layer.items():
            total[name] += 4 * n
    return out


def _require(gguf: GGUF, wanted: str):
    """Raises UsageError that says what the file is, if it is not what is wanted."""
    found = kind(gguf)
    architecture = gguf.metadata.expect("general.architecture", str)
    names = {
        "target": "a DeepSeek V4 target model",
        "draft": "a DSpark draft",
        "mtp": "a one-stage MTP drafter (an older format that this package does not run)",
    }
    foreign = {"target": architecture != "deepseek4", "draft": "41" in (architecture or "")}
    if found != wanted:
        what = names.get(found, f"a model of architecture {architecture!r}")
    elif architecture and foreign[wanted]:
        what = f"of architecture {architecture!r}"
    else:
        return
    raise UsageError(f"{gguf.path}: this is {what}, wanted {names[wanted]}")


def _derived(gguf: GGUF, found: dict[str, Tensor], spare: set[int]) -> dict[str, int | None]:
    """Fields that the tensors tell."""
    numbers = {layer_of(name) for name in gguf.tensors} - {None} - spare
    layers = sorted(numbers)

    def size(name: str, axis: int) -> int:
        """Length of an axis of a tensor, in the first layer that has it; 0 without."""
        names = [name, *(f"layers.{i}.{name}" for i in layers)]
        shape = next((found[n].shape for n in names if n in found), ())
        return shape[axis] if axis < len(shape) else 0

    heads, head_dim = size("attn.attn_sink", 0), size("attn.wkv.weight", 0)
    groups = heads * head_dim // (size("attn.wo_a.weight", 1) or 1)
    wide = size("ffn.experts.w1.weight", 1)
    derived = {
        "num_hidden_layers": 1 + max(layers, default=-1),
        "hidden_size": size("embed.weight", 1),
        "vocab_size": size("embed.weight", 0) or _tokens(gguf),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "q_lora_rank": size("attn.wq_a.weight", 0),
        "o_groups": groups,
        "o_lora_rank": size("attn.wo_a.weight", 0) // (groups or 1),
        "n_routed_experts": size("ffn.gate.weight", 0),
        "num_experts_per_tok": size("ffn.gate.tid2eid", 1),
        "moe_intermediate_size": wide,
        "n_shared_experts": size("ffn.shared_experts.w1.weight", 0) // (wide or 1),
        "index_n_heads": size("attn.indexer.weights_proj.weight", 0),
        "index_head_dim": size("attn.indexer.compressor.norm.weight", 0),
        "hc_mult": size("hc_head_base", 0),
    }
    hashed = sum(name.endswith("tid2eid") for name in found)
    return {f: n or None for f, n in derived.items()} | {"num_hash_layers": hashed}


def _ratios(layers: int, found: dict[str, Tensor]) -> list[int]:
    """Tokens of a layer's window: the rows of its compressor's positional bias."""
    apes = (found.get(f"layers.{i}.attn.compressor.ape") for i in range(min(layers, len(found))))
    return [ape.shape[0] if ape else 0 for ape in apes]


def _tokens(gguf: GGUF) -> int:
    return gguf.metadata.length("tokenizer.ggml.tokens") or 0


def _contradictions(c: dict, found: dict[str, Tensor], limits: list, gguf: GGUF) -> list[str]:
    """What settings must have to do with each other and with the tensors."""
    layers, k, E = c["num_hidden_layers"], c["num_experts_per_tok"], c["n_routed_experts"]
    ratios, Dh, R = c["compress_ratios"], c["head_dim"], c["qk_rope_head_dim"]
    width, groups = c["num_attention_heads"] * Dh, c["o_groups"]
    value_length = gguf.metadata.get("deepseek4.attention.value_length", Dh)
    hashed = {t.shape[-1] for name, t in found.items() if name.endswith("tid2eid")} - {k}
    senseless = [r for r in ratios if not 0 <= r <= _MAX_INT]
    one_limit = len(set(limits)) == 1 and 0 < limits[0] < math.inf
    narrow = min(Dh, c["index_head_dim"])
    checks = (
        (layers > len(found), f"block_count is {layers}, for {len(found)} tensors"),
        (layers < 1, "block_count counts no layer but next-token drafters"),
        (c["num_hash_layers"] > layers, f"hash_layer_count is {c['num_hash_layers']} of {layers}"),
        (len(ratios) < layers, f"{len(ratios)} compress_ratios for {layers} layers"),
        (senseless, f"compress_ratios hold {_brief(senseless)}, wanted 0 or tokens of a window"),
        (
            not one_limit,
            f"swiglu_clamp_exp is {_brief(sorted(set(limits)))}, wanted one limit for all layers",
        ),
        (hashed, f"expert_used_count is {k}, rows of ffn_gate_tid2eid are {_brief(hashed)} wide"),
        (k > E, f"expert_used_count is {k}, expert_count {E}"),
        (c["num_key_value_heads"] > 1, f"head_count_kv is {c['num_key_value_heads']}, wanted 1"),
        (value_length != Dh, f"value_length is {value_length!r:.60}, key_length {Dh}"),
        (R % 2 or narrow < R, f"rope.dimension_count is {R}, wanted an even one up to {narrow}"),
        (width % groups, f"{groups} output groups do not divide {width} channels"),
        (
            _tokens(gguf) > c["vocab_size"],
            f"{_tokens(gguf)} tokens for a vocab_size of {c['vocab_size']}",
        ),
    )
    return [message for wrong, message in checks if wrong]


class _Keys:
    """Reads metadata and remembers all that is missing or wrong."""

    def __init__(self, gguf: GGUF, prefixes: tuple[str, ...]):
        self.gguf, self.metadata, self.prefixes = gguf, gguf.metadata, prefixes
        self.missing, self.wrong = [], []

    def find(self, *names: str) -> str | None:
        """The first of the keys that the file has."""
        keys = (p + n for n in names for p in self.prefixes)
        return next((k for k in keys if k in self.metadata), None)

    def number(self, names: tuple[str, ...], kind: type, default=None, least=1, most=_MAX_INT):
        """A number of one of the keys; None where it is missing or wrong, which is noted."""
        key = self.find(*names) or self.prefixes[0] + names[0]
        value = self.metadata.get(key, default)
        if value is None:
            self.missing.append(key)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            self.wrong.append(f"{key} is {value!r:.60}, wanted a number")
        elif kind is int and not (least <= value <= most and value == int(value)):
            self.wrong.append(f"{key} is {value}, wanted an integer from {least} to {most}")
        elif kind is float and not 0 < value < math.inf:
            self.wrong.append(f"{key} is {value}, wanted a number above 0")
        else:
            return int(value) if kind is int else _decimal(value)
        return None

    def numbers(self, *names: str, kinds: str = "iu") -> list | None:
        """An array, or a number as an array of one, of NumPy's `kinds`; None without the key."""
        if (key := self.find(*names)) is None:
            return None
        value = np.atleast_1d(np.asarray(self.metadata[key]))
        if value.dtype.kind not in kinds:
            wanted = "numbers" if "f" in kinds else "integers"
            self.wrong.append(f"{key} is {self.metadata[key]!r:.60}, wanted {wanted}")
            return []
        return [v.item() for v in value]

    def fixed(self, wanted: dict):
        for name, value in wanted.items():
            key = self.find(name)
            found = self.metadata[key] if key else value
            if type(found) is not type(value) or found != value:
                self.wrong.append(f"{key} is {found!r:.60}, wanted {value!r}")

    def finish(self):
        """Raises FileError that names every key missing or wrong."""
        problems = self.wrong
        if self.missing:
            problems = [f"metadata keys are missing: {', '.join(self.missing)}", *problems]
        if problems:
            raise FileError(f"{self.gguf.path}: {some(problems)}")


def _origin(gguf: GGUF) -> dict[str, str | None]:
    """Which checkpoint a file comes from, by its metadata, or else by its name."""
    general = (
        "version",
        "name",
        "basename",
        "finetune",
        "base_model.0.version",
        "base_model.0.name",
    )
    keys = [f"general.{k}" for k in general]
    keys += [k for k in gguf.metadata if "checkpoint" in k or "revision" in k]
    texts = [gguf.metadata.get(k) for k in keys] + [gguf.path.name, gguf.given.name]
    found = lineage(texts)
    return {"lineage": found, "release": found if found != "vision-exp" else None}


def lineage(texts: Iterable) -> str | None:
    """The checkpoint that the first text with such a word names: "0731", "preview", .."""
    patterns = {
        "vision-exp": r"vision",
        "0731": r"(?<![0-9a-f])0731(?![0-9a-f])",  # not within a hash
        "preview": r"preview",
    }
    hits = (
        name
        for text in texts
        if isinstance(text, str)
        for name, pattern in patterns.items()
        if re.search(pattern, text, re.IGNORECASE)
    )
    return next(hits, None)


def _brief(values) -> str:
    values = list(values)
    text = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values[:8])
    return text + (", .." if len(values) > 8 else "")


def _decimal(x: float) -> float:
    """The shortest decimal of a number that was stored in float32: 1e-6, not 9.99999997e-07."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(x))) if np.float32(x) == x else float(x)
