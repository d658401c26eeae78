"""Which tensors a model must have, of which types and shapes, and whether a file has just these."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import FileError
from .folder import FolderTensor, StoredTensor
from .gguf import GGUF, Tensor, some
from .names import by_official_name, draft_name, gguf_name, layer_of, spare_layers, target_name

FLOATS = ("F32", "F16", "BF16")
_PACKED = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ2_XXS", "MXFP4")
SUPPORTED = (*FLOATS, *_PACKED, "I32")
_TYPES = {"matrix": (*FLOATS, *_PACKED), "vector": FLOATS, "ids": ("I32",)}

_Wanted = dict[str, tuple[str, tuple[int, ...]]]  # official name -> (kind, shape)


def check_target(gguf: GGUF, config: dict) -> dict[str, Tensor]:
    """The target's tensors by official name, experts stacked [E, ., .] (model 18).

    Without `output.weight` the head is the embedding's tensor.

    Raises FileError that names every tensor missing, unexpected, or of another type or shape.
    """
    spare = spare_layers(gguf) - set(range(config["num_hidden_layers"]))
    own = [t for t in gguf.tensors.values() if layer_of(t.name) not in spare]
    return _target_tensors(gguf.path, config, *by_official_name(own, target_name))


def check_folder(path: Path, tensors: dict[str, FolderTensor | StoredTensor], config: dict) -> dict:
    """The same of a folder of safetensors, whose names are the official ones already."""
    own = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
    return _target_tensors(path, config, own, [])


def _target_tensors(path: Path, config: dict, found: dict, problems: list[str]) -> dict:
    wanted = dict(wanted_target(config))
    if config.get("tie_word_embeddings"):
        del wanted["head.weight"]
    tensors = _checked(path, wanted, _TYPES, found, problems)
    return {"head.weight": tensors["embed.weight"]} | tensors


def check_draft(gguf: GGUF, draft: dict, target: dict) -> dict[str, Tensor]:
    """A DSpark draft's tensors by official name, with shapes that fit the target (model 16).

    `draft` and `target` are what draft_config and target_config return. Copies of the target's
    embedding and head, which llama.cpp's files may hold, are checked and left out: a draft
    shares the target's.

    Raises FileError that names everything that does not fit.
    """
    found, problems = by_official_name(
        (t for t in gguf.tensors.values() if t.name not in ("token_embd.weight", "output.weight")),
        lambda name: draft_name(name, draft["n_mtp_layers"]),
    )
    shape = (target["vocab_size"], target["hidden_size"])
    for t in (gguf.tensors.get(n) for n in ("token_embd.weight", "output.weight")):
        if t and t.shape != shape:
            problems.append(f"{t.name} is {_text(t.shape)}, the target's is {_text(shape)}")
    return _draft_tensors(gguf.path, draft, target, found, problems)


def check_draft_folder(
    path: Path, tensors: dict[str, FolderTensor | StoredTensor], draft: dict, target: dict
) -> dict:
    """The same of a folder of safetensors, whose names are the official ones already."""
    own = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
    return _draft_tensors(path, draft, target, own, [])


def _draft_tensors(path: Path, draft: dict, target: dict, found: dict, problems: list) -> dict:
    V, noise = target["vocab_size"], draft["dspark_noise_token_id"]
    ids, layers = draft["dspark_target_layer_ids"], target["num_hidden_layers"]
    if noise >= V:
        problems.append(f"noise token {noise} is outside the target's vocabulary of {V}")
    if ids[-1] >= layers:
        problems.append(f"target layer {ids[-1]} is outside the target's {layers} layers")
    wanted = dict(wanted_draft(draft, target))
    types = _TYPES | {"vector": (*FLOATS, "Q8_0")}
    return _checked(path, wanted, types, found, problems)


def check_pair(draft: dict, target: dict) -> str | None:
    """A warning if it cannot be told that a draft was made for the target's checkpoint.

    Raises FileError if both settings carry a lineage and it differs.
    """
    a, b = draft["lineage"], target["lineage"]
    if a and b and a != b:
        raise FileError(
            f'the draft is of checkpoint "{a}", the target of "{b}"; take the draft that was '
            f'made for "{b}"'
        )
    if a == b:
        return None
    silent, other = ("draft", "target") if b else ("target", "draft")
    return (
        f'the {silent} does not tell its checkpoint, the {other} is of "{a or b}": if they do '
        "not belong together, drafts are rarely accepted"
    )


def check_ids(name: str, ids: np.ndarray, experts: int):
    """Raises FileError if the hash routing table int32 [V, k] names an expert there is not."""
    bad = (ids < 0) | (ids >= experts)
    if bad.any():
        row = int(np.argmax(bad.any(axis=-1)))
        raise FileError(
            f"{name}: token {row} is routed to experts {', '.join(map(str, ids[row]))}, "
            f"wanted 0 to {experts - 1}; {int(bad.sum())} such ids"
        )


def _checked(path: Path, wanted: _Wanted, types: dict, found: dict, problems: list) -> dict:
    """`found` in its wanted shapes, or FileError with these and all further `problems`."""
    tensors = {}
    for name, (kind, shape) in wanted.items():
        t = found.pop(name, None)
        if t is None:
            problems.append(f"missing {gguf_name(name)} {_text(shape)}")
            continue
        if t.type not in types[kind]:
            problems.append(f"{t.name} is {t.type}, wanted {' or '.join(types[kind])}")
        # Writers differ in whether they keep axes of length 1.
        if [n for n in t.shape if n > 1] != [n for n in shape if n > 1]:
            problems.append(f"{t.name} is {_text(t.shape)}, wanted {_text(shape)}")
        tensors[name] = replace(t, shape=shape)
    for name, gate in tensors.items():
        if name.endswith(".experts.w1.weight"):
            up = tensors.get(name.replace(".w1.", ".w3."), gate)
            if up.type != gate.type:
                problems.append(f"{gate.name} is {gate.type} but {up.name} is {up.type}")
    problems += [f"unexpected {t.name} {t.type} {_text(t.shape)}" for t in found.values()]
    if problems:
        raise FileError(
            f"{path}: {len(problems)} problems with its tensors (shapes outermost first): "
            f"{some(problems)}"
        )
    return tensors


def wanted_target(c: dict) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """(official name, (kind, shape)) of every tensor; a kind is a matrix, a vector or ids."""
    D, V = c["hidden_size"], c["vocab_size"]
    yield "embed.weight", ("matrix", (V, D))
    yield "head.weight", ("matrix", (V, D))
    yield "norm.weight", ("vector", (D,))
    yield from _hc_head(c)
    for i, ratio in enumerate(c["compress_ratios"][: c["num_hidden_layers"]]):
        for name, wanted in _block(c, ratio, i < c["num_hash_layers"]).items():
            yield f"layers.{i}.{name}", wanted


def wanted_draft(draft: dict, c: dict) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """The same of a DSpark draft for the target `c`."""
    D, V, R = c["hidden_size"], c["vocab_size"], draft["dspark_markov_rank"]
    last = f"mtp.{draft['n_mtp_layers'] - 1}."
    for s in range(draft["n_mtp_layers"]):
        for name, wanted in _block(c, 0, False).items():
            yield f"mtp.{s}.{name}", wanted
    yield "mtp.0.main_proj.weight", ("matrix", (D, len(draft["dspark_target_layer_ids"]) * D))
    yield "mtp.0.main_norm.weight", ("vector", (D,))
    yield f"{last}norm.weight", ("vector", (D,))
    for name, wanted in _hc_head(c):
        yield last + name, wanted
    yield f"{last}markov_head.markov_w1.weight", ("matrix", (V, R))
    yield f"{last}markov_head.markov_w2.weight", ("matrix", (V, R))
    yield f"{last}confidence_head.proj.weight", ("matrix", (1, D + R))


def _hc_head(c: dict) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    HC = c["hc_mult"]
    yield "hc_head_fn", ("matrix", (HC, HC * c["hidden_size"]))
    yield "hc_head_base", ("vector", (HC,))
    yield "hc_head_scale", ("vector", (1,))


def _block(c: dict, ratio: int, hashed: bool) -> _Wanted:
    """Tensors of a layer or a draft stage, by their name below it."""
    D, V, H, Dh = c["hidden_size"], c["vocab_size"], c["num_attention_heads"], c["head_dim"]
    Rq, G, Ro = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    E, K, F = c["n_routed_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"]
    HC, S, Hi, Di = c["hc_mult"], c["n_shared_experts"] * F, c["index_n_heads"], c["index_head_dim"]
    out = {
        "attn_norm.weight": ("vector", (D,)),
        "attn.wq_a.weight": ("matrix", (Rq, D)),
        "attn.q_norm.weight": ("vector", (Rq,)),
        "attn.wq_b.weight": ("matrix", (H * Dh, Rq)),
        "attn.wkv.weight": ("matrix", (Dh, D)),
        "attn.kv_norm.weight": ("vector", (Dh,)),
        "attn.attn_sink": ("vector", (H,)),
        "attn.wo_a.weight": ("matrix", (G * Ro, H * Dh // G)),
        "attn.wo_b.weight": ("matrix", (D, G * Ro)),
        "ffn_norm.weight": ("vector", (D,)),
        "ffn.gate.weight": ("matrix", (E, D)),
        "ffn.experts.w1.weight": ("matrix", (E, F, D)),
        "ffn.experts.w3.weight": ("matrix", (E, F, D)),
        "ffn.experts.w2.weight": ("matrix", (E, D, F)),
        "ffn.shared_experts.w1.weight": ("matrix", (S, D)),
        "ffn.shared_experts.w3.weight": ("matrix", (S, D)),
        "ffn.shared_experts.w2.weight": ("matrix", (D, S)),
    }
    for part in ("attn", "ffn"):
        out[f"hc_{part}_fn"] = ("matrix", (HC * (HC + 2), HC * D))
        out[f"hc_{part}_base"] = ("vector", (HC * (HC + 2),))
        out[f"hc_{part}_scale"] = ("vector", (3,))
    out |= {"ffn.gate.tid2eid": ("ids", (V, K))} if hashed else {"ffn.gate.bias": ("vector", (E,))}
    if ratio:
        out |= _compressor("attn.compressor", ratio, Dh, D)
    if ratio == 4:
        out |= _compressor("attn.indexer.compressor", ratio, Di, D)
        out["attn.indexer.wq_b.weight"] = ("matrix", (Hi * Di, Rq))
        out["attn.indexer.weights_proj.weight"] = ("matrix", (Hi, D))
    return out


def _compressor(name: str, ratio: int, width: int, D: int) -> _Wanted:
    rows = 2 * width if ratio == 4 else width  # ratio 4 overlaps: two halves a row
    return {
        f"{name}.wkv.weight": ("matrix", (rows, D)),
        f"{name}.wgate.weight": ("matrix", (rows, D)),
        f"{name}.ape": ("matrix", (ratio, rows)),
        f"{name}.norm.weight": ("vector", (width,)),
    }


def _text(shape: tuple[int, ...]) -> str:
    return str(list(shape))
