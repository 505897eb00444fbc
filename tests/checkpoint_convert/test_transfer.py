"""Values copied from file to file."""

from pathlib import Path

import pytest

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.verify import verify_weights
from helpers.conversions import variant
from helpers.models import tiny_model
from parallel import ParallelDims


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def test_weights_beyond_the_range_of_a_dtype_are_refused_by_name(model, tmp_path):
    def enlarge(weights):
        weights["model.norm.weight"][3] = 1e5

    large = variant(model, tmp_path / "large", enlarge)
    with pytest.raises(ValueError, match=r"final_layernorm.* that F16 cannot hold"):
        import_checkpoint(large, tmp_path / "out", ParallelDims(), dtype="F16")
    assert not (tmp_path / "out").exists()
    import_checkpoint(large, tmp_path / "out", ParallelDims(), dtype="BF16")


def num_bytes_read() -> int:
    """Bytes that this process has requested from the kernel so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_rows_are_read_once_for_the_columns_of_all_ranks(tmp_path, monkeypatch):
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8}
    model = tiny_model(tmp_path / "model", "llama", **wide)
    source = model / "model.safetensors"
    monkeypatch.setattr("checkpoint_convert.transfer.PART_BYTES", 1 << 16)
    monkeypatch.setattr(
        "checkpoint_convert.transfer.run_tasks", lambda task, shares, *_: list(map(task, shares))
    )
    before = num_bytes_read()
    import_checkpoint(model, tmp_path / "out", ParallelDims(tensor=8))
    num_bytes = num_bytes_read() - before
    assert source.stat().st_size > 7e6
    assert 0 <= num_bytes - source.stat().st_size < 500_000  # the config is read too
    monkeypatch.undo()
    assert verify_weights(model, tmp_path / "out") == []
