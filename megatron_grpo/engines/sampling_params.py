"""Sampling parameters of a generation, and the requests made from them."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from megatron_grpo.data.samples import turn_seed
from megatron_grpo.engines.engine import INDEX_TOPK, ROUTES_START, Json

if TYPE_CHECKING:
    from torch import Tensor

    from parallel.images import PromptImages


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How many samples a prompt of a generation gets, from which weights, how, and its seeds."""

    num_generations: int
    policy_version: int
    """Version of the weights that engines must hold."""
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_completion_length: int
    """Limit of sampled tokens; in a dialogue, of observations, too."""
    stop_token_ids: Sequence[int]
    stop: Sequence[str] = ()
    router_replay: bool = False
    """Whether samples have the experts that processed their tokens."""
    index_topk: int = 0
    """Tokens that an indexer chooses for each token, if samples are to have their positions in
    `routes`; else 0."""
    seed: int
    series: int
    """The generation's number: its seeds differ from those of others with the same `seed`."""
    position: int = 0
    """Place of the prompt in its generation."""

    @property
    def has_routes(self) -> bool:
        """Whether samples have what engines chose for their tokens."""
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
        """A request to /inference/v1/generate that continues `token_ids`, with `image_features`.

        If samples have routes, those of the tokens from `routes_start` on are returned.
        """
        sampling: Json = {
            "temperature": self.temperature,
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
        """Seed of a turn of a sample; -1 is the turn before the first, of its partner."""
        return turn_seed(self.seed, self.series, self.position, sample_index, turn)


def image_features(images: "PromptImages") -> Json:
    """Encode images for vLLM 0.32: the patches of each, and the places of its tokens.

    Like ``vllm.entrypoints.scale_out.token_in_token_out.mm_serde``: MessagePack in base64. Bytes
    are scaled and shifted on the engine's device, as by its ``mm_device_do_normalize``. The engine
    tells images from others by their hashes.
    """
    sizes = images.grids.prod(1)
    counts = (sizes * len(images.tokens) // sizes.sum()).tolist()
    parts = images.patches.split(sizes.tolist())
    hashes = [blake2b(part.numpy().tobytes(), digest_size=16) for part in parts]
    for each, grid in zip(hashes, images.grids, strict=True):
        each.update(grid.numpy().tobytes())
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


_WHOLE = {"slices": [(None, None, None)], "dim": 0, "keep_on_cpu": False}
_RAW = 3
"""vLLM's code for the bytes of a tensor."""


def _tensor(values: "Tensor") -> tuple[str, list[int], msgspec.msgpack.Ext]:
    raw = msgspec.msgpack.Ext(_RAW, values.numpy().tobytes())
    return str(values.dtype).removeprefix("torch."), [*values.shape], raw
