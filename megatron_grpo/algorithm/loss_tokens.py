"""The tokens that enter the loss, without prompts and padding."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel.packing import PackedBatch
from parallel.sequences import SequenceMeans, counted_lengths
from parallel.vocab import ChosenTokens


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """The K tokens of a packed microbatch that count on this rank, in packed order; [K] each."""

    logprobs: Tensor
    """Under the policy being trained, with gradient."""
    entropy: Tensor
    """Entropy of the policy's distribution over this token, with gradient."""
    weights: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    """Under the policy that generated; None if that is the current policy."""
    ref_logprobs: Tensor | None
    high_entropy: Tensor | None
    """bool: the tokens that the objective is restricted to; None for all."""
    entropy_weights: Tensor | None
    """Weight of each token's entropy in the bonus; None without a bonus."""
    sequences: SequenceMeans
    """The n sequences of the microbatch."""
    sequence_index: Tensor
    """[n] index of each in the optimizer batch; -1 for padding and shared prompts."""

    @classmethod
    def of(
        cls,
        batch: PackedBatch,
        chosen: ChosenTokens,
        context_group: dist.ProcessGroup | None = None,
    ) -> "LossTokens":
        """The `chosen` tokens of `batch`; each is chosen on exactly one rank of `context_group`.

        Values of other tokens in `batch` have no influence, even if they are NaN.
        """

        def at(values: Tensor) -> Tensor:
            return values.index_select(0, chosen.positions)  # in 2/3 of the time of indexing

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
