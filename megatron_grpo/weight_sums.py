"""What every worker of an engine must hold after a push, as checksums that the ranks add up."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from checkpoint_convert import ModelShape, hf_tensors
from checkpoint_convert.vllm import EngineDims, engine_layouts
from megatron_grpo.config import RolloutConfig
from megatron_grpo.rollout import WorkerSums
from parallel import Layout


def engine_dims(rollout: RolloutConfig) -> EngineDims:
    """Sizes of each of the engines."""
    return EngineDims(
        tensor=rollout.tensor_parallel_size,
        expert_parallel=bool(rollout.vllm.get("enable_expert_parallel", False)),
    )


def worker_layouts(shape: ModelShape, rollout: RolloutConfig) -> list[Layout]:
    """What each worker of one engine holds, in the order of ranks; all engines are alike."""
    if rollout.engine == "transformers":
        return [Layout.of_whole_tensors(hf_tensors(shape))]
    return engine_layouts(shape, engine_dims(rollout))


def sums_of_all_ranks(
    sent: Mapping[int, Mapping[str, int]], workers: Sequence[Layout], device: torch.device
) -> Sequence[WorkerSums]:
    """What each worker must hold, from what each rank has `sent` it: checksums by parameter.

    Padding is zero and counts for none. Collective over all ranks of the default group: one
    all-reduce of an int64 for each parameter of each worker.
    """
    names = [(number, name) for number, worker in enumerate(workers) for name in worker.shapes]
    sums = torch.tensor(
        [sent.get(number, {}).get(name, 0) for number, name in names],
        dtype=torch.int64,
        device=device,
    )
    dist.all_reduce(sums)
    totals: list[dict[str, int]] = [{} for _ in workers]
    for (number, name), total in zip(names, sums.tolist(), strict=True):
        totals[number][name] = total
    return totals
