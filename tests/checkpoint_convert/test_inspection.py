"""`checkpoint-convert inspect`: contents and problems of a folder, from headers alone."""

import re
import shutil

import pytest
import torch

from checkpoint_convert.hf_to_megatron import import_checkpoint
from helpers.conversions import run_cli, variant, weights_of
from helpers.models import tiny_model
from parallel import ParallelDims


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("mixture"), "mixtral")


def inspect(tmp_path, *arguments) -> str:
    finished = run_cli("inspect", *arguments, logs=tmp_path / "logs")
    assert finished.exit_code == 0, finished.errors
    assert finished.errors == ""
    # Collapse the spaces between columns of a table.
    return re.sub(r" +", " ", finished.output)


def as_bin(model, folder):
    shutil.copytree(model, folder)
    torch.save(weights_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def as_checkpoint(model, folder):
    import_checkpoint(model, folder, ParallelDims())
    return folder


FORMATS = {
    "safetensors": lambda model, path: model,
    "bin": as_bin,
    "torch_dist": as_checkpoint,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_told_with_its_shape_and_dtypes(model, tmp_path, name):
    text = inspect(tmp_path, FORMATS[name](model, tmp_path / "model"))
    assert " family qwen3 \n num_layers 2 \n hidden_size 64 \n" in text
    assert " possible --tp [1, 2, 4] \n" in text
    assert f"\n{name}: " in text
    assert text.endswith(" stored tensors are exactly the 25 tensors of the model\n")
    num_parameters = sum(value.numel() for value in weights_of(model).values())
    assert f" float32 25 {num_parameters:,} 0.000 GB \n" in text


def test_mixed_dtypes_are_counted_apart(model, tmp_path):
    def edit(weights):
        weights["lm_head.weight"] = weights["lm_head.weight"].bfloat16()

    text = inspect(tmp_path, variant(model, tmp_path / "edited", edit))
    assert " bfloat16 1 16,000 " in text
    assert " float32 24 " in text


def test_what_a_rank_would_hold_is_told_for_every_stage(mixture, tmp_path):
    text = inspect(tmp_path, mixture, "--tp", "2", "--pp", "2", "--ep", "2")
    assert " moe.num_experts 4 \n moe.experts_per_token 2 \n" in text
    assert " possible --ep [1, 2, 4] \n" in text
    stages = re.findall(r"^ ([01]) (\d) ([\d,]+) 0\.000 GB $", text, re.MULTILINE)
    table = 125 * 64
    attention = (64 + 2 * 32) // 2 * 64 + 64 // 2 * 64 + 2 * 64
    experts = 2 * 3 * (96 // 2) * 64 + 4 * 64
    layer = attention + experts
    assert stages == [("0", "1", f"{table + layer:,}"), ("1", "1", f"{table + layer + 64:,}")]


def test_latents_are_told_and_what_every_rank_holds_of_them(tmp_path):
    model = tiny_model(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    text = inspect(tmp_path, model, "--tp", "2", "--pp", "2")
    assert " latent.query_rank 24 \n latent.rank 32 \n latent.rotary_dim 8 \n" in text
    stages = re.findall(r"^ ([01]) (\d) ([\d,]+) 0\.000 GB $", text, re.MULTILINE)
    down = (24 + 32 + 8) * 64 + 24 + 32  # whole on every rank, with the norms of latents
    up = (4 * 24 * 24 + 4 * (16 + 12) * 32 + 4 * 12 * 64) // 2
    attention, norms, table = down + up, 2 * 64, 125 * 64
    dense = attention + norms + 3 * (96 // 2) * 64
    experts = attention + norms + (8 + 1) * 3 * (48 // 2) * 64 + 8 * 64 + 8
    assert stages == [("0", "1", f"{table + dense:,}"), ("1", "1", f"{table + experts + 64:,}")]


def test_a_checkpoint_without_config_needs_one(model, tmp_path):
    checkpoint = as_checkpoint(model, tmp_path / "ckpt")
    shutil.rmtree(checkpoint / "hf_config")
    finished = run_cli("inspect", checkpoint, logs=tmp_path / "logs")
    assert finished.exit_code == 2
    assert "give --hf-config" in finished.message
    assert "\ntorch_dist: " in inspect(tmp_path, checkpoint, "--hf-config", model)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["--tp", "3"], "tensor(3) cannot split the model"),
        (["--pp", "3"], "2 layers cannot fill pipeline(3)"),
        (["--ep", "3"], "expert(3) cannot split the experts"),
    ],
    ids=str,
)
def test_sizes_that_cannot_split_the_model_are_an_error_after_its_shape(
    mixture, tmp_path, sizes, message
):
    finished = run_cli("inspect", mixture, *sizes, logs=tmp_path / "logs")
    assert finished.exit_code == 2
    assert message in finished.message
    assert "possible --tp" in finished.output


def test_a_config_alone_tells_the_shape_before_the_weights_are_missed(model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    finished = run_cli("inspect", tmp_path, "--tp", "2", logs=tmp_path / "logs")
    assert finished.exit_code == 2
    assert f"{tmp_path} has no weights: none of model.safetensors," in finished.message
    assert "num_attention_heads" in finished.output
    assert "parameters of a rank" in finished.output
