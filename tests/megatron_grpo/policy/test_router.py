"""With replay the policy computes what `transformers` computes with the same routes: the experts of
tokens, and the tokens that its indexers choose."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.engines.live import random_prompts, sampling_params
from helpers.engines.sampling import Completions
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    Numbers,
    OracleCase,
    layout_name,
    load_oracle,
    numbers_of,
    pack_all,
    random_sequences,
    sequence_logprobs,
    start_policy,
    tiny_config,
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
from megatron_grpo.policy.router import RouterReplay, with_own_layers
from parallel import ParallelDims
from parallel.microbatches import CostModel
from parallel.packing import PackedBatch
from reference_engine.engine import TransformersEngine

LAYERS, EXPERTS, TOPK, INDEX_TOPK = 4, 8, 3, 5
REPLAY = "rollout.router_replay=true"
SPARSE = "deepseek_v32"
"""Whose indexers choose `INDEX_TOPK` tokens."""
# Under 1F1B the next microbatch runs before the backward of this one recomputes it.
FULL = ["recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1"]
EXPERTS_ONLY = ["recompute_granularity=selective", "recompute_modules=[moe]"]
ATTENTION = ["recompute_granularity=selective", "recompute_modules=[core_attn]"]
CASES: list[tuple[str, ParallelDims, list[str]]] = [
    ("qwen3_moe", ParallelDims(tensor=2, context=2, expert=2), []),
    ("qwen3_moe", ParallelDims(pipeline=2), EXPERTS_ONLY),
    ("qwen3_moe", ParallelDims(pipeline=2, virtual_pipeline=2), FULL),
    # Its first layer has no experts.
    ("glm4_moe", ParallelDims(pipeline=2, virtual_pipeline=2), FULL),
    ("glm4_moe", ParallelDims(tensor=2, expert=2, expert_tensor=1), []),
    # Its routers have a bias.
    ("gpt_oss", ParallelDims(tensor=2, expert=2, expert_tensor=1), []),
    (SPARSE, ParallelDims(tensor=2, expert=2, expert_tensor=1), []),
    (SPARSE, ParallelDims(context=2, expert=2), ATTENTION),
    (SPARSE, ParallelDims(pipeline=2, virtual_pipeline=2), FULL),
]
NUM_EXPERTS = {
    "qwen3_moe": "num_experts",
    "glm4_moe": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    SPARSE: "n_routed_experts",
}


def overrides_of(family: str) -> list[str]:
    """Overrides with which the choices of a family are replayed."""
    others = ["rollout.indexer_replay=true", "rollout.engine=sglang", "rollout.vllm={}"]
    return [REPLAY, *(others if family == SPARSE else ())]


def random_routes() -> list[Tensor]:
    """For each sequence of `LENGTHS`, experts of all its tokens but the last that no router would
    choose."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand(len(each.tokens) - 1, LAYERS, EXPERTS, generator=generator)
        .topk(TOPK)
        .indices.to(torch.uint8)
        for each in random_sequences(LENGTHS)
    ]


def random_tokens() -> list[Tensor]:
    """For the same tokens, positions that no indexer would choose; 999 for tokens that see no more
    than are chosen, which nothing reads."""
    generator, unread = torch.Generator().manual_seed(2), 999
    found = []
    for each in random_sequences(LENGTHS):
        shape = len(each.tokens) - 1, LAYERS, INDEX_TOPK
        tokens = torch.full(shape, unread, dtype=torch.int16)
        for position in range(INDEX_TOPK, len(tokens)):
            scores = torch.rand(LAYERS, position + 1, generator=generator)
            tokens[position] = scores.topk(INDEX_TOPK).indices
        found.append(tokens)
    return found


def batches_with_routes(family: str, dims: ParallelDims) -> list[PackedBatch]:
    """The batches of `LENGTHS` with random experts, and with random tokens if a family has them."""
    if family != SPARSE:
        return pack_all(LENGTHS, dims, random_routes())
    pairs = zip(random_routes(), random_tokens(), strict=True)
    both = [torch.cat(pair, dim=2) for pair in pairs]
    return pack_all(LENGTHS, dims, both, index_topk=INDEX_TOPK)


