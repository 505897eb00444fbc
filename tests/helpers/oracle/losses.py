"""A minimal language model for comparing losses in float64."""

import torch
from torch import Tensor

from parallel.logprobs import ChosenTokens, chosen_logprobs
from parallel.packing import PackedBatch
from parallel.rank_part import Predictions, prediction_targets

TEMPERATURE = 0.7


class BigramModel:
    """Logits of the next token are a table's row, chosen by the last token."""

    vocab_size = 11

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(11, 11, generator=generator, dtype=torch.float64)
        self.table = table.requires_grad_()

    def of_response(self, tokens: Tensor, num_prompt_tokens: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the response tokens."""
        everything = torch.log_softmax(self.table / TEMPERATURE, dim=1)
        rows = everything[tokens[num_prompt_tokens - 1 : -1]]
        logprobs = rows[torch.arange(len(rows)), tokens[num_prompt_tokens:]]
        return logprobs, -(rows.exp() * rows).sum(dim=1)

    def of_packed(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [T] of a packed batch, computed by the trainer's code."""
        chosen = chosen_logprobs(
            torch.nn.functional.one_hot(batch.tokens, self.vocab_size).to(self.table),
            self.table.t(),
            batch.tokens,
            Predictions.of(
                prediction_targets(batch.cu_seqlens, torch.arange(len(batch.tokens))),
                batch.loss_mask,
            ),
            temperature=TEMPERATURE,
            vocab_size=self.vocab_size,
            tensor_group=None,
            tile_columns=3,
        )
        return chosen.whole(len(batch.tokens))


# Inputs of a loss as the trainer's head passes them, with made-up values.


def chosen_tokens(mask: Tensor, logprobs: Tensor, entropy: Tensor) -> ChosenTokens:
    """The tokens of `mask` [T] with these log-probabilities and entropies [T]."""
    positions = mask.nonzero().squeeze(1)
    return ChosenTokens(
        positions=positions, logprobs=logprobs[positions], entropy=entropy[positions]
    )
