"""Our model against `transformers`: same folder, same numbers, at every parallel layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoint_convert import read_shape
from distributed import run_ranks
from megatron_grpo.config import Config
from megatron_grpo.config_file import load_config
from megatron_grpo.model import Policy, build_policy, build_reference
from megatron_grpo.schedule import run_schedule
from megatron_grpo.train_step import compute_logprobs, response_logprobs
from models import tiny_model
from oracle import oracle_logprobs
from parallel import (
    Alignment,
    Groups,
    PackedBatch,
    ParallelDims,
    TokenSequence,
    init_groups,
    pack,
    setup_device,
)

# Five layers split unevenly over every pipeline below.
MODELS = [
    (family, tied, {"num_hidden_layers": 5})
    for family in ("llama", "qwen2", "qwen3")
    for tied in (False, True)
]
LAYOUTS = [
    ParallelDims(),
    ParallelDims(tensor=2),
    ParallelDims(tensor=4),  # more ranks than key-value heads
    ParallelDims(pipeline=2),
    ParallelDims(context=2),
    ParallelDims(tensor=2, pipeline=2, context=2),
    ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2, context=2),
]
# (prompt, completion) lengths of each packed microbatch: unequal ones, one that fills the pack (the
# RoPE table then has as many rows as there are packed tokens), equal ones, and no work at all.
PACKS = [[(5, 32), (3, 9), (20, 44)], [(7, 41)], [(9, 7), (9, 7)], []]

Folders = dict[str, Path]


def random_sequences(packs: list[list[tuple[int, int]]]) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)
    return [
        TokenSequence(
            # From 4 on: transformers has no gradient for the padding token's embedding.
            tokens=torch.randint(4, 250, (prompt + completion,), generator=generator),
            num_prompt_tokens=prompt,
            advantage=1.0,
            loss_weight=0.01,
            rollout_logprobs=torch.zeros(completion),
        )
        for lengths in packs
        for prompt, completion in lengths
    ]


def pack_all(packs: list[list[tuple[int, int]]], dims: ParallelDims) -> list[PackedBatch]:
    sequences, alignment = random_sequences(packs), Alignment.of(dims, dims.tensor > 1)
    indices = iter(range(len(sequences)))
    return [pack(sequences, [next(indices) for _ in lengths], alignment) for lengths in packs]


def oracle(folder: Path, packs: list[list[tuple[int, int]]]) -> list[Tensor]:
    """Response log-probabilities of every sequence, from transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = random_sequences(packs)
    with torch.no_grad():
        return oracle_logprobs(
            model,
            [s.tokens[: s.num_prompt_tokens].tolist() for s in sequences],
            [s.tokens[s.num_prompt_tokens :].tolist() for s in sequences],
        )


def config(folder: Path, dims: ParallelDims, *overrides: str) -> Config:
    return load_config(
        Path("configs/tiny_cpu.yaml"),
        [
            f"model.path={folder}",
            f"parallel.tensor_parallel_size={dims.tensor}",
            f"parallel.pipeline_parallel_size={dims.pipeline}",
            f"parallel.virtual_pipeline_parallel_size={dims.virtual_pipeline}",
            f"parallel.context_parallel_size={dims.context}",
            f"parallel.data_parallel_size={dims.data}",
            *overrides,
        ],
    )


def reference_logprobs(
    rank: int, folders: Folders, dims: ParallelDims, packs: list[list[tuple[int, int]]]
) -> dict[str, list[Tensor]]:
    """Response log-probabilities of every sequence; empty before the last pipeline stage."""
    setup_device(rank)
    groups = init_groups(dims)
    batches = pack_all(packs, dims)
    results = {}
    for name, folder in folders.items():
        model = build_reference(config(folder, dims), read_shape(folder), groups)
        values = compute_logprobs(model, batches, 1.0, groups)
        if model.is_last_stage:
            results[name] = [
                whole[batch.loss_mask & (batch.sequence_index == index)]
                for batch, whole in zip(batches, values, strict=True)
                for index in batch.sequence_index[batch.loss_mask].unique()
            ]
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> Folders:
    return {
        f"{family} tied={tied}": tiny_model(
            tmp_path_factory.mktemp(family), family, tied=tied, **shape
        )
        for family, tied, shape in MODELS
    }


