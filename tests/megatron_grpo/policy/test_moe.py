"""Mixtures of experts: losses of routers, untrained parameters, and checkpoints of all layers.

Rows of test_model.py have log-probabilities and gradients.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.models.conversions import read_checkpoint
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LOSS_WEIGHT,
    Lengths,
    Numbers,
    assert_equal_tensors,
    check_gradients,
    checkpoints_of,
    gradients_of,
    layout,
    load_oracle,
    numbers_of,
    own_share,
    pack_all,
    random_sequences,
    save_checkpoint,
    sequence_logprobs,
    start_policy,
    take_step,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("moe"), "qwen3_moe", num_hidden_layers=4, num_experts=8
    )


# Nothing here is padded, at any of the layouts: routers' losses count padding as tokens.
WHOLE_LENGTHS: Lengths = [[(8, 32), (4, 8), (20, 44)], [(8, 40)], [(9, 7), (9, 7)], [(4, 8)]]
BALANCE, Z_LOSS = 0.1, 0.01
ROUTER_LOSSES = [
    f"model.megatron.moe_aux_loss_coeff={BALANCE}",
    f"model.megatron.moe_z_loss_coeff={Z_LOSS}",
]


def router_losses(model: AutoModelForCausalLM, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Both losses, averaged over the tokens of all microbatches and added up over routers.

    Balance: Switch Transformer (arXiv:2101.03961), equations 4 to 6; z: ST-MoE (arXiv:2202.08906),
    equation 5.
    """
    sequences = iter(random_sequences(lengths))
    topk, num_tokens = model.config.num_experts_per_tok, 0
    total_balance = total_z = torch.zeros(())
    for microbatch in lengths:
        outputs = [
            model(input_ids=next(sequences).tokens[None], output_router_logits=True).router_logits
            for _ in microbatch
        ]
        for layer in zip(*outputs, strict=True):
            logits = torch.cat(layer)
            probabilities = logits.softmax(dim=-1)
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(topk).indices, 1.0)
            balance = (
                logits.shape[1] * (chosen.mean(dim=0) / topk * probabilities.mean(dim=0)).sum()
            )
            total_balance = total_balance + len(logits) * balance
            total_z = total_z + (logits.logsumexp(dim=-1) ** 2).sum()
        num_tokens += len(logits)
    return total_balance / num_tokens, total_z / num_tokens


def losses_on_rank(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[Numbers, dict[str, float]]:
    """A policy's numbers, and router metrics of a step on the same tokens: the step before it, on
    others, has a learning rate of 0."""
    sizes = "grpo.generation_batch_size=8", "grpo.num_generations=2"
    overrides = (*overrides, *sizes, "grpo.beta=0", "optimizer.lr_warmup_steps=1")
    policy, groups = start_policy(rank, folder, dims, *overrides)
    batches = own_share(pack_all(WHOLE_LENGTHS, dims), groups)
    numbers = numbers_of(policy, groups, batches)
    others = [replace(batch, tokens=batch.tokens.flip(0)) for batch in batches]
    cfg, skipped = tiny_config(folder, dims, *overrides), SkippedSteps(1)
    for each in (others, batches):
        report = train_step(policy, each, cfg, groups, LossFunction.of(cfg.grpo), skipped, 0.0)
    metrics = {name: value for name, value in report.metrics.items() if name.startswith("moe/")}
    return numbers, metrics


def options(*names: str) -> list[str]:
    return [f"model.megatron.{name}" for name in names]


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "recomputed"),
    [
        pytest.param(
            "",
            ["granularity=full", "method=uniform", "num_layers=1"],
            marks=pytest.mark.slow,
        ),
        ("pp2 vpp2 dp2 ep2", []),
        ("tp2 cp2 ep2", ["granularity=selective", "modules=[moe]"]),
    ],
)
def test_router_losses_are_weighted_by_tokens_and_reported(mixture, at, recomputed):
    dims, model = layout(at), load_oracle(mixture)
    balance, z_loss = router_losses(model, WHOLE_LENGTHS)
    means = [float(loss.detach()) / model.config.num_hidden_layers for loss in (balance, z_loss)]
    logprobs = torch.cat(sequence_logprobs(model, WHOLE_LENGTHS)).sum()
    expected = gradients_of(model, BALANCE * balance + Z_LOSS * z_loss - LOSS_WEIGHT * logprobs)
    given = [*ROUTER_LOSSES, *options(*(f"recompute_{each}" for each in recomputed))]
    ranks = run_ranks(dims.world_size, losses_on_rank, mixture, dims, *given)
    check_gradients([numbers for numbers, _ in ranks], expected)
    for _, found in ranks:
        reported = [found["moe/load_balancing_loss"], found["moe/z_loss"]]
        assert reported == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["moe_z_loss_coeff=0.1"], ["moe/z_loss"]),
        (["moe_aux_loss_coeff=0.1"], ["moe/load_balancing_loss"]),
        (["moe_aux_loss_coeff=0.1", "moe_router_load_balancing_type=none"], []),
    ],
)
def test_router_losses_that_are_off_are_not_reported(mixture, overrides, names):
    ((_, found),) = run_ranks(1, losses_on_rank, mixture, ParallelDims(), *options(*overrides))
    assert list(found) == names


