"""Messages between pipeline stages: both ends know their shapes beforehand."""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from parallel.dims import ParallelDims
from parallel.groups import Groups
from parallel.packing import PackedBatch

Shape = tuple[int, int, int]


def stage_shapes(
    batches: Sequence[PackedBatch], config: TransformerConfig, dims: ParallelDims
) -> list[Shape]:
    """What a stage sends of each microbatch: activations, or their gradients."""
    parts = dims.tensor if config.sequence_parallel else 1
    return [
        (len(batch.tokens) // batch.context_size // parts, 1, config.hidden_size)
        for batch in batches
    ]


def received_order(num_microbatches: int, dims: ParallelDims, *, is_end: bool) -> list[int]:
    """Numbers of the microbatches that a stage receives from one side, in this order.

    With interleaving, the model chunks of a stage take turns, each for as many microbatches as
    there are stages. `is_end`: one of its chunks has no neighbour on this side.
    """
    num_chunks = dims.virtual_pipeline - is_end
    return [
        number
        for first in range(0, num_microbatches, dims.pipeline)
        for _ in range(num_chunks)
        for number in range(first, min(first + dims.pipeline, num_microbatches))
    ]


class StageMessages(P2PCommunicator):
    """Megatron's communicator, which is told the shapes of the tensors that it will receive.

    Megatron sends a tensor of variable length after a message with its shape, and to read that the
    host waits twice for its GPU: it cannot queue any work ahead of a microbatch. But every rank of
    a model replica has all microbatches.
    """

    def __init__(
        self, config: TransformerConfig, groups: Groups, batches: Sequence[PackedBatch]
    ) -> None:
        """For one pass over `batches`."""
        super().__init__(groups.pipeline, config)
        dims, stage = groups.dims, groups.coordinates.pipeline
        shapes = stage_shapes(batches, config, dims)
        self._from_previous, self._from_next = (
            [shapes[number] for number in reversed(received_order(len(shapes), dims, is_end=end))]
            for end in (stage == 0, stage == dims.pipeline - 1)
        )

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Called by Megatron before each message: the shapes to receive, in turn."""
        return (
            self._from_previous.pop() if recv_prev else None,
            self._from_next.pop() if recv_next else None,
        )


def pipeline_arguments(
    config: TransformerConfig, groups: Groups, batches: Sequence[PackedBatch]
) -> dict[str, Any]:
    """Arguments of Megatron's schedule for one pass over `batches`; none without a pipeline."""
    if groups.dims.pipeline == 1:
        return {}
    # Next to a communicator Megatron wants its groups, too: those that it takes by default.
    own = ProcessGroupCollection()
    own.tp, own.cp, own.pp = groups.tensor, groups.contexts[groups.dims.context], groups.pipeline
    own.embd = parallel_state.get_embedding_group(check_initialized=False)
    own.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    own.dp, own.dp_cp = groups.data, groups.data_context
    own.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return {"p2p_communicator": StageMessages(config, groups, batches), "pg_collection": own}
