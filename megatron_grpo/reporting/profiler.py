"""Profiles of chosen optimizer steps, for https://ui.perfetto.dev: `train.profile_steps`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.profiler import profile

from megatron_grpo.config.train import TrainConfig
from megatron_grpo.timing import PhaseTimer

FOLDER = "profile"


@contextmanager
def profiled_step(train: TrainConfig, step: int, timer: PhaseTimer) -> Iterator[None]:
    """Record the block, which is optimizer step `step`, on the ranks that are asked for.

    Collective, in the phase in which files may take long: traces have up to some GB, and a rank
    that writes one must not look as if it hung.
    """
    if step not in train.profile_steps:
        yield
        return
    rank = dist.get_rank()
    recorded = profile() if rank in train.profile_ranks else None
    if recorded:
        recorded.start()
    yield
    with timer.phase("save"):
        if recorded:
            recorded.stop()  # evaluates all events: of a large step, for a minute or more
            folder = train.run_dir / FOLDER
            folder.mkdir(exist_ok=True)
            recorded.export_chrome_trace(str(folder / f"step_{step}_rank_{rank}.json.gz"))
        dist.barrier()
