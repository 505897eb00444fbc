"""What does not go with training a vision tower is refused by name."""

import re

import pytest
from safetensors.torch import load_file

from checkpoint_convert import read_shape
from helpers.images import PATCH_SIZES, tiny_vision_model
from helpers.models import tiny_model
from helpers.policies import tiny_config
from megatron_grpo.config.trained_shape import trained_shape
from parallel import ParallelDims

TRAINED = ("model.freeze_vision=false", "data.image_column=image")
REFUSED = {
    "model.freeze_vision false needs prompts with images": ("data.image_column=null",),
    "disk, as workers read only the text tower from a folder: set auto": (
        "rollout.weight_transport=disk",
    ),
    "mm_encoder_tp_mode data, as pushes send each worker its share": (
        "rollout.vllm.mm_encoder_tp_mode=data",
    ),
    "num_layers_in_first_pipeline_stage to 3 or more": ("parallel.pipeline_parallel_size=2",),
}


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


@pytest.mark.parametrize("told", REFUSED)
def test_what_does_not_go_with_it_is_named(tmp_path, told):
    folder = tiny_vision_model(tmp_path, "qwen3_vl")
    with pytest.raises(ValueError, match=re.escape(told)):
        shape_with(folder, *TRAINED, *REFUSED[told])


def test_so_is_a_model_without_such_a_tower(tmp_path):
    folder = tiny_model(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="a qwen3, and vision towers are trained of"):
        shape_with(folder, *TRAINED)
