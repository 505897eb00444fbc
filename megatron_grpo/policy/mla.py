"""Multi-head latent attention (arXiv 2405.04434, section 2.1) as a module of Megatron-Core.

Megatron-Core's own module splits the projections down to latents over tensor ranks with torch's
layers, but not with Transformer Engine's (test_upstream: latent_projections): a rank's parts of the
weights would depend on the kind of layers. It also has a RoPE of its own. Here every tensor rank
computes whole latents of its own tokens with both kinds of layers, and RoPE is `PackedRotary`.
Tensor ranks need sequence parallelism: all models with latents also have experts.

Keys and values are projected up to all heads before attention, which takes the fewest FLOPs for
whole sequences.
"""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import set_save_original_input
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from checkpoint_convert.shape import LatentShape
from megatron_grpo.policy.packed_params import PackedParams


class LatentAttention(Attention):
    """Latent attention with the submodules of Megatron's ``MLASelfAttention``.

    `head_dim` is the head size of queries and keys; `config.kv_channels` the size of values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *,
        latent: LatentShape,
        head_dim: int,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, attention_type="self", **options)
        self.latent, self.head_dim = latent, head_dim
        # `rotate_own_tokens` may replace the collection's group later, for RoPE alone.
        self.context_group = self.pg_collection.cp
        # The base class's attention has one head size for queries and values. Transformer Engine's
        # accepts no further options.
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=self.layer_number,
            attn_mask_type=self.attn_mask_type,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            k_channels=head_dim,
            v_channels=latent.value_dim,
            cp_comm_type=options.get("cp_comm_type"),
            pg_collection=self.pg_collection,
        )
        hidden, heads = config.hidden_size, config.num_attention_heads
        queries, rank = heads * head_dim, latent.query_rank
        if rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, hidden, queries, "q_proj")
        else:
            self.linear_q_down_proj = self._down(submodules.linear_q_down_proj, rank, "q_down_proj")
            self.q_layernorm = self._norm(submodules.q_layernorm, rank)
            self.linear_q_up_proj = self._up(
                submodules.linear_q_up_proj, rank, queries, "q_up_proj"
            )
        self.linear_kv_down_proj = self._down(
            submodules.linear_kv_down_proj, latent.rank + latent.rotary_dim, "kv_down_proj"
        )
        self.kv_layernorm = self._norm(submodules.kv_layernorm, latent.rank)
        self.linear_kv_up_proj = self._up(
            submodules.linear_kv_up_proj,
            latent.rank,
            heads * (head_dim - latent.rotary_dim + latent.value_dim),
            "kv_up_proj",
        )

    def _down(self, module: Any, size: int, name: str) -> Any:
        linear = build_module(
            module,
            self.config.hidden_size,
            size,
            parallel_mode="duplicated",
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
            tp_comm_buffer_name=name,
        )
        # Transformer Engine marks every linear weight as split, and the gradient norm would count
        # this one once per tensor rank.
        linear.weight.tensor_model_parallel = False
        return linear

    def _norm(self, module: Any, size: int) -> Any:
        eps = self.config.layernorm_epsilon
        return build_module(module, config=self.config, hidden_size=size, eps=eps)

    def _up(self, module: Any, rank: int, size: int, name: str) -> Any:
        return build_module(
            module,
            rank,
            size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=self.tp_group,
        )

    def set_for_recompute_input_layernorm(self) -> None:
        """Called by Megatron with FP8, to let projections keep their input unquantised.

        Otherwise each would keep a quantised copy of the norm's output, which Megatron frees and
        recomputes.
        """
        queries = "linear_q_proj" if self.latent.query_rank is None else "linear_q_down_proj"
        for name in queries, "linear_kv_down_proj":
            set_save_original_input(getattr(self, name))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedParams,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [t, 1, hidden size] to the same shape; t: tokens of this rank's sequence shard."""
        hidden = hidden_states.squeeze(1)
        latent = hidden if self.latent.query_rank is None else self.linear_q_down_proj(hidden)[0]
        heads = self.get_query_key_value_tensors(hidden, latent, rotary_pos_emb, packed_seq_params)
        mixed = self._attend(heads, hidden, latent, rotary_pos_emb, packed_seq_params)
        return self.linear_proj(mixed.reshape(len(mixed), 1, -1))

    def _attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        hidden: Tensor,
        latent: Tensor,
        rotary_pos_emb: Tensor,
        params: PackedParams,
    ) -> Tensor:
        """Attend with `heads`: queries, keys and values. Sparse attention reads the rest."""
        recomputes = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if recomputes else self.core_attention
        return attend(*heads, None, attn_mask_type=self.attn_mask_type, packed_seq_params=params)

    def get_query_key_value_tensors(
        self, hidden: Tensor, query_latent: Tensor, rotary_pos_emb: Tensor, params: PackedParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [t, heads of this rank, head_dim], and values [.., value_dim]."""
        rotary_dim, value_dim = self.latent.rotary_dim, self.latent.value_dim
        both, _ = self.linear_kv_down_proj(hidden)
        latent, key_rotary = both.split([self.latent.rank, rotary_dim], dim=-1)
        # All heads share the rotated part of keys: its gradient is a sum over tensor ranks, which
        # the backward of this gather makes.
        key_rotary = gather_from_sequence_parallel_region(key_rotary, group=self.tp_group)
        keys_and_values, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        heads = self.num_attention_heads_per_partition
        key, value = keys_and_values.unflatten(-1, (heads, -1)).split(
            [self.head_dim - rotary_dim, value_dim], dim=-1
        )
        query, query_rotary = (
            self._queries(query_latent)
            .unflatten(-1, (heads, -1))
            .split([self.head_dim - rotary_dim, rotary_dim], dim=-1)
        )
        key_rotary = self._rotate(key_rotary.unsqueeze(1), rotary_pos_emb, params)
        query_rotary = self._rotate(query_rotary, rotary_pos_emb, params)
        query = torch.cat([query, query_rotary], dim=-1)
        key = torch.cat([key, key_rotary.expand(-1, heads, -1)], dim=-1)
        return query, key, value.contiguous()

    def _queries(self, latent: Tensor) -> Tensor:
        if self.latent.query_rank is None:
            return self.linear_q_proj(latent)[0]
        return self.linear_q_up_proj(self.q_layernorm(latent))[0]

    def _rotate(self, part: Tensor, rotary_pos_emb: Tensor, params: PackedParams) -> Tensor:
        """RoPE of [t, heads, rotary_dim]; its pairs are neighbours in the weights' order."""
        # Megatron's RoPE pairs element i with i + rotary_dim / 2. Scores stay equal in any order
        # that queries and keys share.
        halves = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary_pos_emb(
            halves,
            rotary_pos_emb,
            config=self.config,
            cu_seqlens=params.rope_cu_seqlens,
            cp_group=self.pg_collection.cp,
        )


class WholeLinear(torch.nn.Linear):
    """Torch's linear layer, whole on every tensor rank; Megatron-Core has none."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias=False,
            dtype=config.params_dtype,
            device=torch.cuda.current_device(),
        )
        # Each tensor rank sees a part of the tokens; the mark makes Megatron sum the gradient.
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        """Leave weights uninitialised: they are about to be loaded."""

    def forward(self, input: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The product and no bias, as Megatron-Core's linear layers return."""
        return super().forward(input), None
