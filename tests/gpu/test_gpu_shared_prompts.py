"""Shared prompts on CUDA: compiled flex attention in layers of torch and Transformer Engine."""

import pytest
import torch
from torch import Tensor

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import accumulate, start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.forward import compute_logprobs
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.attention import block_mask, flex, packed_attention
from parallel.packing import TokenSequence, pack
from parallel.rank_part import context_indices

SHAPE = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (192, 128)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    "segments", [[640, 256, 384, 124], [128, 64, 64, 4], [1000, 40, 8, 900], [64, 16, 8, 12]]
)
def test_flex_attention_equals_the_loops(segments, has_sinks, window, size, head_dim, value_dim):
    """Lengths change between microbatches, but the kernel stays the same. The second head sizes are
    DeepSeek-V3's."""
    prefix = segments[0] - 3
    none, shared = (0, 0), (0, prefix)
    branch = segments[0] + segments[1], sum(segments[:3]) - 3  # the last parts from the third
    prefixes = [[none, none], [shared, none], [shared, none], [shared, branch]]
    prefixes = torch.tensor(prefixes, device="cuda")
    cu_seqlens = torch.tensor([0, *segments], device="cuda").cumsum(0).int()
    query, key, value = (
        torch.randn(sum(segments), heads, width, device="cuda").requires_grad_()
        for heads, width in ((8, head_dim), (2, head_dim), (2, value_dim))
    )
    sinks = torch.randn(8, device="cuda").requires_grad_() if has_sinks else None
    inputs = (query, key, value, *([sinks] if has_sinks else []))
    for rank in range(size):
        local = context_indices(cu_seqlens, rank, size)
        mask = block_mask(cu_seqlens, prefixes, local, window=window)
        got = flex(query[local], key, value, mask, None, sinks)
        want = packed_attention(
            query[local],
            key,
            value,
            cu_seqlens,
            prefixes=prefixes,
            rank=rank,
            size=size,
            window=window,
            sinks=sinks,
        )
        probe = torch.randn_like(want)
        for a, b in zip(
            (got, *torch.autograd.grad((got * probe).sum(), inputs)),
            (want, *torch.autograd.grad((want * probe).sum(), inputs)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)


def group() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, 250, (150,), generator=generator)
    return [
        TokenSequence(
            tokens=torch.cat([prompt, torch.randint(4, 250, (n,), generator=generator)]),
            num_prompt_tokens=len(prompt),
            advantage=1.0,
            loss_weight=0.01,
            rollout_logprobs=torch.zeros(n),
        )
        for n in (30, 77, 1, 200)
    ]


def logprobs_and_norm(
    rank: int, folder: str, dims: ParallelDims, shared: bool, implementation: str
) -> tuple[Tensor, float]:
    """Concatenated log-probabilities of the completions, and the norm of the gradient."""
    policy, groups = start_policy(
        rank,
        folder,
        dims,
        "model.dtype=bfloat16",
        f"model.megatron.transformer_impl={implementation}",
        f"grpo.shared_prompts={str(shared).lower()}",
    )
    sequences, alignment = group(), Alignment.for_mesh(dims, False)
    batch = pack(sequences, range(len(sequences)), alignment, share_prompts=shared)
    batch = batch.to(f"cuda:{torch.cuda.current_device()}")
    ((whole, _),) = compute_logprobs(policy, [batch], 1.0, groups)
    accumulate(policy, groups, [batch])
    return whole[batch.loss_mask].cpu(), float(policy.optimizer.step()[1])


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(context=2)], ids=str)
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_a_policy_has_the_same_numbers_with_shared_prompts(tmp_path, dims, implementation):
    if torch.cuda.device_count() < dims.world_size:
        pytest.skip(f"needs {dims.world_size} GPUs")
    folder = tiny_model(tmp_path, "llama", **SHAPE)
    (shared, norm), (alone, expected) = (
        run_ranks(
            dims.world_size, logprobs_and_norm, folder, dims, is_shared, implementation, cuda=True
        )[0]
        for is_shared in (True, False)
    )
    torch.testing.assert_close(shared, alone, atol=0.1, rtol=0)
    assert norm == pytest.approx(expected, rel=0.02)
