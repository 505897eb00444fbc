"""Attention of models whose heads have sinks: a parameter that softmax counts as one more score."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from checkpoint_convert import ModelShape
from parallel.attention import PackedAttention


def packed_attention_of(shape: ModelShape) -> type[PackedAttention]:
    """What replaces Megatron's core attention in a model of this shape."""
    return SinkAttention if shape.has_sinks else PackedAttention


class SinkAttention(PackedAttention):
    """Has the sinks of a tensor rank's heads, as Megatron's own attention has."""

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
        # Else the gradient norm would count those of one rank only.
        sinks.tensor_model_parallel, sinks.partition_dim, sinks.partition_stride = True, 0, 1
        self.softmax_offset = sinks

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Called by Megatron, as of its own attention."""
        assert metadata is not None
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded
