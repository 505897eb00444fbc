"""The inputs that a trainer's head passes to a loss, with made-up values."""

from torch import Tensor

from parallel.logprobs import ChosenTokens


def chosen_tokens(mask: Tensor, logprobs: Tensor, entropy: Tensor) -> ChosenTokens:
    """The tokens of `mask` [T] with these log-probabilities and entropies [T]."""
    positions = mask.nonzero().squeeze(1)
    return ChosenTokens(
        positions=positions, logprobs=logprobs[positions], entropy=entropy[positions]
    )
