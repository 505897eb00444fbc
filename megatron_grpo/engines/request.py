"""Requests for completions: sampling parameters, bodies, and the rest of cut completions."""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from megatron_grpo.data.samples import seed_after, turn_seed
from megatron_grpo.engines.choice import CUT, Choice
from megatron_grpo.engines.engine import INDEX_TOPK, ROUTES_START, Json

if TYPE_CHECKING:
    from torch import Tensor

    from parallel.images import PromptImages

Decode = Callable[[Sequence[int]], str]
"""Decodes sampled tokens, without special ones."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoded text of an incomplete character."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one prompt: number of samples, weight version, distribution and seeds."""

    num_generations: int
    policy_version: int
    """Version of the weights that engines must hold."""
    temperature: float
    own_temperature: float | None = None
    """Temperature of a retry, instead of the run's; its samples carry it."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_completion_length: int
    """Limit of sampled tokens; in a dialogue, observations count, too."""
    stop_token_ids: Sequence[int]
    stop: Sequence[str] = ()
    router_replay: bool = False
    """Whether samples have the experts that processed their tokens."""
    index_topk: int = 0
    """Tokens that an indexer chooses for each token, if `routes` are to hold them; else 0."""
    seed: int
    series: int
    """Number of the generation: seeds differ between generations of one `seed`."""
    position: int = 0
    """Place of the prompt in its generation."""

    @property
    def has_routes(self) -> bool:
        return self.router_replay or self.index_topk > 0

    def request(
        self,
        token_ids: list[int],
        *,
        seed: int,
        max_tokens: int,
        routes_start: int,
        features: Json | None = None,
    ) -> Json:
        """Body for /inference/v1/generate: continue `token_ids`, with the `image_features`, and
        return routes, if the run has any, from token `routes_start` on."""
        sampling: Json = {
            "temperature": self.own_temperature or self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": max_tokens,
            "logprobs": 0,  # only of the sampled token
            "stop_token_ids": [*self.stop_token_ids],
            "stop": [*self.stop],
            "include_stop_str_in_output": bool(self.stop),
            "ignore_eos": True,  # the tokenizer's; all of the model's are stop tokens above
            "seed": seed,
        }
        if self.has_routes:
            sampling[ROUTES_START] = routes_start
        if self.index_topk:
            sampling[INDEX_TOPK] = self.index_topk
        return {
            "token_ids": token_ids,
            "output_mode": "text",
            "sampling_params": sampling,
            **({"features": features} if features else {}),
        }

    def turn_seed(self, sample_index: int, turn: int) -> int:
        """Seed of a sample's turn; -1 is the partner's turn before the first."""
        return turn_seed(self.seed, self.series, self.position, sample_index, turn)


@dataclass(eq=False)
class Request:
    """A completion from its request to its last token; created in the loop.

    An engine may abort it at any token, for a checkpoint or because it is lost: the next engine
    continues `begun`. Cancelling `answer` withdraws the request.
    """

    body: Json
    """Body of a request to `engine.GENERATE`."""
    priority: int
    """Lower numbers go first, in the router's queue and at the engine."""
    stop: Sequence[str] = ()
    """Strings that end the completion, also across a cut."""
    url: str = ""
    """Preferred engine, which has the session's last turn cached."""
    begun: Choice | None = None
    answer: "asyncio.Future[tuple[Choice, str]]" = field(default_factory=asyncio.Future)
    """The whole completion, and the address of its last engine."""
    batch: int = 0
    """Requests of one batch share their prompt, and stay together."""

    @property
    def is_open(self) -> bool:
        return not self.answer.done()

    @property
    def rest(self) -> Json:
        """Body of the request for all tokens after `begun`."""
        body = rest_of(self.body, self.begun) if self.begun else self.body
        return {**body, "priority": self.priority}

    def take(self, choice: Choice, url: str, decode: Decode) -> None:
        """Append what the engine at `url` has sampled; sets the answer unless it was cut."""
        if choice.finish_reason == CUT and not choice.token_ids:
            return
        if self.begun:
            choice = joined(self.begun, choice, decode, self.stop)
        self.begun = choice
        if choice.finish_reason != CUT and self.is_open:
            self.answer.set_result((choice, url))


def rest_of(request: Json, begun: Choice) -> Json:
    """Body of the request for the tokens after `begun`, with its own seed and token limit."""
    params, num_tokens = request["sampling_params"], len(begun.token_ids)
    token_ids = [*request["token_ids"], *begun.token_ids]
    # The routes of all tokens but the last are known, and must stay as they were when the next
    # tokens were sampled: the engine computes these tokens anew, and may choose other experts.
    routes = {ROUTES_START: len(token_ids) - 1} if ROUTES_START in params else {}
    return {
        **request,
        "token_ids": token_ids,
        "sampling_params": {
            **params,
            "max_tokens": params["max_tokens"] - num_tokens,
            # The seed of `begun` would repeat its random numbers.
            "seed": seed_after(params["seed"], num_tokens),
            **routes,
        },
    }


