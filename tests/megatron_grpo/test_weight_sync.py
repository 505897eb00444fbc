"""A push from the shards of ranks into a real vLLM, repeated when it failed."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoint_convert import read_shape
from helpers.engines import TestEngine, largest_logprob_error, random_prompts, served_model
from helpers.policies import start_policy, tiny_config
from helpers.pushes import push_policy, push_whole, rollout_overrides
from helpers.ranks import run_ranks
from megatron_grpo.engines.http import EngineError
from megatron_grpo.policy.model import weight_sender
from megatron_grpo.weight_sync import WeightSync
from parallel import ParallelDims
from parallel.weight_transfer import rendezvous_address

TP2_PP2 = ParallelDims(tensor=2, pipeline=2)


@pytest.mark.parametrize("transport", ["auto", "network"])
@pytest.mark.parametrize(
    ("dims", "num_flips"),
    [(ParallelDims(data=2), 0), (TP2_PP2, 1)],
    ids=["at once", "at the second attempt"],
)
def test_a_push_brings_the_shards_to_the_engine(
    vllm_engine: TestEngine, tied_model: Path, tmp_path: Path, dims, num_flips, transport
) -> None:
    vllm_engine.push(served_model(tmp_path, "qwen3", tied=True, seed=1))
    vllm_engine.version += 1
    overrides = [
        *rollout_overrides(vllm_engine.rollout, vllm_engine.servers.base_urls),
        f"rollout.weight_transport={transport}",
    ]
    token = vllm_engine.servers.token
    arguments = (tied_model, dims, token, overrides, vllm_engine.version, num_flips)
    results = run_ranks(dims.world_size, push_policy, *arguments)
    assert {error for error, _ in results} == {""}
    phases = ["time/await_engines", "time/push", "time/verify_weights", "time/step"]
    assert results[0][1] == phases
    samples = vllm_engine.generate(random_prompts(2))
    assert largest_logprob_error(tied_model, samples) < 1e-4


def test_after_two_failures_the_push_raises_and_the_engine_serves_nothing(
    vllm_engine: TestEngine, tied_model: Path
) -> None:
    vllm_engine.version += 1
    [url] = vllm_engine.servers.base_urls
    overrides = rollout_overrides(vllm_engine.rollout, [url])
    arguments = (tied_model, vllm_engine.servers.token, overrides, vllm_engine.version, 2)
    [(error, _)] = run_ranks(1, push_whole, *arguments)
    assert f"rollout engine {url} worker 0: 1 of 18 parameters differ from what was pushed" in error
    with pytest.raises(EngineError, match="holds no complete weights"):
        vllm_engine.generate(random_prompts(1))
    vllm_engine.push(tied_model)


def test_ranks_and_workers_meet_on_loopback_where_that_will_do() -> None:
    environ = {"MASTER_ADDR": "127.0.0.9"}
    assert (
        rendezvous_address(["http://localhost:1", "http://127.0.0.1:2"], 1, environ) == "127.0.0.1"
    )
    assert rendezvous_address([], 1, {}) == "127.0.0.1"
    assert rendezvous_address([], 2, environ) == "127.0.0.9"
    # The address from which this host reaches the engine's: here its own, as it is the same host.
    assert rendezvous_address(["http://127.0.0.7:1"], 1, environ).startswith("127.")


def address_of_meeting(rank: int, folder: Path) -> str:
    socket.gethostbyname = {"head": f"127.0.0.{rank + 1}"}.__getitem__  # of this process alone
    os.environ["MASTER_ADDR"] = "head"
    dims = ParallelDims(data=2)
    policy, groups = start_policy(rank, folder, dims)
    sender, cfg = weight_sender(policy, groups), tiny_config(folder, dims)
    sync = WeightSync(
        cfg, read_shape(folder), sender, torch.device("cpu"), num_hosts=2, engines=None
    )
    return sync._address


def memory_given_back(rank: int, folder: Path, lost: list[list[str]]) -> list[int]:
    """How often a rank has given memory back before it assembles engines, of which some start."""
    dims, calls, found = ParallelDims(data=2), [], []
    policy, groups = start_policy(rank, folder, dims)
    sender, cfg = weight_sender(policy, groups), tiny_config(folder, dims)
    torch.cuda.empty_cache = lambda: calls.append(None)  # of this process alone
    for starting in lost:
        pool = SimpleNamespace(starting=starting)
        engines = SimpleNamespace(pool=pool, assemble=lambda check: (1, 1)) if rank == 0 else None
        sync = WeightSync(
            cfg, read_shape(folder), sender, torch.device("cpu"), num_hosts=1, engines=engines
        )
        sync._assemble()
        found.append(len(calls))
    return found


def test_ranks_give_memory_back_to_an_engine_that_starts_again(tied_model: Path) -> None:
    """Beside them: vLLM ends at once if its share of the GPU is not free."""
    lost = [[], ["http://127.0.0.1:1"], []]
    assert run_ranks(2, memory_given_back, tied_model, lost) == [[0, 1, 1]] * 2


def test_ranks_of_several_hosts_meet_where_the_last_rank_finds_rank_0(tied_model: Path) -> None:
    """On rank 0's own host its name may stand for loopback."""
    assert run_ranks(2, address_of_meeting, tied_model) == ["127.0.0.2"] * 2
