"""Router replay: a policy makes its own choices, or follows those of an engine.

Rows of test_model.py compare its numbers with `transformers` under the same choices.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.engines.live import random_prompts, sampling_params
from helpers.engines.sampling import Completions
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    load_oracle,
    numbers_of,
    pack_all,
    sequence_logprobs,
    start_policy,
    tiny_config,
)
from helpers.oracle.routes import (
    EXPERTS,
    INDEX_TOPK,
    LAYERS,
    ROUTED,
    SPARSE,
    TOPK,
    Routed,
    batches_with_routes,
    overrides_of,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.batch.experience import Experience
from megatron_grpo.batch.prepare import Preparation
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import decode_choice
from megatron_grpo.engines.request import Request
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import unwrapped
from megatron_grpo.policy.reference import reference_of
from megatron_grpo.policy.router import RouterReplay
from parallel import ParallelDims
from parallel.microbatches import CostModel
from reference_engine.engine import TransformersEngine


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        family: tiny_model(tmp_path_factory.mktemp(family), family, **fields)
        for family, fields in ROUTED.items()
    }


# B is zero: the numbers are those of the base.
ADAPTERS = ("lora.r=2", "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]", "lora.sync=merged")
LATENT_ADAPTERS = (ADAPTERS[0], "lora.target_modules=[o_proj]", ADAPTERS[2])


def own_routes_on_rank(rank: int, family: str, folder: Path, *overrides: str) -> list[list[Tensor]]:
    """Log-probabilities of the reference, of a policy without routes in its batch, and of one with
    some."""
    dims = ParallelDims()
    overrides = (*overrides_of(family), *overrides)
    policy, groups = start_policy(rank, folder, dims, *overrides)
    routed, free = batches_with_routes(family, dims), pack_all(LENGTHS, dims)
    compute_logprobs(policy, routed, 1.0, groups)  # leaves its routes behind
    reference = reference_of(policy, tiny_config(folder, dims, *overrides), groups)
    return [
        [
            values[batch.loss_mask]
            for batch, (values, _) in zip(
                batches, compute_logprobs(model, batches, 1.0, groups), strict=True
            )
        ]
        for model, batches in ((reference, routed), (policy, free), (policy, routed))
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *(("qwen3_moe", ()), ("qwen3_moe", ADAPTERS), ("glm4_moe", ()), ("gpt_oss", ADAPTERS)),
        (SPARSE, LATENT_ADAPTERS),
    ],
)
def test_reference_and_a_batch_without_routes_make_their_own_choices(folders, family, overrides):
    folder = folders[family]
    [found] = run_ranks(1, own_routes_on_rank, family, folder, *overrides)
    with torch.no_grad():
        own = torch.cat(sequence_logprobs(load_oracle(folder), LENGTHS))
    routed = torch.cat(Routed().oracle(folder).logprobs)
    assert (own - routed).abs().max() > 0.1
    for logprobs, expected in zip(found, (own, own, routed), strict=True):
        torch.testing.assert_close(torch.cat(logprobs).double(), expected, atol=1e-5, rtol=0)


def noted_choices_on_rank(rank: int, folder: Path) -> list[list[Tensor]]:
    """Log-probabilities and gradients of a policy that chooses tokens, and of one that replays
    them."""
    dims, found = ParallelDims(), []
    replays = overrides_of(SPARSE)[1:]
    policy, groups = start_policy(rank, folder, dims, *replays)
    for attention in (layer.self_attention for layer in unwrapped(policy.chunks[0]).decoder.layers):
        attention._choose = noted(attention._choose, found)
    own = numbers_of(policy, groups, pack_all(LENGTHS, dims))
    assert len(found) == LAYERS * 2 * (len(LENGTHS) - 1)  # no choices for padding
    tokens: list[Tensor] = []
    for number, lengths in enumerate(LENGTHS[:-1]):
        chosen = torch.stack(found[number * LAYERS :][:LAYERS], dim=1)
        sizes = [sum(each) for each in lengths]
        for start, size in zip(accumulate([0, *sizes]), sizes, strict=False):
            tokens.append((chosen[start : start + size - 1] - start).short())
    found.clear()
    given = numbers_of(policy, groups, pack_all(LENGTHS, dims, tokens, index_topk=INDEX_TOPK))
    assert not found
    return [[*logprobs.values(), *(g for *_, g in boxes)] for logprobs, boxes, _ in (own, given)]


def noted(choose: Callable[..., Tensor], found: list[Tensor]) -> Callable[..., Tensor]:
    def chosen(*arguments: Any) -> Tensor:
        found.append(choose(*arguments))
        return found[-1]

    return chosen


@pytest.mark.slow
def test_replay_of_own_choices_changes_no_bit(folders):
    [(own, given)] = run_ranks(1, noted_choices_on_rank, folders[SPARSE])
    assert len(own) > 40 and all(map(torch.equal, own, given))


NUM_SAMPLES = 32


def bfloat16_samples(family: str, folder: Path) -> list[Sample]:
    """What an engine with bfloat16 weights samples, sent as vLLM sends it."""
    index_topk = INDEX_TOPK if family == SPARSE else 0
    engine = TransformersEngine(
        folder,
        torch.bfloat16,
        "cpu",
        return_routed_experts=True,
        return_indexer_topk=index_topk > 0,
    )
    engine.weight_version = "0"
    params = sampling_params(
        num_generations=4,
        max_completion_length=24,
        stop_token_ids=[],
        router_replay=True,
        index_topk=index_topk,
    )

    class Answering:
        """Stands for a router: the engine answers in this process."""

        def submit(self, requests: Sequence[Request]) -> None:
            for request in requests:
                answer = json.dumps(engine.generate(request.rest, lambda: True)).encode()
                request.take(decode_choice(answer), "http://a", str)

    async def sample() -> list[Sample]:
        completions = Completions(random_prompts(NUM_SAMPLES // 4), params)
        await completions.begin(Answering())
        await asyncio.gather(*completions.sampling)
        return completions.samples()

    return asyncio.run(sample())


def gaps_on_rank(
    rank: int, family: str, folder: Path, dims: ParallelDims, samples: list[Sample]
) -> list[Tensor]:
    """Gaps between log-probabilities of trainer and engine: with replay, and without."""
    replays = overrides_of(family)
    overrides = *replays, "model.dtype=bfloat16", f"grpo.generation_batch_size={NUM_SAMPLES}"
    policy, groups = start_policy(rank, folder, dims, *overrides)
    cfg, found = tiny_config(folder, dims, *overrides), []
    for given in (samples, [replace(each, routes=None) for each in samples]):
        nothing = torch.zeros(len(given), dtype=torch.float64)
        experience = Experience(given, [], nothing, nothing.long(), nothing) if rank == 0 else None
        cost, device = CostModel.transformer(64), torch.device("cpu")
        preparation = Preparation(policy, None, cost, cfg, groups, device)
        [batches] = preparation.packed(experience, 0)
        computed = compute_logprobs(policy, batches, 1.0, groups)
        gaps = [
            (logprobs - batch.rollout_logprobs).abs()[batch.loss_mask]
            for batch, (logprobs, _) in zip(batches, computed, strict=True)
        ]
        found.append(torch.cat(gaps))
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param(SPARSE, marks=pytest.mark.slow)])
def test_replay_follows_an_engine_whose_rounding_decides_between_experts(folders, family):
    folder = folders[family]
    samples = bfloat16_samples(family, folder)
    ranks = run_ranks(2, gaps_on_rank, family, folder, ParallelDims(data=2, expert=2), samples)
    replayed, free = (torch.cat(gaps) for gaps in zip(*ranks, strict=True))
    assert len(replayed) == len(free) == NUM_SAMPLES * 24
    # A token that goes to other experts differs by tenths, and rounding by hundredths.
    assert replayed.max() < 0.1 < 0.3 < free.max()
    assert replayed.mean() < 0.7 * free.mean()


def test_router_replay_refuses_fewer_experts_than_a_token_has():
    replay = RouterReplay()
    replay.routed_experts = torch.zeros(5, 0, dtype=torch.uint8)  # the engine sent no experts
    with pytest.raises(ValueError, match="reported 0 experts of each token, but the model has 3"):
        replay.get_replay_topk(torch.rand(5, EXPERTS), TOPK, None, None, None)
