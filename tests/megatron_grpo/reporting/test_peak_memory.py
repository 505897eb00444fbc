import pytest
import torch

from helpers.ranks.processes import run_ranks
from megatron_grpo.reporting.metrics import peak_memory


def peak_on_rank(rank: int) -> dict[str, float]:
    """The metrics for faked GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "max_memory_allocated", lambda _: (rank + 1) * 10**9)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda _: (4 - rank) * 10**9)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
        return peak_memory(torch.device("cuda", rank))


def test_of_all_ranks_the_fullest_gpu_is_told():
    told = {"perf/max_memory_allocated_gb": 2.0, "perf/max_memory_reserved_gb": 4.0}
    assert run_ranks(2, peak_on_rank) == [told, told]
