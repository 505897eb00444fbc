"""What a generation asks of the engines."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_grpo.data.samples import turn_seed
from megatron_grpo.engines.engine import Json


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How many samples each prompt of a generation gets, from which weights, how, and its seeds."""

    num_generations: int
    policy_version: int
    """Version of the weights that engines must hold."""
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_completion_length: int
    """In a dialogue, with observations."""
    stop_token_ids: Sequence[int]
    stop: Sequence[str] = ()
    router_replay: bool = False
    """Whether samples have the experts that processed their tokens."""
    seed: int
    series: int
    """The generation's number: its seeds differ from those of others with the same `seed`."""
    first_position: int = 0
    """If prompts are generated in several parts: the position of this part's first in the whole."""

    def request(
        self, token_ids: list[int], *, number: int, seed: int, max_tokens: int, routes_start: int
    ) -> Json:
        """A request to /inference/v1/generate that continues `token_ids`.

        Its `number` is its priority; the lowest goes first. With `router_replay`, the experts of
        the tokens from `routes_start` on are returned.
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
        if self.router_replay:
            sampling["routed_experts_prompt_start"] = routes_start
        return {
            "token_ids": token_ids,
            "output_mode": "text",
            "priority": number,
            "sampling_params": sampling,
        }

    def turn_seed(self, number: int, turn: int) -> int:
        """Seed of a turn of sample `number` of this part, counted over all of its prompts."""
        position, sample_index = divmod(number, self.num_generations)
        position += self.first_position
        return turn_seed(self.seed, self.series, position, sample_index, turn)