def joined(begun: Choice, rest: Choice, decode: Decode, stop: Sequence[str]) -> Choice:
    """Join a cut completion and its rest, which may be cut again.

    It ends early if a stop string spans the cut: an engine looks only in what it samples itself.
    """
    found = begun.followed_by(rest)
    if num_tokens := num_until_stop(begun.token_ids, rest.token_ids, decode, stop):
        found = found.stopped(num_tokens)
    if found.finish_reason == CUT:
        return found
    # From all tokens: a character with bytes on both sides of the cut is in neither part's text.
    has_end_token = found.finish_reason == "stop" and not stop
    found.text = decode(found.token_ids[:-1] if has_end_token else found.token_ids)
    if ends := _stop_ends(found.text, stop):
        found.text = found.text[: min(ends)]  # the last token may have more text
    return found


def num_until_stop(
    begun: Sequence[int], rest: Sequence[int], decode: Decode, stop: Sequence[str]
) -> int:
    """Number of tokens up to the end of a stop string that began in `begun`; 0 without one. Looks
    after each token, as an engine does."""
    # The engine has not looked for a stop string in an incomplete character.
    num_seen = len(decode(begun).rstrip(INCOMPLETE)) if stop else 0
    for num_tokens in range(len(begun) + 1, len(begun) + len(rest) + 1) if stop else ():
        # From the first token on: parts decoded each by itself may join to another text.
        text = decode([*begun, *rest][:num_tokens])
        if _stop_ends(text, stop, num_seen):
            return num_tokens
        # A string that ends later began in `rest`: there the engine has looked for it.
        if len(text.rstrip(INCOMPLETE)) >= num_seen + max(map(len, stop)):
            break
    return 0


def _stop_ends(text: str, stop: Sequence[str], num_seen: int = 0) -> list[int]:
    """Ends of the stop strings in `text` that end after `num_seen` characters."""
    starts = [(text.find(each, max(0, num_seen + 1 - len(each))), len(each)) for each in stop]
    return [start + length for start, length in starts if start >= 0]


def image_features(images: "PromptImages") -> Json:
    """Encode images for vLLM 0.32, as its ``token_in_token_out.mm_serde`` does.

    Each has patches of bytes, which the engine's device scales (``mm_device_do_normalize``), a
    hash, and the places of its tokens.
    """
    sizes = images.grids.prod(1)
    counts = (sizes * len(images.tokens) // sizes.sum()).tolist()
    parts = images.patches.split(sizes.tolist())
    hashes = [blake2b(part.numpy().tobytes(), digest_size=16) for part in parts]
    for each, grid in zip(hashes, images.grids, strict=True):
        each.update(grid.numpy().tobytes())  # images of one colour differ in their grids alone
    starts = [int(places[0]) for places in images.tokens.split(counts)]
    items = [
        {
            "pixel_values": {"data": _tensor(part), "field": ("flat", _WHOLE)},
            "image_grid_thw": {"data": _tensor(grid), "field": ("batched", {"keep_on_cpu": True})},
        }
        for part, grid in zip(parts, images.grids, strict=True)
    ]
    return {
        "mm_hashes": {"image": [each.hexdigest() for each in hashes]},
        "mm_placeholders": {
            "image": [
                {"offset": start, "length": count}
                for start, count in zip(starts, counts, strict=True)
            ]
        },
        "kwargs_data": {
            "image": [b64encode(msgspec.msgpack.encode(item)).decode() for item in items]
        },
    }


def features_at(features: Json, places: Sequence[tuple[int, int]]) -> Json:
    """The `image_features` of images by (index, position of its first token)."""
    found = {
        name: {"image": [values["image"][number] for number, _ in places]}
        for name, values in features.items()
    }
    sizes = found["mm_placeholders"]["image"]
    moved = [{**size, "offset": at} for size, (_, at) in zip(sizes, places, strict=True)]
    return found | {"mm_placeholders": {"image": moved}}


_WHOLE = {"slices": [(None, None, None)], "dim": 0, "keep_on_cpu": False}
_RAW = 3
"""vLLM's msgpack code for raw tensor bytes."""


def _tensor(values: "Tensor") -> tuple[str, list[int], msgspec.msgpack.Ext]:
    raw = msgspec.msgpack.Ext(_RAW, values.numpy().tobytes())
    return str(values.dtype).removeprefix("torch."), [*values.shape], raw
