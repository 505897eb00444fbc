"""Files that accompany weights, and the config by which weights are read."""

import shutil

import pytest

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.megatron_to_hf import export_checkpoint
from checkpoint_convert.sidecar import CHECKPOINT_FOLDER, copy_sidecar_files, model_config
from helpers.models.conversions import config_of, edit_config, variant
from helpers.models.tiny import tiny_model
from parallel import ParallelDims


@pytest.fixture(scope="module")
def imported(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("megatron") / "out"
    import_checkpoint(model, out, ParallelDims())
    return out


def test_copy_sidecar_files_carries_no_code(model, tmp_path):
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


def test_copy_sidecar_files_follows_links_of_a_folder(model, tmp_path):
    for folder in ("links", "out"):
        (tmp_path / folder).mkdir()
    for file in model.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    copy_sidecar_files(tmp_path / "links", tmp_path / "out", "BF16")
    copied = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert copied == (model / "tokenizer.json").read_bytes()


def test_copy_sidecar_files_refuses_links_elsewhere(model, tmp_path):
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
    message = r"notes\.txt is a link to .*secret, outside of .*: replace it with a copy of the file"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=message):
        copy_sidecar_files(snapshot, empty, "BF16")
    assert list(empty.iterdir()) == []


DTYPE, TORCH_DTYPE = {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("family", "source", "written"),
    [
        ("qwen3", {"dtype": None}, DTYPE),
        ("qwen3", {"dtype": None, "torch_dtype": "float32"}, {"dtype": None} | TORCH_DTYPE),
        ("qwen3", {"torch_dtype": "float32"}, DTYPE | TORCH_DTYPE),
        # MTP layers are left out of the config, as of the weights.
        ("glm4_moe", {"num_nextn_predict_layers": 1}, DTYPE | {"num_nextn_predict_layers": 0}),
        # DeepSeek-V3 is served with `--trust-remote-code`, which must find no reference to code.
        ("qwen3", {"auto_map": {"AutoConfig": "own.Config"}}, DTYPE | {"auto_map": None}),
    ],
    ids=str,
)
def test_copy_sidecar_files_changes_the_config(tmp_path, family, source, written):
    model = variant(tiny_model(tmp_path / "model", family), tmp_path / "in", **source)
    out = tmp_path / "out"
    out.mkdir()
    copy_sidecar_files(model, out, "BF16")
    edit_config(model, **written)
    assert config_of(out) == config_of(model)


def test_export_refuses_another_model_of_equal_sizes(model, imported, tmp_path):
    # 4 heads of size 16 in 2 groups have the same fused shapes as 8 heads of size 8 in 4 groups.
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    other = variant(model, tmp_path / "other", **heads)
    with pytest.raises(ValueError) as error:
        export_checkpoint(imported, tmp_path / "out", hf_config=other)
    for words in ("another model", "num_attention_heads: 4, 8", "head_dim: 16, 8"):
        assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_model_config_may_differ_where_no_number_changes(model, imported, tmp_path):
    longer = variant(model, tmp_path / "longer", max_position_embeddings=1024, eos_token_id=3)
    assert model_config(imported, longer) == longer


def test_export_does_not_take_added_rows_for_padding(tmp_path):
    bigger = tiny_model(tmp_path / "bigger", "llama", vocab_size=400)
    import_checkpoint(bigger, tmp_path / "megatron", ParallelDims())
    shutil.rmtree(tmp_path / "megatron" / CHECKPOINT_FOLDER)
    smaller = tiny_model(tmp_path / "smaller", "llama")
    with pytest.raises(ValueError, match=r"an embedding of 400 rows, but the config says .* 250"):
        export_checkpoint(tmp_path / "megatron", tmp_path / "out", hf_config=smaller)


@pytest.mark.parametrize("pointer", ["latest_checkpointed_iteration.txt", "LATEST"])
def test_model_config_names_a_folder_of_checkpoints(imported, tmp_path, pointer):
    shutil.copytree(imported, tmp_path / "iter_0000100")
    (tmp_path / pointer).write_text("100")
    with pytest.raises(ValueError, match=r"is a folder of checkpoints; .* \['iter_0000100'\]"):
        model_config(tmp_path)
