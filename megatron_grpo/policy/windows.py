"""Attention in models of which some layers have a window: a token sees the last ones before it."""

from copy import copy
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from checkpoint_convert import ModelShape
from megatron_grpo.policy.mla import softmax_scale
from parallel.attention import PackedAttention


def window_fields(shape: ModelShape) -> dict[str, Any]:
    """Megatron's fields for the windows of a model, which attention of every kind reads."""
    if shape.window is None:
        return {"window_size": None, "window_attn_skip_freq": None}
    layers = [int(layer in shape.windowed_layers) for layer in range(shape.num_layers)]
    # Megatron's window is a number of tokens before a token, and one of those after it.
    return {"window_size": (shape.window - 1, 0), "window_attn_skip_freq": layers}


def attention_windows(chunk: GPTModel) -> set[int | None]:
    """The windows of a chunk's layers, None for those without; empty if their attention needs no
    masks, as it is not `PackedAttention`."""
    if not isinstance(chunk.decoder.layers[0].self_attention.core_attention, PackedAttention):
        return set()
    size = chunk.config.window_size
    return {None} if size is None else {None, size[0] + 1}


def use_windows(layer: ModuleSpec, shape: ModelShape) -> None:
    """Give layers with a window a RoPE of their own, if the model does."""
    if shape.window_rope_theta is not None:
        attention = layer.submodules.self_attention
        attention.module = WindowedAttention
        attention.params |= {"window_scale": softmax_scale(shape, None)}


class WindowedAttention(SelfAttention):
    """Attention of a model whose layers with a window have a RoPE of their own: see `PackedRotary`.

    That is not scaled. Where the model's RoPE is, by YaRN, its attention factor is part of the
    scale of scores, so that these layers have another one, too.
    """

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
        if self.table:
            config = copy(config)
            config.softmax_scale = window_scale
        super().__init__(config, submodules, layer_number, **options)

    def forward(
        self, hidden_states: Tensor, *options: Any, rotary_pos_emb: Tensor, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Takes both of `PackedRotary`'s tables."""
        own = rotary_pos_emb[self.table]
        return super().forward(hidden_states, *options, rotary_pos_emb=own, **named)
