"""Token-by-token sampling of completions from a `transformers` model."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

Completion = tuple[list[int], list[float]]  # token ids and their log-probabilities


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompt_ids: list[int],
    *,
    seeds: list[int],
    temperature: float,
    top_p: float = 1.0,
    top_k: int = -1,
    max_tokens: int,
    stop_token_ids: list[int],
    note: Callable[[int], None] = lambda num_tokens: None,
) -> list[Completion]:
    """Sample a completion of one prompt for each of `seeds`.

    Log-probabilities are those after temperature, top-p and top-k. Each completion has its
    own random generator; temperature 0 is greedy. A completion ends with the first of
    `stop_token_ids`, which it includes, or after `max_tokens`. `note` is called after every forward
    pass with the number of new tokens, and may stop the sampling by raising an exception.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    completions: list[Completion] = [([], []) for _ in seeds]
    running = list(range(len(seeds)))
    inputs = torch.tensor([prompt_ids], device=model.device)
    cache = None
    while running:
        output = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[:, -1].float().cpu()
        if len(inputs) < len(running):  # the prompt is computed once for all completions
            logits = logits.expand(len(seeds), -1)
            cache.batch_repeat_interleave(len(seeds))
        logprobs = cut(torch.log_softmax(logits / (temperature or 1.0), dim=-1), top_p, top_k)
        chosen = [
            _draw(row, generators[i]) if temperature else int(row.argmax())
            for i, row in zip(running, logprobs, strict=True)
        ]
        for row, i in enumerate(running):
            completions[i][0].append(chosen[row])
            completions[i][1].append(float(logprobs[row, chosen[row]]))
        note(len(running))
        keep = [
            row
            for row, i in enumerate(running)
            if chosen[row] not in stop_token_ids and len(completions[i][0]) < max_tokens
        ]
        running = [running[row] for row in keep]
        cache.batch_select_indices(torch.tensor(keep, dtype=torch.long, device=model.device))
        inputs = torch.tensor([[chosen[row]] for row in keep], device=model.device)
    return completions


def cut(logprobs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Restrict `logprobs` [N, vocabulary] to the `top_k` likeliest tokens (-1: all), and these to
    the likeliest with a total probability of `top_p`; the others become -inf, as in vLLM."""
    if top_k != -1:
        least = logprobs.topk(min(top_k, logprobs.shape[-1])).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf).log_softmax(-1)
    if top_p < 1:
        ascending, order = logprobs.sort(dim=-1)
        is_rest = ascending.exp().cumsum(-1) <= 1 - top_p
        is_rest[:, -1] = False
        logprobs = logprobs.masked_fill(is_rest.scatter(-1, order, is_rest), -torch.inf)
        logprobs = logprobs.log_softmax(-1)
    return logprobs


def _draw(logprobs: Tensor, generator: torch.Generator) -> int:
    """Draw a token from log-probabilities, as the winner of a race of exponential clocks."""
    clocks = torch.empty_like(logprobs).exponential_(generator=generator)
    return int((logprobs - clocks.log()).argmax())
