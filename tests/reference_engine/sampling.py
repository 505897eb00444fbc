"""Token-by-token sampling of completions from a `transformers` model."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel


class Completion(NamedTuple):
    """A sampled completion."""

    token_ids: list[int]
    logprobs: list[float]
    routes: Tensor | None
    """Routes by `RouteRecorder`, [tokens, layers, columns], for each token of prompt and completion
    except the last; None without a recorder."""


class RouteRecorder:
    """Records the experts that a model's routers choose, and the tokens that its indexers choose.

    The columns of a token are its experts, 0 in layers without, then the positions that it attends
    to, padded with 0; each only if `recorded`.
    """

    def __init__(self, model: PreTrainedModel, recorded: Sequence[str]) -> None:
        """`recorded`: ends of the names of modules to record."""
        layers: Any = model.get_decoder().layers
        self._num_layers = len(layers)
        self._of_layers: dict[str, dict[int, Tensor]] = {kind: {} for kind in recorded}
        for number, layer in enumerate(layers):
            for module in layer.modules():
                for kind in recorded:
                    if type(module).__name__.lower().endswith(kind):
                        module.register_forward_hook(partial(self._note, kind, number))

    def _note(self, kind: str, number: int, module: Any, _inputs: Any, outputs: Any) -> None:
        chosen = outputs[2] if kind == "topkrouter" else outputs  # after logits and weights
        if kind == "indexer":
            chosen = pad(chosen.flatten(0, 1), (0, module.index_topk - chosen.shape[-1]))
        self._of_layers[kind][number] = chosen

    def last_routes(self, num_completions: int, is_prompt: bool) -> Sequence[Tensor]:
        """Routes of the last forward pass for each completion, int32 [tokens, layers, columns].

        The pass had one token of each completion, or their common prompt.
        """
        kinds = []
        for found in self._of_layers.values():
            none = torch.zeros_like(next(iter(found.values())))
            layers = [found.get(number, none) for number in range(self._num_layers)]
            kinds.append(torch.stack(layers, dim=1).to("cpu", torch.int32))
        routes = torch.cat(kinds, dim=2)
        return [routes] * num_completions if is_prompt else routes.split(1)


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
    recorder: RouteRecorder | None = None,
) -> list[Completion]:
    """Sample a completion of one prompt for each of `seeds`.

    Log-probabilities are taken after temperature, top-p and top-k. Each completion has its own
    random generator; temperature 0 is greedy. A completion ends with the first of `stop_token_ids`,
    which it includes, or after `max_tokens`. `note` is called after every forward pass with the
    number of new tokens, and may raise to stop the sampling. With the model's `recorder`,
    completions have the routes of their tokens.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    token_ids: list[list[int]] = [[] for _ in seeds]
    logprobs_of: list[list[float]] = [[] for _ in seeds]
    routes: list[list[Tensor]] = [[] for _ in seeds]
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
        if recorder:
            is_prompt = not token_ids[running[0]]
            for i, part in zip(running, recorder.last_routes(len(running), is_prompt), strict=True):
                routes[i].append(part)
        logprobs = cut(torch.log_softmax(logits / (temperature or 1.0), dim=-1), top_p, top_k)
        chosen = [
            _draw(row, generators[i]) if temperature else int(row.argmax())
            for i, row in zip(running, logprobs, strict=True)
        ]
        for row, i in enumerate(running):
            token_ids[i].append(chosen[row])
            logprobs_of[i].append(float(logprobs[row, chosen[row]]))
        note(len(running))
        keep = [
            row
            for row, i in enumerate(running)
            if chosen[row] not in stop_token_ids and len(token_ids[i]) < max_tokens
        ]
        running = [running[row] for row in keep]
        cache.batch_select_indices(torch.tensor(keep, dtype=torch.long, device=model.device))
        inputs = torch.tensor([[chosen[row]] for row in keep], device=model.device)
    return [
        Completion(ids, values, torch.cat(parts) if recorder else None)
        for ids, values, parts in zip(token_ids, logprobs_of, routes, strict=True)
    ]


def cut(logprobs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set log-probabilities [N, vocabulary] to -inf outside the `top_k` likeliest tokens (-1: all),
    then outside the likeliest with a total probability of `top_p`, as in vLLM."""
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
