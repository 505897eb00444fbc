"""Limits, network, GPUs, Slurm and container of one host, from planted facts and files."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.doctor.finding import can_train
from megatron_grpo.doctor.gpus import Gpu, Gpus, driver_version, judge_gpus
from megatron_grpo.doctor.host import (
    UNLIMITED,
    Limits,
    judge_limits,
    judge_surroundings,
    read_limits,
)
from megatron_grpo.doctor.network import (
    can_load,
    judge_interfaces,
    judge_own_name,
    judge_ports,
    read_interfaces,
    read_ports,
)

WIDE = Limits(num_cpus=112, memory=2**41, shared=2**40, locked=UNLIMITED, num_files=2**20, core=0)
H100 = Gpu("NVIDIA H100 80GB HBM3", 85_000_000_000, (9, 0))
EIGHT = Gpus("580.65.06", "2.13.0", "13.0", "2.28.9", (H100,) * 8, ())


def unwell(findings) -> list[str]:
    return [finding.name for finding in findings if finding.status != "ok"]


@pytest.mark.parametrize(
    ("change", "name", "remedy"),
    [
        ({"shared": 64 * 2**20}, "shared memory", "--shm-size=16g"),
        ({"locked": 8 * 2**20}, "ulimit -l (locked memory)", "ulimit -l unlimited"),
        ({"num_files": 1024}, "ulimit -Hn (open files)", "ulimit -Hn 65536"),
        ({"core": UNLIMITED}, "ulimit -c (core dumps)", "ulimit -c 0"),
    ],
)
def test_a_small_limit_is_a_warning_with_a_command(change, name, remedy):
    assert unwell(judge_limits(WIDE, on_gpu=True)) == []
    findings = list(judge_limits(replace(WIDE, **change), on_gpu=True))
    assert unwell(findings) == [name]
    assert remedy in next(finding.remedy for finding in findings if finding.name == name)


def test_locked_memory_matters_where_there_is_rdma_to_do():
    assert unwell(judge_limits(replace(WIDE, locked=0), on_gpu=False)) == []


def test_the_limits_of_this_process_are_read():
    limits = read_limits()
    assert limits.num_cpus >= 1
    assert limits.memory > 1e9
    assert limits.num_files > 0


def plant_port(sys: Path, device: str, state: str, link_layer: str) -> None:
    port = sys / "class" / "infiniband" / device / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text(f"{link_layer}\n")


def test_ports_are_counted_by_kind_and_one_that_is_down_is_named(tmp_path):
    for number in range(7):
        plant_port(tmp_path, f"mlx5_{number}", "4: ACTIVE", "InfiniBand")
    plant_port(tmp_path, "mlx5_7", "1: DOWN", "InfiniBand")
    plant_port(tmp_path, "mlx5_8", "4: ACTIVE", "Ethernet")
    findings = list(judge_ports(read_ports(tmp_path), verbs=True, library=True, on_gpu=True))
    assert [(one.status, one.value) for one in findings] == [
        ("ok", "1 x RoCE, 400 Gb/sec (4X NDR), active"),
        ("ok", "7 x InfiniBand, 400 Gb/sec (4X NDR), active"),
        ("warning", "1 x InfiniBand, 400 Gb/sec (4X NDR), down"),
    ]
    assert "NCCL_IB_HCA" in findings[-1].remedy


@pytest.mark.parametrize(
    ("verbs", "library", "name"), [(False, True, "RDMA verbs"), (True, False, "RDMA library")]
)
def test_ports_that_a_container_cannot_use_are_a_warning(tmp_path, verbs, library, name):
    plant_port(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    assert unwell(judge_ports(read_ports(tmp_path), verbs, library, on_gpu=True)) == [name]


def test_a_library_is_there_if_the_linker_finds_it():
    assert can_load("libc.so.6")
    assert not can_load("libibverbs.so.0")


def test_no_rdma_is_a_warning_with_gpus_alone(tmp_path):
    for on_gpu, names in [(True, ["RDMA"]), (False, [])]:
        findings = judge_ports(read_ports(tmp_path), verbs=False, library=False, on_gpu=on_gpu)
        assert unwell(findings) == names


def test_interfaces_are_named_as_nccl_takes_them(tmp_path):
    for name, state, speed in [
        ("lo", "unknown", "1"),
        ("eth0", "up", "100000"),
        ("eth1", "down", "1"),
    ]:
        folder = tmp_path / "class" / "net" / name
        folder.mkdir(parents=True)
        for file, text in [("operstate", state), ("speed", speed), ("mtu", "9000")]:
            (folder / file).write_text(text)
    assert judge_interfaces(read_interfaces(tmp_path)).value == "eth0 (100 Gb/s, mtu 9000)"
    assert read_interfaces()  # this host's own


def test_an_own_name_that_stands_for_loopback_wants_an_interface():
    none, chosen = {}, {"GLOO_SOCKET_IFNAME": "ib0"}
    assert judge_own_name(none, "127.0.1.1", on_gpu=True).status == "warning"
    assert judge_own_name(chosen, "127.0.1.1", on_gpu=True).status == "ok"
    assert judge_own_name(none, "127.0.1.1", on_gpu=False).status == "ok"
    assert judge_own_name(none, "10.0.0.5", on_gpu=True).status == "ok"


def test_eight_gpus_are_one_line_with_driver_and_nccl():
    findings = list(judge_gpus(EIGHT))
    assert unwell(findings) == []
    assert findings[0].value == "8 x NVIDIA H100 80GB HBM3, 85 GB, compute capability 9.0"
    assert findings[1].value == "driver 580.65.06, CUDA 13.0 in torch, NCCL 2.28.9"


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (
            {"gpus": (), "cuda": None, "torch": "2.13.0+cpu"},
            "bash requirements/gpu.sh",
        ),
        ({"gpus": ()}, "nvidia-smi"),
    ],
    ids=["torch for CPUs", "none visible"],
)
def test_a_driver_without_gpus_to_train_on_is_an_error(change, remedy):
    findings = list(judge_gpus(replace(EIGHT, **change)))
    assert not can_train(findings)
    assert remedy in findings[0].remedy


def test_what_makes_gpus_slow_is_a_warning():
    old = Gpu("Tesla V100-SXM2-32GB", 34_000_000_000, (7, 0))
    assert unwell(judge_gpus(replace(EIGHT, gpus=(old,)))) == ["GPUs"]
    assert unwell(judge_gpus(replace(EIGHT, without_peer_access=((0, 4),)))) == ["peer access"]


def test_a_machine_without_a_driver_trains_on_its_cpus(tmp_path):
    assert driver_version(tmp_path, tmp_path) is None
    assert can_train(judge_gpus(None))


def test_the_driver_tells_its_version(tmp_path):
    file = tmp_path / "driver" / "nvidia" / "version"
    file.parent.mkdir(parents=True)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    file.write_text(line)
    assert driver_version(tmp_path, tmp_path) == "580.65.06"


def test_job_container_and_settings_are_told_and_nothing_else_of_the_environment(tmp_path):
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
    findings = list(judge_surroundings(environ, on_gpu=True, root=tmp_path))
    assert [finding.value for finding in findings] == [
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
def test_a_setting_that_training_does_not_bear_is_a_warning(name, good, bad):
    assert unwell(judge_surroundings({name: good}, on_gpu=True)) == []
    assert unwell(judge_surroundings({name: bad}, on_gpu=False)) == []
    finding = [*judge_surroundings({name: bad}, on_gpu=True)][-1]
    assert (finding.status, finding.value) == ("warning", f"{name}={bad}")
    assert finding.remedy.startswith(f"unset {name}: ")
