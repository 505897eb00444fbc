"""The place of a process among the ranks, and of ranks and engines on a job's nodes."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.oracle.policies import tiny_config
from helpers.runs.train import TINY_CONFIG
from megatron_grpo import cli
from megatron_grpo.config.reward import RewardConfig
from megatron_grpo.launch.launch import (
    LAUNCHER_VARIABLE,
    RankPlace,
    check_host,
    rank_place,
    tie_to_launcher,
)
from megatron_grpo.launch.placement import EnginePlace, place, place_engines
from parallel import ParallelDims

SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
}


TORCHRUN = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2"}
ONE_TASK = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
OF_AN_IMAGE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""What PyTorch's container images set in every Slurm task."""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PATH": "/bin"}, None),
        (ONE_TASK, None),  # a shell in an allocation
        (ONE_TASK | OF_AN_IMAGE, None),
        (TORCHRUN, RankPlace(rank=11, local_rank=3, world_size=16, num_hosts=2)),
        (SLURM | TORCHRUN, RankPlace(rank=11, local_rank=3, world_size=16, num_hosts=2)),
    ],
)
def test_rank_place(environ, expected):
    assert rank_place(environ) == expected


def test_srun_gives_the_place_if_the_address_of_rank_0_is_set():
    meeting = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    expected = RankPlace(rank=9, local_rank=1, world_size=16, num_hosts=2)
    assert rank_place(SLURM | meeting) == expected
    with pytest.raises(ValueError, match=r"MASTER_ADDR and MASTER_PORT not set .* 16 tasks"):
        rank_place(SLURM)


def test_rank_whose_launcher_died_before_it_was_tied_exits(monkeypatch):
    monkeypatch.setattr("megatron_grpo.launch.launch.die_with_parent", lambda: None)
    tie_to_launcher({LAUNCHER_VARIABLE: str(os.getppid())})
    with pytest.raises(SystemExit, match="the launcher is gone"):
        tie_to_launcher({LAUNCHER_VARIABLE: str(os.getpid())})


NODES = ["a", "b", "c", "d"]


def job(ranks: int, engines: int, tensor: int = 1):
    return tiny_config(
        Path("model"),
        ParallelDims(data=ranks),
        f"grpo.generation_batch_size={4 * ranks}",
        f"rollout.num_engines={engines}",
        f"rollout.tensor_parallel_size={tensor}",
    )


def test_place_gives_engines_nodes_of_their_own():
    placed = place(job(16, 2, tensor=8), NODES, 8)
    assert (placed.trainer_nodes, placed.ranks_per_node) == (["a", "b"], 8)
    assert placed.engines == [EnginePlace(["c"], range(8)), EnginePlace(["d"], range(8))]


def test_place_gives_engines_gpus_that_ranks_leave():
    placed = place(job(3, 2, tensor=2), ["a"], 8)
    assert placed.engines == [EnginePlace(["a"], range(4, 6)), EnginePlace(["a"], range(6, 8))]


def test_place_shares_gpus_one_engine_per_node_first():
    placed = place(job(16, 3, tensor=4), ["a", "b"], 8)
    assert [(*at.nodes, at.gpus.start) for at in placed.engines] == [("a", 0), ("b", 0), ("a", 4)]


def test_place_puts_reward_models_behind_the_ranks():
    def with_model(cfg, size: int, **others):
        arguments = {"path": "p", "tensor_parallel_size": size, **others}
        model = {"name": "reward_model", "arguments": arguments}
        return cfg.model_copy(update={"reward": RewardConfig(functions=[model])})

    placed = place(with_model(job(3, 2, tensor=2), 1), ["a"], 8)
    assert placed.engines == [EnginePlace(["a"], range(4, 6)), EnginePlace(["a"], range(6, 8))]
    placed = place(with_model(job(3, 1, tensor=2), 2), ["a"], 8)
    assert placed.engines == [EnginePlace(["a"], range(6, 8))]
    # Engines that share GPUs with ranks do not take the reward model's, either.
    placed = place(with_model(job(4, 3, tensor=2), 2), ["a"], 8)
    assert [at.gpus.start for at in placed.engines] == [0, 2, 6]
    with pytest.raises(ValueError, match="2 GPUs for reward models behind the 8 ranks of a node"):
        place(with_model(job(8, 1), 2), NODES, 8)
    # Reward models that share GPUs take none from engines.
    placed = place(with_model(job(8, 1), 8, share_gpus=True), ["a"], 8)
    assert placed.engines == place(job(8, 1), ["a"], 8).engines
    with pytest.raises(ValueError, match=r"9 GPUs for reward models that share .* host has 8"):
        place(with_model(job(8, 1), 9, share_gpus=True), NODES, 8)


def test_place_gives_large_engines_whole_nodes():
    """First those without ranks; where these are too few, all engines share."""
    apart = place(job(8, 1, tensor=16), NODES, 8)
    assert apart.engines == [EnginePlace(["b", "c"], range(8))]
    shared = place(job(8, 2, tensor=16), NODES, 8)
    assert [at.nodes for at in shared.engines] == [["a", "b"], ["c", "d"]]
    assert place(job(4, 1, tensor=16), NODES, 8).engines == apart.engines
    assert place(job(1, 1, tensor=8), ["a"], 8).engines == [EnginePlace(["a"], range(8))]


