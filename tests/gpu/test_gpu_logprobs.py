"""Log-probabilities on CUDA, by fused kernels for logit tiles, against those on the CPU."""

import pytest
import torch

from parallel.logprobs import chosen_logprobs
from parallel.rank_part import Predictions, prediction_targets

NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE = 300, 5003, 64


def values_and_gradients(dtype, device, tile_columns, num_tokens=NUM_TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).bfloat16()
    weight = torch.randn(5008, HIDDEN_SIZE, generator=generator).bfloat16()
    tokens = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).to(device)
    inputs = [each.to(device, dtype).requires_grad_() for each in (hidden, weight)]
    targets = prediction_targets(torch.tensor([0, num_tokens]), torch.arange(num_tokens))
    everything = torch.ones(num_tokens, dtype=torch.bool)
    chosen = chosen_logprobs(
        *inputs,
        tokens,
        Predictions.of(targets, everything).to(device),
        temperature=0.8,
        vocab_size=VOCAB_SIZE,
        tensor_group=None,
        tile_columns=tile_columns,
    )
    logprobs, entropy = chosen.whole(num_tokens)
    only_logprobs = torch.autograd.grad(logprobs.sum(), inputs, retain_graph=True)
    both = torch.autograd.grad((logprobs + entropy).sum(), inputs)
    return [x.detach().cpu().double() for x in (logprobs, entropy, *only_logprobs, *both)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile_columns", [None, 512])
def test_fused_tiles_equal_the_definition(dtype, tile_columns):
    exact = values_and_gradients(torch.float64, "cpu", 512)
    got = values_and_gradients(dtype, "cuda", tile_columns)
    for number, (one, other) in enumerate(zip(got, exact, strict=True)):
        # Logits are not rounded to bfloat16; gradients and the factors of their products are.
        tolerance = 2e-2 if number > 1 and dtype == torch.bfloat16 else 1e-4
        assert (one - other).norm() < tolerance * other.norm(), number


def test_microbatches_of_other_lengths_take_the_same_kernels():
    for num_tokens in (2, 17, 129, 200):
        exact = values_and_gradients(torch.float64, "cpu", 512, num_tokens)
        got = values_and_gradients(torch.bfloat16, "cuda", None, num_tokens)
        assert (got[0] - exact[0]).norm() < 1e-4 * exact[0].norm()
