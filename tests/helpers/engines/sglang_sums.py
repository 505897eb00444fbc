"""SGLang engines with changed behaviour, and checksums of their parameters around pushes."""

import os
from pathlib import Path

import httpx
import pytest

from helpers.engines.live import PACKAGES, TestEngine
from helpers.pushes.policies import push_policy, rollout_overrides
from helpers.ranks.processes import run_ranks
from megatron_grpo.engines.sglang import args
from megatron_grpo.launch.run_dir import bearer
from parallel import ParallelDims

OF_POSITIONS = ".rotary_emb.axis_map"
"""A constant of M-RoPE that SGLang's checksums include."""


def pose_as(patch: pytest.MonkeyPatch, *poses: str) -> None:
    """Start later engines with these functions of `sglang_server`."""
    patch.setattr(args, "SERVER", "helpers.engines.sglang_server")
    patch.setenv("PYTHONPATH", PACKAGES, prepend=os.pathsep)
    patch.setenv("ENGINE_POSES", " ".join(poses))


def own_checksums(engine: TestEngine) -> list[dict[str, str]]:
    """SGLang's own checksum of every parameter, by worker; every group reports all workers."""
    [url] = engine.servers.base_urls
    answer = httpx.post(
        f"{url}/weights_checker",
        json={"action": "checksum"},
        headers=bearer(engine.servers.token),
        timeout=60,
    )
    sums = [worker["checksums"] for worker in answer.raise_for_status().json()["ranks"]]
    num_workers = engine.rollout.gpus_per_engine
    assert sums == engine.rollout.data_parallel_size * sums[:num_workers]
    assert len(sums) >= num_workers
    return sums[:num_workers]


def all_differ(these: list[dict[str, str]], others: list[dict[str, str]]) -> bool:
    """Whether all checksums of weights differ, except biases that only worker 0 adds."""
    return all(
        one[name] != other[name] or (number > 0 and name.endswith("w2_weight_bias"))
        for number, (one, other) in enumerate(zip(these, others, strict=True))
        for name in one
        if not name.endswith(OF_POSITIONS)
    )


def check_pushes(
    engine: TestEngine, folder: Path, others: Path, dims: ParallelDims, *options: str
) -> None:
    """Push the weights of `others`, then flipped bits, then those of `folder`: the workers must end
    with the parameters that they have loaded."""
    loaded = own_checksums(engine)
    assert push(engine, others, dims, options=options) == ""
    assert all_differ(loaded, own_checksums(engine))
    error = push(engine, folder, dims, num_flips=10**6, options=options)
    assert "differ from what was pushed: " in error
    assert push(engine, folder, dims, options=options) == ""
    assert own_checksums(engine) == loaded


def push(
    engine: TestEngine,
    folder: Path,
    dims: ParallelDims,
    num_flips: int = 0,
    options: tuple[str, ...] = (),
) -> str:
    """Push a folder's weights from the ranks of a policy; `options` are overrides of its config.
    Returns the error of rank 0."""
    engine.version += 1
    overrides = [*rollout_overrides(engine.rollout, engine.servers.base_urls), *options]
    arguments = (folder, dims, engine.servers.token, overrides, engine.version, num_flips)
    return run_ranks(dims.world_size, push_policy, *arguments)[0][0]
