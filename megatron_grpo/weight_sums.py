"""What every worker of an engine must hold after a push, as checksums that the ranks add up."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape, hf_tensors
from checkpoint_convert.vllm import EngineDims, engine_layouts
from megatron_grpo.config import RolloutConfig
from megatron_grpo.rollout import WorkerSums
from parallel import Copy, Layout, intersect
from parallel.checksum import checksum
from parallel.views import as_local, as_whole


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


class WeightSums:
    """Checksums of the workers' parameters, from the weights as they are spread over the ranks.

    Each rank adds what it owns to the parameters of every worker that holds it: replicated weights
    count for each of these, padding is zero and counts for none. Computed from the weights and the
    layouts alone, not from what the push wrote, so that an error of the push cannot hide in both.
    """

    def __init__(self, source: Layout, workers: Sequence[Layout], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._names = [list(worker.shapes) for worker in workers]
        self._copies: list[tuple[int, Copy, tuple[int, ...]]] = []
        first = 0
        for worker in workers:
            position = {name: first + index for index, name in enumerate(worker.shapes)}
            self._copies += [
                (position[copy.destination], copy, tuple(worker.shapes[copy.destination]))
                for copy in intersect(source, worker)
            ]
            first += len(worker.shapes)

    @torch.no_grad()
    def of(self, parameters: Mapping[str, Tensor]) -> list[WorkerSums]:
        """The checksums by worker, after `parameters` are converted to the engines' dtype.

        Collective over all ranks of the default group: one all-reduce of an int64 for each
        parameter of each worker.
        """
        device = next(iter(parameters.values())).device
        num_sums = sum(map(len, self._names))
        sums = torch.zeros(num_sums, dtype=torch.int64, device=device)
        for position, copy, shape in self._copies:
            values = as_whole(parameters[copy.source][copy.source_box.slices], copy.source_axes)
            values = as_local(values, copy.destination_axes, len(shape))
            sums[position] += checksum(values.to(self._dtype), copy.destination_box, shape)
        dist.all_reduce(sums)
        bounds = [0]
        for names in self._names:
            bounds.append(bounds[-1] + len(names))
        values_of = sums.tolist()
        return [
            dict(zip(names, values_of[start:end], strict=True))
            for names, (start, end) in zip(self._names, pairwise(bounds), strict=True)
        ]
