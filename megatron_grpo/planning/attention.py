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
"""Queries in a block of attention, and of the indexer, as in `parallel.sparse_attention`."""


@dataclass(frozen=True)
class Attention(Block):
    """Grouped-query attention with RoPE, full or over a window."""

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
        """Width of the output gate in the projection of queries; 0 without one."""
        return self.heads.output if self.shape.has_output_gate else 0

    def weights(self) -> Iterator[Weights]:
        heads = self.heads
        outputs = heads.query + self._gates + heads.key + heads.value
        yield Weights("attention", self.shape.hidden_size * (outputs + heads.output))

    def other_flops(self, work: Computed) -> Iterator[Flops]:
        """Q K^T and P V: two operations per element and attending pair."""
        # No weights are involved: frozen ones save no pass.
        of_pair = 2.0 * (self.heads.query + self.heads.output)
        yield Flops("core_attn", of_pair * self._pairs(work), frozen_passes=PASSES)

    def _pairs(self, work: Computed) -> float:
        """Attending pairs, averaged over the model's layers: at most window x tokens in a windowed
        layer."""
        shape = self.shape
        if shape.window is None:
            return work.pairs
        share = len(shape.windowed_layers) / shape.num_layers
        return (1 - share) * work.pairs + share * min(work.pairs, shape.window * work.tokens)

    def saved(self, kernels: Kernels) -> dict[str, Saved]:
        heads, tensor = self.heads, kernels.dims.tensor
        kept = heads.elements
        if heads.are_fused:  # values are a view of the projection: queries, keys, gates stay alive
            kept += heads.query + heads.key + self._gates
        # The gate's sigmoid in float32, and its product with the attention's output.
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
            # Not the output: the projection after it keeps that, too.
            "core_attn": self.saved(kernels)["core_attn"].num_bytes - output,
            "attn_proj": output,
        }

    def context_elements(self, forwards: float, others: float, *, is_ring: bool) -> float:
        """Ring: keys and values in each forward; in the backward once more, with their gradients.
        All-to-all: queries, keys, values and outputs, without the heads that a rank keeps."""
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
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): heads are projected from
    latents."""

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
        """Add the norms of latents; the linear layer after a norm keeps its output."""
        ranks = [rank for rank in (self.latent.query_rank, self.latent.rank) if rank]
        norms = sum(kernels.norm(rank) - kernels.less_of_inputs * rank for rank in ranks)
        # The latent is a view of the projection, which keeps the rotated keys alive; torch's norms
        # in 16 bits copy it.
        norms += kernels.itemsize * self.latent.rotary_dim
        return super().saved(kernels) | {"latents": Saved(norms * kernels.token_share)}

    @property
    def gathered(self) -> tuple[int, int]:
        """Latents (hidden states where queries have none), and the rotated part of keys."""
        queries = self.latent.query_rank or self.shape.hidden_size
        return queries + self.latent.rank, self.latent.rotary_dim

    def engine_flops(self, tokens: int, prompt_tokens: float, pairs: float) -> float:
        """Decode with absorbed projections (arXiv 2405.04434, section 2.1.2): per pair and head, a
        score over latent and rotated part, and a weighted sum of latents.

        Absorbing costs as much per generated token as the up-projection that `weights` counts.
        """
        sizes = 2 * self.latent.rank + self.latent.rotary_dim
        return 2.0 * self.shape.num_attention_heads * sizes * pairs

    def cached_bytes(self, tensor: int, itemsize: int) -> int:
        """Latents and rotated keys have no heads to split: every worker caches both."""
        return (self.latent.rank + self.latent.rotary_dim) * itemsize


@dataclass(frozen=True)
class SparseAttention(LatentAttention):
    """Attention to the tokens that an indexer chose, in blocks that the backward computes again.

    All pairs are computed and most are masked, so no operations are saved here.
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
        """Add the indexer's key: 8 bits, and a float32 scale for 128 elements.

        Latents in 8 bits have the same scales, and rotated keys then 16 bits (Blackwell's kernels:
        8, without scales).
        """
        key = self.indexer.head_dim + self.indexer.head_dim // 128 * 4
        if itemsize == 1:
            key += self.latent.rank // 128 * 4 + self.latent.rotary_dim
        return super().cached_bytes(tensor, itemsize) + key

    def working_bytes(self, cfg: Config, device: str, *, backward: bool) -> int:
        """0 if no sequence is longer than `topk`: attention is dense then."""
        if longest_sequence(cfg, self.shape) <= self.indexer.topk:
            return 0
        return max(self.choosing_bytes(cfg), self.attending_bytes(cfg, device, backward=backward))

    def choosing_bytes(self, cfg: Config) -> int:
        """Peak bytes of the indexer, in float32: while it projects, or while it scores.

        Projecting: queries before and after RoPE, and two or three copies of their rotated part.
        Scoring: rotated queries, the keys of all context ranks and, for a block of queries and each
        key, the scores of all heads and 20 bytes for their sums and order.
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
        """Peak bytes of attention to the chosen tokens, by kernels that hold no scores of pairs.

        Forward: outputs of blocks until they are joined. Backward: float32 sums of the gradients of
        keys and values, gradients of queries until they are joined, and the larger of one block's
        gradients or the final copies of the sums in the model's dtype.
        """
        heads, num_tokens = self.heads, cfg.train.max_tokens_per_microbatch
        itemsize = ITEMSIZE[cfg.model.dtype] if device == "cuda" else 4
        own, num_keys = num_tokens / cfg.dims.context, self.num_keys(cfg, BLOCK)
        # A mask of bytes, the same mask in the dtype of scores, and 8 bytes for each chosen token.
        block = BLOCK * (num_keys * (1 + itemsize) + 8 * self.indexer.topk)
        if not backward:
            return round(own * itemsize * heads.output / cfg.dims.tensor + block)
        queries = own * itemsize * heads.query / cfg.dims.tensor
        width = (heads.query + heads.output) / cfg.dims.tensor
        copies = 0 if itemsize == 4 else itemsize * num_tokens * width
        of_block = itemsize * num_keys * width + block
        return round(4 * num_tokens * width + queries + max(of_block, copies + queries))

    def num_keys(self, cfg: Config, block: int) -> int:
        """Most keys that a block of queries sees: one whole sequence, and the next one up to the
        block's last query.

        A context rank's first slice of a sequence starts behind up to (C - 1) / 2C of it.
        """
        context, longest = cfg.dims.context, longest_sequence(cfg, self.shape)
        before = longest * (context - 1) // (2 * context)
        return min(longest + before + block * context, cfg.train.max_tokens_per_microbatch)
