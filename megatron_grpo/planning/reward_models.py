"""Reward models on the GPUs of ranks: what they take while they score, and asleep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_grpo.config.config import Config
from megatron_grpo.config.offload import parts_away
from megatron_grpo.config.reward import RewardFunction, served_here
from megatron_grpo.engines.reward_models import gpu_share
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, StageMemory
from megatron_grpo.planning.state import part_bytes
from megatron_grpo.rewards.reward_model import WEIGHTS


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """A reward model, and what it takes of each of its GPUs."""

    ranks: range
    """Those whose GPUs it shares, as far as the first node has so many."""
    awake: int
    """Its share of vLLM, while completions are scored."""
    outside: int
    """What it never releases: CUDA context and NCCL buffers."""
    weights: int
    """Those in its files, which are on the host while it sleeps."""


def shared_models(cfg: Config, card: GpuSpec) -> list[SharedModel]:
    """The reward models of a run that share GPUs; ValueError if one cannot."""
    found: list[SharedModel] = []
    for model in served_here(cfg.rewards.values()):
        if not model.shares_gpus:
            continue
        start, size = found[-1].ranks.stop if found else 0, model.num_gpus
        one = SharedModel(
            ranks=range(start, start + size),
            awake=round(gpu_share(model, cfg.rollout) * card.memory),
            outside=CONTEXT_BYTES + COMMUNICATOR_BYTES * (size > 1),
            weights=file_bytes(model) // size,
        )
        found.append(one)
    return found


def beside_reward_models(
    cfg: Config, card: GpuSpec, stages: Sequence[StageMemory]
) -> list[StageMemory]:
    """`stages_memory` with the reward models that share GPUs of each stage.

    They are awake beside the engines, and asleep in all other phases.
    """
    models, size = shared_models(cfg, card), cfg.dims.stage_size
    found = []
    for stage in stages:
        first, end = stage.stage * size, (stage.stage + 1) * size
        beside = [each for each in models if each.ranks.start < end and each.ranks.stop > first]
        if beside:
            away = part_bytes(stage.state, parts_away(cfg.train.offload, "generate"))
            engine = stage.phases.get("generate", 0)
            awake = max(each.awake for each in beside)
            stage = replace(
                stage,
                engine=stage.engine + max(each.outside for each in beside),
                phases=stage.phases | {"generate": engine + awake},
                away=stage.away | {"generate": away},
            )
        found.append(stage)
    return found


def file_bytes(model: RewardFunction) -> int:
    """Bytes of the weight files of a reward model."""
    folder = Path(model.arguments["path"])
    return sum(file.stat().st_size for kind in WEIGHTS for file in folder.glob(kind))
