"""Mistakes of users: exit code 2, one message that names the culprit, and nothing written."""

import json
import pickle
import re
import shutil
import time
from pathlib import Path

import pytest

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.formats.safetensors_file import create_file
from helpers.conversions import run_cli, weights_of
from helpers.models import tiny_model

# Time limit of a refusal; half of it allows for starting Python and torch on a busy machine.
SECONDS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module", autouse=True)  # also starts the fork server, which takes seconds
def imported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported")
    finished = run_cli("import", "--hf", model, "--out", folder / "ckpt", logs=folder / "logs")
    assert finished.exit_code == 0, finished.errors
    return folder / "ckpt"


def refusal(tmp_path, command, *arguments) -> str:
    """The message of a command that is refused; its default `--out` is `tmp_path / "out"`."""
    out = () if "--out" in arguments else ("--out", tmp_path / "out")
    before = {path for path in tmp_path.iterdir() if path.name != "logs"}
    start = time.monotonic()
    finished = run_cli(command, *arguments, *out, logs=tmp_path / "logs")
    assert time.monotonic() - start < SECONDS
    assert finished.exit_code == 2, finished
    assert "complete" not in finished.output
    assert {path for path in tmp_path.iterdir() if path.name != "logs"} == before
    return finished.message


# The Hugging Face folder of an import.


def cut_off(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lose_a_shard(folder):
    """Write an index of two files, one of which does not exist."""
    names = list(weights_of(folder))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_index(folder, {name: files[name == names[-1]] for name in names})


def write_index(folder, weight_map):
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def set_config(**fields):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def remove(name):
    def damage(folder):
        (folder / name).unlink()

    return damage


FOLDERS = {
    "truncated": (cut_off, r"model\.safetensors has [\d]+ bytes.*truncated"),
    "shard missing": (lose_a_shard, r"not there: \['model-00002-of-00002\.safetensors'\]"),
    "no weights": (remove("model.safetensors"), r"none of model\.safetensors,"),
    "no config": (remove("config.json"), r"config\.json does not exist"),
    "other family": (set_config(model_type="llama"), r"q_norm\.weight \[16\] is not part of the"),
    "more layers": (set_config(num_hidden_layers=3), r"layers\.2\.mlp\.up_proj\.weight \[96, 64\]"),
    "other width": (set_config(intermediate_size=128), r"has shape \[96, 64\], .*\[128, 64\]"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_no_complete_model(model, tmp_path, case):
    damage, culprit = FOLDERS[case]
    folder = tmp_path / "source" / "model"
    shutil.copytree(model, folder)
    damage(folder)
    message = refusal(tmp_path, "import", "--hf", folder)
    assert re.search(culprit, message), message
    assert str(folder) in message


# The checkpoint of an export.


def cut_off_a_distcp(folder):
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.truncate(10_000)


def change_metadata(change):
    def damage(folder):
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return damage


def lose_a_layer(metadata):
    entry = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    entry.chunks.pop()


CHECKPOINTS = {
    "file truncated": (cut_off_a_distcp, r"__0_0\.distcp has 10000 of \d+ bytes"),
    "file missing": (remove("__0_0.distcp"), r"__0_0\.distcp is not there"),
    "no metadata": (remove(".metadata"), r"not a complete torch_dist checkpoint"),
    "no backends": (remove("metadata.json"), r"not a complete torch_dist checkpoint"),
    "no config": (lambda folder: shutil.rmtree(folder / "hf_config"), r"give --hf-config"),
    "layer missing": (
        change_metadata(lose_a_layer),
        r"is damaged.*\n.*linear_fc2\.weight: \d+ of \d+ elem",
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_is_no_complete_model(imported, tmp_path, case):
    damage, culprit = CHECKPOINTS[case]
    folder = shutil.copytree(imported, tmp_path / "ckpt")
    damage(folder)
    message = refusal(tmp_path, "export", "--megatron", folder)
    assert re.search(culprit, message), message
    assert str(folder) in message


def test_what_is_no_checkpoint_at_all(model, imported, tmp_path):
    for place in (model, imported.parent, tmp_path / "nowhere"):
        message = refusal(tmp_path, "export", "--megatron", place)
        assert f"{place} has no .metadata" in message


# Places to write to.


@pytest.mark.parametrize("name", ["out", "out.partial"])
@pytest.mark.parametrize("command", ["import", "export"])
def test_a_place_that_is_taken(model, imported, tmp_path, command, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").write_text("data")
    source = ("--hf", model) if command == "import" else ("--megatron", imported)
    assert f"{tmp_path / name} exists: " in refusal(tmp_path, command, *source)
    assert (tmp_path / name / "precious").read_text() == "data"


@pytest.mark.parametrize("place", ["/proc/out", "/proc/self/nowhere/out"])
def test_a_place_where_nobody_can_write(model, tmp_path, place):
    message = refusal(tmp_path, "import", "--hf", model, "--out", place)
    assert str(Path(place).parent) in message


def test_a_place_below_a_file(model, tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(tmp_path, "import", "--hf", model, "--out", tmp_path / "file" / "out")
    assert str(tmp_path / "file") in message


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 1 << 16,
        "num_attention_heads": 1 << 9,
        "intermediate_size": 1 << 20,
        "vocab_size": 1 << 22,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = hf_tensors(read_shape(folder))
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    create_file(folder / "model.safetensors", tensors)  # sparse
    message = refusal(tmp_path, "import", "--hf", folder)
    assert re.search(rf"{tmp_path} has [\d,]+ bytes free, but the weights take 1,5[\d,]+", message)


# Options.


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--tp", "3"], "tensor(3) cannot split the model"),
        (["--pp", "3"], "2 layers cannot fill pipeline(3)"),
        (["--vpp", "2"], "set pipeline to 2 or more"),
        (["--ep", "2"], "expert(2) splits experts, but qwen3 has none"),
        (["--hf", "/nowhere"], "/nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_sizes_and_sources_that_do_not_fit(model, tmp_path, options, culprit):
    assert culprit in refusal(tmp_path, "import", "--hf", model, *options)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (["--tp", "two"], "--tp"),
        (["--tp", "0"], "--tp"),
        (["--dtype", "fp8"], "fp8"),
        (["--x"], "-x"),
    ],
    ids=str,
)
def test_options_that_are_none_are_told_with_the_usage(model, tmp_path, options, culprit):
    arguments = ("import", "--hf", model, "--out", tmp_path / "out", *options)
    finished = run_cli(*arguments, logs=tmp_path / "logs")
    assert finished.exit_code == 2
    assert "Usage: " in finished.errors and culprit in finished.errors
    assert not (tmp_path / "out").exists()
