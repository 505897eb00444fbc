"""Models on CUDA: Transformer Engine's layers against torch's, and NCCL between GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import accumulate, pack_all, sequence_logprobs, start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.forward import compute_logprobs
from parallel import ParallelDims

LENGTHS = [[(5, 32), (3, 9), (20, 44)], [(7, 41)]]
# Head size 64, which every attention kernel supports, unless HEADS has another; latents have
# DeepSeek-V3's sizes, since their kernels support few.
SHAPE = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512}
VARIANTS = {
    "torch float32": ["model.dtype=float32", "model.megatron.transformer_impl=local"],
    "torch": ["model.dtype=bfloat16", "model.megatron.transformer_impl=local"],
    "fused": ["model.dtype=bfloat16", "model.megatron.transformer_impl=transformer_engine"],
}
LAYERS = list(VARIANTS)
VARIANTS |= {f"{name} lora": [*given, "lora.r=4"] for name, given in VARIANTS.items()}


def logprobs_and_gradient_norm(
    rank: int, folder: Path, dims: ParallelDims, variant: str
) -> tuple[Tensor | None, float]:
    """Response log-probabilities in packed order, on the last stage, and the gradient norm."""
    policy, groups = start_policy(rank, folder, dims, *VARIANTS[variant])
    share = [
        batch.to(f"cuda:{torch.cuda.current_device()}")
        for batch in pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    ]
    values = compute_logprobs(policy, share, 1.0, groups)
    accumulate(policy, groups, share)
    norm = float(policy.optimizer.step()[1])
    if not policy.is_last_stage:
        return None, norm
    chosen = [whole[batch.loss_mask] for batch, (whole, _) in zip(share, values, strict=True)]
    return torch.cat(chosen).cpu(), norm


def logprobs_after_muon(rank: int, folder: Path, dims: ParallelDims) -> Tensor:
    """Response log-probabilities in packed order, after a step with Muon; every rank is on the last
    stage and has all sequences."""
    muon = "optimizer.optimizer=muon", "optimizer.lr=1e-4"
    policy, groups = start_policy(rank, folder, dims, *VARIANTS["torch float32"], *muon)
    share = [batch.to(f"cuda:{torch.cuda.current_device()}") for batch in pack_all(LENGTHS, dims)]
    accumulate(policy, groups, share)
    policy.optimizer.step()
    values = compute_logprobs(policy, share, 1.0, groups)
    chosen = [whole[batch.loss_mask] for batch, (whole, _) in zip(share, values, strict=True)]
    return torch.cat(chosen).cpu()


def run_on_gpus(folder: Path, dims: ParallelDims, variant: str) -> list[tuple[Tensor, float]]:
    if torch.cuda.device_count() < dims.world_size:
        pytest.skip(f"needs {dims.world_size} GPUs")
    return run_ranks(
        dims.world_size, logprobs_and_gradient_norm, folder, dims, variant, cuda=True, timeout=240
    )


HEADS = {
    "qwen3": {"head_dim": 128},  # as published
    "qwen2": {},
    "glm4_moe_lite": {
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    },
    "deepseek_v3": {
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
OWN_SIZE = ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "nemotron_h")
"""Families with a separate intermediate size of experts."""


def save_model(folder: Path, family: str, **overrides: Any) -> Path:
    heads = HEADS.get(family, {"head_dim": 64})
    experts = {"moe_intermediate_size": 128} if family in OWN_SIZE else {}
    return tiny_model(folder, family, **SHAPE, **heads, **experts, **overrides)


def transformers_logprobs(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat(sequence_logprobs(model, LENGTHS))


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "qwen2",
        "qwen3",
        "olmo2",
        "olmo3",
        "gemma3_text",
        "gpt_oss",
        "minimax_m2",
        "mixtral",
        "qwen3_5_text",
        "qwen3_next",
        *OWN_SIZE,
    ],
)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def expected(folder):
    return transformers_logprobs(folder)


def test_torch_layers_equal_transformers_on_cuda(folder, expected):
    ((logprobs, _),) = run_on_gpus(folder, ParallelDims(), "torch float32")
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def test_transformer_engine_layers_have_the_numbers_of_torch_layers(folder, expected):
    ((plain, plain_norm),) = run_on_gpus(folder, ParallelDims(), "torch")
    ((fused, fused_norm),) = run_on_gpus(folder, ParallelDims(), "fused")
    rounding = (plain - expected).abs().mean()
    assert (fused - expected).abs().mean() < 2 * rounding
    assert fused_norm == pytest.approx(plain_norm, rel=3e-2)


def test_the_gradient_norm_counts_projections_to_latents_once(tmp_path):
    folder = save_model(tmp_path, "deepseek_v3")
    ((_, alone),) = run_on_gpus(folder, ParallelDims(), "fused")
    for _, norm in run_on_gpus(folder, ParallelDims(tensor=2), "fused"):
        assert norm == pytest.approx(alone, rel=3e-2)


def test_transformer_engine_keeps_the_attention_factor_of_yarn(tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 2.0,
    }
    folder = save_model(tmp_path, "qwen3", max_position_embeddings=64, rope_parameters=rope)
    ((logprobs, _),) = run_on_gpus(folder, ParallelDims(), "fused")
    # With torch's layers, 0.07 was measured from rounding, and 1.4 without the factor.
    assert (logprobs - transformers_logprobs(folder)).abs().mean() < 0.2


def gradients(rank: int, folder: Path, *overrides: str) -> tuple[set[str], dict[str, Tensor]]:
    """Names of weights with a gradient that a product added to its buffer, and all gradients."""
    policy, groups = start_policy(rank, folder, ParallelDims(), *overrides)
    batches = [batch.to("cuda") for batch in pack_all(LENGTHS, groups.dims)]
    accumulate(policy, groups, batches)
    named = {k: v for k, v in policy.parameters().items() if v.requires_grad}
    added = {name for name, weight in named.items() if weight.grad_added_to_main_grad}
    return added, {name: weight.main_grad.cpu() for name, weight in named.items()}


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen3", "fused"), ("qwen3_moe", "fused"), ("qwen3", "torch")]
)
def test_fused_products_add_the_same_gradients(tmp_path, family, layers):
    if layers == "torch":
        pytest.importorskip("fused_weight_gradient_mlp_cuda", reason="without Apex")
    folder, fusion = save_model(tmp_path, family), "model.megatron.gradient_accumulation_fusion"
    on, off = ([*VARIANTS[layers], f"{fusion}={value}"] for value in ("true", "false"))
    ((added, fused),) = run_ranks(1, gradients, folder, *on, cuda=True)
    ((none, apart),) = run_ranks(1, gradients, folder, *off, cuda=True)
    assert not none
    assert {name.split(".")[-2] for name in added} >= {"linear_qkv", "linear_proj", "linear_fc2"}
    for name, gradient in apart.items():  # rounded to bfloat16 once per microbatch
        assert (fused[name] - gradient).norm() <= 2**-7 * gradient.norm(), name


def states_before_the_first_step(rank: int, folder: Path) -> list[set[str]]:
    """For each parameter, the keys of its optimizer state before the first step."""
    policy, _ = start_policy(rank, folder, ParallelDims(), *VARIANTS["fused"])
    parts = policy.optimizer.chained_optimizers
    return [set(state) for part in parts for state in part.optimizer.state.values()]


def test_the_fused_adam_can_be_saved_before_its_first_step(folder):
    (states,) = run_ranks(1, states_before_the_first_step, folder, cuda=True)
    assert states
    assert all({"exp_avg", "exp_avg_sq"} <= names for names in states)


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("qwen3", ParallelDims(tensor=2)),
        ("qwen3", ParallelDims(context=2)),
        ("qwen3", ParallelDims(pipeline=2, virtual_pipeline=2)),
        ("qwen3_moe", ParallelDims(data=2, expert=2)),
        ("deepseek_v3", ParallelDims(context=2)),
        ("deepseek_v3", ParallelDims(tensor=2, data=2, expert=2)),
        ("nemotron_h", ParallelDims(tensor=2)),
        ("nemotron_h", ParallelDims(pipeline=2)),
    ],
    ids=str,
)
def test_layouts_of_transformer_engine_agree(tmp_path, family, dims):
    folder = save_model(tmp_path, family)
    expected = transformers_logprobs(folder)
    ((alone, norm),) = run_on_gpus(folder, ParallelDims(), "fused")
    rounding = (alone - expected).abs().mean()
    for logprobs, found in run_on_gpus(folder, dims, "fused"):
        assert found == pytest.approx(norm, rel=3e-2)
        if logprobs is not None and dims.data == 1:
            assert (logprobs - expected).abs().mean() < 2 * rounding


def check_layout(folder: Path, expected: Tensor, dims: ParallelDims) -> None:
    results = run_on_gpus(folder, dims, "torch float32")
    ((_, want),) = run_on_gpus(folder, ParallelDims(), "torch float32")
    for logprobs, norm in results:
        assert norm == pytest.approx(want, rel=1e-5)
        if logprobs is not None and dims.data == 1:
            torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(tensor=2),
        ParallelDims(pipeline=2),
        ParallelDims(pipeline=2, virtual_pipeline=2),
        ParallelDims(context=2),
        ParallelDims(data=2),
        ParallelDims(tensor=2, pipeline=2, context=2),
    ],
    ids=str,
)
def test_layouts_agree_over_nccl(folder, expected, dims):
    check_layout(folder, expected, dims)


def test_matrices_that_muon_sends_over_nccl_move_as_whole_ones(folder, expected):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    alone, split, _ = (
        logprobs
        for dims in (ParallelDims(), ParallelDims(tensor=2))
        for logprobs in run_ranks(dims.world_size, logprobs_after_muon, folder, dims, cuda=True)
    )
    moved = (alone - expected).abs().mean()
    assert (split - alone).abs().mean() < 0.1 * moved, "it rounds products to bfloat16"


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(data=2, expert=2),
        ParallelDims(tensor=2, expert_tensor=1, expert=2),
        ParallelDims(tensor=2, data=2, expert=2),
    ],
    ids=lambda d: f"{d} ep({d.expert}) etp({d.expert_tensor})",
)
def test_expert_layouts_agree_over_nccl(tmp_path, dims):
    folder = save_model(tmp_path, "qwen3_moe")
    check_layout(folder, transformers_logprobs(folder), dims)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])  # with norms near 1, and near 0
def test_adapters_of_fused_layers_have_the_gradient_of_torch_layers(tmp_path, family):
    heads = HEADS.get(family, {"head_dim": 64})
    folder = tiny_model(tmp_path, family, num_hidden_layers=2, hidden_size=256, **heads)
    (exact, norm), (plain, _), (fused, fused_norm) = (
        run_on_gpus(folder, ParallelDims(), f"{name} lora")[0] for name in LAYERS
    )
    assert (fused - exact).abs().mean() < 2 * (plain - exact).abs().mean()
    assert fused_norm == pytest.approx(norm, rel=0.03)
