"""Limits, disk, network and environment of one host, from planted facts and files."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.doctor.host import (
    UNLIMITED,
    Limits,
    Storage,
    can_load,
    can_train,
    check_environment,
    check_limits,
    check_network,
    check_rdma,
    check_storage,
    measure_storage,
    read_limits,
)

WIDE = Limits(num_cpus=112, memory=2**41, shared=2**40, locked=UNLIMITED, num_files=2**20, core=0)
FAST = Storage("lustre", free=1e15, written=2e9, read=4e9)
ACTIVE, DOWN = (f"{state}|400 Gb/sec (4X NDR)|InfiniBand" for state in ("4: ACTIVE", "1: DOWN"))


def problems(checks) -> list[str]:
    return [check.name for check in checks if check.status != "ok"]


@pytest.mark.parametrize(
    ("change", "name", "remedy"),
    [
        ({"shared": 64 * 2**20}, "shared memory", "--shm-size=16g"),
        ({"locked": 8 * 2**20}, "ulimit -l (locked memory)", "ulimit -l unlimited"),
        ({"num_files": 1024}, "ulimit -Hn (open files)", "ulimit -Hn 65536"),
        ({"core": UNLIMITED}, "ulimit -c (core dumps)", "ulimit -c 0"),
    ],
)
def test_a_bad_limit_is_a_warning_with_a_command(change, name, remedy):
    assert problems(check_limits(WIDE, on_gpu=True)) == []
    (check,) = (
        one for one in check_limits(replace(WIDE, **change), on_gpu=True) if one.status != "ok"
    )
    assert check.name == name and remedy in check.remedy


def test_locked_memory_matters_on_gpu_hosts_only():
    assert problems(check_limits(replace(WIDE, locked=0), on_gpu=False)) == []


def test_limits_of_this_process_are_read():
    limits = read_limits()
    assert limits.num_cpus >= 1
    assert limits.memory > 1e9
    assert limits.num_files > 0


def test_measure_storage_leaves_nothing(tmp_path):
    storage = measure_storage(tmp_path / "not" / "there" / "yet")
    assert list(tmp_path.iterdir()) == []
    assert storage.written > 0 and storage.read > 0 and storage.free > 0


@pytest.mark.parametrize(
    ("change", "name", "trains"),
    [
        ({"written": 20e6}, "run directory", True),
        ({"free": 1e9}, "free space", True),
        ({"local_locks": "localflock"}, "locks", False),
    ],
)
def test_a_bad_disk_is_named_and_missing_locks_stop_a_run(change, name, trains):
    assert problems(check_storage(FAST)) == []
    checks = list(check_storage(replace(FAST, **change)))
    assert problems(checks) == [name]
    assert can_train(checks) == trains


def test_rdma_ports_are_counted_by_kind_and_a_down_one_is_named():
    infiniband, down = (tuple(one.split("|")) for one in (ACTIVE, DOWN))
    roce = (*infiniband[:2], "Ethernet")
    checks = list(check_rdma([infiniband] * 7 + [down, roce], True, True, on_gpu=True))
    assert {(check.status, check.value) for check in checks} == {
        ("ok", "1 x RoCE, 400 Gb/sec (4X NDR), active"),
        ("ok", "7 x InfiniBand, 400 Gb/sec (4X NDR), active"),
        ("warning", "1 x InfiniBand, 400 Gb/sec (4X NDR), down"),
    }


@pytest.mark.parametrize(
    ("ports", "verbs", "library", "on_gpu", "names"),
    [
        ([ACTIVE], True, True, True, []),
        ([ACTIVE], False, True, True, ["RDMA verbs"]),
        ([ACTIVE], True, False, True, ["RDMA library"]),
        ([], False, False, True, ["RDMA"]),
        ([], False, False, False, []),
    ],
)
def test_rdma_that_cannot_be_used_is_a_warning_on_gpus(ports, verbs, library, on_gpu, names):
    ports = [tuple(port.split("|")) for port in ports]
    assert problems(check_rdma(ports, verbs, library, on_gpu)) == names


def test_ports_and_interfaces_are_read_from_sys(tmp_path):
    def plant(folder: Path, **files: str) -> None:
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")

    state, rate, link_layer = ACTIVE.split("|")
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    plant(port, state=state, rate=rate, link_layer=link_layer)
    for name, state, speed in (("lo", "unknown", 1), ("eth0", "up", 100_000), ("eth1", "down", 1)):
        plant(tmp_path / "class" / "net" / name, operstate=state, speed=str(speed), mtu="9000")
    values = [check.value for check in check_network(on_gpu=True, sys=tmp_path)]
    assert values[0] == "1 x InfiniBand, 400 Gb/sec (4X NDR), active"
    assert "eth0 (100 Gb/s, mtu 9000)" in values


def test_a_library_is_there_if_the_linker_finds_it():
    assert can_load("libc.so.6")
    assert not can_load("libibverbs.so.0")


def test_check_environment_shows_no_secrets(tmp_path):
    (tmp_path / ".dockerenv").touch()
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "8",
        "SLURM_JOB_USER": "alice",
        "NCCL_IB_HCA": "mlx5",
        "NVTE_FUSED_ATTN": "1",
        "TORCH_HOME": "/home/alice/torch",
        "WANDB_API_KEY": "hush",
    }
    checks = check_environment(environ, on_gpu=True, root=tmp_path)
    assert [check.value for check in checks] == [
        "in a job of 8 nodes",
        "docker",
        "NCCL_IB_HCA=mlx5 NVTE_FUSED_ATTN=1",
    ]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8"),
        ("NVIDIA_TF32_OVERRIDE", "0", "1"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", "1"),
    ],
)
def test_a_setting_that_harms_training_is_a_warning(name, good, bad):
    assert problems(check_environment({name: good}, on_gpu=True)) == []
    assert problems(check_environment({name: bad}, on_gpu=False)) == []
    check = [*check_environment({name: bad}, on_gpu=True)][-1]
    assert (check.status, check.value) == ("warning", f"{name}={bad}")
    assert check.remedy.startswith(f"unset {name}: ")
