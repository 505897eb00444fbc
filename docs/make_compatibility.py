"""Writes the table of docs/compatibility.md: which features of a run exclude each other.

    PYTHONPATH=.:tests python docs/make_compatibility.py

Each cell is what the checks before a run say of both in one config, with a model that has what they
need.
"""

import tempfile
from itertools import combinations
from pathlib import Path

from checkpoint_convert.hf_config import has_other_towers
from helpers.published_models import write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.data.images import check_images
from megatron_grpo.engines.support import check_drafts, check_towers_served
from megatron_grpo.engines.vllm.args import check_adapters
from megatron_grpo.preflight import check_text_tower
from megatron_grpo.prompt_checks import check_reward_models

PAGE = Path(__file__).with_name("compatibility.md")
BASE = Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml"
BEGIN = "| feature | refused with |\n|---|---|\n"

CORRECTED = "grpo.rollout_importance_sampling_mode=token_truncate"
IN_FLIGHT = f"rollout.max_staleness=2 rollout.in_flight_updates=true {CORRECTED}"
ADAPTERS = "lora.r=8 lora.lora_alpha=8"
SLEEPS = "rollout.enable_sleep_mode=true"
EIGHT_BITS = f"rollout.quantization=fp8 {CORRECTED}"
DIALOGUE = "environment.name=demo/environments.py:GuessTheNumber data.max_prompt_length=64"
LIMITS = {
    "vllm": "rollout.vllm.limit_mm_per_prompt={image: 1, video: 0}",
    "sglang": "rollout.sglang.limit_mm_data_per_request={image: 1}",
}
"""How an engine is told of images."""
IMAGES = f"data.image_column=image {LIMITS['vllm']}"
DRAFTS = "{method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 3}"
SERVED_BY_SGLANG = "rollout.engine=sglang rollout.python=python"
FEATURES = {
    "lora.sync: adapter": ADAPTERS,
    "lora.sync: merged": f"{ADAPTERS} lora.sync=merged",
    "rollout.max_staleness": f"rollout.max_staleness=1 {CORRECTED}",
    "rollout.in_flight_updates": IN_FLIGHT,
    "rollout.over_sampling": f"{IN_FLIGHT} rollout.over_sampling=2.0",
    "rollout.recompute_kv_cache: false": f"{IN_FLIGHT} rollout.recompute_kv_cache=false",
    "rollout.enable_sleep_mode": SLEEPS,
    "train.offload: all": f"{SLEEPS} train.offload=all",
    "train.offload: optimizer": f"{SLEEPS} train.offload=optimizer",
    "rollout.engine: sglang": SERVED_BY_SGLANG,
    "rollout.quantization": EIGHT_BITS,
    "rollout.quantization_aware": f"{EIGHT_BITS} rollout.quantization_aware=true",
    "train.export_quantization": "train.export_quantization=fp8",
    "rollout.weight_transport: disk": "rollout.weight_transport=disk",
    "rollout.router_replay": "rollout.router_replay=true",
    "rollout.indexer_replay": f"rollout.indexer_replay=true {SERVED_BY_SGLANG}",
    "rollout.vllm.speculative_config": f"rollout.vllm.speculative_config={DRAFTS}",
    "model.mtp_num_layers": "model.mtp_num_layers=1",
    "data.image_column": IMAGES,
    "model.freeze_vision: false": f"{IMAGES} model.freeze_vision=false",
    "environment": DIALOGUE,
    "agent": "agent.command=agent data.max_prompt_length=64",
    "sources": "sources.column=kind sources.by_name={a: {}}",
    "reward_model": "reward.functions=[{name: reward_model, arguments: {base_url: http://host/v1}}]",
    "grpo.shared_prompts": "grpo.shared_prompts=true",
    "grpo.dynamic_sample": "grpo.dynamic_sample=true",
    "environment with grpo.supervision: process": f"grpo.supervision=process {DIALOGUE}",
    "grpo.sync_ref_model": "grpo.sync_ref_model=true grpo.beta=0.04",
    "train.replay": "train.replay=runs/a",
    "train.init_from": "train.init_from=runs/a",
    "optimizer.optimizer: muon": "optimizer.optimizer=muon",
    "optimizer.optimizer_cpu_offload": "optimizer.optimizer_cpu_offload=true",
    "parallel.dynamic_context_parallel": "parallel.dynamic_context_parallel=true",
    "parallel.overlap_param_gather": "parallel.data_parallel_size=2 "
    "parallel.overlap_grad_reduce=true parallel.overlap_param_gather=true",
}
"""What turns each feature on."""
MODELS = {
    "data.image_column": "Qwen3-VL-30B-A3B",
    "model.freeze_vision: false": "Qwen3-VL-30B-A3B",
    "model.mtp_num_layers": "GLM-4.5-Air",
    "rollout.indexer_replay": "DeepSeek-V3.2",
    "rollout.router_replay": "Qwen3-30B-A3B",
}
"""A model for a feature that not all have; of a pair, that of the first here."""


def overrides(feature: str) -> list[str]:
    """The keys of a feature; a space after a colon or a comma is within a value."""
    words: list[str] = []
    for word in FEATURES[feature].split(" "):
        if words and words[-1].endswith((":", ",")):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def refusal(features: tuple[str, ...], models: Path) -> str:
    """Why these features do not go together, by the checks before a run; empty if they do."""
    name = next((MODELS[each] for each in MODELS if each in features), "Qwen3-32B")
    keys = [key for each in features for key in overrides(each)]
    if "rollout.engine: sglang" in features:
        keys = [LIMITS["sglang"] if key == LIMITS["vllm"] else key for key in keys]
    try:
        cfg = load_config(BASE, ["model.dtype=bfloat16", f"model.path={models / name}", *keys])
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


def table() -> str:
    """A row for each feature that excludes others."""
    excluded: dict[str, list[str]] = {feature: [] for feature in FEATURES}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        for name in {*MODELS.values(), "Qwen3-32B"}:
            write_config(models / name, name)
        for feature in FEATURES:
            assert not (told := refusal((feature,), models)), told
        for pair in combinations(FEATURES, 2):
            if refusal(pair, models):
                excluded[pair[0]].append(f"`{pair[1]}`")
                excluded[pair[1]].append(f"`{pair[0]}`")
    rows = [f"| `{name}` | {', '.join(others)} |\n" for name, others in excluded.items() if others]
    return BEGIN + "".join(rows)


def page() -> str:
    """The text of docs/compatibility.md, with the table as the checks are now."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
