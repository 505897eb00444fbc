"""The gap between two INT8 engines of a pretrained model if one kernel rounds differently.

    PYTHONPATH=.:tests .venv/bin/python benchmarks/int8_activations.py models/SmolLM2-135M-Instruct

Prints the mean difference of log-probabilities over the tokens of a text between two forwards of
the bfloat16 model by transformers: with equal or different attention kernels, and with the layers
of `rollout.quantization: int8` on CPUs in both, or in one against their dequantised weights, which
the trainer has with `rollout.quantization_aware`.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_convert.quantized.numbers import block_maxima, dequantized, quantized, scales_of
from engines_on_cpu.products import product_of_rows

TEXT = (
    "What is 3 + 4? The answer is 7. The history of Rome begins with a small town on the Tiber, "
    "whose kings were driven out, and which then ruled Italy."
)
ROWS = (
    ("bfloat16, two kernels of attention", (None, "sdpa"), (None, "eager")),
    ("int8 and bfloat16", ("int8", "sdpa"), (None, "sdpa")),
    ("int8 and its weights dequantised", ("int8", "sdpa"), ("weights", "sdpa")),
    ("int8, two kernels of attention", ("int8", "sdpa"), ("int8", "eager")),
)


class Int8Linear(torch.nn.Module):
    """The linear layer of `int8` engines: each token is quantised like each row of the weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.numbers, self.scales = _quantized(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the quantised factors."""
        return product_of_rows(x, self.numbers, self.scales, None)


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    row = (1, weight.shape[1])
    scales = scales_of(block_maxima(weight, row), torch.int8)
    return quantized(weight, scales, torch.int8, row), scales


def logprobs(folder: str, kind: str | None, kernel: str) -> Tensor:
    """Log-probabilities of the tokens of TEXT after the first, [tokens - 1]."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=kernel
    )
    for name, layer in [*model.model.named_modules()]:
        if kind is None or not isinstance(layer, Linear):
            continue
        if kind == "int8":
            model.model.set_submodule(name, Int8Linear(layer.weight.data))
        else:
            numbers, scales = _quantized(layer.weight.data)
            row = (1, numbers.shape[1])
            layer.weight.data = dequantized(numbers, scales, row, (0, 0)).bfloat16()
    [ids] = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    rows = model(ids.unsqueeze(0)).logits[0, :-1].float().log_softmax(-1)
    return rows.gather(1, ids[1:, None]).squeeze(1)


@torch.no_grad()
def main() -> None:
    """Print the table."""
    for name, one, other in ROWS:
        difference = logprobs(sys.argv[1], *one) - logprobs(sys.argv[1], *other)
        print(f"{name}: {difference.abs().mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
