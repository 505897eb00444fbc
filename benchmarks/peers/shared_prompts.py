"""The gradient of one group of completions: its prompt computed once, and with each completion.

The peer is our own trainer without `grpo.shared_prompts`: of the others none computes a prompt once
on Megatron-Core. Prompt, completions and width are an eighth of a real shape, so that matrices and
attention have the proportion of a model of hidden size 4,096 on prompts of 2,048 tokens.

FLOPs are counted with both sides' attention in plain matrix products, which compute masked scores
as well: a causal square counts whole on both.
"""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from helpers.ranks.measure import counted_flops
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.algorithm.loss_function import LossFunction
from megatron_grpo.batch.distribute import split_for_data_parallel
from megatron_grpo.batch.experience import Experience
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.train_step import accumulate_gradient
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.microbatches import CostModel

PROMPT, RESPONSE, GENERATIONS = 2048 // 8, 1024 // 8, 16
HIDDEN, LAYERS = 4096 // 8, 2
TOKEN_RATIO = GENERATIONS * (PROMPT + RESPONSE) / (PROMPT + GENERATIONS * RESPONSE)

ROUNDS = 3
TITLE = (
    f"Gradient of a group: {GENERATIONS} completions of {RESPONSE} tokens to a prompt of {PROMPT}, "
    f"{LAYERS} layers of {HIDDEN}"
)
REQUIREMENTS: dict[str, list[str]] = {}
SETTINGS = {"unshared": "This trainer with grpo.shared_prompts=false: packed, no padding."}
# The least that sharing must save of the FLOPs: 0.95 of what it saves of the tokens.
GOALS = [("flops", "unshared", 0.95 * TOKEN_RATIO), ("tokens", "unshared", 0.99 * TOKEN_RATIO)]


def ours(folder: Path) -> dict[str, float]:
    """The group in one microbatch, its prompt once."""
    return _measure(folder, shared=True)


def unshared(folder: Path) -> dict[str, float]:
    """The same group, as many tokens in a microbatch at most."""
    return _measure(folder, shared=False)


SIDES = {"ours": ours, "unshared": unshared}


def compare(ours: Path, peer: Path) -> str:
    """Raises AssertionError where a gradient differs by more than float32 explains."""
    own, theirs = (load_file(folder / "gradients.safetensors") for folder in (ours, peer))
    assert own.keys() == theirs.keys()
    worst = max(float((own[name] - theirs[name]).norm() / theirs[name].norm()) for name in own)
    assert worst < 1e-5, worst
    return f"every gradient equal to {worst:.0e} of its norm"


def _measure(folder: Path, shared: bool) -> dict[str, float]:
    model = tiny_model(
        folder / "model",
        "llama",
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        head_dim=64,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64 // 4,
        intermediate_size=3 * HIDDEN,
        initializer_range=0.02,
    )
    ((figures, gradients),) = run_ranks(1, _on_rank, model, shared, timeout=600)
    save_file(gradients, folder / "gradients.safetensors")
    return figures


def _on_rank(
    rank: int, model: Path, shared: bool
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    options = (
        f"grpo.generation_batch_size={GENERATIONS}",
        f"grpo.num_generations={GENERATIONS}",
        f"grpo.shared_prompts={str(shared).lower()}",
        "grpo.beta=0",
        "grpo.loss_type=grpo",
        f"train.max_tokens_per_microbatch={GENERATIONS * (PROMPT + RESPONSE) // 2}",
    )
    cfg = tiny_config(model, ParallelDims(), *options)
    policy, groups = start_policy(rank, model, ParallelDims(), *options)
    cost, dims = CostModel.transformer(HIDDEN), ParallelDims()
    ((share,),) = split_for_data_parallel(_experience(), 0, cost, cfg, dims, Alignment())
    batches = share.pack(Alignment(), share_prompts=shared)
    with counted_flops() as counter:
        accumulate_gradient(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), 0.0)
    gradients = {name: p.main_grad.clone() for name, p in policy.parameters().items()}
    start = time.perf_counter()
    accumulate_gradient(policy, batches, cfg, groups, LossFunction.of(cfg.grpo), 0.0)
    figures = {
        "seconds": time.perf_counter() - start,
        "flops": float(counter.get_total_flops()),
        "tokens": float(sum(len(batch.tokens) for batch in batches)),
    }
    return figures, gradients


def _experience() -> Experience:
    generator = torch.Generator().manual_seed(0)
    prompt = Prompt(
        index=0,
        token_ids=tuple(torch.randint(4, 250, (PROMPT,), generator=generator).tolist()),
        text="",
        row={},
    )
    samples = [
        Sample(
            prompt=prompt,
            sample_index=i,
            completion_ids=tuple(torch.randint(4, 250, (RESPONSE,), generator=generator).tolist()),
            logprobs=(-5.0,) * RESPONSE,
            finish_reason="stop",
            text="",
            policy_version=0,
        )
        for i in range(GENERATIONS)
    ]
    advantages = torch.randn(GENERATIONS, generator=generator, dtype=torch.float64)
    group_ids = torch.zeros(GENERATIONS, dtype=torch.int64)
    return Experience(samples, [], advantages, group_ids, advantages)
