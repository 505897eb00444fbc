"""Jobs of published models: only their config.json is there."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from helpers.models.published import write_config
from helpers.oracle.policies import tiny_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning.card import CARDS, GpuSpec
from megatron_grpo.planning.workload import Job
from parallel import ParallelDims

ONE_RANK = ParallelDims()


@pytest.fixture
def job_of(tmp_path) -> Callable[..., Job]:
    """A job by configs/tiny_cpu.yaml in bfloat16, of 16 sequences, without a reference; with
    overrides.

    A microbatch has room for the longest sequence. `differing` are keys of the model's config.json.
    """
    numbers = count()

    def make(
        name: str,
        *overrides: str,
        dims: ParallelDims = ONE_RANK,
        lengths: tuple[int, ...] = (1024,),
        card: GpuSpec = CARDS["h100"],
        num_gpus: int = 0,
        **differing: Any,
    ) -> Job:
        folder = write_config(tmp_path / f"model_{next(numbers)}", name, **differing)
        options = ["model.dtype=bfloat16", "grpo.beta=0.0"]
        options += [f"train.max_tokens_per_microbatch={max(lengths)}", *overrides]
        cfg = tiny_config(folder, dims, *options)
        return Job(cfg, trained_shape(cfg), card, [*lengths], num_gpus)

    return make