def attend(model: AutoModelForCausalLM, tokens: list[Tensor]) -> None:
    """Make every indexer choose these `tokens` of one right-padded batch."""
    longest = 1 + max(map(len, tokens))
    padded = torch.zeros(len(tokens), longest, LAYERS, INDEX_TOPK, dtype=torch.int32)
    for row, of_sequence in zip(padded, tokens, strict=True):
        row[: len(of_sequence)] = of_sequence
    padded[:, :INDEX_TOPK] = torch.arange(INDEX_TOPK)
    for layer, block in enumerate(model.model.layers):
        block.self_attn.indexer.register_forward_hook(lambda *_, i=layer: padded[:, :, i])


def follow(model: AutoModelForCausalLM, routes: list[Tensor]) -> None:
    """Make every router send the tokens of one right-padded batch where `routes` say."""
    longest = 1 + max(map(len, routes))
    padded = torch.arange(TOPK).expand(len(routes), longest, LAYERS, TOPK).clone()
    for row, of_sequence in zip(padded, routes, strict=True):
        row[: len(of_sequence)] = of_sequence

    def rerouted(layer: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        chosen = padded[:, :, layer].flatten(0, 1)

        def hook(module, _inputs, outputs):
            scale = getattr(module, "routed_scaling_factor", None)
            scores = outputs[0].sigmoid() if scale else outputs[0].softmax(-1)
            weights = scores.gather(1, chosen)
            return outputs[0], (scale or 1.0) * weights / weights.sum(-1, keepdim=True), chosen

        return hook

    for layer, block in enumerate(model.model.layers):
        for name in ("gate", "router"):
            if hasattr(block.mlp, name):
                getattr(block.mlp, name).register_forward_hook(rerouted(layer))


@dataclass(frozen=True)
class Case:
    """A model and what `transformers` computes for it, by its own routes and by others."""

    own_logprobs: list[Tensor]
    routed: OracleCase

    @classmethod
    def of(cls, family: str, folder: Path) -> "Case":
        sizes = {NUM_EXPERTS[family]: EXPERTS, "num_experts_per_tok": TOPK}
        if family == SPARSE:
            sizes |= {"index_topk": INDEX_TOPK, "n_group": 1, "topk_group": 1}
        model = load_oracle(tiny_model(folder, family, num_hidden_layers=LAYERS, **sizes))
        with torch.no_grad():
            own_logprobs = sequence_logprobs(model, LENGTHS)
        follow(model, random_routes())
        if family == SPARSE:
            attend(model, random_tokens())
        return cls(own_logprobs, OracleCase.of(folder, LENGTHS, model))


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    return {family: Case.of(family, tmp_path_factory.mktemp(family)) for family in NUM_EXPERTS}


def numbers_on_rank(
    rank: int, family: str, folder: Path, dims: ParallelDims, *overrides: str
) -> Numbers:
    policy, groups = start_policy(rank, folder, dims, *overrides_of(family), *overrides)
    batches = [with_own_layers(batch, groups) for batch in batches_with_routes(family, dims)]
    return numbers_of(policy, groups, batches[groups.coordinates.data :: dims.data])


@pytest.mark.parametrize(
    ("family", "dims", "recompute"),
    CASES,
    ids=[
        f"{family} {layout_name(dims)} {' '.join(options[:1])}" for family, dims, options in CASES
    ],
)
def test_logprobs_and_gradients_are_those_of_the_routes(cases, family, dims, recompute):
    case = cases[family].routed
    overrides = [f"model.megatron.{option}" for option in recompute]
    case.check(run_ranks(dims.world_size, numbers_on_rank, family, case.folder, dims, *overrides))


# B is zero: the numbers are those of the base.
ADAPTERS = ("lora.r=2", "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]", "lora.sync=merged")
LATENT_ADAPTERS = (ADAPTERS[0], "lora.target_modules=[o_proj]", ADAPTERS[2])


def own_routes_on_rank(rank: int, family: str, folder: Path, *overrides: str) -> list[list[Tensor]]:
    """Log-probabilities under the reference, under a policy whose batch has no routes, and under
    one whose batch has some."""
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
def test_the_reference_and_a_batch_without_routes_have_their_own(cases, family, overrides):
    case = cases[family]
    [found] = run_ranks(1, own_routes_on_rank, family, case.routed.folder, *overrides)
    own, routed = torch.cat(case.own_logprobs), torch.cat(case.routed.logprobs)
    assert (own - routed).abs().max() > 0.1
    for logprobs, expected in zip(found, (own, own, routed), strict=True):
        torch.testing.assert_close(torch.cat(logprobs).double(), expected, atol=1e-5, rtol=0)


def noted_choices_on_rank(rank: int, folder: Path) -> list[list[Tensor]]:
    """Log-probabilities and gradients of a policy that chooses its tokens, and of one that is given
    these again."""
    dims, found = ParallelDims(), []
    replays = overrides_of(SPARSE)[1:]
    policy, groups = start_policy(rank, folder, dims, *replays)
    for attention in (layer.self_attention for layer in unwrapped(policy.chunks[0]).decoder.layers):
        attention._choose = noted(attention._choose, found)
    own = numbers_of(policy, groups, pack_all(LENGTHS, dims))
    assert len(found) == LAYERS * 2 * (len(LENGTHS) - 1)  # nothing is chosen of padding alone
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
def test_with_a_policys_own_choices_replay_changes_no_bit(cases):
    [(own, given)] = run_ranks(1, noted_choices_on_rank, cases[SPARSE].routed.folder)
    assert len(own) > 40 and all(map(torch.equal, own, given))


def dynamic_numbers_on_rank(rank: int, folder: Path, dims: ParallelDims) -> Numbers:
    overrides = *overrides_of(SPARSE), "parallel.dynamic_context_parallel=true"
    policy, groups = start_policy(rank, folder, dims, *overrides)
    batches = [with_own_layers(batch, groups) for batch in batches_with_routes(SPARSE, dims)]
    return numbers_of(policy, groups, batches)


@pytest.mark.slow
def test_choices_are_followed_where_context_ranks_may_change(cases):
    case, dims = cases[SPARSE].routed, ParallelDims(context=2)
    case.check(run_ranks(2, dynamic_numbers_on_rank, case.folder, dims))


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
        asked = Completions(random_prompts(NUM_SAMPLES // 4), params)
        await asked.begin(Answering())
        await asyncio.gather(*asked.sampling)
        return asked.samples()

    return asyncio.run(sample())


def gaps_on_rank(
    rank: int, family: str, folder: Path, dims: ParallelDims, samples: list[Sample]
) -> list[Tensor]:
    """How far log-probabilities of the trainer are from the engine's: with replay, and without."""
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
def test_the_trainer_follows_an_engine_whose_rounding_decides_between_experts(cases, family):
    folder = cases[family].routed.folder
    samples = bfloat16_samples(family, folder)
    ranks = run_ranks(2, gaps_on_rank, family, folder, ParallelDims(data=2, expert=2), samples)
    replayed, free = (torch.cat(gaps) for gaps in zip(*ranks, strict=True))
    assert len(replayed) == len(free) == NUM_SAMPLES * 24
    # A token that goes to other experts differs by tenths, and rounding by hundredths.
    assert replayed.max() < 0.1 < 0.3 < free.max()
    assert replayed.mean() < 0.7 * free.mean()


def test_routes_of_fewer_experts_than_the_model_has_for_a_token_are_refused():
    replay = RouterReplay()
    replay.routed_experts = torch.zeros(5, 0, dtype=torch.uint8)  # an engine told tokens alone
    with pytest.raises(ValueError, match="told 0 experts of a token, but the model has 3"):
        replay.get_replay_topk(torch.rand(5, EXPERTS), TOPK, None, None, None)
