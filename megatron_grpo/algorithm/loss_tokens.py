"""The tokens that a loss is taken over, without prompts and padding."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel.packing import PackedBatch
from parallel.sequences import SequenceMeans, counted_lengths
from parallel.vocab import ChosenTokens


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """The K tokens of a packed microbatch that count on this rank, in their order; [K] each."""

    logprobs: Tensor
    """Of the policy that is trained, with gradient."""
    entropy: Tensor
    """Of the distribution that the token was drawn from, with gradient."""
    weights: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    """Of the policy that generated; None: it is the present one."""
    ref_logprobs: Tensor | None
    high_entropy: Tensor | None
    """bool: those the objective is taken over; None: all."""
    entropy_weights: Tensor | None
    """Of each entropy in the bonus; None: no bonus."""
    sequences: SequenceMeans
    """Those of the microbatch, n of them."""
    sequence_index: Tensor
    """[n] of each in the optimizer batch; -1 for one that is padding."""

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        chosen: ChosenTokens,
        context_group: dist.ProcessGroup | None = None,
    ) -> "LossTokens":
        """The `chosen` ones of `batch`, each of them chosen on one rank of `context_group`.

        What `batch` holds of other tokens has no influence, be it NaN.
        """

        def at(values: Tensor) -> Tensor:
            return values.index_select(0, chosen.positions)  # two thirds of the time of indexing

        def at_if(values: Tensor | None) -> Tensor | None:
            return None if values is None else at(values)

        starts = batch.cu_seqlens[:-1].long()
        return cls(
            logprobs=chosen.logprobs,
            entropy=chosen.entropy,
            weights=at(batch.loss_weights),
            advantages=at(batch.advantages),
            rollout_logprobs=at(batch.rollout_logprobs).to(chosen.logprobs),
            old_logprobs=at_if(batch.old_logprobs),
            ref_logprobs=at_if(batch.ref_logprobs),
            high_entropy=at_if(batch.high_entropy),
            entropy_weights=at_if(batch.entropy_weights),
            sequences=SequenceMeans(
                counted_lengths(batch.cu_seqlens, chosen.positions), context_group
            ),
            sequence_index=batch.sequence_index[starts],
        )
