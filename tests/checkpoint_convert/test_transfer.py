"""Values on their way from file to file."""

import pytest
import torch

from checkpoint_convert.hf_to_megatron import import_checkpoint
from conversions import variant
from models import tiny_model
from parallel import ParallelDims


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def test_weights_beyond_the_range_of_a_dtype_are_refused_by_name(model, tmp_path):
    def enlarge(weights):
        weights["model.norm.weight"][3] = 1e5

    large = variant(model, tmp_path / "large", enlarge)
    with pytest.raises(ValueError, match=r"final_layernorm.* that torch\.float16 cannot hold"):
        import_checkpoint(large, tmp_path / "out", ParallelDims(), dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    import_checkpoint(large, tmp_path / "out", ParallelDims(), dtype=torch.bfloat16)
