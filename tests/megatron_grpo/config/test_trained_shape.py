"""A layer for multi-token prediction is trained of models that have one."""

import json

import pytest
from safetensors.torch import load_file, save_file

from checkpoint_convert import read_shape
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


def test_the_layer_is_a_part_of_the_model_only_if_it_is_trained(folders):
    folder = folders["deepseek_v3"]
    assert shape_with(folder) == read_shape(folder)
    assert shape_with(folder, "model.mtp_num_layers=1").trains_mtp


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("qwen3", "0 of them"),
        ("glm4_moe", "0 of them"),
        ("deepseek_v32", "sparse attention"),
    ],
)
def test_a_model_without_such_a_layer_is_refused(folders, family, found):
    with pytest.raises(ValueError, match=f"model.path has {found}: set 0"):
        shape_with(folders[family], "model.mtp_num_layers=1")


@pytest.mark.parametrize("where", ["config.json", "model.safetensors"])
def test_so_is_a_layer_with_its_own_embedding(tmp_path, where):
    folder = add_mtp_layer(tiny_model(tmp_path, "qwen3_5_text"))
    shape_with(folder, "model.mtp_num_layers=1")
    if where == "config.json":
        config = json.loads((folder / where).read_text()) | {"mtp_use_dedicated_embeddings": True}
        (folder / where).write_text(json.dumps(config))
    else:
        weights = load_file(folder / where)
        weights["mtp.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / where)
    with pytest.raises(ValueError, match=r"\(mtp_use_dedicated_embeddings, .* supported: set 0"):
        shape_with(folder, "model.mtp_num_layers=1")
