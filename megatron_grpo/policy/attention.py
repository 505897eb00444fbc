"""Attention with windows, sinks, a bias of its output projection, or LongRoPE.

In a layer with a window of w, a token attends to itself and the w - 1 tokens before it. A sink is a
parameter of a head, which softmax counts as one more score.
"""

from copy import copy
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from checkpoint_convert import ModelShape
from megatron_grpo.policy.rope import softmax_scale
from parallel.attention import PackedAttention


def window_fields(shape: ModelShape) -> dict[str, Any]:
    """Megatron's fields for the windows of a model, read by attention of every kind."""
    if shape.window is None:
        return {"window_size": None, "window_attn_skip_freq": None}
    layers = [int(layer in shape.windowed_layers) for layer in range(shape.num_layers)]
    # Megatron counts (tokens before, tokens after), without the token itself.
    return {"window_size": (shape.window - 1, 0), "window_attn_skip_freq": layers}


def attention_windows(chunk: GPTModel) -> set[int | None]:
    """Windows of a chunk's layers, with None for layers without; these need block masks.

    Empty if no layer has `PackedAttention`: other attention needs no masks.
    """
    cores = [
        getattr(layer.self_attention, "core_attention", None) for layer in chunk.decoder.layers
    ]
    if not any(isinstance(core, PackedAttention) for core in cores):
        return set()
    size = chunk.config.window_size
    return {None} if size is None else {None, size[0] + 1}


class WindowedAttention(SelfAttention):
    """Attention of a model with another RoPE in windowed layers: see `PackedRotary`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *,
        window_scale: float | None,
        **options: Any,
    ) -> None:
        layers = config.window_attn_skip_freq
        assert isinstance(layers, list)
        self.table = layers[layer_number - 1]
        # YaRN's attention factor is part of the scale of scores (`rope.py`), and the RoPE of
        # windowed layers is not scaled: `window_scale` has no such factor.
        if self.table:
            config = copy(config)
            config.softmax_scale = window_scale
        super().__init__(config, submodules, layer_number, **options)

    def forward(
        self, hidden_states: Tensor, *options: Any, rotary_pos_emb: Tensor, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Megatron's forward; `rotary_pos_emb` are both of `PackedRotary`'s tables [2, ...]."""
        own = rotary_pos_emb[self.table]
        return super().forward(hidden_states, *options, rotary_pos_emb=own, **named)


class BiasedAttention(SelfAttention):
    """Attention with a bias of its output projection; Megatron's field is for MLPs as well."""

    def __init__(self, config: TransformerConfig, *positional: Any, **options: Any) -> None:
        config = copy(config)
        config.add_bias_linear = True
        super().__init__(config, *positional, **options)


class LongAttention(SelfAttention):
    """Attention with LongRoPE, whose attention factor scales the rotated part of queries and keys.

    Rotations keep factors, and only products of queries and keys count: queries get its square.
    """

    def __init__(
        self, *positional: Any, rotary_dim: int, attention_factor: float, **options: Any
    ) -> None:
        super().__init__(*positional, **options)
        self.rotary_dim, self.scale = rotary_dim, attention_factor**2

    def get_query_key_value_tensors(
        self, *positional: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [t, 1, heads of this rank, head size] each."""
        query, key, value = super().get_query_key_value_tensors(*positional, **options)
        rotated, rest = query.tensor_split([self.rotary_dim], dim=-1)
        return torch.cat([rotated * self.scale, rest], dim=-1), key, value


def use_variants(layer: ModuleSpec, shape: ModelShape) -> None:
    """Choose the class above that a model needs, if any; no family needs two."""
    attention = layer.submodules.self_attention
    if shape.window_rope_theta is not None:
        attention.module = WindowedAttention
        attention.params |= {"window_scale": softmax_scale(shape, None)}
    if shape.has_output_bias and not shape.has_linear_biases:
        attention.module = BiasedAttention
    if shape.rope_scaling and shape.rope_type == "longrope":
        attention.module = LongAttention
        attention.params |= {
            "rotary_dim": shape.rotary_dim,
            "attention_factor": shape.rope_scaling["attention_factor"],
        }


def packed_attention_of(shape: ModelShape) -> type[PackedAttention]:
    """Choose the class that replaces Megatron's core attention."""
    return SinkAttention if shape.has_sinks else PackedAttention


class SinkAttention(PackedAttention):
    """Packed attention with the sinks [heads of this rank], named as in Megatron's attention."""

    def __init__(self, *, config: Any, pg_collection: Any, **options: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **options)
        self.tensor_group = pg_collection.tp
        sinks: Any = torch.nn.Parameter(
            torch.empty(
                config.num_attention_heads // config.tensor_model_parallel_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )
        # Unmarked parameters count as copies: the gradient norm would take tensor rank 0's alone.
        sinks.tensor_model_parallel, sinks.partition_dim, sinks.partition_stride = True, 0, 1
        self.softmax_offset = sinks

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Called by Megatron, like the method of its own attention."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
