"""Golden vectors of an independent reference (transformers in float32; see golden/*/case.json)."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx

from ds4mlx.config import TargetConfig
from ds4mlx.convert.folder import folder_tensors
from ds4mlx.draft import Draft, DraftConfig
from ds4mlx.target import Target
from ds4mlx.weights import load_weights

HERE = Path(__file__).parent / "golden"
SHARED = Path(__file__).parents[2] / "shared"
CASES = ("s1_w16_r8", "s2_w128_r128", "s3_flashlike", "s4_odd_batch")


@cache
def op_vectors() -> dict[str, mx.array]:
    return mx.load(str(HERE / "ops.safetensors"))


def folder(case: str) -> Path | None:
    """Where a case lies; the large ones only beside the checkout."""
    places = (HERE / case, SHARED / "golden" / case)
    return next((p for p in places if p.is_dir()), None)


@cache
def vectors(case: str) -> dict[str, mx.array]:
    return mx.load(str(folder(case) / "vectors.safetensors"))


@cache
def description(case: str) -> dict:
    return json.loads((folder(case) / "case.json").read_text())


def target(case: str, **changes) -> Target:
    """The case's target; rounding is off unless `changes` says otherwise."""
    config = TargetConfig.from_dict(description(case)["config"]).rounded(False)
    path = folder(case) / "target_weights.safetensors"
    tensors = folder_tensors([path])
    return Target(replace(config, **changes), load_weights(tensors, config.n_routed_experts))


def draft(case: str, **changes) -> Draft:
    """The case's draft with its target."""
    config = DraftConfig.from_dict(description(case)["config"])
    tensors = folder_tensors([folder(case) / "draft_weights.safetensors"])
    model = target(case, **changes)
    return Draft(config, model, load_weights(tensors, model.config.n_routed_experts))
