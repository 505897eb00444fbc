"""The files that accompany weights, and the config with which weights are read."""

import json
import shutil

import pytest

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.sidecar import CHECKPOINT_FOLDER, copy_sidecar_files, model_config
from helpers.models.tiny import tiny_model
from parallel import ParallelDims


@pytest.fixture(scope="module")
def imported(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("megatron") / "out"
    import_checkpoint(model, out, ParallelDims())
    return out


def edited(model, folder, **changes):
    """Copy the model and change fields of its config."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_licences_and_named_templates_are_carried_and_code_is_not(model, tmp_path):
    source, out = shutil.copytree(model, tmp_path / "source"), tmp_path / "out"
    (source / "additional_chat_templates").mkdir()
    carried = (
        "LICENSE",
        "NOTICE.txt",
        "tokenizer.model.v3",
        "additional_chat_templates/tool.jinja",
    )
    left_out = ("modeling.py", "training_args.bin", "adapter_config.json")
    for name in (*carried, *left_out):
        (source / name).write_text(name)
    out.mkdir()
    copy_sidecar_files(source, out, "BF16")
    assert [(out / name).read_text() for name in carried] == list(carried)
    assert not any((out / name).exists() for name in left_out)


def test_a_folder_of_links_to_a_models_files_is_that_model(model, tmp_path):
    for folder in ("links", "out"):
        (tmp_path / folder).mkdir()
    for file in model.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    copy_sidecar_files(tmp_path / "links", tmp_path / "out", "BF16")
    copied = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert copied == (model / "tokenizer.json").read_bytes()


def test_a_link_out_of_the_folder_is_refused_and_one_within_the_hubs_cache_is_not(model, tmp_path):
    snapshot = tmp_path / "snapshots" / "main"
    shutil.copytree(model, snapshot)
    (tmp_path / "blobs").mkdir()
    shutil.move(snapshot / "tokenizer.json", tmp_path / "blobs" / "0123")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0123")
    out = tmp_path / "out"
    out.mkdir()
    copy_sidecar_files(snapshot, out, "BF16")
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    (tmp_path / "secret").write_text("token")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    told = r"notes\.txt is a link to .*secret, outside of .*: replace it with a copy of the file"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=told):
        copy_sidecar_files(snapshot, empty, "BF16")
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "written"),
    [((), {"dtype"}), (("torch_dtype",), {"torch_dtype"}), (("torch_dtype", "dtype"),) * 2],
)
def test_the_dtype_is_told_by_every_key_that_had_it(model, tmp_path, keys, written):
    source, out = shutil.copytree(model, tmp_path / "source"), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "float32")))
    out.mkdir()
    copy_sidecar_files(source, out, "BF16")
    copied = json.loads((out / "config.json").read_text())
    assert copied == config | dict.fromkeys(written, "bfloat16")


def test_layers_that_predict_further_tokens_are_left_out_of_the_config_as_of_the_weights(tmp_path):
    model, out = tiny_model(tmp_path / "model", "glm4_moe"), tmp_path / "out"
    source = edited(model, tmp_path / "source", num_nextn_predict_layers=1)
    out.mkdir()
    copy_sidecar_files(source, out, "BF16")
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_config_names_no_code_since_none_is_carried(model, tmp_path):
    """Files that it names would be missed with `--trust-remote-code`, as DeepSeek-V3 is served."""
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    source, out = edited(model, tmp_path / "source", auto_map=code), tmp_path / "out"
    out.mkdir()
    copy_sidecar_files(source, out, "F32")
    assert "auto_map" not in json.loads((out / "config.json").read_text())


def test_a_config_under_which_the_same_sizes_mean_another_model_is_refused(
    model, imported, tmp_path
):
    # 4 heads of size 16 in 2 groups have the same fused shapes as 8 heads of size 8 in 4 groups.
    other = edited(
        model, tmp_path / "other", num_attention_heads=8, num_key_value_heads=4, head_dim=8
    )
    with pytest.raises(ValueError) as error:
        export_checkpoint(imported, tmp_path / "out", hf_config=other)
    for words in ("another model", "num_attention_heads: 4, 8", "head_dim: 16, 8"):
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_config_may_differ_in_what_changes_no_numbers(model, imported, tmp_path):
    longer = edited(model, tmp_path / "longer", max_position_embeddings=1024, eos_token_id=3)
    assert model_config(imported, longer) == longer


def test_rows_of_added_tokens_are_not_taken_for_padding(tmp_path):
    bigger = tiny_model(tmp_path / "bigger", "llama", vocab_size=400)
    import_checkpoint(bigger, tmp_path / "megatron", ParallelDims())
    shutil.rmtree(tmp_path / "megatron" / CHECKPOINT_FOLDER)
    smaller = tiny_model(tmp_path / "smaller", "llama")
    with pytest.raises(ValueError, match=r"an embedding of 400 rows, but the config says .* 250"):
        export_checkpoint(tmp_path / "megatron", tmp_path / "out", hf_config=smaller)


@pytest.mark.parametrize("pointer", ["latest_checkpointed_iteration.txt", "LATEST"])
def test_a_folder_of_checkpoints_is_told_with_those_in_it(imported, tmp_path, pointer):
    shutil.copytree(imported, tmp_path / "iter_0000100")
    (tmp_path / pointer).write_text("100")
    with pytest.raises(ValueError, match=r"is a folder of checkpoints; .* \['iter_0000100'\]"):
        model_config(tmp_path)
