"""Checksums that a running SGLang tells of its parameters, before and after pushes of a policy."""

from pathlib import Path

import httpx

from helpers.engines.live import TestEngine
from helpers.pushes.policies import push_policy, rollout_overrides
from helpers.ranks.processes import run_ranks
from megatron_grpo.launch.run_dir import bearer
from parallel import ParallelDims

OF_POSITIONS = ".rotary_emb.axis_map"
"""A constant of M-RoPE, of which SGLang tells a checksum, too."""


def own_checksums(engine: TestEngine) -> list[dict[str, str]]:
    """SGLang's own checksum of every parameter of each worker; each group tells those of all."""
    [url] = engine.servers.base_urls
    answer = httpx.post(
        f"{url}/weights_checker",
        json={"action": "checksum"},
        headers=bearer(engine.servers.token),
        timeout=60,
    )
    told = [worker["checksums"] for worker in answer.raise_for_status().json()["ranks"]]
    num_workers = engine.rollout.gpus_per_engine
    assert told == engine.rollout.data_parallel_size * told[:num_workers]
    return told[:num_workers]


def all_differ(these: list[dict[str, str]], others: list[dict[str, str]]) -> bool:
    """Whether all checksums of weights do; biases that the first worker adds are zero in others."""
    return all(
        one[name] != other[name] or (number > 0 and name.endswith("w2_weight_bias"))
        for number, (one, other) in enumerate(zip(these, others, strict=True))
        for name in one
        if not name.endswith(OF_POSITIONS)
    )


def push(
    engine: TestEngine,
    folder: Path,
    dims: ParallelDims,
    num_flips: int = 0,
    options: tuple[str, ...] = (),
) -> str:
    """Push the weights of a folder from the ranks of a policy with further `options` of its config;
    returns the error of rank 0."""
    engine.version += 1
    overrides = [*rollout_overrides(engine.rollout, engine.servers.base_urls), *options]
    arguments = (folder, dims, engine.servers.token, overrides, engine.version, num_flips)
    return run_ranks(dims.world_size, push_policy, *arguments)[0][0]
