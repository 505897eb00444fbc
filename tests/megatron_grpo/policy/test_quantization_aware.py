"""Quantisation-aware training against a plain straight-through formulation in float64."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.quantized.model import quantized_model
from helpers.models.conversions import weights_of
from helpers.models.tiny import tiny_model
from helpers.oracle import adapters
from helpers.oracle.adapters import Boxes, whole
from helpers.oracle.policies import (
    LENGTHS,
    Numbers,
    OracleCase,
    accumulate,
    checkpoints_of,
    layout_name,
    load_oracle,
    logprobs_of,
    numbers_of,
    pack_all,
    save_checkpoint,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.policy.model import build_policy
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from megatron_grpo.policy.quantized import QuantizedPolicy
from megatron_grpo.policy.reference import reference_of
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, destroy_groups, init_groups

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Case:
    """A model of `MODELS`, how its weights are quantised, and the layout that trains it."""

    model: str
    scheme: str
    dims: ParallelDims

    def __str__(self) -> str:
        return f"{self.model}, {self.scheme}, {layout_name(self.dims)}"


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tied": True},
    # Tensor ranks cut the second of three blocks of a gate's rows; blocks of columns are partial.
    "qwen3 of blocks": {
        "seed": 1,
        "hidden_size": 192,
        "head_dim": 64,
        "intermediate_size": 384,
    },
    "qwen3_moe": {},
    "deepseek_v3": {},
}
TENSOR, STAGES, CONTEXT = (ParallelDims(**{each: 2}) for each in ("tensor", "pipeline", "context"))
EXPERTS = ParallelDims(data=2, expert=2)
CASES = [
    Case("qwen3", "int8", TENSOR),
    Case("qwen3", "int8", STAGES),
    Case("qwen3", "fp8_channel", TENSOR),
    Case("qwen3", "fp8_channel", CONTEXT),
    Case("qwen3 of blocks", "fp8", TENSOR),
    Case("qwen3_moe", "fp8_channel", TENSOR),
    Case("qwen3_moe", "int8", EXPERTS),
    Case("deepseek_v3", "fp8_channel", ParallelDims(tensor=2, expert=2, expert_tensor=1)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Of `MODELS`. In the first one, the largest of each row is positive: see ModelOpt's test."""
    found = {
        name: tiny_model(tmp_path_factory.mktemp("model"), name.split()[0], **fields)
        for name, fields in MODELS.items()
    }
    weights = weights_of(found["qwen3"])
    for name in filter(is_quantized, weights):
        largest = weights[name].gather(1, weights[name].abs().argmax(1, keepdim=True))
        weights[name] *= largest.sign()
    save_file(weights, found["qwen3"] / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def plain(folders) -> dict[str, list[Tensor]]:
    """Log-probabilities of the models, whose weights are not rounded."""
    return {name: OracleCase.of(folder).logprobs for name, folder in folders.items()}


def is_quantized(name: str) -> bool:
    return "_proj" in name and name.endswith(".weight")


def rounded_block(values: Tensor) -> Tensor:
    return rounded(values.reshape(1, -1), "fp8_channel").view_as(values)


def rounded(weight: Tensor, scheme: str) -> Tensor:
    """What the numbers of each row, or of each block of 128 x 128, stand for."""
    if scheme == "fp8":
        parts = [rows.split(128, dim=1) for rows in weight.split(128)]
        return torch.cat([torch.cat([*map(rounded_block, row)], dim=1) for row in parts])
    largest = weight.abs().amax(1, keepdim=True)
    if scheme == "int8":
        return (weight / (largest / 127.5)).round().clamp(-128, 127) * (largest / 127.5)
    return (weight / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)


def oracle_of(case: Case, folder: Path, out: Path) -> OracleCase:
    """Straight through means: the gradient is that of the rounded weights."""
    shutil.copytree(folder, out)
    weights = {
        name: rounded(values, case.scheme) if is_quantized(name) else values
        for name, values in weights_of(folder).items()
    }
    save_file(weights, out / "model.safetensors")
    return OracleCase.of(out)


def aware(case: Case, folder: Path, groups: Groups, *overrides: str) -> QuantizedPolicy:
    model = quantized_model(case.scheme, read_shape(folder), "F32")
    assert model is not None
    cfg = tiny_config(folder, case.dims, "optimizer.lr_warmup_steps=0", *overrides)
    plain = build_policy(cfg, read_shape(folder), groups)
    return QuantizedPolicy(**vars(plain), quantized=model, groups=groups)


def trained(policy: QuantizedPolicy, groups: Groups) -> Numbers:
    """What it computes for the gradient with which it then makes a step."""
    before = {name: values.detach().clone() for name, values in policy.parameters().items()}
    share = pack_all(LENGTHS, groups.dims)[groups.coordinates.data :: groups.dims.data]
    found = numbers_of(policy, groups, share)
    for name, values in policy.parameters().items():
        assert torch.equal(values, before[name]), f"{name} is left rounded"
    apply_gradient(policy.optimizer, found[2])
    for name, values in policy.parameters().items():  # a step of Adam is as long as lr
        if values.requires_grad:
            assert 0 < (values - before[name]).abs().max() < 1.01e-3, name
    return found


def numbers(rank: int, folders: dict[str, Path]) -> list[Numbers]:
    """Of every case, one after the other."""
    setup_device(rank)
    found = []
    for case in CASES:
        groups = init_groups(case.dims)
        found.append(trained(aware(case, folders[case.model], groups), groups))
        destroy_groups()
    return found


@pytest.fixture(scope="module")
def ranks(folders) -> list[list[Numbers]]:
    """The numbers of both ranks, by case."""
    return [list(each) for each in zip(*run_ranks(2, numbers, folders), strict=True)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(str, CASES))
def test_loss_and_gradients_are_those_of_the_quantised_weights(
    folders, plain, ranks, tmp_path, number
):
    """Tensor ranks cut rows and blocks of a scale, and agree on it."""
    case = CASES[number]
    expected = oracle_of(case, folders[case.model], tmp_path / "quantised")
    apart = (a - b for a, b in zip(plain[case.model], expected.logprobs, strict=True))
    assert max(each.abs().max() for each in apart) > 1e-3
    expected.check(ranks[number])


def modelopt_model(folder: Path, scheme: str) -> Any:
    """The model with ModelOpt's quantizers of weights in its linear layers."""
    quantization = pytest.importorskip("modelopt.torch.quantization")
    how: dict[str, Any] = {"num_bits": (4, 3), "axis": 0}
    if scheme == "int8":
        how = {"num_bits": 8, "narrow_range": False, "axis": 0}
    if scheme == "fp8":
        how = {"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}}
    config = {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*_proj.weight_quantizer", "cfg": how},
        ],
        "algorithm": "max",
    }
    model = quantization.quantize(load_oracle(folder), config, lambda model: None)
    if scheme == "int8":  # its largest weight becomes 127, that of compressed-tensors 127.5
        for name, module in model.named_modules():
            if name.endswith("_proj.weight_quantizer"):
                module.amax = module.amax * (127 / 127.5)
    return model


@pytest.mark.parametrize("scheme", ["int8", "fp8_channel", "fp8"])
def test_they_are_those_of_modelopt(folders, ranks, scheme):
    """Its quantizers in a model of transformers, in one process.

    It multiplies by the inverse of a scale, so that it may round what is half-way differently. No
    weight of these models is: the largest of a row, half-way in INT8, are positive, and clamped.
    """
    model = "qwen3 of blocks" if scheme == "fp8" else "qwen3"
    expected = OracleCase.of(folders[model], model=modelopt_model(folders[model], scheme))
    for case, found in zip(CASES, ranks, strict=True):
        if (case.model, case.scheme) == (model, scheme):
            expected.check(found)


def boxes_of(policy: QuantizedPolicy) -> Boxes:
    weights = policy.parameters()
    return [
        (piece.tensor, piece.box, weights[piece.local].detach()[piece.local_box.slices].clone())
        for piece in policy.layout.pieces
        if not piece.is_replica
    ]


def weights_in_run(rank: int, run: Path, folder: Path, case: Case) -> tuple[Boxes, Boxes]:
    """The weights after the first step, which may be loaded, and those it then computes with."""
    setup_device(rank)
    groups = init_groups(case.dims)
    policy = aware(case, folder, groups)
    if run.exists():
        checkpoints_of(run, policy, folder, case.dims).load()
    else:
        trained(policy, groups)
        save_checkpoint(run, 1, policy, folder, case.dims)
    with policy.computing():
        computed = boxes_of(policy)
    return boxes_of(policy), computed


def test_a_run_resumes_at_another_layout_bit_for_bit(folders, tmp_path):
    saved, resumed = (
        run_ranks(2, weights_in_run, tmp_path / "run", folders["qwen3"], case) for case in CASES[:2]
    )
    for before, after in zip(zip(*saved, strict=True), zip(*resumed, strict=True), strict=True):
        expected, found = whole([*before]), whole([*after])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def with_adapters(rank: int, folder: Path, case: Case) -> dict[str, Any]:
    """Log-probabilities by sequence, and then those of the reference; gradients and values of
    adapters, and the merged weights."""
    setup_device(rank)
    groups = init_groups(case.dims)
    options = adapters.options("deepseek_v3" if case.model == "deepseek_v3" else "qwen3_moe")
    policy = aware(case, folder, groups, *options)
    adapters.set_b(policy)
    share = pack_all(LENGTHS, groups.dims)[groups.coordinates.data :: groups.dims.data]
    merged = policy.served(LoraConfig(sync="merged"))
    found: dict[str, Any] = {"logprobs": logprobs_of(policy, groups, share)}
    reference = reference_of(policy, tiny_config(folder, case.dims, *options), groups)
    found["reference"] = logprobs_of(reference, groups, share)
    found["merged"] = [
        (piece.tensor, piece.box, merged[piece.local].detach()[piece.local_box.slices].clone())
        for piece in policy.layout.pieces
        if not piece.is_replica
    ]
    accumulate(policy, groups, share)
    gradient_norm(policy.optimizer)
    found["gradients"] = adapters.boxes_of(policy, adapters.gathered_gradients(policy))
    found["values"] = adapters.boxes_of(policy, policy.adapters.parameters())
    return found


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_with_adapters_it_is_their_sum_with_the_weights_that_is_quantised(
    folders, plain, tmp_path, case
):
    """Some layers have none. The reference computes with neither."""
    oracle_of(case, folders[case.model], tmp_path / "quantised")
    ranks = run_ranks(2, with_adapters, folders[case.model], case)
    merged, values, found = (
        whole([rank[key] for rank in ranks]) for key in ("merged", "values", "gradients")
    )
    adapted = {name.removeprefix("base_model.model.").replace(".lora_A", "") for name in values}
    numbers = {n: rounded(each, case.scheme) for n, each in merged.items() if n in adapted}
    expected, _, gradients, _ = adapters.oracle(tmp_path / "quantised", values, 2.0, numbers)
    for key, of_oracle in (("logprobs", expected), ("reference", plain[case.model])):
        for index, logprobs in (each for rank in ranks for each in rank[key].items()):
            torch.testing.assert_close(logprobs.double(), of_oracle[index], atol=1e-5, rtol=0)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-5, name
