"""Softmax attention: full, over windows, of latents, and sparse by an indexer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from checkpoint_convert.shape import IndexerShape, LatentShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.block import PASSES, Block, Flops, Heads, Kernels, Saved, Weights
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.workload import Computed, longest_sequence

BLOCK, INDEX_BLOCK = 128, 32
"""Queries of attention and of the indexer at a time, as in `parallel.sparse_attention`."""


@dataclass(frozen=True)
class Attention(Block):
    """Grouped queries, with RoPE, over all tokens before or a window of them."""

    repeats: ClassVar[Mapping[str, str]] = {"tensor": "attention", "context": "core_attn"}

    @property
    def heads(self) -> Heads:
        shape = self.shape
        num_heads, num_kv = shape.num_attention_heads, shape.num_key_value_heads
        return Heads(
            num_heads=num_heads,
            query=num_heads * shape.head_dim,
            key=num_kv * shape.head_dim,
            value=num_kv * shape.value_dim,
            output=num_heads * shape.value_dim,
            are_fused=shape.latent is None,
        )

    @property
    def _gates(self) -> int:
        """Outputs of the projection of queries that gate the output."""
        return self.heads.output if self.shape.has_output_gate else 0

    def weights(self) -> Iterator[Weights]:
        heads = self.heads
        outputs = heads.query + self._gates + heads.key + heads.value
        yield Weights("attention", self.shape.hidden_size * (outputs + heads.output))

    def other_flops(self, work: Computed) -> Iterator[Flops]:
        """Products of the query with the key, and of its weight with the value, of each pair."""
        of_pair = 2.0 * (self.heads.query + self.heads.output)
        yield Flops("core_attn", of_pair * self._pairs(work), frozen_passes=PASSES)

    def _pairs(self, work: Computed) -> float:
        """Pairs of tokens that attend, in the mean over the model's layers: a token to a window, or
        to all before it where that is less for the mean of them."""
        shape = self.shape
        if shape.window is None:
            return work.pairs
        share = len(shape.windowed_layers) / shape.num_layers
        return (1 - share) * work.pairs + share * min(work.pairs, shape.window * work.tokens)

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        heads, tensor = self.heads, kernels.dims.tensor
        kept = heads.elements
        if heads.are_fused:  # values are a view of what comes with queries, keys and gates
            kept += heads.query + heads.key + self._gates
        # A sigmoid in float32, and its product with the attention's output.
        around = self._head_norms(kernels) + (4 + kernels.itemsize) * self._gates / tensor
        if not kernels.fuses_rope:  # four tables
            around += 4 * self.shape.rotary_dim * kernels.itemsize
        return super().saved(kernels) | {
            "core_attn": Saved(kernels.attention(heads) / tensor, kernels.itemsize * kept / tensor),
            "around attention": Saved(around),
        }

    def _head_norms(self, kernels: Kernels) -> float:
        """Bytes of norms of queries and keys, without their outputs."""
        if not self.shape.qk_norm:
            return 0.0
        num_heads = self.shape.num_attention_heads + self.shape.num_key_value_heads
        norm = kernels.norm(self.shape.head_dim) - kernels.itemsize * self.shape.head_dim
        return num_heads * norm / kernels.dims.tensor

    def offloadable(self, kernels: Kernels) -> Mapping[str, float]:
        width, share = self.shape.hidden_size, kernels.token_share
        is_fused = kernels.fuses_norms and self.shape.has_pre_norms
        before = kernels.norm(width) if is_fused else kernels.itemsize * width
        before -= kernels.less_of_inputs * width
        output = kernels.itemsize * self.heads.output / kernels.dims.tensor
        return {
            "attn_norm": self._norm_without_input(kernels),
            "qkv_linear": before * share + self._head_norms(kernels),
            # The product after it keeps its output, too.
            "core_attn": self.saved(kernels)["core_attn"].num_bytes - output,
            "attn_proj": output,
        }

    def context_elements(self, forwards: float, others: float, *, is_ring: bool) -> float:
        """In a ring a backward passes keys and values round once more, and their gradients; else a
        rank keeps some heads of its tokens, of queries and outputs, too."""
        heads = self.heads
        if is_ring:
            return (forwards + 2) * (heads.key + heads.value) * others
        return (forwards + 1) * heads.elements * others / (others + 1)

    def engine_flops(self, tokens: int, prompt_tokens: float, pairs: float) -> float:
        return 2.0 * (self.heads.query + self.heads.output) * pairs

    def cached_bytes(self, tensor: int, itemsize: int) -> int:
        """At least one key-value head, however many workers there are."""
        return 2 * -(-self.shape.num_key_value_heads // tensor) * self.shape.head_dim * itemsize


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Queries, keys and values of all heads are projections of latents."""

    has_own_norm = True

    @property
    def latent(self) -> LatentShape:
        assert self.shape.latent is not None
        return self.shape.latent

    def weights(self) -> Iterator[Weights]:
        hidden, heads, latent = self.shape.hidden_size, self.heads, self.latent
        queries = hidden * heads.query
        if latent.query_rank is not None:
            queries = (hidden + heads.query) * latent.query_rank
        without_rope = self.shape.num_attention_heads * (self.shape.head_dim - latent.rotary_dim)
        keys_and_values = hidden * (latent.rank + latent.rotary_dim)
        keys_and_values += latent.rank * (without_rope + heads.value)
        yield Weights("attention", queries + keys_and_values + heads.output * hidden)

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        """And norms of latents, whose outputs are inputs of linear layers."""
        ranks = [rank for rank in (self.latent.query_rank, self.latent.rank) if rank]
        norms = sum(kernels.norm(rank) - kernels.less_of_inputs * rank for rank in ranks)
        # A view, which keeps the rotated part of keys, too; torch's norms in 16 bits copy it.
        norms += kernels.itemsize * self.latent.rotary_dim
        return super().saved(kernels) | {"latents": Saved(norms * kernels.token_share)}

    @property
    def gathered(self) -> tuple[int, int]:
        """Latents, and the rotated part of keys."""
        queries = self.latent.query_rank or self.shape.hidden_size
        return queries + self.latent.rank, self.latent.rotary_dim

    def engine_flops(self, tokens: int, prompt_tokens: float, pairs: float) -> float:
        """Engines generate without projecting latents up: queries are multiplied with latents
        instead, and so are their weighted sums (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
        These are as many operations per generated token as one of the projection's, and a query is
        as long as a latent with its rotated part."""
        sizes = 2 * self.latent.rank + self.latent.rotary_dim
        return 2.0 * self.shape.num_attention_heads * sizes * pairs

    def cached_bytes(self, tensor: int, itemsize: int) -> int:
        """The latent and the rotated part of keys, which have no heads: every worker has both."""
        return (self.latent.rank + self.latent.rotary_dim) * itemsize


