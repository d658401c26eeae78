"""Metadata of the GGUF files that ds4 reads, from the official config.json and tokenizer.json.

Keys, types and order of the format's description, 1.3 and 2.1.
"""

from ..errors import FileError
from .gguf import some

Typed = dict[str, tuple]  # key -> (type name, value), as `write` takes them


def target_metadata(config: dict, name: str, *, chat: bool = True) -> Typed:
    """The target's keys. Raises FileError that names every field missing or of another kind.

    `chat` tells whether the model was trained on chat roles.
    """
    c = _Fields(config)
    yarn = _Fields(config.get("rope_scaling"), "rope_scaling.")
    layers = c.whole("num_hidden_layers")
    ratios = c.wholes("compress_ratios")[:layers]
    if len(ratios) < layers:
        c.wrong.append(f"compress_ratios has {len(ratios)} entries for {layers} layers")
    u32 = {
        "block_count": layers,
        "embedding_length": c.whole("hidden_size"),
        "vocab_size": c.whole("vocab_size"),
        "attention.head_count": c.whole("num_attention_heads"),
        "attention.head_count_kv": c.whole("num_key_value_heads"),
        "attention.key_length": c.whole("head_dim"),
        "attention.value_length": c.whole("head_dim"),
        "rope.dimension_count": c.whole("qk_rope_head_dim"),
        "attention.q_lora_rank": c.whole("q_lora_rank"),
        "attention.output_lora_rank": c.whole("o_lora_rank"),
        "attention.output_group_count": c.whole("o_groups"),
        "expert_count": c.whole("n_routed_experts"),
        "expert_used_count": c.whole("num_experts_per_tok"),
        "expert_feed_forward_length": c.whole("moe_intermediate_size"),
        "expert_shared_count": c.whole("n_shared_experts"),
        "hash_layer_count": c.whole("num_hash_layers"),
        "expert_group_count": 0,
        "expert_group_used_count": 0,
        "expert_gating_func": 4,  # sqrt of softplus
        "attention.sliding_window": c.whole("sliding_window"),
        "attention.indexer.head_count": c.whole("index_n_heads"),
        "attention.indexer.key_length": c.whole("index_head_dim"),
        "attention.indexer.top_k": c.whole("index_topk"),
        "hyper_connection.count": c.whole("hc_mult"),
        "hyper_connection.sinkhorn_iterations": c.whole("hc_sinkhorn_iters"),
        "rope.scaling.original_context_length": yarn.whole("original_max_position_embeddings"),
        "context_length": c.whole("max_position_embeddings"),
    }
    f32 = {
        "rope.freq_base": c.real("rope_theta"),
        "attention.compress_rope_freq_base": c.real("compress_rope_theta"),
        "expert_weights_scale": c.real("routed_scaling_factor"),
        "attention.layer_norm_rms_epsilon": c.real("rms_norm_eps"),
        "hyper_connection.epsilon": c.real("hc_eps"),
        "rope.scaling.factor": yarn.real("factor"),
        "rope.scaling.yarn_beta_fast": yarn.real("beta_fast"),
        "rope.scaling.yarn_beta_slow": yarn.real("beta_slow"),
    }
    other = {
        "attention.compress_ratios": ("[UINT32]", ratios),
        "swiglu_clamp_exp": ("[FLOAT32]", [c.real("swiglu_limit")] * len(ratios)),
        "expert_weights_norm": ("BOOL", c.fixed("norm_topk_prob", True)),
        "rope.scaling.type": ("STRING", yarn.fixed("type", "yarn")),
    }
    c.fixed("scoring_func", "sqrtsoftplus")
    _finish(c, yarn)
    values = {key: ("UINT32", value) for key, value in u32.items()}
    values |= {key: ("FLOAT32", value) for key, value in f32.items()} | other
    roles = {} if chat else {"ds4mlx.chat": ("BOOL", False)}
    return {
        "general.architecture": ("STRING", "deepseek4"),
        "general.name": ("STRING", name),
        "general.alignment": ("UINT32", 32),
        **{f"deepseek4.{key}": value for key, value in values.items()},
        **roles,
    }


