"""Recorded plans of the shipped configs: all figures, layouts, and whether each fits.

Simpler formulas may move figures by half a percent, but no verdict and no layout. After a larger
change, record them again, and say why in CHANGELOG.md:

    PYTHONPATH=.:tests python -m golden.plans
"""

import json
import tempfile
from collections.abc import Sequence
from math import isclose
from pathlib import Path
from typing import Any

from helpers.models.published import write_config
from megatron_grpo.config.file import load_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.suggest import suggest
from megatron_grpo.planning.workload import Job, longest_sequence

FILE = Path(__file__).with_name("plans.json")
CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = tempfile.TemporaryDirectory()
"""Each model's config.json, which plans of vision towers read."""
FULL = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}"
)
AGAIN = "model.megatron={recompute_granularity: selective, recompute_modules:"
DRAFTS = "rollout.vllm.speculative_config={method: ngram, num_speculative_tokens: 2}"
FP8 = "model.megatron={fp8: e4m3, fp8_recipe: blockwise}"
MUON = "optimizer.optimizer=muon"
OFFLOADED = (
    "model.megatron={fine_grained_activation_offloading: true, "
    "offload_modules: [qkv_linear, core_attn, attn_proj]}"
)
DISPATCH = "model.megatron.moe_token_dispatcher_type="
OVERLAPPED = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
ASLEEP = [
    *("parallel.tensor_parallel_size=4", "parallel.data_parallel_size=4"),
    *("rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.8"),
]
RUNS: list[tuple[str, str, str, list[str]]] = [
    ("grpo_8b", "Llama-3.1-8B", "h100", []),
    ("grpo_8b", "Llama-3.1-8B", "h100", [FP8]),
    ("grpo_8b", "Llama-3.1-8B", "h100", ["rollout.max_staleness=0"]),
    ("grpo_8b", "Llama-3.1-8B", "h100", [OFFLOADED]),
    ("grpo_8b", "Llama-3.1-8B", "b200", [OFFLOADED, "train.seed=2"]),
    ("grpo_8b", "Llama-3.1-8B", "h100", [*OVERLAPPED, "grpo.steps_per_generation=4"]),
    ("grpo_8b", "Llama-3.1-8B", "h100", [FULL, "parallel.context_parallel_size=2"]),
    ("grpo_70b", "Llama-3.3-70B", "h100", []),
    ("grpo_70b", "Llama-3.3-70B", "h100", [MUON]),
    ("grpo_70b", "Llama-3.3-70B", "h100", ["grpo.shared_prompts=true", "grpo.beta=0.04"]),
    ("grpo_70b", "Llama-3.3-70B", "h100", [*ASLEEP, "train.offload=all"]),
    ("grpo_70b", "Llama-3.3-70B", "h100", ["rollout.quantization=fp8"]),
    ("grpo_70b", "Qwen2.5-72B", "h100", []),
    ("grpo_70b_lora", "Llama-3.3-70B", "h100", []),
    ("grpo_70b_lora", "Llama-3.3-70B", "h100", ["lora.sync=merged"]),
    ("grpo_70b_lora", "Llama-3.3-70B", "h100", ["lora.r=0"]),
    ("grpo_70b_lora", "Qwen2.5-72B", "h100", []),
    ("grpo_70b_one_node", "Llama-3.3-70B", "h100", []),
    ("grpo_70b_one_node", "Llama-3.3-70B", "h100", ["grpo.beta=0.04", "train.offload=all"]),
    ("grpo_70b_one_node", "Qwen2.5-72B", "h100", []),
    ("grpo_32b_32k", "Qwen3-32B", "h100", []),
    ("grpo_32b_64k", "DeepSeek-R1-Distill-Qwen-32B", "h100", []),
    ("grpo_30b_a3b", "Qwen3-30B-A3B", "h100", []),
    ("grpo_30b_a3b_vl", "Qwen3-VL-30B-A3B", "h100", []),
    ("grpo_30b_glm_flash", "GLM-4.7-Flash", "h100", []),
    ("grpo_qwen3_next_80b", "Qwen3-Next-80B-A3B", "h100", []),
    ("grpo_qwen3_next_80b", "Qwen3-Next-80B-A3B", "h100", [DRAFTS]),
    ("grpo_gpt_oss_120b", "gpt-oss-120b", "h100", []),
    ("grpo_106b_a12b", "GLM-4.5-Air", "h100", []),
    ("grpo_106b_a12b", "GLM-4.5-Air", "h100", [f"{AGAIN} [moe, core_attn]}}"]),
    ("grpo_106b_a12b", "GLM-4.5-Air", "h100", [f"{AGAIN} [mlp, shared_experts]}}"]),
    ("grpo_106b_a12b", "GLM-4.5-Air", "h100", [f"{DISPATCH}flex", MUON]),
    ("grpo_106b_a12b", "GLM-4.5-Air", "h100", ["model.megatron.moe_shared_expert_overlap=true"]),
    ("grpo_235b_a22b", "Qwen3-235B-A22B", "h100", []),
    ("grpo_235b_a22b", "Qwen3-235B-A22B", "h100", [FP8]),
    ("grpo_235b_a22b", "MiniMax-M2", "h100", []),
    ("grpo_355b_a32b", "GLM-4.5", "h100", []),
    ("grpo_397b_a17b", "Qwen3.5-397B-A17B", "h100", []),
    ("grpo_405b", "Llama-3.1-405B", "h100", []),
    ("grpo_671b_a37b", "DeepSeek-V3", "h200", []),
    ("grpo_671b_a37b", "DeepSeek-V3", "h200", ["model.mtp_num_layers=1", FULL, MUON]),
    ("grpo_671b_a37b", "DeepSeek-V3", "h200", ["rollout.quantization=fp8"]),
    ("grpo_671b_a37b", "DeepSeek-V3", "h200", [FP8]),
    ("grpo_671b_h100", "DeepSeek-V3", "h100", []),
    ("grpo_744b_a40b", "GLM-5", "h200", []),
    ("grpo_744b_a40b", "GLM-5", "h200", ["grpo.shared_prompts=false"]),
    ("grpo_744b_a40b", "DeepSeek-V3.2", "h200", []),
]
"""Config, published model, card and overrides."""
SUGGESTED = [("grpo_8b", "Llama-3.1-8B", 8), ("grpo_70b", "Llama-3.3-70B", 64)]
"""Config, published model and number of GPUs."""


