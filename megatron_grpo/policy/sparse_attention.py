"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, GLM-5).

Megatron-Core's experimental variant is not used. Without fused kernels it holds scores of all pairs
of tokens for all heads of an indexer at once, and torch's `topk` decides between equal scores,
which may depend on the layout (test_upstream: indexer). It trains the indexer, by a loss of its
own, and has another latent attention (see `mla.py`).

The indexer is frozen: no gradient comes through a choice. Every tensor rank holds the whole indexer
and chooses for its own tokens; the choices are then gathered. Indexer replay takes the choices of
the engine's indexers from sampling (cf. `router.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm

from checkpoint_convert.shape import IndexerShape
from megatron_grpo.policy.mla import LatentAttention
from megatron_grpo.policy.packed_params import PackedParams
from parallel.attention import gather_packed
from parallel.dtypes import attention_dtype
from parallel.sparse_attention import choose_tokens, recorded_tokens, sparse_attention

NORM_EPS = 1e-6
"""Epsilon in the norm of the indexer's keys, whatever `rms_norm_eps` is."""


@dataclass
class IndexerReplay:
    """Replay state of one layer's attention."""

    number: int
    """Place of the layer among this rank's layers: its column in `chosen_tokens`."""
    is_on: bool = True


def add_indexer_replay(chunks: Sequence[GPTModel]) -> None:
    """Make the layers of a model follow the choices in the params of each packed microbatch."""
    for number, layer in enumerate(layer for chunk in chunks for layer in chunk.decoder.layers):
        layer.self_attention.replay = IndexerReplay(number)


class SparseAttention(LatentAttention):
    """Sparse attention of a layer; dense in microbatches without a sequence longer than `topk`."""

    def __init__(
        self, config: TransformerConfig, submodules: Any, *, indexer: IndexerShape, **options: Any
    ) -> None:
        super().__init__(config, submodules, **options)
        rank = self.latent.query_rank
        assert rank is not None, "read_indexer refuses others"
        self.indexer = Indexer(config, indexer, rank, self.latent.rotary_dim)
        self.replay: IndexerReplay | None = None

    def _attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        hidden: Tensor,
        latent: Tensor,
        rotary_pos_emb: Tensor,
        params: PackedParams,
    ) -> Tensor:
        if params.rope_length <= self.indexer.shape.topk:
            return super()._attend(heads, hidden, latent, rotary_pos_emb, params)
        if self.replay and self.replay.is_on and params.chosen_tokens is not None:
            chosen = recorded_tokens(params.chosen_tokens[:, self.replay.number], params.queries)
        else:
            chosen = self._choose(hidden, latent, rotary_pos_emb, params)
        query, key, value = heads
        group = params.cp_group or self.context_group
        key, value = (gather_packed(each, params, group) for each in (key, value))
        dtype = attention_dtype(query.dtype)
        scale = self.config.softmax_scale or self.head_dim**-0.5
        output = sparse_attention(
            query.to(dtype), key.to(dtype), value.to(dtype), chosen, params.queries, scale
        )
        return output.to(query.dtype)

    @torch.no_grad()
    def _choose(
        self, hidden: Tensor, latent: Tensor, rotary_pos_emb: Tensor, params: PackedParams
    ) -> Tensor:
        """Choose [t, topk] tokens for all t tokens of this context rank."""
        size = self.tp_group.size() if self.config.sequence_parallel else 1
        rank = self.tp_group.rank() if size > 1 else 0
        own = params.queries.part(rank, size)
        weight = getattr(self.linear_q_up_proj, "layer_norm_weight", None)
        if weight is None:  # torch's layers: Transformer Engine's fuse the norm into the product
            weight = self.q_layernorm.weight
        normed = rms_norm(latent, latent.shape[-1:], weight, self.config.layernorm_epsilon)
        at = params.queries.offsets if params.rope_rows is None else params.rope_rows
        angles = rotary_pos_emb[at, 0, 0]
        query, key, weights = self.indexer(hidden, normed, angles.chunk(size)[rank])
        if size > 1:
            key = gather_from_sequence_parallel_region(key, group=self.tp_group)
        key = gather_packed(key, params, params.cp_group or self.context_group)
        chosen = choose_tokens(query, key, weights, own, self.indexer.shape.topk)
        if size > 1:
            chosen = gather_from_sequence_parallel_region(chosen, group=self.tp_group)
        return chosen


class Indexer(MegatronModule):
    """Frozen projections to queries of `num_heads` heads, one shared key, and a weight per head."""

    def __init__(
        self, config: TransformerConfig, shape: IndexerShape, query_rank: int, rotary_dim: int
    ) -> None:
        super().__init__(config)
        self.shape, self.rotary_dim = shape, rotary_dim
        self.wq_b = self._weights(shape.num_heads * shape.head_dim, query_rank)
        self.wk = self._weights(shape.head_dim, config.hidden_size)
        self.weights_proj = self._weights(shape.num_heads, config.hidden_size)
        self.k_norm = self._weights(shape.head_dim, dtype=torch.float32)
        self.k_norm.bias = torch.nn.Parameter(torch.empty_like(self.k_norm.weight))
        self.requires_grad_(False)

    def _weights(self, *size: int, dtype: torch.dtype | None = None) -> Any:
        module: Any = torch.nn.Module()
        device, dtype = torch.cuda.current_device(), dtype or self.config.params_dtype
        module.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        return module

    def forward(
        self, hidden: Tensor, latent: Tensor, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [t, heads, d], keys [t, d] and weights [t, heads], in float32 at least.

        `hidden`: [t, hidden size]; `latent`: normed, of queries, [t, rank]; `angles`: RoPE's,
        [t, rotary_dim]. The weights include 1 / sqrt(d heads), the scale of scores.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        angles = angles.to(wide)
        query = linear(latent, self.wq_b.weight).unflatten(-1, (self.shape.num_heads, -1)).to(wide)
        norm = self.k_norm.weight.to(wide), self.k_norm.bias.to(wide)
        key = linear(hidden, self.wk.weight).to(wide)
        key = layer_norm(key, key.shape[-1:], *norm, NORM_EPS)
        weights = linear(hidden, self.weights_proj.weight).to(wide)
        scale = (self.shape.head_dim * self.shape.num_heads) ** -0.5
        query, key = self._rotate(query, angles.unsqueeze(1)), self._rotate(key, angles)
        return query, key, weights * scale

    def _rotate(self, part: Tensor, angles: Tensor) -> Tensor:
        """RoPE of the first `rotary_dim` elements."""
        turned, rest = part.split([self.rotary_dim, part.shape[-1] - self.rotary_dim], dim=-1)
        # Neighbours become halves: queries and keys share the new order, so products stay equal.
        if self.shape.has_neighbouring_pairs:
            turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat([-second, first], dim=-1)
        return torch.cat([turned * angles.cos() + crossed * angles.sin(), rest], dim=-1)
