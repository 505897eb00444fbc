"""Transformer Engine is imported, and libraries that it loads a second time are named."""

import _ctypes
from shutil import copyfile

import pytest

from megatron_grpo.doctor.finding import can_train
from megatron_grpo.doctor.gpus import judge_loaded
from transformer_engines import write_transformer_engine


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """The findings, by name, if Transformer Engine's part for torch is this code."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def judge_package(pytorch):
        write_transformer_engine(tmp_path, pytorch)
        return {finding.name: finding for finding in judge_loaded()}

    return judge_package


@pytest.mark.parametrize(
    ("pytorch", "value"),
    [
        ("import onnxscrpt", "ModuleNotFoundError: No module named 'onnxscrpt'"),
        (
            "raise OSError('/shared/me/lib/libtransformer_engine.so: undefined symbol: x')",
            "OSError: libtransformer_engine.so: undefined symbol: x",
        ),
    ],
    ids=["a dependency is missing", "a library does not fit"],
)
def test_a_transformer_engine_that_does_not_import_is_told_with_its_last_line(
    judge, pytorch, value
):
    findings = judge(pytorch)
    assert not can_train(findings.values())
    assert [one.value for one in findings.values()] == [value]


def test_a_library_from_two_folders_is_a_warning(judge, tmp_path):
    copies = [tmp_path / folder / "libcudnn_graph.so.9" for folder in ("site", "torch")]
    for copy in copies:
        copy.parent.mkdir()
        copyfile(_ctypes.__file__, copy)
    load = f"import ctypes\nlibraries = [ctypes.CDLL(path) for path in {[*map(str, copies)]}]"
    finding = judge(load)["CUDA libraries"]
    assert (finding.status, finding.value) == ("warning", "cudnn loaded from several folders")
    assert str(copies[0].parent) in finding.remedy


def test_libraries_that_torch_alone_loads_are_well(judge, tmp_path):
    own = tmp_path / "libnccl_ep.so"  # Transformer Engine's, in a folder of its own
    copyfile(_ctypes.__file__, own)
    findings = judge(f"import ctypes\nlibrary = ctypes.CDLL({str(own)!r})")
    assert [one.status for one in findings.values()] == ["ok", "ok"]
