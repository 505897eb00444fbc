"""Mixtures of experts: the numbers of `transformers`, however the experts are laid out."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from helpers.models import tiny_model
from helpers.policies import (
    LENGTHS,
    LOSS_WEIGHT,
    Lengths,
    Numbers,
    accumulate,
    check_gradients,
    check_logprobs,
    checkpoints_of,
    gradients_of,
    layout_name,
    load_oracle,
    numbers_of,
    pack_all,
    random_sequences,
    save_checkpoint,
    sequence_logprobs,
    start_policy,
    tiny_config,
)
from helpers.ranks import run_ranks
from megatron_grpo.policy.model import build_policy
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

PLAIN_WEIGHTS = "qwen3_moe, plain weights"
# As DeepSeek's models have it; `mscale_all_dim` scales the scores.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
MODELS = {
    # Latent attention, and groups of experts. With and without a latent of queries.
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek_v3, whole queries": ("deepseek_v3", {"q_lora_rank": None}),
    # A shared expert, experts chosen by biased sigmoid scores, a dense layer, and half of RoPE.
    "glm4_moe": ("glm4_moe", {}),
    # transformers has this epsilon in the norms of latents, whatever the config says.
    "glm4_moe_lite": ("glm4_moe_lite", {"rms_norm_eps": 1e-6}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}),
    # The weights of a token's experts do not sum to 1.
    PLAIN_WEIGHTS: ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
}
LAYOUTS = [
    ParallelDims(),
    ParallelDims(data=2),
    ParallelDims(data=2, expert=2),
    ParallelDims(tensor=2),
    ParallelDims(tensor=2, expert_tensor=1),  # twice as many copies of experts as of the rest
    ParallelDims(tensor=2, expert_tensor=1, expert=2),
    ParallelDims(tensor=2, data=2, expert=2),
    ParallelDims(pipeline=2),
    ParallelDims(context=2),
    ParallelDims(context=2, expert=2),
    ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2),
]


@dataclass
class Case:
    """A model, and the results of `transformers` for it in float64."""

    folder: Path
    logprobs: list[Tensor]
    gradients: dict[str, Tensor]

    @property
    def gradient_norm(self) -> float:
        return float(torch.cat([g.flatten() for g in self.gradients.values()]).norm())


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    cases = {}
    for name, (family, overrides) in MODELS.items():
        folder = tmp_path_factory.mktemp("moe")
        tiny_model(folder, family, num_hidden_layers=4, **overrides)
        model = load_oracle(folder)
        logprobs = sequence_logprobs(model, LENGTHS)
        gradients = gradients_of(model, -LOSS_WEIGHT * torch.cat(logprobs).sum())
        cases[name] = Case(folder, [lp.detach() for lp in logprobs], gradients)
    return cases


def numbers_on_rank(
    rank: int, folders: dict[str, Path], dims: ParallelDims, lengths: Lengths, *overrides: str
) -> dict[str, Numbers]:
    """For every model: log-probabilities by sequence, boxes of the gradient, and its norm."""
    setup_device(rank)
    groups = init_groups(dims)
    share = pack_all(lengths, dims)[groups.coordinates.data :: dims.data]
    results = {}
    for name, folder in folders.items():
        policy = build_policy(tiny_config(folder, dims, *overrides), read_shape(folder), groups)
        results[name] = numbers_of(policy, groups, share)
    return results


@pytest.mark.parametrize("dims", LAYOUTS, ids=layout_name)
def test_logprobs_and_gradients_equal_transformers(cases, dims):
    # A router's weights know of no layout: every second has them as they are.
    chosen = {
        name: case
        for name, case in cases.items()
        if name != PLAIN_WEIGHTS or LAYOUTS.index(dims) % 2 == 0
    }
    folders = {name: case.folder for name, case in chosen.items()}
    ranks = run_ranks(dims.world_size, numbers_on_rank, folders, dims, LENGTHS)
    for name, case in chosen.items():
        numbers = [rank[name] for rank in ranks]
        check_logprobs(numbers, case.logprobs)
        check_gradients(numbers, case.gradients, case.gradient_norm)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("mixtral", ["granularity=full", "method=uniform", "num_layers=1"]),
        ("mixtral", ["granularity=selective", "modules=[moe]"]),
        ("deepseek_v3", ["granularity=selective", "modules=[core_attn]"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_recomputed_activations_have_the_same_gradient(cases, name, recompute):
    case, dims = cases[name], ParallelDims(tensor=2, data=2, expert=2)
    overrides = [f"model.megatron.recompute_{option}" for option in recompute]
    ranks = run_ranks(
        dims.world_size, numbers_on_rank, {"": case.folder}, dims, LENGTHS, *overrides
    )
    check_gradients([rank[""] for rank in ranks], case.gradients, case.gradient_norm)


# Nothing here is padded, at any of the layouts: routers' losses count padding as tokens.
WHOLE_LENGTHS: Lengths = [[(8, 32), (4, 8), (20, 44)], [(8, 40)], [(9, 7), (9, 7)], [(4, 8)]]
BALANCE, Z_LOSS = 0.1, 0.01


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


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pipeline=2),
        ParallelDims(data=2, expert=2),
        ParallelDims(tensor=2, context=2, expert=2),
    ],
    ids=layout_name,
)
def test_losses_of_routers_are_weighted_by_tokens(cases, dims):
    folder = cases["qwen3_moe"].folder
    model = load_oracle(folder)
    logprobs = torch.cat(sequence_logprobs(model, WHOLE_LENGTHS)).sum()
    balance, z_loss = router_losses(model, WHOLE_LENGTHS)
    loss = BALANCE * balance + Z_LOSS * z_loss - LOSS_WEIGHT * logprobs
    expected = gradients_of(model, loss)
    norm = float(torch.cat([g.flatten() for g in expected.values()]).norm())
    overrides = [
        f"model.megatron.moe_aux_loss_coeff={BALANCE}",
        f"model.megatron.moe_z_loss_coeff={Z_LOSS}",
    ]
    ranks = run_ranks(
        dims.world_size, numbers_on_rank, {"": folder}, dims, WHOLE_LENGTHS, *overrides
    )
    check_gradients([rank[""] for rank in ranks], expected, norm)


def reported_losses(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> dict[str, float]:
    """What a step reports about routers, after one on other tokens that left the weights alone."""
    sizes = "grpo.generation_batch_size=8", "grpo.num_generations=2"
    overrides = (*overrides, *sizes, "grpo.beta=0", "optimizer.lr_warmup_steps=1")
    policy, groups = start_policy(rank, folder, dims, *overrides)
    batches = pack_all(WHOLE_LENGTHS, dims)[groups.coordinates.data :: dims.data]
    others = [replace(batch, tokens=batch.tokens.flip(0)) for batch in batches]
    cfg, skipped = tiny_config(folder, dims, *overrides), SkippedSteps(1)
    for each in (others, batches):
        report = train_step(policy, each, cfg, groups, skipped, 0.0)
    return {name: value for name, value in report.metrics.items() if name.startswith("moe/")}


@pytest.mark.parametrize(
    ("dims", "recompute"),
    [
        (ParallelDims(), ["granularity=full", "method=uniform", "num_layers=1"]),
        (ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2), []),
        (ParallelDims(tensor=2, context=2, expert=2), ["granularity=selective", "modules=[moe]"]),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, ParallelDims) else str(value),
)
def test_a_step_reports_the_losses_of_routers_as_means_over_tokens(cases, dims, recompute):
    folder = cases["qwen3_moe"].folder
    model = load_oracle(folder)
    with torch.no_grad():
        balance, z_loss = (
            float(loss) / model.config.num_hidden_layers
            for loss in router_losses(model, WHOLE_LENGTHS)
        )
    overrides = [
        f"model.megatron.moe_aux_loss_coeff={BALANCE}",
        f"model.megatron.moe_z_loss_coeff={Z_LOSS}",
        *(f"model.megatron.recompute_{option}" for option in recompute),
    ]
    for found in run_ranks(dims.world_size, reported_losses, folder, dims, *overrides):
        assert found["moe/load_balancing_loss"] == pytest.approx(balance, rel=1e-6)
        assert found["moe/z_loss"] == pytest.approx(z_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([], []),
        (["moe_z_loss_coeff=0.1"], ["moe/z_loss"]),
        (
            [
                "moe_aux_loss_coeff=0.1",
                "moe_router_load_balancing_type=none",
                "moe_z_loss_coeff=0",
            ],
            [],
        ),
        (["moe_aux_loss_coeff=0.1"], ["moe/load_balancing_loss"]),
    ],
)
def test_a_loss_that_routers_do_not_have_is_not_reported(cases, overrides, names):
    given = [f"model.megatron.{override}" for override in overrides]
    folder = cases["qwen3_moe"].folder
    (found,) = run_ranks(1, reported_losses, folder, ParallelDims(), *given)
    assert list(found) == names


def train_and_save(rank: int, folder: Path, dims: ParallelDims, run: Path) -> None:
    policy, groups = start_policy(rank, folder, dims)
    for _ in range(2):
        accumulate(policy, groups, pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data])
        policy.optimizer.step()
        policy.scheduler.step(increment=1)
    save_checkpoint(run, 2, policy, folder, dims)


def load_and_save(rank: int, folder: Path, dims: ParallelDims, run: Path, again: Path) -> None:
    policy, _ = start_policy(rank, folder, dims)
    state = checkpoints_of(run, policy, folder, dims).load()
    save_checkpoint(again, state.step, policy, folder, dims)


def stored_tensors(run: Path) -> dict[str, Tensor]:
    folder = run / "checkpoints" / "step_2"
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size) for name, entry in entries.items() if hasattr(entry, "size")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def stored_before_and_after(
    folder: Path, tmp_path: Path, saved_at: ParallelDims, loaded_at: ParallelDims
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, after a check that a run at another layout has them, too."""
    run, again = tmp_path / "run", tmp_path / "again"
    run_ranks(saved_at.world_size, train_and_save, folder, saved_at, run)
    run_ranks(loaded_at.world_size, load_and_save, folder, loaded_at, run, again)
    before, after = stored_tensors(run), stored_tensors(again)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    return before


