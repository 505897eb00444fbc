"""Mistakes of users: exit code 2, one message that names the culprit, and nothing written."""

import json
import pickle
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.formats.safetensors_file import create_file
from helpers.conversions import Touch, run_cli, variant, weights_of
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


@pytest.fixture
def canary(tmp_path):
    """A file that loading a malicious pickle would create, as torch.load proves here."""
    path = tmp_path / "canary"
    torch.save(Touch(path), tmp_path / "attack.pt")
    torch.load(tmp_path / "attack.pt", weights_only=False)
    assert path.exists(), "the attack does not work"
    path.unlink()
    (tmp_path / "attack.pt").unlink()
    return path


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


def cut_off_in_the_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def lose_a_shard(folder):
    """Write an index of two files, one of which does not exist."""
    names = list(weights_of(folder))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    write_index(folder, {name: files[name == names[-1]] for name in names})


def leave_the_folder(folder):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    write_index(folder, dict.fromkeys(weights_of(folder.parent), "../model.safetensors"))


def write_index(folder, weight_map):
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def set_config(**fields):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def break_config(folder):
    (folder / "config.json").write_text('{"model_type": "qwen3",')


def remove(name):
    def damage(folder):
        (folder / name).unlink()

    return damage


FOLDERS = {
    "truncated": (cut_off, r"model\.safetensors has [\d]+ bytes.*truncated"),
    "header truncated": (cut_off_in_the_header, r"model\.safetensors is not a safetensors file"),
    "shard missing": (lose_a_shard, r"not there: \['model-00002-of-00002\.safetensors'\]"),
    "outside": (leave_the_folder, r"files outside the folder: \['\.\./model\.safetensors'\]"),
    "no weights": (remove("model.safetensors"), r"none of model\.safetensors,"),
    "no config": (remove("config.json"), r"config\.json does not exist"),
    "broken config": (break_config, r"config\.json is not valid JSON"),
    "unknown family": (set_config(model_type="gpt2"), r"model_type 'gpt2' is not supported"),
    "other family": (set_config(model_type="llama"), r"q_norm\.weight \[16\] is not part of the"),
    "more layers": (set_config(num_hidden_layers=3), r"layers\.2\.mlp\.up_proj\.weight \[96, 64\]"),
    "other width": (set_config(intermediate_size=128), r"has shape \[96, 64\], .*\[128, 64\]"),
    "other numbers": (set_config(hidden_act="gelu"), r"hidden_act is 'gelu'"),
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


def replaced(name, change):
    def edit(weights):
        weights[name] = change(weights[name])

    return edit


NORM = "model.layers.1.input_layernorm.weight"
WEIGHTS = {
    "missing": (lambda weights: weights.pop(NORM), f"{NORM} [64] is missing"),
    "extra": (lambda weights: weights.update(v_head=torch.ones(3)), "v_head [3] is not part"),
    "shape": (
        replaced(NORM, lambda t: t.repeat(2)),
        f"{NORM} has shape [128], config.json requires",
    ),
    "transposed": (
        replaced("lm_head.weight", lambda t: t.T.contiguous()),
        "lm_head.weight has shape [64, 250], config.json requires [250, 64]",
    ),
    "I64": (replaced(NORM, lambda t: t.long()), f"{NORM} has dtype I64, supported: ["),
    "F8": (replaced(NORM, lambda t: t.to(torch.float8_e4m3fn)), f"{NORM} has dtype F8_E4M3, supp"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_are_not_those_of_the_config(model, tmp_path, case):
    edit, culprit = WEIGHTS[case]
    folder = variant(model, tmp_path / "source", edit)
    message = refusal(tmp_path, "import", "--hf", folder)
    assert culprit in message
    assert str(folder) in message


def test_every_fault_is_listed(model, tmp_path):
    def edit(weights):
        weights.pop(NORM)
        weights["v_head"] = torch.ones(3)

    message = refusal(tmp_path, "import", "--hf", variant(model, tmp_path / "source", edit))
    assert f"\n  {NORM} [64] is missing" in message
    assert "\n  v_head [3] is not part of the model" in message


def test_a_bin_file_that_calls_something(model, tmp_path, canary):
    folder = shutil.copytree(model, tmp_path / "source")
    weights = {**weights_of(folder), "bomb": Touch(canary)}
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    message = refusal(tmp_path, "import", "--hf", folder)
    assert "pytorch_model.bin" in message and "io.open, which is not allowed" in message
    assert not canary.exists()


def test_a_garbage_tokenizer_is_carried_and_does_not_matter(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "source")
    (folder / "tokenizer.json").write_bytes(bytes(range(256)))
    for arguments in (
        ("import", "--hf", folder, "--out", tmp_path / "ckpt"),
        ("export", "--megatron", tmp_path / "ckpt", "--out", tmp_path / "hf"),
    ):
        assert run_cli(*arguments, logs=tmp_path / "logs").exit_code == 0
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == bytes(range(256))


# The checkpoint of an export.


def refused_export(imported, tmp_path, damage) -> str:
    folder = shutil.copytree(imported, tmp_path / "ckpt")
    damage(folder)
    message = refusal(tmp_path, "export", "--megatron", folder)
    assert str(folder) in message
    return message


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


def lie_about_a_dtype(metadata):
    entry = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    entry.properties.dtype = torch.bfloat16


def lose_a_layer(metadata):
    entry = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
    entry.chunks.pop()


def forget_a_key(metadata):
    metadata.state_dict_metadata.pop("decoder.final_layernorm.weight")


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
    "key missing": (change_metadata(forget_a_key), r"final_layernorm\.weight \[64\] is missing"),
    "other dtype": (change_metadata(lie_about_a_dtype), r"holds F32 \[64\], not decoder\.final_la"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_is_no_complete_model(imported, tmp_path, case):
    damage, culprit = CHECKPOINTS[case]
    message = refused_export(imported, tmp_path, damage)
    assert re.search(culprit, message), message


def test_a_checkpoint_of_another_model(imported, tmp_path):
    other = tiny_model(tmp_path / "other", "qwen2")
    message = refusal(tmp_path, "export", "--megatron", imported, "--hf-config", other)
    assert f"{other} describes another model than {imported};" in message
    assert "\n  attention_bias: False, True" in message
    nameless = shutil.copytree(imported, tmp_path / "nameless")
    shutil.rmtree(nameless / "hf_config")
    message = refusal(tmp_path, "export", "--megatron", nameless, "--hf-config", other)
    assert f"{nameless} is not a checkpoint of the qwen2 model" in message
    assert "linear_qkv.bias [2, 128] is missing" in message
    assert "q_layernorm.weight [2, 16] is not part of the model" in message


def test_metadata_that_call_something(imported, tmp_path, canary):
    def damage(folder):
        (folder / ".metadata").write_bytes(pickle.dumps(Touch(canary)))

    assert "io.open, which is not allowed" in refused_export(imported, tmp_path, damage)
    assert not canary.exists()


def test_a_chunk_that_calls_something(imported, tmp_path, canary):
    def damage(folder):
        file = folder / "__0_0.distcp"
        start = file.stat().st_size
        with file.open("ab") as opened:
            torch.save(Touch(canary), opened)

        def point_there(metadata):
            for index, place in metadata.storage_data.items():
                if index.fqn == "output_layer.weight":
                    place.offset, place.length = start, file.stat().st_size - start

        change_metadata(point_there)(folder)

    message = refused_export(imported, tmp_path, damage)
    assert "__0_0.distcp" in message and "io.open, which is not allowed" in message
    assert not canary.exists()


def test_common_state_that_calls_something_is_not_read(imported, tmp_path, canary):
    folder = shutil.copytree(imported, tmp_path / "ckpt")
    torch.save({"args": Touch(canary)}, folder / "common.pt")
    out = ("--out", tmp_path / "hf")
    finished = run_cli("export", "--megatron", folder, *out, logs=tmp_path / "logs")
    assert finished.exit_code == 0
    assert not canary.exists()


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


@pytest.mark.parametrize("place", ["/proc/out", "/sys/out", "/proc/self/nowhere/out"])
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


@pytest.mark.parametrize("size", ["5", "GB", "five GB", "-1GB", "0GB", "5XB", "1e9", ""])
def test_a_shard_size_that_is_none(imported, tmp_path, size):
    message = refusal(tmp_path, "export", "--megatron", imported, f"--max-shard-size={size}")
    assert message.startswith(f"--max-shard-size {size!r} is not a size: write it like 5GB")


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