@dataclass(frozen=True)
class SparseAttention(LatentAttention):
    """Queries meet the tokens that an indexer chose, in blocks that are computed again as they are.

    All pairs are computed and most masked: it saves no operations here.
    """

    @property
    def indexer(self) -> IndexerShape:
        assert self.shape.indexer is not None
        return self.shape.indexer

    def weights(self) -> Iterator[Weights]:
        yield from super().weights()
        indexer, hidden = self.indexer, self.shape.hidden_size
        queries = (self.latent.query_rank or hidden) * indexer.num_heads * indexer.head_dim
        size = queries + hidden * (indexer.head_dim + indexer.num_heads)
        yield Weights("attention", size, is_linear=False)

    def other_flops(self, work: Computed) -> Iterator[Flops]:
        """The indexer scores all pairs, and has no backward."""
        yield from super().other_flops(work)
        scores = 2.0 * self.indexer.num_heads * self.indexer.head_dim * work.pairs
        yield Flops("indexer", scores, passes=1, frozen_passes=1)

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        """Keys and values of all context ranks, and on every tensor rank the chosen tokens."""
        heads, dims = self.heads, kernels.dims
        keys = (heads.key + heads.value) * dims.context
        split = kernels.attention_itemsize * (heads.query + keys) + kernels.itemsize * heads.output
        core = split / dims.tensor + 4 * self.indexer.topk
        return super().saved(kernels) | {"core_attn": Saved(core, entry=core)}

    def cached_bytes(self, tensor: int, itemsize: int) -> int:
        """And the key of the indexer in 8 bits, with a float32 scale for 128 elements; latents in 8
        bits then have such scales, too, and the rotated part 16 bits (kernels of Blackwell have 8,
        without them)."""
        key = self.indexer.head_dim + self.indexer.head_dim // 128 * 4
        if itemsize == 1:
            key += self.latent.rank // 128 * 4 + self.latent.rotary_dim
        return super().cached_bytes(tensor, itemsize) + key

    def working_bytes(self, cfg: Config, device: str, *, backward: bool) -> int:
        """Nothing if no sequence is longer than `topk`, as attention is then whole."""
        if longest_sequence(cfg, self.shape) <= self.indexer.topk:
            return 0
        return max(self.choosing_bytes(cfg), self.attending_bytes(cfg, device, backward=backward))

    def choosing_bytes(self, cfg: Config) -> int:
        """Bytes of the indexer, which chooses the tokens in float32.

        First its queries: as they were projected and rotated, with what of them is rotated and
        twice more. Then the rotated ones, the keys of all context ranks, and for a block of queries
        the scores of every head with each key; of the sums over heads three copies, two of them of
        the block before, and twelve bytes for their order.
        """
        indexer, num_tokens = self.indexer, cfg.train.max_tokens_per_microbatch
        heads, width = indexer.num_heads, indexer.head_dim
        own = num_tokens / cfg.dims.context
        if cfg.parallel.sequence_parallel:
            own /= cfg.dims.tensor
        turned = (3 if indexer.has_neighbouring_pairs else 2) * self.shape.rotary_dim
        projecting = own * 4 * heads * (2 * width + turned)
        block = min(INDEX_BLOCK, own) * self.num_keys(cfg, INDEX_BLOCK) * (4 * heads + 20)
        rotated = own * 4 * (heads * (width + 1) + indexer.topk)
        return round(max(projecting, rotated + 4 * width * num_tokens + block))

    def attending_bytes(self, cfg: Config, device: str, *, backward: bool) -> int:
        """Bytes of attention to the chosen tokens, by kernels that hold no scores of pairs.

        In a forward outputs of blocks, which are then joined. A backward has float32 sums of the
        gradients of keys and values; and those of a block's keys and values, or in the end copies
        of the sums in their dtype. Gradients of queries are joined, too.
        """
        heads, num_tokens = self.heads, cfg.train.max_tokens_per_microbatch
        itemsize = ITEMSIZE[cfg.model.dtype] if device == "cuda" else 4
        own, num_keys = num_tokens / cfg.dims.context, self.num_keys(cfg, BLOCK)
        # A mask, and that in the dtype of scores.
        block = BLOCK * (num_keys * (1 + itemsize) + 8 * self.indexer.topk)
        if not backward:
            return round(own * itemsize * heads.output / cfg.dims.tensor + block)
        queries = own * itemsize * heads.query / cfg.dims.tensor
        width = (heads.query + heads.output) / cfg.dims.tensor
        copies = 0 if itemsize == 4 else itemsize * num_tokens * width
        of_block = itemsize * num_keys * width + block
        return round(4 * num_tokens * width + queries + max(of_block, copies + queries))

    def num_keys(self, cfg: Config, block: int) -> int:
        """The most that a block of queries sees: all of one sequence, and what of the next ones is
        before its last query. That may be in a context rank's first slice, before which are up to
        (C - 1) / 2C of its sequence."""
        context, longest = cfg.dims.context, longest_sequence(cfg, self.shape)
        before = longest * (context - 1) // (2 * context)
        return min(longest + before + block * context, cfg.train.max_tokens_per_microbatch)
