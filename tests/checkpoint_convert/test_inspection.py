"""`checkpoint-convert inspect`: contents and problems of a folder, from headers alone."""

import io
import json
import re
import shutil

import pytest
import torch
from rich.console import Console

from checkpoint_convert.hf_config import read_shape
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.inspection import print_inspection
from helpers.models.conversions import variant, weights_of
from helpers.models.published import write_config
from helpers.models.tiny import tiny_model
from parallel import ParallelDims


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("mixture"), "mixtral")


def inspect(path, *, hf_config=None, output=None, **sizes) -> str:
    output = output or io.StringIO()
    print_inspection(Console(file=output, width=200), path, hf_config, ParallelDims(**sizes))
    # Collapse the spaces between columns of a table.
    return re.sub(r" +", " ", output.getvalue())


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
def test_inspect_shows_format_shape_and_dtypes(model, tmp_path, name):
    text = inspect(FORMATS[name](model, tmp_path / "model"))
    assert " model_type qwen3 \n num_hidden_layers 2 \n hidden_size 64 \n" in text
    assert " possible --tp [1, 2, 4] \n" in text
    assert "vision" not in text
    assert f"\n{name}: " in text
    assert text.endswith(" stored tensors hold exactly the 25 tensors of the model\n")
    num_parameters = sum(value.numel() for value in weights_of(model).values())
    assert f" float32 25 {num_parameters:,} 0.000 GB \n" in text


def test_inspect_counts_each_dtype(model, tmp_path):
    def edit(weights):
        weights["lm_head.weight"] = weights["lm_head.weight"].bfloat16()

    text = inspect(variant(model, tmp_path / "edited", edit))
    assert " bfloat16 1 16,000 " in text
    assert " float32 24 " in text


def test_inspect_shows_the_parameters_of_a_rank_of_every_stage(mixture):
    text = inspect(mixture, tensor=2, pipeline=2, expert=2, data=2)
    assert " num_experts 4 \n num_experts_per_tok 2 \n" in text
    assert " possible --ep [1, 2, 4] \n" in text
    stages = re.findall(r"^ ([01]) (\d) ([\d,]+) 0\.000 GB $", text, re.MULTILINE)
    table = 125 * 64
    attention = (64 + 2 * 32) // 2 * 64 + 64 // 2 * 64 + 2 * 64
    experts = 2 * 3 * (96 // 2) * 64 + 4 * 64
    layer = attention + experts
    assert stages == [("0", "1", f"{table + layer:,}"), ("1", "1", f"{table + layer + 64:,}")]


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Nemotron-3-Nano-30B-A3B"])
def test_layers_without_softmax_attention_are_counted_too(tmp_path, name):
    folder, output = write_config(tmp_path / "model", name), io.StringIO()
    with pytest.raises(ValueError, match="has no weights"):
        inspect(folder, output=output, pipeline=2)
    stages = re.findall(r"^ +[01] +(\d+) +[\d,]+ ", output.getvalue(), re.MULTILINE)
    half = str(read_shape(folder).num_layers // 2)
    assert stages == [half, half]


def test_inspect_counts_dense_and_mtp_layers(tmp_path):
    output = io.StringIO()
    with pytest.raises(ValueError, match="has no weights"):
        sizes = {"num_hidden_layers": 4, "n_routed_experts": 32}
        inspect(write_config(tmp_path / "model", "DeepSeek-V3", **sizes), output=output)
    text = re.sub(r" +", " ", output.getvalue())
    assert " dense MLP in 3 layers \n num_nextn_predict_layers 1 \n" in text


def test_inspect_needs_a_config_for_a_checkpoint(model, tmp_path):
    checkpoint = as_checkpoint(model, tmp_path / "ckpt")
    shutil.rmtree(checkpoint / "hf_config")
    with pytest.raises(ValueError, match="give --hf-config"):
        inspect(checkpoint)
    assert "\ntorch_dist: " in inspect(checkpoint, hf_config=model)


def test_inspect_shows_the_shape_before_it_refuses_sizes(mixture):
    output = io.StringIO()
    with pytest.raises(ValueError, match=r"tensor\(3\) cannot split the model"):
        inspect(mixture, output=output, tensor=3)
    assert "possible --tp" in output.getvalue()


def test_inspect_shows_the_shape_before_it_misses_weights(model, tmp_path):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    output = io.StringIO()
    with pytest.raises(ValueError, match=f"{tmp_path} has no weights: none of model.safetensors,"):
        inspect(tmp_path, output=output, tensor=2)
    assert "num_attention_heads" in output.getvalue()
    assert "parameters of a rank" in output.getvalue()


def test_inspect_shows_the_run_of_a_checkpoint_that_must_be_whole(model, tmp_path):
    checkpoint = as_checkpoint(model, tmp_path / "step_6")
    cursor = {"generation": 1, "iteration": 1, "minibatch": 0}
    record = {"state": {"step": 6}, "cursor": cursor, "versions": {"torch": "2.13.0"}}
    grpo = {"num_generations": 4, "generation_batch_size": 16, "steps_per_generation": 2}
    cfg = {
        "model": {"path": "models/tiny", "dtype": "float32"},
        "data": {"path": "rows.jsonl"},
        "train": {"num_steps": 40},
        "optimizer": {"optimizer": "adam"},
        "grpo": {**grpo, "num_iterations": 2, "loss_type": "dapo"},
        "parallel": {
            f"{axis}_parallel_size": 2 if axis == "tensor" else 1
            for axis in ("tensor", "pipeline", "context", "data", "expert")
        },
    }
    (checkpoint / "trainer.json").write_text(json.dumps(record))
    (checkpoint / "config.yaml").write_text(json.dumps(cfg))
    files = {file.name: {"num_bytes": file.stat().st_size} for file in checkpoint.glob("*.*")}
    (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    text = inspect(checkpoint)
    for line in (
        "optimizer steps 6 of train.num_steps 40",
        "trained on 32 completions, 48 with repetitions, 4 for each prompt",
        "model.path models/tiny",
        "saved by ranks 2 \n parallel.tensor_parallel_size 2 \n on disk 0.000 GB in ",
        "saved with torch 2.13.0",
    ):
        assert line in text
    for name in (".metadata", "config.yaml", "trainer.json"):
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(whole[:99])
        message = rf"step_6 is not whole: {name} has \d\d of [\d,]+ bytes"
        with pytest.raises(ValueError, match=message):
            inspect(checkpoint)
        (checkpoint / name).write_bytes(whole)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    checkpoint.rename(tmp_path / "run" / "checkpoints" / "step_6")
    (tmp_path / "run" / "checkpoints" / "LATEST").write_text("step_6")
    with pytest.raises(ValueError, match=r"is a folder of checkpoints; .*\['step_6'\]"):
        inspect(tmp_path / "run")
