from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from helpers.ranks.processes import run_ranks
from parallel.attention import BLOCK, SLAB, PackedAttention, block_mask, flex, packed_attention
from parallel.rank_part import context_indices, context_order

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
VALUE_DIMS = [HEAD_DIM, 5, 12]
"""Head sizes of values; in latent attention they differ from those of queries and keys."""
LENGTHS = [16, 8, 24]
SINKS = torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=torch.float64)
"""One for each head."""
WINDOWS = [None, 1, 5, 17]
"""No window, the token alone, a window shorter than a prompt, and one longer than it."""


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


def output_and_gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return [output, *torch.autograd.grad((output * probe).sum(), inputs)]


def megatron_config(*windows: int | None) -> SimpleNamespace:
    """The config fields that attention reads; None in `windows` is full attention."""
    sizes = {window for window in windows if window}
    return SimpleNamespace(
        attention_dropout=0.0,
        window_size=(sizes.pop() - 1, 0) if sizes else None,
        window_attn_skip_freq=[int(window is not None) for window in windows],
    )


def sinks_for(has_sinks: bool) -> Tensor | None:
    return SINKS.clone().requires_grad_() if has_sinks else None


def context_parallel_attention(
    rank: int, ranks_per_group: int, window: int | None, has_sinks: bool
) -> list[Tensor]:
    """Attention of this rank's slice in a group that does not start at global rank 0."""
    world = torch.distributed.get_world_size()
    groups = [
        torch.distributed.new_group(list(range(start, start + ranks_per_group)))
        for start in range(0, world, ranks_per_group)
    ]
    group = groups[rank // ranks_per_group]
    attention = PackedAttention(
        config=megatron_config(None, window),
        softmax_scale=None,
        pg_collection=SimpleNamespace(cp=group),
        layer_number=2,
    )
    attention.softmax_offset = sinks_for(has_sinks)
    *tensors, cu_seqlens = random_pack()
    local = context_indices(cu_seqlens, group.rank(), group.size())
    query, key, value = (tensor.detach()[local].requires_grad_() for tensor in tensors)
    params = SimpleNamespace(
        cu_seqlens_q=cu_seqlens,
        prefixes=None,
        block_masks={},
        context_order=context_order(cu_seqlens, group.size()),
        cp_group=None,
    )
    output = attention(query, key, value, None, packed_seq_params=params)
    probe = torch.linspace(-1, 1, tensors[0].numel(), dtype=output.dtype)
    loss = (output * probe.reshape(tensors[0].shape)[local]).sum()
    sinks = [attention.softmax_offset] if has_sinks else []
    gradients = torch.autograd.grad(loss, (query, key, value, *sinks))
    return [local, output.detach(), *gradients]


@pytest.mark.parametrize(
    ("world", "size", "window", "has_sinks"),
    [
        (4, 2, None, False),
        (4, 4, None, False),
        (4, 4, 5, False),
        (4, 2, None, True),
        (4, 4, 5, True),
    ],
)
def test_context_ranks_together_equal_one_process(world, size, window, has_sinks):
    query, key, value, cu_seqlens = random_pack()
    sinks = sinks_for(has_sinks)
    output = packed_attention(query, key, value, cu_seqlens, window=window, sinks=sinks)
    want = output_and_gradients(output, query, key, value, *([sinks] if has_sinks else []))
    ranks = run_ranks(world, context_parallel_attention, size, window, has_sinks)
    for local, *got in ranks:
        for part, whole in zip(got[:4], want[:4], strict=True):
            torch.testing.assert_close(part, whole[local].detach())
    if has_sinks:  # each query counts its sink once, whichever rank has it
        summed = sum(gradient for *_, gradient in ranks)
        torch.testing.assert_close(summed, world // size * want[4])


def bfloat16_attention(rank: int) -> tuple[Tensor, Tensor]:
    attention = PackedAttention(
        config=megatron_config(None),
        layer_number=1,
        softmax_scale=None,
        pg_collection=SimpleNamespace(cp=torch.distributed.group.WORLD),
    )
    query, key, value, cu_seqlens = random_pack(torch.bfloat16)
    params = SimpleNamespace(cu_seqlens_q=cu_seqlens, prefixes=None, block_masks={}, cp_group=None)
    output = attention(query, key, value, None, packed_seq_params=params)
    (gradient,) = torch.autograd.grad(output.float().sum(), key)
    return output.detach(), gradient


def test_output_and_gradients_keep_the_type_of_the_model():
    ((output, gradient),) = run_ranks(1, bfloat16_attention)
    query, key, value, _ = random_pack()
    want = dense_attention(query, key, value, seen_keys(LENGTHS, [[]] * len(LENGTHS)))
    assert output.dtype == gradient.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), want.detach(), atol=2e-2, rtol=2e-2)


# A prompt of 11 tokens padded to 16 with two completions, an unrelated sequence, a prompt of 8
# tokens with its completion.
SEGMENTS = [16, 8, 24, 16, 8, 16, 8, 8]
PREFIXES = [[], [(0, 11)], [(0, 11)], [], [], [(64, 72)]]
# A branch of the third segment's sequence, and a branch of that branch.
PREFIXES += [[(0, 11), (24, 37)], [(0, 11), (24, 37), (88, 91)]]


def shared_pack(value_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(
            sum(SEGMENTS), heads, width, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for heads, width in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, value_dim))
    )
    cu_seqlens = torch.tensor([0, *SEGMENTS]).cumsum(0).int()
    return query, key, value, cu_seqlens, prefixes_of(PREFIXES)