def kept_in_a_step(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> tuple[set[str], set[str]]:
    """Parameters of this rank that a step leaves unchanged, and all its parameters."""
    policy, groups = start_policy(rank, folder, dims, "optimizer.weight_decay=0.1", *overrides)
    before = {name: values.detach().clone() for name, values in policy.parameters().items()}
    take_step(policy, groups)
    after = policy.parameters()
    return {name for name in before if torch.equal(after[name], before[name])}, {*before}


@pytest.mark.parametrize("at", ["tp2 etp1", "dp2 ep2"])
@pytest.mark.parametrize(
    ("family", "overrides", "parts", "number"),
    [
        ("qwen3_moe", ["model.freeze_moe_router=true"], [".router."], 4),
        ("deepseek_v32", [], [".indexer.", ".expert_bias"], 4 * 5 + 3),
    ],
)
def test_step_leaves_routers_or_indexers(tmp_path, family, overrides, parts, number, at):
    folder = tiny_model(tmp_path, family, num_hidden_layers=4)
    for kept, names in run_ranks(2, kept_in_a_step, folder, layout(at), *overrides):
        assert kept == {name for name in names if any(part in name for part in parts)}
        assert len(kept) == number


def train_and_save(rank: int, folder: Path, dims: ParallelDims, run: Path, *overrides: str) -> None:
    policy, groups = start_policy(rank, folder, dims, *overrides)
    for _ in range(2):
        take_step(policy, groups)
    save_checkpoint(run, 2, policy, folder, dims)


def load_and_save(
    rank: int, folder: Path, dims: ParallelDims, run: Path, again: Path, *overrides: str
) -> None:
    policy, _ = start_policy(rank, folder, dims, *overrides)
    state = checkpoints_of(run, policy, folder, dims).load()
    save_checkpoint(again, state.step, policy, folder, dims)


@dataclass(frozen=True)
class Stored:
    """Layouts at which a checkpoint is saved and loaded, and its contents."""

    saved_at: str
    loaded_at: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of layers by Megatron-Core's names for Transformer Engine."""
    fixed: dict[str, str] = field(default_factory=dict)
    """Untrained parameters, which have no moments, and their names in the weight files."""
    overrides: tuple[str, ...] = ()


STORED = {
    "qwen3_moe": Stored(
        "dp2 ep2",
        "tp2 etp1",
        {
            "pre_mlp_layernorm.weight": (4, 64),
            "mlp.experts.experts.linear_fc1.weight": (4, 8, 2 * 48, 64),
            "mlp.experts.experts.linear_fc2.weight": (4, 8, 64, 48),
        },
    ),
    "qwen3_moe, frozen": Stored(
        "dp2 ep2",
        "tp2 etp1",
        fixed={"mlp.router.weight": "model.layers.{}.mlp.gate.weight"},
        overrides=("model.freeze_moe_router=true",),
    ),
    "glm_moe_dsa": Stored(
        "dp2 ep2",
        "pp2",
        fixed={
            f"2.self_attention.indexer.{name}": f"model.layers.2.self_attn.indexer.{name}"
            for name in (
                "wq_b.weight",
                "wk.weight",
                "k_norm.weight",
                "k_norm.bias",
                "weights_proj.weight",
            )
        },
    ),
    "glm4_moe": Stored(
        "pp2 vpp2 dp2 ep2",
        "tp2",
        {
            "0.mlp.linear_fc1.weight": (2 * 96, 64),
            "3.mlp.shared_experts.linear_fc1.weight": (2 * 96, 64),
            "3.mlp.experts.experts.linear_fc2.weight": (4, 64, 48),
        },
        fixed={
            f"{n}.mlp.router.expert_bias": f"model.layers.{n}.mlp.gate.e_score_correction_bias"
            for n in (1, 2, 3)
        },
    ),
    "deepseek_v3": Stored(
        "tp2 dp2 ep2",
        "pp2",
        {
            "3.input_layernorm.weight": (64,),
            "3.self_attention.linear_q_down_proj.weight": (24, 64),
            "3.self_attention.linear_q_up_proj.layer_norm_weight": (24,),
            "3.self_attention.linear_q_up_proj.weight": (4 * 24, 24),
            "3.self_attention.linear_kv_down_proj.weight": (32 + 8, 64),
            "3.self_attention.linear_kv_up_proj.layer_norm_weight": (32,),
            "3.self_attention.linear_kv_up_proj.weight": (4 * (16 + 12), 32),
            "3.self_attention.linear_proj.weight": (64, 4 * 12),
        },
    ),
    "nemotron_h": Stored(
        "tp2 cp2 ep2 etp1",
        "pp2",
        {
            "0.self_attention.in_proj.layer_norm_weight": (64,),
            "0.self_attention.in_proj.weight": (2 * 8 * 12 + 2 * 4 * 8 + 8, 64),
            "0.self_attention.conv1d_bias": (8 * 12 + 2 * 4 * 8,),
            "0.self_attention.D": (8,),
            "0.self_attention.out_norm_weight": (8 * 12,),
            "1.pre_mlp_layernorm.weight": (64,),
            "1.mlp.experts.experts.linear_fc1.weight": (4, 48, 64),
            "2.self_attention.linear_qkv.layer_norm_weight": (64,),
            "3.mlp.linear_fc1.layer_norm_weight": (64,),
            "3.mlp.linear_fc1.weight": (96, 64),
        },
    ),
    "qwen3_next": Stored(
        "tp2 cp2 ep2 etp1",
        "pp2",
        {
            "0.self_attention.in_proj.layer_norm_weight": (64,),
            "0.self_attention.in_proj.weight": (4 * (2 * 8 + 4 * 12 + 4), 64),
            "0.self_attention.conv1d_weight": (4 * (2 * 8 + 2 * 12), 1, 4),
            "0.self_attention.A_log": (8,),
            "0.self_attention.out_norm_weight": (12,),
            "0.self_attention.out_proj.weight": (64, 8 * 12),
            "0.mlp.shared_experts.gate_weight": (1, 64),
            "3.self_attention.linear_qkv.weight": ((2 * 4 + 2) * 16, 64),
        },
    ),
}
LONG = ("qwen3_moe, frozen", "glm_moe_dsa", "deepseek_v3")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in LONG else [pytest.mark.slow]) for name in STORED],
)
def test_checkpoint_loads_at_another_layout_bit_by_bit(tmp_path, name):
    stored, run, again = STORED[name], tmp_path / "run", tmp_path / "again"
    fields = {"full_attention_interval": 4} if name == "qwen3_next" else {}
    fields |= {"num_experts": 8} if name == "qwen3_moe" else {}
    fields |= {"num_key_value_heads": 1} if name == "qwen3_next" else {}
    folder = tiny_model(tmp_path / "model", name.split(",")[0], num_hidden_layers=4, **fields)
    first, second = layout(stored.saved_at), layout(stored.loaded_at)
    run_ranks(first.world_size, train_and_save, folder, first, run, *stored.overrides)
    run_ranks(second.world_size, load_and_save, folder, second, run, again, *stored.overrides)
    before, after = (read_checkpoint(at / "checkpoints" / "step_2") for at in (run, again))
    assert_equal_tensors(after, before)
    for prefix in ("", "optimizer.state.exp_avg."):
        for key, size in stored.shapes.items():
            assert before[f"{prefix}decoder.layers.{key}"].shape == size
    weights = load_file(folder / "model.safetensors")
    for key, name_in_file in stored.fixed.items():
        key = f"decoder.layers.{key}"
        assert [each for each in before if key in each] == [key]
        values = [weights[each] for n in range(4) if (each := name_in_file.format(n)) in weights]
        expected = torch.stack(values) if "{}" in name_in_file else values[0]
        assert torch.equal(before[key], expected) and expected.any()
