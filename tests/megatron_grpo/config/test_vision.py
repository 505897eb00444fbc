"""A vision tower is trained of models whose tower is described."""

import pytest
from safetensors.torch import load_file

from checkpoint_convert import read_shape
from helpers.models.images import PATCH_SIZES, tiny_vision_model
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import tiny_config
from megatron_grpo.config.trained_shape import trained_shape
from parallel import ParallelDims

TRAINED = ("model.freeze_vision=false", "data.image_column=image")
ALLOWED = ("rollout.vllm.mm_encoder_tp_mode=weights",)  # vLLM's default


def shape_with(folder, *overrides):
    return trained_shape(tiny_config(folder, ParallelDims(), *overrides))


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_the_tower_is_a_part_of_the_model_only_if_it_is_trained(tmp_path, family):
    folder = tiny_vision_model(tmp_path, family)
    assert shape_with(folder, "data.image_column=image") == read_shape(folder)
    stored = load_file(folder / "model.safetensors")
    assert dict(shape_with(folder, *TRAINED, *ALLOWED).vision) == {
        name.removeprefix("model."): tuple(values.shape)
        for name, values in stored.items()
        if "visual." in name
    }


def test_a_pipeline_with_too_few_layers_in_its_first_stage_is_refused(tmp_path):
    folder = tiny_vision_model(tmp_path, "qwen3_vl")
    with pytest.raises(ValueError, match="num_layers_in_first_pipeline_stage to 3 or more"):
        shape_with(folder, *TRAINED, "parallel.pipeline_parallel_size=2")


def test_so_is_a_model_without_such_a_tower(tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="a qwen3, and vision towers are trained of"):
        shape_with(folder, *TRAINED)
