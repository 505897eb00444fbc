"""Pushes into a real SGLang: what its workers then hold is what SGLang loads itself."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from helpers.engines import (
    SGLANG_PYTHON,
    TestEngine,
    largest_logprob_error,
    random_prompts,
    running_engine,
)
from helpers.models import servable_model
from helpers.pushes import push_policy, rollout_overrides
from helpers.ranks import run_ranks
from megatron_grpo.launch.run_dir import bearer
from parallel import ParallelDims

WIDTHS = {"intermediate_size": 128, "moe_intermediate_size": 128}
TP2_PP2 = ParallelDims(tensor=2, pipeline=2)
EP2 = ParallelDims(data=2, expert=2)


def own_checksums(engine: TestEngine) -> list[dict[str, str]]:
    """SGLang's own checksum of every parameter of each worker."""
    [url] = engine.servers.base_urls
    answer = httpx.post(
        f"{url}/weights_checker",
        json={"action": "checksum"},
        headers=bearer(engine.servers.token),
        timeout=60,
    )
    return [worker["checksums"] for worker in answer.raise_for_status().json()["ranks"]]


def push(engine: TestEngine, folder: Path, dims: ParallelDims) -> None:
    """Push the weights of a folder from the ranks of a policy."""
    engine.version += 1
    overrides = rollout_overrides(engine.rollout, engine.servers.base_urls)
    arguments = (folder, dims, engine.servers.token, overrides, engine.version)
    results = run_ranks(dims.world_size, push_policy, *arguments)
    assert {error for error, _ in results} == {""}


@pytest.fixture
def model(tmp_path) -> Callable[[str, int], Path]:
    def make(family: str, seed: int) -> Path:
        widths = WIDTHS if "moe" in family else {"intermediate_size": 128}
        return servable_model(tmp_path / str(seed), family, seed=seed, **widths)

    return make


@pytest.mark.parametrize(
    ("family", "size", "dims"),
    [
        ("qwen3_moe", 2, EP2),
        ("llama", 2, TP2_PP2),
        pytest.param("qwen3", 1, TP2_PP2, marks=pytest.mark.slow),
        pytest.param("qwen2", 2, TP2_PP2, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 2, EP2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_after_a_push_every_worker_holds_what_sglang_loads(model, tmp_path, family, size, dims):
    folder, others = model(family, 0), model(family, 1)
    memory = {*Path("/dev/shm").glob("sgl_shm_mq*")}
    with running_engine(
        "sglang", folder, tmp_path / "logs", python=SGLANG_PYTHON, tensor_parallel_size=size
    ) as engine:
        loaded = own_checksums(engine)
        assert len(loaded) == size
        push(engine, others, dims)
        assert all(
            one[name] != other[name]
            for one, other in zip(loaded, own_checksums(engine), strict=True)
            for name in one
        )
        push(engine, folder, dims)
        assert own_checksums(engine) == loaded
        assert largest_logprob_error(folder, engine.generate(random_prompts(4))) < 1e-4
    assert {*Path("/dev/shm").glob("sgl_shm_mq*")} == memory
