"""The parts of a model that are trained: a layer for multi-token prediction, a vision tower."""

import json

import pytest
from safetensors.torch import load_file, save_file

from checkpoint_convert import read_shape
from helpers.models.images import PATCH_SIZES, tiny_vision_model
from helpers.models.tiny import add_mtp_layer, tiny_model
from helpers.oracle.policies import tiny_config
from megatron_grpo.config.trained_shape import trained_shape
from parallel import ParallelDims


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {
        family: tiny_model(tmp_path_factory.mktemp(family), family)
        for family in ("qwen3", "glm4_moe", "deepseek_v3", "deepseek_v32")
    }
    for family in ("deepseek_v3", "deepseek_v32"):
        add_mtp_layer(made[family])
    return made


def shape_with(folder, *overrides):
    return trained_shape(tiny_config(folder, ParallelDims(), *overrides))


MTP = "model.mtp_num_layers=1"


def test_trained_shape_has_the_layer_only_if_it_is_trained(folders):
    folder = folders["deepseek_v3"]
    assert shape_with(folder) == read_shape(folder)
    assert shape_with(folder, MTP).trains_mtp


@pytest.mark.parametrize(
    ("family", "found"),
    [("qwen3", "0 of them"), ("glm4_moe", "0 of them"), ("deepseek_v32", "sparse attention")],
)
def test_trained_shape_refuses_a_model_without_such_a_layer(folders, family, found):
    with pytest.raises(ValueError, match=f"model.path has {found}: set 0"):
        shape_with(folders[family], MTP)


@pytest.mark.parametrize("where", ["config.json", "model.safetensors"])
def test_trained_shape_refuses_a_layer_with_its_own_embedding(tmp_path, where):
    folder = add_mtp_layer(tiny_model(tmp_path, "qwen3_5_text"))
    shape_with(folder, MTP)
    if where == "config.json":
        config = json.loads((folder / where).read_text()) | {"mtp_use_dedicated_embeddings": True}
        (folder / where).write_text(json.dumps(config))
    else:
        weights = load_file(folder / where)
        weights["mtp.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / where)
    with pytest.raises(ValueError, match=r"\(mtp_use_dedicated_embeddings, .* supported: set 0"):
        shape_with(folder, MTP)


TOWER = ("model.freeze_vision=false", "data.image_column=image")
ALLOWED = ("rollout.vllm.mm_encoder_tp_mode=weights",)  # vLLM's default


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_trained_shape_has_the_tower_only_if_it_is_trained(tmp_path, family):
    folder = tiny_vision_model(tmp_path, family)
    assert shape_with(folder, "data.image_column=image") == read_shape(folder)
    stored = load_file(folder / "model.safetensors")
    assert dict(shape_with(folder, *TOWER, *ALLOWED).vision) == {
        name.removeprefix("model."): tuple(values.shape)
        for name, values in stored.items()
        if "visual." in name
    }


def test_trained_shape_refuses_too_few_layers_in_the_first_stage(tmp_path):
    folder = tiny_vision_model(tmp_path, "qwen3_vl")
    with pytest.raises(ValueError, match="num_layers_in_first_pipeline_stage to 3 or more"):
        shape_with(folder, *TOWER, "parallel.pipeline_parallel_size=2")


def test_trained_shape_refuses_a_model_without_a_tower(folders):
    with pytest.raises(ValueError, match="a qwen3, and vision towers can be trained for"):
        shape_with(folders["qwen3"], *TOWER)
