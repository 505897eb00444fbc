"""Quantisation-aware training against a plain straight-through formulation in float64."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert.quantized_model import quantized_model
from helpers.conversions import weights_of
from helpers.models import tiny_model
from helpers.policies import (
    LENGTHS,
    Numbers,
    OracleCase,
    numbers_of,
    pack_all,
    start_policy,
)
from helpers.ranks import run_ranks
from megatron_grpo.policy.optimizer import apply_gradient
from megatron_grpo.policy.quantized import QuantizedPolicy
from parallel import ParallelDims

LAYOUTS = [ParallelDims(), ParallelDims(tensor=2), ParallelDims(pipeline=2, data=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def rounded(weight: Tensor, scheme: str) -> Tensor:
    """What the numbers of each row stand for, with a scale per row."""
    largest = weight.abs().amax(1, keepdim=True)
    if scheme == "int8":
        return (weight / (largest / 127.5)).round().clamp(-128, 127) * (largest / 127.5)
    return (weight / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)


def oracle_of(folder: Path, out: Path, scheme: str) -> OracleCase:
    """Straight through means: the gradient is that of the rounded weights."""
    shutil.copytree(folder, out)
    weights = {
        name: rounded(values, scheme) if name.endswith("_proj.weight") else values
        for name, values in weights_of(folder).items()
    }
    save_file(weights, out / "model.safetensors")
    return OracleCase.of(out)


def numbers(rank: int, folder: Path, dims: ParallelDims, scheme: str) -> Numbers:
    plain, groups = start_policy(rank, folder, dims, "optimizer.lr_warmup_steps=0")
    model = quantized_model(scheme, plain.shape, "F32")
    assert model is not None
    policy = QuantizedPolicy(**vars(plain), quantized=model, groups=groups)
    before = {name: values.detach().clone() for name, values in policy.parameters().items()}
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    found = numbers_of(policy, groups, share)
    for name, values in policy.parameters().items():
        assert torch.equal(values, before[name]), f"{name} is left rounded"
    apply_gradient(policy.optimizer, found[2])
    for name, values in policy.parameters().items():  # a step of Adam is as long as lr
        assert 0 < (values - before[name]).abs().max() < 1.01e-3, name
    return found


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["fp8_channel", "int8"])
def test_loss_and_gradients_are_those_of_the_quantised_weights(folder, tmp_path, scheme):
    """Tensor ranks cut the rows of a scale, and agree on it."""
    case = oracle_of(folder, tmp_path / scheme, scheme)
    plain = OracleCase.of(folder)
    apart = (a - b for a, b in zip(plain.logprobs, case.logprobs, strict=True))
    assert max(each.abs().max() for each in apart) > 1e-3
    for dims in LAYOUTS:
        case.check(run_ranks(dims.world_size, numbers, folder, dims, scheme))
