from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from distributed import run_ranks
from parallel.attention import PackedAttention, packed_attention
from parallel.context import context_indices

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTHS = [16, 8, 24]


def random_pack(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, HEAD_DIM, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return query, key, value, cu_seqlens


def naive_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """One sequence, one head at a time, straight from the definition."""
    outputs, group = torch.zeros_like(query), HEADS // KV_HEADS
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(HEADS):
            scores = query[rows, head] @ key[rows, head // group].T / HEAD_DIM**0.5
            future = torch.ones(length, length).triu(1).bool()
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outputs[rows, head] = weights @ value[rows, head // group]
        start += length
    return outputs


def output_and_gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output, *torch.autograd.grad((output * probe).sum(), inputs)]


def test_every_sequence_attends_to_its_own_past_only():
    query, key, value, cu_seqlens = random_pack()
    got = output_and_gradients(packed_attention(query, key, value, cu_seqlens), query, key, value)
    want = output_and_gradients(naive_attention(query, key, value, LENGTHS), query, key, value)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [2, 4])
def test_queries_of_one_context_rank_get_what_they_get_alone(size):
    query, key, value, cu_seqlens = random_pack()
    whole = packed_attention(query, key, value, cu_seqlens)
    for rank in range(size):
        local = context_indices(cu_seqlens, rank, size)
        part = packed_attention(query[local], key, value, cu_seqlens, rank=rank, size=size)
        torch.testing.assert_close(part, whole[local])


def context_parallel_attention(rank: int, ranks_per_group: int) -> list[Tensor]:
    """Attention of this rank's slice in a group that does not start at global rank 0."""
    world = torch.distributed.get_world_size()
    groups = [
        torch.distributed.new_group(list(range(start, start + ranks_per_group)))
        for start in range(0, world, ranks_per_group)
    ]
    group = groups[rank // ranks_per_group]
    attention = PackedAttention(
        config=SimpleNamespace(attention_dropout=0.0),
        softmax_scale=None,
        pg_collection=SimpleNamespace(cp=group),
        layer_number=1,
    )
    *tensors, cu_seqlens = random_pack()
    local = context_indices(cu_seqlens, group.rank(), group.size())
    query, key, value = (tensor.detach()[local].requires_grad_() for tensor in tensors)
    params = SimpleNamespace(cu_seqlens_q=cu_seqlens, prefixes=None, block_mask=None)
    output = attention(query, key, value, None, packed_seq_params=params)
    probe = torch.linspace(-1, 1, tensors[0].numel(), dtype=output.dtype)
    loss = (output * probe.reshape(tensors[0].shape)[local]).sum()
    return [local, output.detach(), *torch.autograd.grad(loss, (query, key, value))]


@pytest.mark.parametrize(("world", "size"), [(4, 2), (4, 4)])
def test_context_ranks_together_equal_one_process(world, size):
    query, key, value, cu_seqlens = random_pack()
    want = output_and_gradients(packed_attention(query, key, value, cu_seqlens), query, key, value)
    for local, *got in run_ranks(world, context_parallel_attention, size):
        for part, whole in zip(got, want, strict=True):
            torch.testing.assert_close(part, whole[local].detach())


def bfloat16_attention(rank: int) -> tuple[Tensor, Tensor]:
    attention = PackedAttention(
        config=SimpleNamespace(attention_dropout=0.0),
        softmax_scale=None,
        pg_collection=SimpleNamespace(cp=torch.distributed.group.WORLD),
    )
    query, key, value, cu_seqlens = random_pack(torch.bfloat16)
    params = SimpleNamespace(cu_seqlens_q=cu_seqlens, prefixes=None, block_mask=None)
    output = attention(query, key, value, None, packed_seq_params=params)
    (gradient,) = torch.autograd.grad(output.float().sum(), key)
    return output.detach(), gradient


def test_output_and_gradients_keep_the_type_of_the_model():
    ((output, gradient),) = run_ranks(1, bfloat16_attention)
    query, key, value, _ = random_pack()
    want = naive_attention(query, key, value, LENGTHS)
    assert output.dtype == gradient.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), want.detach(), atol=2e-2, rtol=2e-2)