@pytest.fixture(scope="module")
def expected(folders: Folders) -> dict[str, list[Tensor]]:
    return {name: oracle(folder, PACKS) for name, folder in folders.items()}


@pytest.mark.parametrize("dims", LAYOUTS, ids=lambda d: f"{d} vpp({d.virtual_pipeline})")
def test_logprobs_equal_transformers(folders, expected, dims):
    results = [r for r in run_ranks(dims.world_size, reference_logprobs, folders, dims, PACKS) if r]
    assert len(results) == dims.tensor * dims.context
    for result in results:
        for name in folders:
            for got, want in zip(result[name], expected[name], strict=True):
                torch.testing.assert_close(got, want, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(context=2)], ids=str)
def test_llama3_rope_scaling_equals_transformers(tmp_path, dims):
    # Long enough for the scaled frequencies to turn.
    packs = [[(100, 300), (50, 60)]]
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = tiny_model(tmp_path / "scaled", "llama", rope_parameters=rope)
    plain = tiny_model(tmp_path / "plain", "llama")
    want = oracle(scaled, packs)
    assert (want[0] - oracle(plain, packs)[0]).abs().max() > 1e-2
    for result in run_ranks(dims.world_size, reference_logprobs, {"": scaled}, dims, packs):
        for got, reference in zip(result[""], want, strict=True):
            torch.testing.assert_close(got, reference, atol=2e-5, rtol=0)


def accumulate(policy: Policy, groups: Groups, batches: list[PackedBatch]) -> None:
    """Gradient of the weighted negative log-likelihood."""

    def loss_fn(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, None]:
        logprobs, _, _ = response_logprobs(policy, logits, batch, 1.0, groups)
        return -(logprobs * batch.loss_weights).sum(), None

    policy.zero_grad()
    run_schedule(policy, groups, batches, loss_fn, forward_only=False)


def start(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> tuple[Policy, Groups]:
    setup_device(rank)
    groups = init_groups(dims)
    return build_policy(config(folder, dims, *overrides), read_shape(folder), groups), groups


NUM_STEPS = 3
ADAMW = [
    "optimizer.lr=1e-3",
    "optimizer.adam_beta1=0.8",
    "optimizer.weight_decay=0.1",
    "optimizer.max_grad_norm=1.0",
    "optimizer.lr_decay_style=linear",
    f"train.num_steps={2 * NUM_STEPS}",
]


def trained_weights(
    rank: int, folder: Path, dims: ParallelDims
) -> tuple[list[float], list[tuple[str, Any, Tensor]]]:
    """Gradient norms of the steps, and what this rank owns of the weights after them."""
    policy, groups = start(rank, folder, dims, *ADAMW)
    batches, norms = pack_all(PACKS, dims), []
    share = batches[groups.coordinates.data :: dims.data]
    for _ in range(NUM_STEPS):
        accumulate(policy, groups, share)
        norms.append(policy.optimizer.step()[1])
        policy.scheduler.step(increment=1)
    parameters = policy.parameters()
    return norms, [
        (piece.tensor, piece.box, parameters[piece.local][piece.local_box.slices].detach().clone())
        for piece in policy.layout.pieces
        if not piece.is_replica
    ]


def adamw_in_torch(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps with transformers and torch's own AdamW, in one process."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.95),
    )
    norms = []
    sequences = random_sequences(PACKS)
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / (2 * NUM_STEPS))
        optimizer.zero_grad()
        logprobs = oracle_logprobs(
            model,
            [s.tokens[: s.num_prompt_tokens].tolist() for s in sequences],
            [s.tokens[s.num_prompt_tokens :].tolist() for s in sequences],
        )
        (-0.01 * torch.cat(logprobs).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(),
        ParallelDims(tensor=2, pipeline=2),
        ParallelDims(pipeline=2, data=2),
        ParallelDims(pipeline=2, virtual_pipeline=2),
    ],
    ids=lambda d: f"{d} vpp({d.virtual_pipeline})",
)
def test_optimizer_steps_equal_torch_adamw_on_transformers(folders, dims):
    folder = folders["qwen3 tied=True"]
    want_norms, want = adamw_in_torch(folder)
    before = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    seen = set()
    for norms, pieces in run_ranks(dims.world_size, trained_weights, folder, dims):
        assert norms == pytest.approx(want_norms, rel=1e-4)
        for name, box, values in pieces:
            seen.add(name)
            change = values - before[name][box.slices]
            want_change = want[name][box.slices] - before[name][box.slices]
            # Adam's first steps are the signs of gradients: near zero they may be either.
            wrong = (change - want_change).abs() > 1e-4
            assert wrong.float().mean() < 0.01, f"{name}: {wrong.sum()} of {wrong.numel()}"
    assert seen == set(want)


