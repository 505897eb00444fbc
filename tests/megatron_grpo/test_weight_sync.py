"""A push as the ranks do it: from their shards into a real vLLM, and once more when it failed."""

from pathlib import Path

import pytest

from distributed import run_ranks
from engines import EOS_ID, TestEngine, largest_logprob_error, random_prompts
from megatron_grpo.rollout import RolloutClient
from megatron_grpo.rollout.engine_error import EngineError
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import ParallelDims
from policies import start_policy, tiny_config

TP2_PP2 = ParallelDims(tensor=2, pipeline=2)


class FlippingSource:
    """Rank 0's side of a push, which flips a bit in the folder before the engines read it."""

    def __init__(self, url: str, num_flips: int) -> None:
        self.client = RolloutClient([url], 60.0, [EOS_ID])
        self.num_flips = num_flips

    def update_weights(self, folder: Path, *arguments) -> None:
        if self.num_flips:
            self.num_flips -= 1
            with (folder / "model.safetensors").open("r+b") as file:
                file.seek(-1, 2)
                [last] = file.read(1)
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
        self.client.update_weights(folder, *arguments)


def push(
    rank: int, folder: Path, dims: ParallelDims, url: str, version: int, num_flips: int, run: Path
) -> tuple[str, list[str]]:
    """Push the weights in `folder`; returns the error and the phases that were timed."""
    overrides = ["model.dtype=float32", f"rollout.base_urls=[{url}]", f"train.run_dir={run}"]
    policy, groups = start_policy(rank, folder, dims, *overrides)
    weight_sync = WeightSync(tiny_config(folder, dims, *overrides), policy, groups)
    source = FlippingSource(url, num_flips) if rank == 0 else None
    timer, error = PhaseTimer(), ""
    try:
        weight_sync.push(source, version, timer)
    except EngineError as failure:
        error = str(failure)
    weight_sync.close()
    return error, list(timer.metrics())


@pytest.mark.parametrize(
    ("dims", "num_flips"),
    [(ParallelDims(data=2), 0), (TP2_PP2, 1)],
    ids=["at once", "at the second attempt"],
)
def test_a_push_brings_the_shards_to_the_engine(
    vllm_engine: TestEngine, tied_model: Path, tmp_path: Path, dims, num_flips
) -> None:
    vllm_engine.version += 1
    arguments = (vllm_engine.servers.base_urls[0], vllm_engine.version, num_flips, tmp_path)
    results = run_ranks(dims.world_size, push, tied_model, dims, *arguments)
    assert {error for error, _ in results} == {""}
    assert results[0][1] == ["time/verify_weights", "time/push", "time/step"]
    samples = vllm_engine.generate(random_prompts(2))
    assert largest_logprob_error(tied_model, samples) < 1e-4


def test_after_two_failures_the_push_raises_and_the_engine_serves_nothing(
    vllm_engine: TestEngine, tied_model: Path, tmp_path: Path
) -> None:
    vllm_engine.version += 1
    url = vllm_engine.servers.base_urls[0]
    arguments = (url, vllm_engine.version, 2, tmp_path)
    [(error, _)] = run_ranks(1, push, tied_model, ParallelDims(), *arguments)
    assert f"rollout engine {url} worker 0: 1 of 18 parameters hold other values" in error
    with pytest.raises(EngineError, match="holds no complete weights"):
        vllm_engine.generate(random_prompts(1))
    vllm_engine.push(tied_model)
