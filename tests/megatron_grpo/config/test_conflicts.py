"""A run is refused for the pairs of features that `CONFLICTS` has, and for no others."""

from itertools import combinations

import pytest

from checkpoint_convert.hf_config import has_other_towers
from docs.make_compatibility import FEATURES, exclude, implied
from helpers.published_models import write_config
from helpers.runs import TINY_CONFIG
from megatron_grpo.config.features import is_on
from megatron_grpo.config.file import load_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.data.images import check_images
from megatron_grpo.engines.support import check_drafts, check_towers_served
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.preflight import check_text_tower
from megatron_grpo.prompt_checks import check_reward_models

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
EXAMPLES = {
    "lora.sync: adapter": ADAPTERS,
    "lora.sync: merged": f"{ADAPTERS} + lora.sync=merged",
    "rollout.max_staleness": f"rollout.max_staleness=1 + {CORRECTED}",
    "rollout.in_flight_updates": IN_FLIGHT,
    "rollout.over_sampling": f"{IN_FLIGHT} + rollout.over_sampling=2.0",
    "rollout.recompute_kv_cache: false": f"{IN_FLIGHT} + rollout.recompute_kv_cache=false",
    "rollout.enable_sleep_mode": SLEEPS,
    "train.offload: all": f"{SLEEPS} + train.offload=all",
    "train.offload: optimizer": f"{SLEEPS} + train.offload=optimizer",
    "rollout.engine: sglang": SGLANG,
    "rollout.quantization": EIGHT_BITS,
    "rollout.quantization_aware": f"{EIGHT_BITS} + rollout.quantization_aware=true",
    "train.export_quantization": "train.export_quantization=fp8",
    "rollout.weight_transport: disk": "rollout.weight_transport=disk",
    "rollout.router_replay": "rollout.router_replay=true",
    "rollout.indexer_replay": f"rollout.indexer_replay=true + {SGLANG}",
    "rollout.vllm.speculative_config": f"rollout.vllm.speculative_config={DRAFTS}",
    "model.mtp_num_layers": "model.mtp_num_layers=1",
    "data.image_column": IMAGES,
    "model.freeze_vision: false": f"{IMAGES} + model.freeze_vision=false",
    "environment": DIALOGUE,
    "agent": "agent.command=agent + data.max_prompt_length=64",
    "sources": "sources.column=kind + sources.by_name={a: {}}",
    "reward_model": f"reward.functions=[{REWARD_MODEL}]",
    "grpo.shared_prompts": "grpo.shared_prompts=true",
    "grpo.dynamic_sample": "grpo.dynamic_sample=true",
    "environment with grpo.supervision: process": f"grpo.supervision=process + {DIALOGUE}",
    "grpo.sync_ref_model": "grpo.sync_ref_model=true + grpo.beta=0.04",
    "train.replay": "train.replay=runs/a",
    "train.init_from": "train.init_from=runs/a",
    "optimizer.optimizer: muon": "optimizer.optimizer=muon",
    "optimizer.optimizer_cpu_offload": "optimizer.optimizer_cpu_offload=true",
    "parallel.dynamic_context_parallel": "parallel.dynamic_context_parallel=true",
    "parallel.overlap_param_gather": "parallel.data_parallel_size=2 + "
    "parallel.overlap_grad_reduce=true + parallel.overlap_param_gather=true",
}
"""What turns each feature of docs/compatibility.md on."""
MODELS = {
    "data.image_column": "Qwen3-VL-30B-A3B",
    "model.freeze_vision: false": "Qwen3-VL-30B-A3B",
    "model.mtp_num_layers": "GLM-4.5-Air",
    "rollout.indexer_replay": "DeepSeek-V3.2",
    "rollout.router_replay": "Qwen3-30B-A3B",
}
"""A model for a feature that not all have; of a pair, that of the first here."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in {*MODELS.values(), "Qwen3-32B"}:
        write_config(folder / name, name)
    return folder


def overrides(models, *features: str) -> list[str]:
    name = next((MODELS[each] for each in MODELS if each in features), "Qwen3-32B")
    keys = [key for each in features for key in EXAMPLES[each].split(" + ")]
    if "rollout.engine: sglang" in features:
        keys = [IMAGES_OF_SGLANG if key == IMAGES_OF_VLLM else key for key in keys]
    return ["model.dtype=bfloat16", f"model.path={models / name}", *keys]


def refusal(models, *features: str) -> str:
    """Why these features do not go together, by the checks before a run; empty if they do."""
    try:
        cfg = load_config(TINY_CONFIG, overrides(models, *features))
        shape = trained_shape(cfg)
        check_drafts(cfg, shape)
        check_images(cfg)
        check_towers_served(cfg.model, cfg.rollout)
        check_reward_models(cfg)
        if has_other_towers(cfg.model.path):
            check_text_tower(cfg)
        else:
            check_adapters(cfg.lora, shape)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_alone_is_accepted_with_all_that_it_implies(models, feature):
    assert refusal(models, feature) == ""
    cfg = load_config(TINY_CONFIG, overrides(models, feature))
    assert [each for each in implied(feature) if not is_on(cfg, each)] == []


def test_exactly_the_pairs_of_the_table_are_refused(models):
    pairs = combinations(FEATURES, 2)
    wrong = [pair for pair in pairs if bool(refusal(models, *pair)) != exclude(*pair)]
    assert wrong == []