def saved_master_weights(rank: int, folder: Path, dims: ParallelDims) -> list[str]:
    """Names of parameters whose master weights would be saved as something else."""
    policy, groups = start(rank, folder, dims)
    accumulate(policy, groups, pack_all(PACKS, dims))
    policy.optimizer.step()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    models = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(policy.chunks)
    }
    saved = policy.optimizer.sharded_state_dict(models, metadata=metadata)
    masters = [tensors["param"] for tensors in saved["param_state"].values()]
    assert len(masters) == len(policy.parameters())
    weights = [tensor for model in models.values() for tensor in model.values()]
    prefix = "optimizer.state.param."
    return [
        master.key
        for master in masters
        if not any(
            master.key == prefix + weight.key and torch.equal(master.data, weight.data)
            for weight in weights  # all layers go by one key
        )
    ]


def test_the_optimizer_is_saved_with_the_weights_it_has(folders):
    # Megatron's own bookkeeping goes wrong here: a tied embedding on two stages has a gradient
    # bucket of its own, and at TP2 it ends in padding.
    dims = ParallelDims(tensor=2, pipeline=2)
    results = run_ranks(dims.world_size, saved_master_weights, folders["qwen3 tied=True"], dims)
    assert results == [[]] * dims.world_size


def step_beside_a_reference(rank: int, folder: Path, dims: ParallelDims) -> tuple[bool, bool]:
    policy, groups = start(rank, folder, dims)
    reference = build_reference(config(folder, dims), policy.shape, groups)
    assert not any(p.requires_grad for p in reference.parameters().values())
    batches = pack_all(PACKS, dims)
    before = compute_logprobs(reference, batches, 1.0, groups)[0]
    accumulate(policy, groups, batches)
    policy.optimizer.step()
    after = compute_logprobs(reference, batches, 1.0, groups)[0]
    trained = compute_logprobs(policy, batches, 1.0, groups)[0]
    return torch.equal(before, after), torch.equal(before, trained)


def test_the_reference_stays_when_the_policy_moves(folders):
    result = run_ranks(1, step_beside_a_reference, folders["llama tied=False"], ParallelDims())
    assert result == [(True, False)]


def gradient_norm(rank: int, folder: Path, dims: ParallelDims, overrides: list[str]) -> float:
    policy, groups = start(rank, folder, dims, *overrides)
    accumulate(policy, groups, pack_all(PACKS, dims))
    return policy.optimizer.step()[1]


def test_recomputing_activations_changes_nothing(folders):
    folder, dims = folders["qwen3 tied=False"], ParallelDims(tensor=2)
    recompute = [
        "model.megatron.recompute_granularity=full",
        "model.megatron.recompute_method=uniform",
        "model.megatron.recompute_num_layers=1",
    ]
    plain = run_ranks(dims.world_size, gradient_norm, folder, dims, [])
    assert run_ranks(dims.world_size, gradient_norm, folder, dims, recompute) == plain


def test_bfloat16_weights_have_nearly_the_gradient_of_float32(folders):
    folder, dims = folders["llama tied=True"], ParallelDims(pipeline=2)
    exact = run_ranks(dims.world_size, gradient_norm, folder, dims, ["model.dtype=float32"])
    rounded = run_ranks(dims.world_size, gradient_norm, folder, dims, ["model.dtype=bfloat16"])
    assert rounded == pytest.approx(exact, rel=3e-2)
    assert rounded != exact


def gradient_of_a_nan_loss(rank: int, folder: Path, dims: ParallelDims) -> str:
    policy, groups = start(rank, folder, dims)
    next(iter(policy.parameters().values())).data.fill_(torch.nan)
    with pytest.raises(RuntimeError) as error:
        accumulate(policy, groups, pack_all(PACKS, dims))
    return str(error.value)


def test_a_gradient_that_is_no_number_stops_the_run(folders):
    (message,) = run_ranks(1, gradient_of_a_nan_loss, folders["llama tied=False"], ParallelDims())
    assert "NaN" in message