def prefixes_of(parts: list[list[tuple[int, int]]]) -> Tensor:
    most = max(map(len, parts))
    return torch.tensor([[*each, *[(0, 0)] * (most - len(each))] for each in parts])


def seen_keys(
    segments: list[int], prefixes: list[list[tuple[int, int]]], window: int | None = None
) -> Tensor:
    """[T, T] bool: whether a packed position (row) attends to another (column)."""
    total, start = sum(segments), 0
    seen = torch.zeros(total, total, dtype=torch.bool)
    for length, parts in zip(segments, prefixes, strict=True):
        before = [position for first, end in parts for position in range(first, end)]
        for query in range(start, start + length):
            sequence = [*before, *range(start, query + 1)]
            seen[query, sequence[-(window or total) :]] = True
        start += length
    return seen


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Attention with the full matrix of scores, masked by `seen`, and a column of sinks."""
    group = HEADS // KV_HEADS
    keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("value_dim", VALUE_DIMS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_completions_attend_to_the_prompt_they_share_and_to_nothing_else(
    has_sinks, size, value_dim, window
):
    query, key, value, cu_seqlens, prefixes = shared_pack(value_dim)
    seen, sinks = seen_keys(SEGMENTS, PREFIXES, window), sinks_for(has_sinks)
    inputs = (query, key, value, *([sinks] if has_sinks else []))
    for rank in range(size):
        local = context_indices(cu_seqlens, rank, size)
        part = packed_attention(
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
        whole = dense_attention(query[local], key, value, seen[local], sinks)
        got = output_and_gradients(part, *inputs)
        for a, b in zip(got, output_and_gradients(whole, *inputs), strict=True):
            torch.testing.assert_close(a, b)


def test_a_long_sequence_is_cut_into_blocks_of_queries_that_see_their_windows():
    length, window = 3 * BLOCK + 50, 40
    query, key, value = (
        torch.randn(length, heads, HEAD_DIM, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cu_seqlens = torch.tensor([0, length])
    part = packed_attention(query, key, value, cu_seqlens, window=window)
    whole = dense_attention(query, key, value, seen_keys([length], [[]], window))
    got, want = (output_and_gradients(each, query, key, value) for each in (part, whole))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_window_as_long_as_every_sequence_changes_no_bit():
    query, key, value, cu_seqlens, prefixes = shared_pack(HEAD_DIM)
    plain, windowed = (
        packed_attention(query, key, value, cu_seqlens, prefixes=prefixes, window=window)
        for window in (None, 35)
    )
    got, want = (output_and_gradients(each, query, key, value) for each in (windowed, plain))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("value_dim", VALUE_DIMS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_flex_attention_sees_the_same_keys(sinks, size, value_dim, window):
    """Forward only: flex attention has a backward pass only on GPUs, tested in tests/gpu."""
    *tensors, cu_seqlens, prefixes = shared_pack(value_dim)
    query, key, value = (tensor.detach() for tensor in tensors)
    seen = seen_keys(SEGMENTS, PREFIXES, window)
    for rank in range(size):
        local = context_indices(cu_seqlens, rank, size)
        mask = block_mask(cu_seqlens, prefixes, local, window=window)
        part = flex(query[local], key, value, mask, None, sinks)
        whole = dense_attention(query[local], key, value, seen[local], sinks)
        torch.testing.assert_close(part, whole)


@pytest.mark.slow
def test_flex_attention_is_compiled_once_for_all_lengths():
    attend = torch.compile(flex_attention, dynamic=True)
    for count, segments in enumerate([[640, 256, 384, 124], [128, 64, 64, 4], [1000, 40, 8, 9]]):
        prefixes = [[], [(0, segments[0] - 3)], [(0, segments[0] - 3)], []]
        cu_seqlens, total = torch.tensor([0, *segments]).cumsum(0).int(), sum(segments)
        mask = block_mask(cu_seqlens, prefixes_of(prefixes), torch.arange(total))
        query, key, value = (torch.randn(total, h, 64) for h in (HEADS, KV_HEADS, KV_HEADS))
        with torch._dynamo.config.patch(error_on_recompile=count > 0), torch.no_grad():
            got = attend(
                *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
                block_mask=mask,
                enable_gqa=True,
            )
        want = dense_attention(query, key, value, seen_keys(segments, prefixes))
        torch.testing.assert_close(got[0].transpose(0, 1), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("slab", [BLOCK, 4 * BLOCK, SLAB])
@pytest.mark.parametrize("size", [1, 2])
def test_the_block_mask_skips_unseen_blocks_and_leaves_whole_ones_unmasked(
    monkeypatch, size, slab, window
):
    monkeypatch.setattr("parallel.attention.SLAB", slab)
    segments = [640, 256, 384, 124]
    prefixes = [[], [(0, 637)], [(0, 637)], []]
    cu_seqlens = torch.tensor([0, *segments]).cumsum(0).int()
    seen = seen_keys(segments, prefixes, window)
    for rank in range(size):
        local = context_indices(cu_seqlens, rank, size)
        mask = block_mask(cu_seqlens, prefixes_of(prefixes), local, window=window)
        rows = torch.zeros(-(-len(local) // BLOCK) * BLOCK, -(-sum(segments) // BLOCK) * BLOCK)
        rows[: len(local), : sum(segments)] = seen[local].float()
        blocks = rows.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).mean(dim=(1, 3))
        whole = torch.zeros_like(blocks)
        for row, (count, keys) in enumerate(
            zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)
        ):
            whole[row, keys[:count].long()] = 1
        assert torch.equal(mask.to_dense()[0, 0].bool(), blocks > 0)
        assert torch.equal(whole, (blocks == 1).float())
        assert whole.any()