def tokenizer_metadata(tokenizer: dict, config: dict) -> Typed:
    """The `tokenizer.ggml` keys from a `tokenizer.json` (byte-level BPE, GPT-2's byte alphabet).

    Raises FileError unless its ids are those of the vocabulary.
    """
    c = _Fields(config)
    size, bos, eos = map(c.whole, ("vocab_size", "bos_token_id", "eos_token_id"))
    _finish(c)
    try:
        added = {
            token["id"]: (token["content"], token["special"]) for token in tokenizer["added_tokens"]
        }
        texts = {index: token for token, index in tokenizer["model"]["vocab"].items()}
        texts |= {index: text for index, (text, _) in added.items()}
        merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
        _check_text([*texts.values(), *merges])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"tokenizer.json: not a byte-level BPE tokenizer ({error!r:.80})") from None
    whole = len(texts) == size and all(type(index) is int for index in (*texts, *added))
    if not whole or sorted(texts) != list(range(size)):
        raise FileError(f"tokenizer.json: ids of {len(texts)} tokens, wanted 0 to {size - 1}")
    kinds = [1] * size
    for index, (text, special) in added.items():
        marker = text.startswith("<｜") and text.endswith("｜>")
        kinds[index] = 3 if special or marker else 4
    return {
        "tokenizer.ggml.model": ("STRING", "gpt2"),
        "tokenizer.ggml.pre": ("STRING", "joyai-llm"),
        "tokenizer.ggml.tokens": ("[STRING]", [texts[i] for i in range(size)]),
        "tokenizer.ggml.token_type": ("[INT32]", kinds),
        "tokenizer.ggml.merges": ("[STRING]", merges),
        "tokenizer.ggml.bos_token_id": ("UINT32", bos),
        "tokenizer.ggml.eos_token_id": ("UINT32", eos),
    }


def draft_metadata(config: dict, name: str, stages: int) -> Typed:
    """The nine keys of a DSpark support file, in ds4's order. Raises FileError for fields."""
    c = _Fields(config)
    values = {
        "general.architecture": ("STRING", "deepseek4-dspark"),
        "general.name": ("STRING", name),
        "general.alignment": ("UINT32", 32),
        "dspark.block_size": ("UINT32", c.whole("dspark_block_size")),
        "dspark.markov_rank": ("UINT32", c.whole("dspark_markov_rank")),
        "dspark.noise_token_id": ("UINT32", c.whole("dspark_noise_token_id")),
        "dspark.target_layer_ids": ("[UINT32]", c.wholes("dspark_target_layer_ids")),
        "dspark.stage_count": ("UINT32", stages),
        "dspark.n_layers": ("UINT32", stages),
    }
    _finish(c)
    return values


def _check_text(texts: list):
    """Raises TypeError or ValueError for what is no text, or cannot be encoded."""
    "".join(texts).encode()


class _Fields:
    """Reads the fields of a config.json and remembers all that is missing or wrong."""

    def __init__(self, values, prefix: str = ""):
        self.values = values if isinstance(values, dict) else {}
        self.prefix, self.missing, self.wrong = prefix, [], []

    def whole(self, name: str) -> int:
        return self._field(name, "an integer of 32 bits", 0, _is_whole)

    def wholes(self, name: str) -> list[int]:
        return self._field(name, "a list of integers", [], _are_whole)

    def real(self, name: str) -> float:
        return self._field(name, "a number", 0.0, _is_real)

    def fixed(self, name: str, value):
        """A field that may be absent, and must be `value` where it is not."""
        wanted = self.values.get(name, value)
        if wanted != value:
            self.wrong.append(f"{self.prefix}{name} is {wanted!r:.60}, wanted {value!r}")
        return value

    def _field(self, name: str, wanted: str, instead, right):
        value = self.values.get(name)
        if value is None:
            self.missing.append(self.prefix + name)
        elif not right(value):
            self.wrong.append(f"{self.prefix}{name} is {value!r:.60}, wanted {wanted}")
        else:
            return value
        return instead


def _is_whole(value) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _is_real(value) -> bool:
    return type(value) in (int, float) and abs(value) < 1 << 127  # or float32 could not hold it


def _are_whole(value) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _finish(*fields: _Fields):
    problems = [problem for f in fields for problem in f.wrong]
    if missing := [name for f in fields for name in f.missing]:
        problems.insert(0, f"fields are missing: {', '.join(missing)}")
    if problems:
        raise FileError(f"config.json: {some(problems)}")
