import os

import pytest

from megatron_grpo.launch.launch import LAUNCHER_VARIABLE, RankPlace, rank_place, tie_to_launcher

SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
}


def test_alone_a_process_is_no_rank():
    assert rank_place({"PATH": "/bin"}) is None


def test_a_shell_in_a_slurm_allocation_is_no_rank():
    assert rank_place({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun_gives_the_place():
    environ = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2"}
    expected = RankPlace(rank=11, local_rank=3, world_size=16, num_hosts=2)
    assert rank_place(environ) == expected
    assert rank_place(SLURM | environ) == expected  # torchrun inside a Slurm step


def test_what_an_image_sets_in_every_task_of_slurm_is_not_torchrun():
    of_the_image = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert rank_place(alone | of_the_image) is None


def test_srun_gives_the_place_when_it_says_where_the_ranks_meet():
    meeting = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    expected = RankPlace(rank=9, local_rank=1, world_size=16, num_hosts=2)
    assert rank_place(SLURM | meeting) == expected
    with pytest.raises(ValueError, match=r"MASTER_ADDR and MASTER_PORT not set .* 16 tasks"):
        rank_place(SLURM)


def test_a_rank_whose_launcher_died_before_it_could_be_tied_ends(monkeypatch):
    monkeypatch.setattr("megatron_grpo.launch.launch.die_with_parent", lambda: None)
    tie_to_launcher({LAUNCHER_VARIABLE: str(os.getppid())})
    with pytest.raises(SystemExit, match="the launcher is gone"):
        tie_to_launcher({LAUNCHER_VARIABLE: str(os.getpid())})
