"""Packed microbatches through Megatron-Core's schedules, and log-probabilities of responses."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.policy.chunks import gather_weights
from megatron_grpo.policy.model import Model, forward, unwrapped
from megatron_grpo.policy.transformer_engine import drop_quantized_weights
from parallel.dims import ParallelDims
from parallel.groups import Groups
from parallel.logprobs import ChosenTokens, chosen_logprobs
from parallel.packing import PackedBatch


def run_schedule[T](
    model: Model,
    groups: Groups,
    batches: Sequence[PackedBatch],
    loss_fn: Callable[[Tensor, PackedBatch], tuple[Tensor, T]],
    *,
    forward_only: bool,
) -> list[T]:
    """Forward, and unless `forward_only` backward, over all microbatches of this rank.

    On the last pipeline stage, `loss_fn(hidden, batch)` gets the final hidden states in the order
    of `batches` and returns this rank's part of the loss, and a value to collect. Losses are
    globally weighted: gradients are summed over microbatches, context and data ranks, and never
    divided. Returns the collected values; empty on other stages.

    Every rank must pass the same number of microbatches; with interleaved stages, a multiple of the
    pipeline size.
    """
    dims = groups.dims
    assert dims.virtual_pipeline == 1 or len(batches) % dims.pipeline == 0, (
        f"interleaving needs a multiple of {dims.pipeline} microbatches, not {len(batches)}"
    )

    batches = [batch.on_rank(dims, groups.coordinates) for batch in batches]
    if model.vision and model.vision.is_trained:
        # Data ranks without images run no module of the tower: its hooks would wait for them.
        gather_weights(model.chunks)
        batches = model.vision.with_current_features(batches, has_backward=not forward_only)
    config, loss_scale = unwrapped(model.chunks[0]).config, 1.0
    # Routers add auxiliary losses only where a coefficient is set.
    coefficients = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
    if config.num_moe_experts is not None and any(coefficients) and not forward_only:
        loss_scale = _weigh_router_losses(config, groups, batches)

    def forward_step(
        iterator: Any, chunk: Any
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, T]]]:
        batch = next(iterator)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, T]:
            loss, collected = loss_fn(hidden, batch)
            # Megatron divides the loss of a pair, but not of a triple; its token count is unused.
            return loss * loss_scale, torch.zeros((), dtype=torch.int), collected

        return forward(chunk, batch, groups), loss_of

    with model.computing(), torch.set_grad_enabled(not forward_only):
        collected: list[T] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in model.chunks],
            model=model.chunks,
            num_microbatches=len(batches),
            seq_length=len(batches[0].tokens),  # unused: `StageMessages` knows the shapes
            micro_batch_size=1,
            forward_only=forward_only,
            **pipeline_arguments(config, groups, batches),
        )
    if config.fp8:
        drop_quantized_weights(model.chunks)
    return collected


def _weigh_router_losses(
    config: TransformerConfig, groups: Groups, batches: Sequence[PackedBatch]
) -> float:
    """Weight the auxiliary losses of routers by tokens; returns the factor for the main loss.

    Megatron multiplies a router's loss, a mean over the tokens of a microbatch, by their number,
    and relies on a final division of all gradients for the mean over the optimizer batch. Here
    gradients are not divided. Instead Megatron's `grad_scale_func`, applied to every loss before
    the backward, divides by the tokens of the optimizer batch; the returned factor cancels this
    for the main loss.
    """
    tokens = torch.tensor(sum(len(b.tokens) for b in batches), device=batches[0].tokens.device)
    dist.all_reduce(tokens, group=groups.data)
    num_tokens = float(tokens)
    config.grad_scale_func = lambda loss: loss / num_tokens
    return num_tokens


def response_logprobs(
    model: Model, hidden: Tensor, batch: PackedBatch, temperature: float, groups: Groups
) -> ChosenTokens:
    """Log-probabilities and entropies of this context rank's response tokens.

    `hidden`: final hidden states of the last stage (`forward`). Only positions that predict
    response tokens are multiplied with the head. `temperature` is the run's; samples of the batch
    may have their own.
    """
    assert batch.part is not None, "set by `run_schedule`"
    predictions = batch.part.predictions
    return chosen_logprobs(
        hidden,
        model.head_weight,
        batch.tokens,
        predictions,
        temperature=batch.temperature_at(predictions.positions, temperature),
        vocab_size=model.shape.vocab_size,
        tensor_group=groups.tensor,
    )


def compute_logprobs(
    model: Model, batches: Sequence[PackedBatch], temperature: float, groups: Groups
) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and entropies [T] of every microbatch, without gradient.

    Complete on every context and tensor rank of the last stage; empty on earlier stages.
    """

    def collect(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        chosen = response_logprobs(model, hidden, batch, temperature, groups)
        both = torch.stack(chosen.whole(len(batch.tokens)))
        dist.all_reduce(both, group=groups.contexts[batch.context_size])
        return chosen.logprobs.sum(), (both[0].clone(), both[1].clone())

    return run_schedule(model, groups, batches, collect, forward_only=True)


Shape = tuple[int, int, int]


def received_order(num_microbatches: int, dims: ParallelDims, *, is_end: bool) -> list[int]:
    """Numbers of the microbatches that a stage receives from one side, in order.

    Interleaved chunks of a stage take turns of `dims.pipeline` microbatches each: 4 microbatches on
    2 stages of 2 chunks arrive as 0 1 0 1 2 3 2 3. `is_end`: one of the stage's chunks has no
    neighbour on this side, which leaves 0 1 2 3.
    """
    num_chunks = dims.virtual_pipeline - is_end
    return [
        number
        for first in range(0, num_microbatches, dims.pipeline)
        for _ in range(num_chunks)
        for number in range(first, min(first + dims.pipeline, num_microbatches))
    ]


class StageMessages(P2PCommunicator):
    """Megatron's communicator, with the shapes of all received tensors known in advance.

    Megatron sends a message with the shape before each tensor of variable length. To read it the
    host waits twice for its GPU (`synchronize` and `tolist`), and queues no work ahead of a
    microbatch. Here every rank of a model replica has all microbatches, and so all shapes.
    """

    def __init__(
        self, config: TransformerConfig, groups: Groups, batches: Sequence[PackedBatch]
    ) -> None:
        """Know the shapes of one pass over `batches`."""
        super().__init__(groups.pipeline, config)
        dims, stage = groups.dims, groups.coordinates.pipeline
        parts = dims.tensor if config.sequence_parallel else 1
        # [t, 1, H] of activations between stages; their gradients have the same shape, and return
        # in the same order of microbatches.
        shapes = [
            (len(batch.tokens) // batch.context_size // parts, 1, config.hidden_size)
            for batch in batches
        ]
        self._from_previous, self._from_next = [
            [shapes[number] for number in reversed(received_order(len(shapes), dims, is_end=end))]
            for end in (stage == 0, stage == dims.pipeline - 1)
        ]

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Called by Megatron before each message: the next shapes to receive."""
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
    # Given a communicator, the schedules demand a collection of groups, too: pass Megatron's
    # defaults.
    own = ProcessGroupCollection()
    own.tp, own.cp, own.pp = groups.tensor, groups.contexts[groups.dims.context], groups.pipeline
    own.embd = parallel_state.get_embedding_group(check_initialized=False)
    own.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    own.dp, own.dp_cp = groups.data, groups.data_context
    own.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return {"p2p_communicator": StageMessages(config, groups, batches), "pg_collection": own}