def test_a_checkpoint_loads_at_another_expert_layout_bit_by_bit(cases, tmp_path):
    saved_at = ParallelDims(data=2, expert=2)
    loaded_at = ParallelDims(tensor=2, expert_tensor=1)
    before = stored_before_and_after(cases["qwen3_moe"].folder, tmp_path, saved_at, loaded_at)
    # The names and shapes that Megatron-Core has of Transformer Engine's layers.
    for prefix in ("", "optimizer.state.exp_avg."):
        assert before[f"{prefix}decoder.layers.pre_mlp_layernorm.weight"].shape == (4, 64)
        experts = f"{prefix}decoder.layers.mlp.experts.experts."
        assert before[f"{experts}linear_fc1.weight"].shape == (4, 8, 2 * 48, 64)
        assert before[f"{experts}linear_fc2.weight"].shape == (4, 8, 64, 48)


def test_so_does_one_of_unequal_layers_and_training_leaves_the_biases_of_routers(cases, tmp_path):
    folder = cases["glm4_moe"].folder
    saved_at = ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2)
    before = stored_before_and_after(folder, tmp_path, saved_at, ParallelDims(tensor=2))
    weights = load_file(folder / "model.safetensors")
    for layer in (1, 2, 3):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        stored = before[f"decoder.layers.{layer}.mlp.router.expert_bias"]
        assert torch.equal(stored, weights[name]) and stored.any()
    for prefix in ("", "optimizer.state.exp_avg."):
        layers = f"{prefix}decoder.layers."
        assert before[f"{layers}0.mlp.linear_fc1.weight"].shape == (2 * 96, 64)
        assert before[f"{layers}3.mlp.shared_experts.linear_fc1.weight"].shape == (2 * 96, 64)
        assert before[f"{layers}3.mlp.experts.experts.linear_fc2.weight"].shape == (4, 64, 48)
    assert not any("expert_bias" in name for name in before if name.startswith("optimizer."))


def test_so_does_one_of_latent_attention(cases, tmp_path):
    folder = cases["deepseek_v3"].folder
    saved_at = ParallelDims(tensor=2, data=2, expert=2)
    before = stored_before_and_after(folder, tmp_path, saved_at, ParallelDims(pipeline=2))
    # The names and shapes that Megatron-Core has of Transformer Engine's layers.
    wanted = {
        "input_layernorm.weight": (64,),
        "self_attention.linear_q_down_proj.weight": (24, 64),
        "self_attention.linear_q_up_proj.layer_norm_weight": (24,),
        "self_attention.linear_q_up_proj.weight": (4 * 24, 24),
        "self_attention.linear_kv_down_proj.weight": (32 + 8, 64),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (32,),
        "self_attention.linear_kv_up_proj.weight": (4 * (16 + 12), 32),
        "self_attention.linear_proj.weight": (64, 4 * 12),
    }
    for prefix in ("", "optimizer.state.exp_avg."):
        for name, size in wanted.items():
            assert before[f"{prefix}decoder.layers.3.{name}"].shape == size