@pytest.mark.parametrize(
    ("ranks", "engines", "tensor", "message"),
    [
        (12, 1, 1, "12 ranks do not fill nodes of 8 GPUs: set .* to 16, for 16 ranks"),
        (40, 1, 1, "40 ranks need 5 nodes of 8 GPUs, and the job has 4"),
        (8, 1, 12, "12 does not fill nodes of 8 GPUs: set it to 8, or to a multiple such as 16"),
        (8, 1, 48, "1 of 48 GPUs each do not fit on 4 nodes of 8: take 6 nodes or more"),
        (8, 3, 16, "3 of 16 GPUs each do not fit on 4 nodes of 8: set it to 2 or less"),
        (32, 9, 4, "set it to 8 or less"),
    ],
)
def test_place_refuses_a_job_that_does_not_fit(ranks, engines, tensor, message):
    with pytest.raises(ValueError, match=message):
        place(job(ranks, engines, tensor), NODES, 8)


@pytest.mark.parametrize(("tensor", "most"), [(2, 4), (16, 1)])
def test_place_refuses_groups_of_sglang_over_nodes(tensor, most):
    cfg = job(8, 1, tensor)

    def placed(engine: str, groups: int) -> EnginePlace:
        sizes = {"engine": engine, "data_parallel_size": groups}
        rollout = cfg.rollout.model_copy(update=sizes)
        [engine_place] = place(cfg.model_copy(update={"rollout": rollout}), NODES, 8).engines
        return engine_place

    assert placed("sglang", most).gpus == range(8)
    assert len(placed("vllm", 2 * most).nodes) > 1
    with pytest.raises(ValueError, match=f"data_parallel_size to {most} at most, or .*=vllm"):
        placed("sglang", 2 * most)


@pytest.mark.parametrize(
    ("ranks", "gpus", "gigabytes", "message"),
    [
        (8, 4, 9999, r"dp\(8\) = 8 ranks need 8 GPUs, and this host has 4: .* --gpus 4`"),
        (8, 8, 1, None),
        (1, 0, 419, "no GPU and 419 GB of memory, .* take 3 x 140 GB"),
        (1, 0, 420, None),
    ],
)
def test_check_host_refuses_a_job_it_cannot_hold(ranks, gpus, gigabytes, message):
    refused = pytest.raises(ValueError, match=message) if message else nullcontext()
    with refused:
        check_host(job(ranks, 2), int(140e9), gpus, int(gigabytes * 1e9))


@pytest.mark.parametrize(
    ("dims", "gpus_per_node", "data"),
    [
        (ParallelDims(tensor=4, pipeline=3), 8, 2),
        (ParallelDims(tensor=4, pipeline=3, data=3), 8, 4),
        (ParallelDims(tensor=4, context=2, data=3), 16, 4),
        # Four copies would fill nodes, but 3 * 2 expert ranks do not divide their stages of 8.
        (ParallelDims(tensor=2, pipeline=2, data=3, expert=3, expert_tensor=2), 8, 6),
        (ParallelDims(tensor=4, pipeline=3, expert=4, expert_tensor=1), 8, 2),
    ],
)
def test_place_suggests_a_data_parallel_size(dims, gpus_per_node, data):
    copy = dims.world_size // dims.data
    cfg = tiny_config(Path("model"), dims, "grpo.generation_batch_size=96")
    message = f"set parallel.data_parallel_size to {data}, for {copy * data} ranks"
    with pytest.raises(ValueError, match=message):
        place(cfg, NODES, gpus_per_node)
    full = tiny_config(Path("model"), replace(dims, data=data), "grpo.generation_batch_size=96")
    assert place(full, ["a"] * 99, gpus_per_node).ranks_per_node == gpus_per_node


def test_place_command_prints_the_placement(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    given = [f"model.path={tmp_path}", f"data.path={tmp_path}"]
    arguments = ["place", str(TINY_CONFIG), "--nodes", "a,b", "--gpus-per-node", "4", *given]
    said = CliRunner().invoke(cli.app, arguments)
    assert said.output.splitlines() == [
        "run_dir runs/tiny_cpu",
        "trainer a",
        "trainer b",
        "engine a 0",
    ]
    assert said.exception is None
    said = CliRunner().invoke(cli.app, [*arguments, "data.path=no.jsonl"])
    assert str(said.exception) == f"data.path no.jsonl does not exist in {Path.cwd()}"
    said = CliRunner().invoke(cli.app, [*arguments, "--only-engines", "data.path=no.jsonl"])
    assert said.exception is None
    said = CliRunner().invoke(cli.app, [*arguments, "rollout.tensor_parallel_size=8"])
    assert said.output.splitlines()[-1] == "engine a,b 0,1,2,3"
    ahead = ["rollout.max_staleness=1", "grpo.old_logprobs=rollout"]
    said = CliRunner().invoke(cli.app, [*arguments, *ahead])
    assert "8 ranks would share 8 GPUs with engines of 1," in str(said.exception)
    said = CliRunner().invoke(cli.app, [*arguments, *ahead, "--nodes", "a,b,c"])
    assert said.output.splitlines()[-1] == "engine c 0"


def test_place_engines_fills_the_job():
    placed = place_engines(job(16, 1, tensor=4), ["a", "b"], 8)
    assert [(*at.nodes, at.gpus.start) for at in placed.engines] == [
        ("a", 0),
        ("a", 4),
        ("b", 0),
        ("b", 4),
    ]
    with pytest.raises(ValueError, match="needs 2 nodes of 8 GPUs for an engine, and the job has"):
        place_engines(job(16, 1, tensor=16), ["a"], 8)
