"""Layouts that the planner suggests, beside published ones of the same model and GPUs."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from megatron_grpo.config.config import Config
from megatron_grpo.config.config_file import load_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.suggest import suggest
from published_models import write_config

CONFIGS = Path(__file__).parents[3] / "configs"
CARD = CARDS["h100"]
ENGINES_ELSEWHERE = ("rollout.engine=transformers", "rollout.tensor_parallel_size=1")
RECOMPUTED = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"


@dataclass(frozen=True)
class Published:
    """Recipes for H100 in bfloat16: of NeMo-RL for GRPO, of Megatron-Bridge for pre-training."""

    source: str
    model: str
    num_gpus: int
    layout: tuple[str, ...]
    fits: bool = True
    megatron: str = "{}"


def parallel(**sizes: int) -> tuple[str, ...]:
    sizes = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1} | sizes
    return tuple(f"parallel.{axis}_parallel_size={size}" for axis, size in sizes.items())


PUBLISHED = [
    # It sums gradients in bfloat16 and fuses the activation of the MLP: 16 and 4 GB less than here.
    Published("Megatron-Bridge", "Llama-3.1-8B", 8, parallel(context=2, data=4), fits=False),
    Published("NeMo-RL", "Llama-3.1-8B", 8, parallel(pipeline=2, data=4), megatron=RECOMPUTED),
    Published("NeMo-RL", "Qwen3-32B", 32, parallel(tensor=4, pipeline=4, data=2)),
    # By 0.3 GB, of the 6 that the fusion would save.
    Published("NeMo-RL", "Llama-3.3-70B", 64, parallel(tensor=4, pipeline=4, data=4), fits=False),
    Published(
        "Megatron-Bridge", "Llama-3.3-70B", 64, parallel(tensor=4, pipeline=4, context=2, data=2)
    ),
    Published(
        "Megatron-Bridge", "Llama-3.3-70B", 128, parallel(tensor=4, pipeline=4, context=2, data=4)
    ),
    Published(
        "Megatron-Bridge", "Llama-3.1-405B", 512, parallel(tensor=8, pipeline=8, context=2, data=4)
    ),
]


def config(folder: Path, *overrides: str) -> Config:
    """The 70B config for a trainer whose engines are not on its GPUs."""
    arguments = [f"model.path={folder}", "rollout.num_engines=1", "rollout.vllm={}"]
    return load_config(CONFIGS / "grpo_70b.yaml", [*arguments, *ENGINES_ELSEWHERE, *overrides])


def name(published: Published) -> str:
    return f"{published.source}, {published.model} on {published.num_gpus}"


@pytest.mark.parametrize(
    "published",
    [
        pytest.param(each, id=name(each), marks=pytest.mark.slow if each.num_gpus > 64 else ())
        for each in PUBLISHED
    ],
)
def test_no_published_layout_that_fits_is_faster_than_the_suggestion(published, tmp_path):
    folder = write_config(tmp_path, published.model)
    shape = read_shape(folder)
    first = suggest(config(folder), shape, CARD, [4096], published.num_gpus)[0]
    assert first.cfg.dims.world_size == published.num_gpus
    theirs = config(folder, *published.layout, f"model.megatron={published.megatron}")
    plan = plan_job(theirs, shape, CARD, [4096], published.num_gpus)
    assert first.memory.total <= plan.memory_limit
    assert plan.fits is published.fits
    assert first.time.estimate <= plan.time.estimate or not plan.fits


def test_a_suggestion_can_be_written_behind_the_config_and_plans_as_it_says(tmp_path):
    folder = write_config(tmp_path, "Llama-3.3-70B")
    shape, path = read_shape(folder), CONFIGS / "grpo_70b.yaml"
    cfg = load_config(path, [f"model.path={folder}"])
    first = suggest(cfg, shape, CARD, [4096], 128)[0]
    again = load_config(path, [f"model.path={folder}", *first.as_json()["overrides"]])
    plan = plan_job(again, shape, CARD, [4096], 128)
    assert plan.is_shared and again.rollout.num_engines == 16
    assert plan.fits and plan.fullest == first.memory
    assert plan.time == first.time


def test_engines_on_gpus_of_their_own_keep_them(tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-8B")
    cfg = load_config(CONFIGS / "grpo_8b.yaml", [f"model.path={folder}"])
    found = suggest(cfg, read_shape(folder), CARD, [4096], 12)
    assert {each.cfg.dims.world_size for each in found} == {8}  # and four engines
    assert all(each.cfg.rollout.num_engines == 4 for each in found)
    with pytest.raises(ValueError, match=r"take 4 of 4 GPUs.*--gpus 5"):
        suggest(cfg, read_shape(folder), CARD, [4096], 4)


def test_experts_stay_in_a_node_and_recomputation_comes_last(tmp_path):
    folder = write_config(tmp_path, "Qwen3-30B-A3B")
    cfg = load_config(CONFIGS / "grpo_30b_a3b.yaml", [f"model.path={folder}"])
    found = suggest(cfg, read_shape(folder), CARD, [2048], 8)
    assert all(each.cfg.dims.expert <= 8 for each in found)
    layouts = [each.cfg.dims for each in found]
    assert len(layouts) == len(set(layouts))  # each once, with the least recomputation that fits
