"""Mixtures of experts: the numbers of `transformers`, however the experts are laid out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.models.conversions import read_checkpoint
from helpers.models.tiny import renamed, tiny_model
from helpers.oracle.policies import (
    EXACT,
    LENGTHS,
    LOSS_WEIGHT,
    Lengths,
    Numbers,
    OracleCase,
    accumulate,
    check_gradients,
    checkpoints_of,
    exact_numbers_on_rank,
    gradients_of,
    layout_name,
    load_oracle,
    numbers_of,
    numbers_on_rank,
    pack_all,
    random_sequences,
    save_checkpoint,
    sequence_logprobs,
    start_policy,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from megatron_grpo.policy.skipped_steps import SkippedSteps
from megatron_grpo.train_step import train_step
from parallel import ParallelDims

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
KIMI, KIMI_YARN = "kimi_k2", YARN | {"beta_fast": 1.0, "beta_slow": 1.0}
MODELS = {
    # Latent attention, and groups of experts. With and without a latent of queries.
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek_v3, whole queries": ("deepseek_v3", {"q_lora_rank": None}),
    # An indexer in every layer chooses fewer tokens than most sequences have.
    "deepseek_v32": ("deepseek_v32", {"rope_parameters": YARN}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    # A shared expert, experts chosen by biased sigmoid scores, a dense layer, and half of RoPE.
    "glm4_moe": ("glm4_moe", {}),
    # transformers has this epsilon in the norms of latents, whatever the config says.
    "glm4_moe_lite": ("glm4_moe_lite", {"rms_norm_eps": 1e-6}),
    # One group of experts, and YaRN whose ramp has no width.
    KIMI: ("deepseek_v3", {"rope_parameters": KIMI_YARN, "n_group": 1, "topk_group": 1}),
    # Sinks, biases, and windows in every other layer, that are shorter than sequences.
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, one key": ("gpt_oss", {"num_key_value_heads": 1, "num_local_experts": 6}),
    # Norms over all heads of queries and of keys, before which is another norm.
    "minimax_m2": ("minimax_m2", {}),
    "mixtral": ("mixtral", {}),
    # One module in each layer: Mamba-2's, experts, attention without RoPE, an MLP without gates.
    "nemotron_h": ("nemotron_h", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}),
    # Linear attention, before the last layer; a gate of attention, and one of the shared expert.
    "qwen3_next": ("qwen3_next", {"full_attention_interval": 4, "num_key_value_heads": 1}),
    # The weights of a token's experts do not sum to 1.
    PLAIN_WEIGHTS: ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
}
OWN_ATTENTION = [
    *("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss", "minimax_m2", "nemotron_h"),
    *("qwen3_next", "qwen3_5_moe_text"),
]
"""Models whose attention, or what they have for it, is not that of qwen3_moe: contexts split it."""
UNLIKE_LAYERS = ["deepseek_v3", "glm4_moe", "gpt_oss", "nemotron_h", "qwen3_next"]
"""Models whose layers differ from each other: a pipeline must give each its own."""
FAST = [
    # Twice as many copies of experts as of the rest.
    (ParallelDims(tensor=2, expert_tensor=1, expert=2), [*MODELS]),
    (ParallelDims(context=2, expert=2), OWN_ATTENTION),
    (ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2), UNLIKE_LAYERS),
]
"""Layouts, and the models that show their faults; with the others they are slow cases."""
MORE_LAYOUTS = [
    ParallelDims(),
    ParallelDims(data=2, expert=2),
    ParallelDims(data=2),
    ParallelDims(tensor=2, expert_tensor=1),
    ParallelDims(tensor=2, data=2, expert=2),
]
SLOW = [
    *((dims, [n for n in MODELS if n not in names]) for dims, names in FAST[1:]),
    *((dims, [*MODELS]) for dims in MORE_LAYOUTS),
]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    found = {
        name: OracleCase.of(
            tiny_model(tmp_path_factory.mktemp("moe"), family, num_hidden_layers=4, **overrides)
        )
        for name, (family, overrides) in MODELS.items()
    }
    renamed(found[KIMI].folder, KIMI)
    return found


@pytest.mark.parametrize(
    ("dims", "names"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda each: f"{len(each)} models" if isinstance(each, list) else layout_name(each),
)
def test_logprobs_and_gradients_equal_transformers(cases, dims, names):
    folders = {name: cases[name].folder for name in names}
    if dims.world_size > 1:  # a router's weights know of no layout
        folders.pop(PLAIN_WEIGHTS, None)
        folders.pop(KIMI, None)  # DeepSeek's layers are split in the same way
    if dims.expert_tensor > 1:  # which is refused
        folders = {name: each for name, each in folders.items() if not name.startswith("gpt_oss")}
    ranks = run_ranks(dims.world_size, numbers_on_rank, folders, dims, LENGTHS)
    for name in folders:
        cases[name].check([rank[name] for rank in ranks])


def test_in_float64_they_are_exact(cases):
    folders = {name: case.folder for name, case in cases.items()}
    (found,) = run_ranks(1, exact_numbers_on_rank, folders, LENGTHS)
    for name, case in cases.items():
        case.check([found[name]], EXACT)


UNIFORM = ["granularity=full", "method=uniform", "num_layers=1"]
RECOMPUTED = {
    "mixtral": UNIFORM,
    "deepseek_v3": ["granularity=selective", "modules=[core_attn]"],
    "nemotron_h": ["granularity=selective", "modules=[core_attn,mlp,moe]"],
}


def recompute(options: list[str]) -> list[str]:
    return [f"model.megatron.recompute_{option}" for option in options]


@pytest.mark.long
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_activations_have_the_same_gradient(cases, name):
    dims, options = ParallelDims(tensor=2, data=2, expert=2), recompute(RECOMPUTED[name])
    folders = {"": cases[name].folder}
    ranks = run_ranks(dims.world_size, numbers_on_rank, folders, dims, LENGTHS, *options)
    cases[name].check([rank[""] for rank in ranks])


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("dims", "recomputed"),
    [
        pytest.param(ParallelDims(), UNIFORM, marks=pytest.mark.slow),
        (ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2), []),
        (ParallelDims(tensor=2, context=2, expert=2), ["granularity=selective", "modules=[moe]"]),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, ParallelDims) else str(value),
)
def test_losses_of_routers_are_weighted_by_tokens_and_reported(cases, dims, recomputed):
    folder = cases["qwen3_moe"].folder
    model = load_oracle(folder)
    balance, z_loss = router_losses(model, WHOLE_LENGTHS)
    means = [float(loss.detach()) / model.config.num_hidden_layers for loss in (balance, z_loss)]
    logprobs = torch.cat(sequence_logprobs(model, WHOLE_LENGTHS)).sum()
    expected = gradients_of(model, BALANCE * balance + Z_LOSS * z_loss - LOSS_WEIGHT * logprobs)
    options = [*ROUTER_LOSSES, *recompute(recomputed)]
    ranks = run_ranks(dims.world_size, numbers_on_rank, {"": folder}, dims, WHOLE_LENGTHS, *options)
    check_gradients([rank[""] for rank in ranks], expected)
    for found in run_ranks(dims.world_size, reported_losses, folder, dims, *options):
        told = [found["moe/load_balancing_loss"], found["moe/z_loss"]]
        assert told == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["moe_z_loss_coeff=0.1"], ["moe/z_loss"]),
        (["moe_aux_loss_coeff=0.1"], ["moe/load_balancing_loss"]),
        (["moe_aux_loss_coeff=0.1", "moe_router_load_balancing_type=none"], []),
    ],
)
def test_a_loss_that_routers_do_not_have_is_not_reported(cases, overrides, names):
    given = [f"model.megatron.{override}" for override in overrides]
    folder = cases["qwen3_moe"].folder
    (found,) = run_ranks(1, reported_losses, folder, ParallelDims(), *given)
    assert list(found) == names


def changed_by_a_step(
    rank: int, folder: Path, dims: ParallelDims, *overrides: str
) -> dict[str, bool]:
    """Whether a step has changed each parameter of this rank."""
    policy, groups = start_policy(rank, folder, dims, "optimizer.weight_decay=0.1", *overrides)
    before = {name: values.detach().clone() for name, values in policy.parameters().items()}
    accumulate(policy, groups, pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data])
    apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
    return {name: not torch.equal(of, before[name]) for name, of in policy.parameters().items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "dims", [ParallelDims(tensor=2, expert_tensor=1), ParallelDims(data=2, expert=2)], ids=str
)
def test_frozen_routers_have_no_gradient_and_stay_while_all_else_is_trained(cases, dims):
    case, frozen = cases["qwen3_moe"], "model.freeze_moe_router=true"
    expected = {name: g for name, g in case.gradients.items() if ".mlp.gate." not in name}
    assert len(expected) < len(case.gradients)
    folders = {"": case.folder}
    ranks = run_ranks(dims.world_size, numbers_on_rank, folders, dims, LENGTHS, frozen)
    check_gradients([rank[""] for rank in ranks], expected)
    for changed in run_ranks(dims.world_size, changed_by_a_step, case.folder, dims, frozen):
        assert changed == {name: ".router." not in name for name in changed}


def dynamic_numbers(rank: int, folder: Path, dims: ParallelDims) -> Numbers:
    policy, groups = start_policy(rank, folder, dims, "parallel.dynamic_context_parallel=true")
    return numbers_of(policy, groups, pack_all(LENGTHS, dims))


def test_indexers_rotate_own_tokens_where_context_ranks_may_change(cases):
    case, dims = cases["glm_moe_dsa"], ParallelDims(context=2)
    case.check(run_ranks(2, dynamic_numbers, case.folder, dims))


@pytest.mark.parametrize(
    "dims", [ParallelDims(tensor=2, expert_tensor=1), ParallelDims(data=2, expert=2)], ids=str
)
def test_indexers_stay_as_they_are_while_all_else_is_trained(cases, dims):
    assert not any(".indexer." in name for name in cases["deepseek_v32"].gradients)
    for changed in run_ranks(2, changed_by_a_step, cases["deepseek_v32"].folder, dims):
        kept = {name for name, is_other in changed.items() if not is_other}
        fixed = (".indexer.", ".expert_bias")
        assert kept == {name for name in changed if any(part in name for part in fixed)}
        assert len([name for name in kept if ".indexer." in name]) == 4 * 5


@pytest.mark.long
def test_checkpoints_hold_indexers_without_moments_and_load_at_another_layout(cases, tmp_path):
    folder, run, again = cases["glm_moe_dsa"].folder, tmp_path / "run", tmp_path / "again"
    run_ranks(2, train_and_save, folder, ParallelDims(data=2, expert=2), run)
    run_ranks(2, load_and_save, folder, ParallelDims(pipeline=2), run, again)
    before, after = (read_checkpoint(at / "checkpoints" / "step_2") for at in (run, again))
    weights = load_file(folder / "model.safetensors")
    names = [name for name in weights if ".layers.2.self_attn.indexer." in name]
    assert len(names) == 5
    assert [key for key, values in before.items() if not torch.equal(values, after[key])] == []
    for name in names:
        key = "decoder.layers.2.self_attention.indexer." + name.partition(".indexer.")[2]
        assert [each for each in before if key in each] == [key]
        assert torch.equal(before[key], weights[name])


def train_and_save(rank: int, folder: Path, dims: ParallelDims, run: Path, *overrides: str) -> None:
    policy, groups = start_policy(rank, folder, dims, *overrides)
    for _ in range(2):
        accumulate(policy, groups, pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data])
        policy.optimizer.step()
        policy.scheduler.step(increment=1)
    save_checkpoint(run, 2, policy, folder, dims)


def load_and_save(
    rank: int, folder: Path, dims: ParallelDims, run: Path, again: Path, *overrides: str
) -> None:
    policy, _ = start_policy(rank, folder, dims, *overrides)
    state = checkpoints_of(run, policy, folder, dims).load()
    save_checkpoint(again, state.step, policy, folder, dims)


STORED = {  # of layers, by the names and shapes that Megatron-Core has of Transformer Engine's
    "qwen3_moe": (
        ParallelDims(data=2, expert=2),
        ParallelDims(tensor=2, expert_tensor=1),
        {
            "pre_mlp_layernorm.weight": (4, 64),
            "mlp.experts.experts.linear_fc1.weight": (4, 8, 2 * 48, 64),
            "mlp.experts.experts.linear_fc2.weight": (4, 8, 64, 48),
        },
    ),
    "glm4_moe": (
        ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2),
        ParallelDims(tensor=2),
        {
            "0.mlp.linear_fc1.weight": (2 * 96, 64),
            "3.mlp.shared_experts.linear_fc1.weight": (2 * 96, 64),
            "3.mlp.experts.experts.linear_fc2.weight": (4, 64, 48),
        },
    ),
    "deepseek_v3": (
        ParallelDims(tensor=2, data=2, expert=2),
        ParallelDims(pipeline=2),
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
    "nemotron_h": (
        ParallelDims(tensor=2, context=2, expert=2, expert_tensor=1),
        ParallelDims(pipeline=2),
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
    "qwen3_next": (
        ParallelDims(tensor=2, context=2, expert=2, expert_tensor=1),
        ParallelDims(pipeline=2),
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


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "deepseek_v3" else [pytest.mark.slow])
        for name in STORED
    ],
)
def test_a_checkpoint_loads_at_another_layout_bit_by_bit(cases, tmp_path, name):
    folder, (saved_at, loaded_at, shapes) = cases[name].folder, STORED[name]
    run, again = tmp_path / "run", tmp_path / "again"
    run_ranks(saved_at.world_size, train_and_save, folder, saved_at, run)
    run_ranks(loaded_at.world_size, load_and_save, folder, loaded_at, run, again)
    before, after = (read_checkpoint(at / "checkpoints" / "step_2") for at in (run, again))
    assert before.keys() == after.keys()
    assert [key for key, values in before.items() if not torch.equal(values, after[key])] == []
    for prefix in ("", "optimizer.state.exp_avg."):
        for key, size in shapes.items():
            assert before[f"{prefix}decoder.layers.{key}"].shape == size
    if name == "glm4_moe":  # training leaves the biases of routers
        weights = load_file(folder / "model.safetensors")
        for layer in (1, 2, 3):
            bias = before.pop(f"decoder.layers.{layer}.mlp.router.expert_bias")
            wanted = weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
            assert torch.equal(bias, wanted) and bias.any()
        assert not any("expert_bias" in key for key in before)


@pytest.mark.long
def test_a_checkpoint_has_frozen_routers_without_moments_and_loads_at_another_layout(
    cases, tmp_path
):
    folder, frozen = cases["qwen3_moe"].folder, "model.freeze_moe_router=true"
    run, again = tmp_path / "run", tmp_path / "again"
    run_ranks(2, train_and_save, folder, ParallelDims(data=2, expert=2), run, frozen)
    other = ParallelDims(tensor=2, expert_tensor=1)
    run_ranks(2, load_and_save, folder, other, run, again, frozen)
    before, after = (read_checkpoint(at / "checkpoints" / "step_2") for at in (run, again))
    assert [key for key in before if "router" in key] == ["decoder.layers.mlp.router.weight"]
    assert before.keys() == after.keys()
    assert [key for key, values in before.items() if not torch.equal(values, after[key])] == []
