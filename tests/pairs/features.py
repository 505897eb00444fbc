"""The features of docs/compatibility.md: what turns each on, and what a pair with it must equal."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal

from megatron_grpo.config.conflicts import CONFLICTS
from megatron_grpo.config.needs import NEEDS

Kind = Literal["arrangement", "value", "rollout"]


@dataclass(frozen=True)
class Feature:
    """How to turn a feature on, and what a pair with it must equal, by `kind`.

    - "arrangement": trains the same weights in another way; equal to a run without it
    - "value": changes what is trained; equal to a float64 oracle
    - "rollout": changes how samples are made or scored, or how weights reach the engines; what is
      trained on the samples is equal to a replay without it
    """

    kind: Kind
    overrides: str
    """Joined by " + "."""
    family: str = "qwen3"
    """A model that has the feature; see `family_of`."""
    also: tuple[str, ...] = ()
    """Features, by their names in `CONFLICTS`, that it is a kind of."""
    needs: str = ""
    """A part of it that a run on CPUs lacks."""


CORRECTED = "grpo.rollout_importance_sampling_mode=token_truncate"
IN_FLIGHT = f"rollout.max_staleness=2 + rollout.in_flight_updates=true + {CORRECTED}"
ADAPTERS = "lora.r=8 + lora.lora_alpha=8"
SLEEPS = "rollout.enable_sleep_mode=true"
EIGHT_BITS = f"rollout.quantization=fp8 + {CORRECTED}"
DIALOGUE = "environment.name=demo/environments.py:GuessTheNumber + data.max_prompt_length=64"
IMAGES_OF_VLLM = "rollout.vllm.limit_mm_per_prompt={image: 1, video: 0}"
IMAGES_OF_SGLANG = "rollout.sglang.limit_mm_data_per_request={image: 1}"
IMAGES = f"data.image_column=image + {IMAGES_OF_VLLM}"
SGLANG = "rollout.engine=sglang + rollout.python=python"
DRAFTS = "{method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 3}"
REWARD_MODEL = "{name: reward_model, arguments: {base_url: http://host/v1}}"

ROWS = {
    "lora.sync: adapter": Feature("value", ADAPTERS, also=("lora.r",)),
    "lora.sync: merged": Feature("value", f"{ADAPTERS} + lora.sync=merged", also=("lora.r",)),
    "rollout.max_staleness": Feature("rollout", f"rollout.max_staleness=1 + {CORRECTED}"),
    "rollout.in_flight_updates": Feature("rollout", IN_FLIGHT),
    "rollout.over_sampling": Feature("rollout", f"{IN_FLIGHT} + rollout.over_sampling=2.0"),
    "rollout.recompute_kv_cache: false": Feature(
        "rollout", f"{IN_FLIGHT} + rollout.recompute_kv_cache=false"
    ),
    "rollout.enable_sleep_mode": Feature("rollout", SLEEPS),
    "train.offload: all": Feature(
        "arrangement",
        f"{SLEEPS} + train.offload=all",
        also=("train.offload", "train.offload of weights"),
    ),
    "train.offload: optimizer": Feature(
        "arrangement", f"{SLEEPS} + train.offload=optimizer", also=("train.offload",)
    ),
    "rollout.engine: sglang": Feature("rollout", SGLANG, needs="SGLang"),
    "rollout.quantization": Feature("rollout", EIGHT_BITS),
    "rollout.quantization_aware": Feature(
        "value",
        f"{EIGHT_BITS} + rollout.quantization_aware=true",
        also=("rollout.quantization",),
    ),
    "train.export_quantization": Feature("arrangement", "train.export_quantization=fp8"),
    "rollout.weight_transport: disk": Feature("rollout", "rollout.weight_transport=disk"),
    "rollout.router_replay": Feature("value", "rollout.router_replay=true", "qwen3_moe"),
    "rollout.indexer_replay": Feature(
        "value", f"rollout.indexer_replay=true + {SGLANG}", "deepseek_v32", needs="SGLang"
    ),
    "rollout.vllm.speculative_config": Feature(
        "rollout", f"rollout.vllm.speculative_config={DRAFTS}", also=("rollout.vllm",)
    ),
    "model.mtp_num_layers": Feature("value", "model.mtp_num_layers=1", "glm4_moe"),
    "data.image_column": Feature("value", IMAGES, "qwen3_vl_moe"),
    "model.freeze_vision: false": Feature(
        "value", f"{IMAGES} + model.freeze_vision=false", "qwen3_vl_moe"
    ),
    "environment": Feature("rollout", DIALOGUE, also=("dialogues",)),
    "agent": Feature(
        "rollout", "agent.command=agent + data.max_prompt_length=64", also=("dialogues",)
    ),
    "sources": Feature("rollout", "sources.column=kind + sources.by_name={a: {}}"),
    "reward_model": Feature("rollout", f"reward.functions=[{REWARD_MODEL}]"),
    "grpo.shared_prompts": Feature("arrangement", "grpo.shared_prompts=true"),
    "grpo.dynamic_sample": Feature("rollout", "grpo.dynamic_sample=true"),
    "grpo.dynamic_sample_temperature": Feature(
        "rollout",
        "grpo.dynamic_sample=true + grpo.dynamic_sample_temperature=1.2",
        also=("grpo.dynamic_sample",),
    ),
    "environment with grpo.supervision: process": Feature(
        "rollout",
        f"grpo.supervision=process + {DIALOGUE}",
        also=("environment", "rewards in parts"),
    ),
    "grpo.sync_ref_model": Feature("value", "grpo.sync_ref_model=true + grpo.beta=0.04"),
    "train.replay": Feature("arrangement", "train.replay=runs/a"),
    "train.init_from": Feature("arrangement", "train.init_from=runs/a"),
    "optimizer.optimizer: muon": Feature("value", "optimizer.optimizer=muon"),
    "optimizer.optimizer_cpu_offload": Feature(
        "arrangement", "optimizer.optimizer_cpu_offload=true"
    ),
    "parallel.dynamic_context_parallel": Feature(
        "arrangement", "parallel.dynamic_context_parallel=true"
    ),
    "parallel.overlap_param_gather": Feature(
        "arrangement",
        "parallel.data_parallel_size=2 + parallel.overlap_grad_reduce=true + "
        "parallel.overlap_param_gather=true",
    ),
}
"""In the order of the page."""

FAMILIES = ("qwen3_vl_moe", "glm4_moe", "deepseek_v32", "qwen3_moe", "qwen3")


def family_of(*features: str) -> str:
    """The model of features together: the first in `FAMILIES` that one of them needs."""
    return min((ROWS[each].family for each in features), key=FAMILIES.index)


def overrides_of(*features: str) -> list[str]:
    """Overrides that turn the features on together."""
    keys = [key for each in features for key in ROWS[each].overrides.split(" + ")]
    if "rollout.engine: sglang" in features:
        keys = [IMAGES_OF_SGLANG if key == IMAGES_OF_VLLM else key for key in keys]
    return keys


def implied(feature: str) -> Iterator[str]:
    """Features of every run with this one: its kinds, its needs, and whatever these imply."""
    yield feature
    needed = [other.removesuffix(": true") for (each, other) in NEEDS if each == feature]
    also = ROWS[feature].also if feature in ROWS else ()
    for other in (*also, *needed):
        yield from implied(other)


def exclude(feature: str, other: str) -> bool:
    """Whether a run can have only one of two features."""
    pairs = product(implied(feature), implied(other))
    return any((a, b) in CONFLICTS or (b, a) in CONFLICTS for a, b in pairs)


def legal_pairs() -> Iterator[tuple[str, str]]:
    """Pairs of features that a run may have together, in the order of the page."""
    return (pair for pair in combinations(ROWS, 2) if not exclude(*pair))


UNTRIED = {
    ("lora.sync: adapter", "lora.sync: merged"): "two values of one key",
    ("train.offload: all", "train.offload: optimizer"): "two values of one key",
    (
        "rollout.quantization_aware",
        "model.mtp_num_layers",
    ): "no oracle rounds the layer, as ranks do",
    ("rollout.quantization_aware", "rollout.indexer_replay"): "models with sparse attention cannot "
    "be quantised",
    ("rollout.indexer_replay", "model.mtp_num_layers"): "no oracle has a layer with both",
    ("grpo.sync_ref_model", "train.init_from"): "the reference begins anew",
}
"""Pairs without a test of two steps, and why."""
