"""Plans of the shipped configs as they were: totals, layouts, and whether each fits.

A plan's figures rest on formulas that may be made simpler: totals may move by half a percent, and
verdicts and layouts by nothing. Record them again, and say in CHANGELOG.md why:

    PYTHONPATH=.:tests python -m golden.plans
"""

import json
import tempfile
from collections.abc import Sequence
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
RUNS: list[tuple[str, str, str, list[str]]] = [
    ("grpo_8b", "Llama-3.1-8B", "h100", []),
    ("grpo_8b", "Llama-3.1-8B", "h100", ["model.megatron={fp8: e4m3, fp8_recipe: blockwise}"]),
    ("grpo_8b", "Llama-3.1-8B", "h100", ["rollout.max_staleness=0"]),
    ("grpo_70b", "Llama-3.3-70B", "h100", []),
    ("grpo_70b", "Llama-3.3-70B", "h100", ["optimizer.optimizer=muon"]),
    ("grpo_70b", "Llama-3.3-70B", "h100", ["grpo.shared_prompts=true", "grpo.beta=0.04"]),
    ("grpo_70b", "Qwen2.5-72B", "h100", []),
    ("grpo_70b_lora", "Llama-3.3-70B", "h100", []),
    ("grpo_32b_32k", "Qwen3-32B", "h100", []),
    ("grpo_32b_64k", "DeepSeek-R1-Distill-Qwen-32B", "h100", []),
    ("grpo_30b_a3b", "Qwen3-30B-A3B", "h100", []),
    ("grpo_30b_glm_flash", "GLM-4.7-Flash", "h100", []),
    ("grpo_qwen3_next_80b", "Qwen3-Next-80B-A3B", "h100", []),
    ("grpo_gpt_oss_120b", "gpt-oss-120b", "h100", []),
    ("grpo_106b_a12b", "GLM-4.5-Air", "h100", []),
    ("grpo_235b_a22b", "Qwen3-235B-A22B", "h100", []),
    ("grpo_235b_a22b", "MiniMax-M2", "h100", []),
    ("grpo_355b_a32b", "GLM-4.5", "h100", []),
    ("grpo_397b_a17b", "Qwen3.5-397B-A17B", "h100", []),
    ("grpo_405b", "Llama-3.1-405B", "h100", []),
    ("grpo_671b_a37b", "DeepSeek-V3", "h200", []),
    ("grpo_671b_a37b", "DeepSeek-V3.2", "h200", []),
    ("grpo_671b_a37b", "GLM-5", "h200", []),
]
"""Config, published model, card and overrides."""
SUGGESTED = [("grpo_8b", "Llama-3.1-8B", 8), ("grpo_70b", "Llama-3.3-70B", 64)]
"""Config, published model and number of GPUs."""


def job(name: str, published: str, gpu: str, overrides: Sequence[str], num_gpus: int = 0) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), published)
        cfg = load_config(CONFIGS / f"{name}.yaml", [f"model.path={path}", *overrides])
        shape = trained_shape(cfg)
    return Job(cfg, shape, CARDS[gpu], [longest_sequence(cfg, shape)], num_gpus)


def totals(plan: dict[str, Any]) -> dict[str, Any]:
    """What a user decides by, from the JSON of a plan."""
    engine, rollout, host = plan["engine"], plan["rollout"], plan["host"]
    loop = plan["asynchrony"]
    return {
        "num_gpus": plan["num_gpus"],
        "is_shared": plan["is_shared"],
        "fits": plan["fits"],
        "microbatches": plan["workload"]["microbatches"],
        "sizes": {
            "stages": [stage["total"] for stage in plan["stages"]],
            "engine_cached_tokens": [engine["cached_tokens"]] if engine else [],
            "step_seconds": [plan["step"]["estimate_seconds"]],
            "rollout_seconds": [rollout["seconds"]] if rollout else [],
            "host": [host["total"]] if host else [],
            "asynchrony_seconds": [mode["seconds"] for mode in loop] if loop else [],
        },
    }


def title(name: str, published: str, overrides: Sequence[str]) -> str:
    return " ".join([name, published, *overrides])


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def record() -> dict[str, Any]:
    plans = {
        title(name, published, words): totals(plan_job(job(name, published, gpu, words)).as_json())
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
