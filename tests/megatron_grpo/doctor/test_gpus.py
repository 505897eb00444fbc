"""GPUs and their driver, from planted facts; Transformer Engine and its libraries, imported."""

import _ctypes
from dataclasses import replace
from shutil import copyfile

import pytest

from helpers.runs.transformer_engines import write_transformer_engine
from megatron_grpo.doctor.gpus import (
    Gpu,
    Gpus,
    check_gpus,
    check_transformer_engine,
    driver_version,
)
from megatron_grpo.doctor.host import can_train

H100 = Gpu("NVIDIA H100 80GB HBM3", 85_000_000_000, (9, 0))
EIGHT = Gpus("580.65.06", "2.13.0", "13.0", "2.28.9", (H100,) * 8)


def test_equal_gpus_are_one_line():
    checks = list(check_gpus(EIGHT))
    assert [check.status for check in checks] == ["ok"] * 3
    assert checks[0].value == "8 x NVIDIA H100 80GB HBM3, 85 GB, compute capability 9.0"
    assert "580.65.06" in checks[1].value and "2.28.9" in checks[1].value


@pytest.mark.parametrize(
    ("change", "name", "status", "remedy"),
    [
        ({"gpus": (), "cuda": None}, "GPUs", "missing", "bash requirements/gpu.sh"),
        ({"gpus": ()}, "GPUs", "missing", "nvidia-smi"),
        ({"gpus": (replace(H100, capability=(8, 0)),)}, "GPUs", "warning", "flash-attn"),
        ({"gpus": (replace(H100, capability=(7, 0)),)}, "GPUs", "warning", "model.dtype=float32"),
        ({"without_peer_access": ((0, 4),)}, "peer access", "warning", "nvidia-smi topo"),
    ],
)
def test_gpus_that_do_not_train_well_are_named(change, name, status, remedy):
    (check,) = (one for one in check_gpus(replace(EIGHT, **change)) if one.status != "ok")
    assert (check.name, check.status) == (name, status)
    assert remedy in check.remedy


def test_a_machine_without_a_driver_trains_on_its_cpus(tmp_path):
    assert driver_version(tmp_path, tmp_path) is None
    assert can_train(check_gpus(None))


def test_driver_version_is_read_from_proc(tmp_path):
    file = tmp_path / "driver" / "nvidia" / "version"
    file.parent.mkdir(parents=True)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    file.write_text(line)
    assert driver_version(tmp_path, tmp_path) == "580.65.06"


@pytest.fixture
def check_import(tmp_path, monkeypatch):
    """Checks by name, with this code as Transformer Engine's module for torch."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def check_package(pytorch):
        write_transformer_engine(tmp_path, pytorch)
        return {check.name: check for check in check_transformer_engine()}

    return check_package


def test_a_failed_import_is_shown_with_its_last_line_without_paths(check_import):
    (check,) = check_import("raise OSError('/me/lib/libte.so: undefined symbol: x')").values()
    assert (check.status, check.value) == ("missing", "OSError: libte.so: undefined symbol: x")


def test_a_library_from_two_folders_is_a_warning(check_import, tmp_path):
    copies = [tmp_path / folder / "libcudnn_graph.so.9" for folder in ("site", "torch")]
    for copy in copies:
        copy.parent.mkdir()
        copyfile(_ctypes.__file__, copy)
    load = f"import ctypes\nlibraries = [ctypes.CDLL(path) for path in {[*map(str, copies)]}]"
    check = check_import(load)["CUDA libraries"]
    assert (check.status, check.value) == ("warning", "cudnn loaded from several folders")
    assert str(copies[0].parent) in check.remedy


def test_transformer_engines_own_library_is_no_second_nccl(check_import, tmp_path):
    own = tmp_path / "libnccl_ep.so"
    copyfile(_ctypes.__file__, own)
    checks = check_import(f"import ctypes\nlibrary = ctypes.CDLL({str(own)!r})")
    assert [check.status for check in checks.values()] == ["ok", "ok"]
