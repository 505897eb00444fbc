"""The model family that CONTRIBUTING.md adds as an example works and is correct."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.seed_oss import SeedOssConfig

from checkpoint_convert import megatron_layout, read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.hf_export import create_export, write_weights
from checkpoint_convert.weights import read_weights
from helpers import models
from helpers.policies import LENGTHS, pack_all, sequence_logprobs, tiny_config
from helpers.ranks import run_ranks
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.reference import build_reference
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}


def add_example() -> None:
    """Register the example's family, as its file would."""
    code = re.search(
        r"```python\n(# checkpoint_convert/families/.*?)```", CONTRIBUTING.read_text(), re.DOTALL
    )
    namespace = {}
    exec(code[1], namespace)
    FAMILIES["seed_oss"] = namespace["SEED_OSS"]


@pytest.fixture
def example(monkeypatch, tmp_path):
    """A tiny random model of the example's family."""
    monkeypatch.setitem(models.CONFIGS, "seed_oss", SeedOssConfig)
    monkeypatch.setitem(FAMILIES, "seed_oss", None)  # restored afterwards
    add_example()
    return models.tiny_model(tmp_path / "example", "seed_oss", num_hidden_layers=5, **NO_DROPOUT)


def test_the_example_is_converted_bitwise(example, tmp_path):
    shape = read_shape(example)
    dims = ParallelDims(tensor=4, pipeline=2)
    create_export(tmp_path / "out", example, shape, torch.float32)
    for rank in range(dims.world_size):
        layout = megatron_layout(shape, dims, dims.coordinates(rank), transformer_engine=True)
        tensors = {name: torch.empty(size) for name, size in layout.shapes.items()}
        read_weights(example, shape, layout, tensors)
        write_weights(tmp_path / "out", layout, tensors)
    stored, written = (load_file(at / "model.safetensors") for at in (example, tmp_path / "out"))
    assert stored.keys() == written.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in stored.items())


def our_logprobs(rank: int, folder: Path, dims: ParallelDims) -> list[Tensor]:
    setup_device(rank)
    add_example()
    groups, batches = init_groups(dims), pack_all(LENGTHS, dims)
    model = build_reference(tiny_config(folder, dims), read_shape(folder), groups)
    values = compute_logprobs(model, batches, 1.0, groups)
    return [
        whole[batch.loss_mask & (batch.sequence_index == index)]
        for batch, (whole, _) in zip(batches, values, strict=True)
        for index in batch.sequence_index[batch.loss_mask].unique()
    ]


def test_the_example_computes_what_transformers_computes(example):
    with torch.no_grad():
        expected = sequence_logprobs(AutoModelForCausalLM.from_pretrained(example), LENGTHS)
    for logprobs in run_ranks(2, our_logprobs, example, ParallelDims(tensor=2)):
        for got, want in zip(logprobs, expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_the_example_refuses_the_dropout_that_its_family_assumes(example):
    file = example / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in config.items() if k not in NO_DROPOUT}))
    assert {k: getattr(SeedOssConfig.from_pretrained(example), k) for k in NO_DROPOUT} == {
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    }
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1.*residual_dropout is 0\.1"):
        read_shape(example)