def job(name: str, published: str, gpu: str, overrides: Sequence[str], num_gpus: int = 0) -> Job:
    path = write_config(Path(MODELS.name) / published, published)
    cfg = load_config(CONFIGS / f"{name}.yaml", [f"model.path={path}", *overrides])
    shape = trained_shape(cfg)
    return Job(cfg, shape, CARDS[gpu], [longest_sequence(cfg, shape)], num_gpus)


def figures(plan: Any, path: str = "") -> dict[str, Any]:
    """All values of a plan's JSON by path; links by their purposes."""
    if not isinstance(plan, dict | list):
        return {path: round(plan, 6) if isinstance(plan, float) else plan}
    if isinstance(plan, list):
        is_named = all(isinstance(each, dict) for each in plan)
        plan = {each.get("purpose", n) if is_named else n: each for n, each in enumerate(plan)}
    parts = [figures(value, f"{path}.{key}".lstrip(".")) for key, value in plan.items()]
    return {key: value for part in parts for key, value in part.items()}


def differences(found: dict[str, Any], recorded: dict[str, Any], rel: float) -> list[str]:
    """Paths with a missing value, a number apart by more than `rel`, or another value."""

    def is_as_recorded(path: str) -> bool:
        value, expected = found.get(path, "nothing"), recorded.get(path, "nothing")
        if isinstance(value, int | float) and isinstance(expected, int | float):
            return isclose(value, expected, rel_tol=rel, abs_tol=1e-6)
        return value == expected

    return [path for path in sorted(found | recorded) if not is_as_recorded(path)]


def plan_of(name: str, published: str, gpu: str, overrides: Sequence[str]) -> dict[str, Any]:
    # Through JSON, as the recorded plan: without tuples.
    return json.loads(json.dumps(plan_job(job(name, published, gpu, overrides)).as_json()))


def title(name: str, published: str, overrides: Sequence[str]) -> str:
    return " ".join([name, published, *overrides])


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def record() -> dict[str, Any]:
    plans = {
        title(name, published, words): figures(plan_of(name, published, gpu, words))
        for name, published, gpu, words in RUNS
    }
    layouts = {
        title(name, published, [f"on {count} GPUs"]): layouts_of(name, published, count)
        for name, published, count in SUGGESTED
    }
    return {"plans": plans, "layouts": layouts}


def layouts_of(name: str, published: str, num_gpus: int) -> list[list[str]]:
    """Overrides of the three fastest layouts."""
    return [each.overrides for each in suggest(job(name, published, "h100", [], num_gpus))[:3]]


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
