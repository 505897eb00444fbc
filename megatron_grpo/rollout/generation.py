"""The requests of one generation; each is answered once, by any engine."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.engine import Json
from megatron_grpo.rollout.samples import Sample, first_seed


class Requests(Protocol):
    """Requests that a `RolloutClient` has the engines answer."""

    policy_version: int

    @property
    def open(self) -> Mapping[int, Json]:
        """Unanswered requests, by number."""

    async def settle(self) -> None:
        """Wait until `open` holds everything that is left to do."""

    async def take(self, number: int, answer: Json, url: str) -> Json | None:
        """Process the answer to an open request from the engine at `url`; returns the follow-up."""

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once no request is open."""


class Generation:
    """`num_generations` samples of each prompt: the open requests and the samples received.

    One request asks for all samples of a prompt, which then share its prefix. Each sample has its
    own seed (`first_seed`), independent of when and where it is generated. If prompts are generated
    in several parts, `first_position` is the position of this part's first prompt in the whole.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations: int,
        temperature: float,
        max_completion_length: int,
        stop_token_ids: Sequence[int],
        seed: int,
        step: int,
        policy_version: int,
        top_p: float = 1.0,
        top_k: int = -1,
        first_position: int = 0,
    ) -> None:
        self.policy_version = policy_version
        self.engines: set[str] = set()
        """Addresses of the engines that have answered."""
        self._prompts = prompts
        self._samples: dict[int, list[Sample]] = {}
        sampling: Json = {
            "n": num_generations,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": max_completion_length,
            "logprobs": 0,  # only of the sampled token
            "stop_token_ids": [*stop_token_ids],
            "ignore_eos": True,  # the tokenizer's; all of the model's are stop tokens above
        }
        self.open: dict[int, Json] = {
            position: {
                "token_ids": prompt.token_ids,
                "output_mode": "text",
                "priority": position,
                "sampling_params": sampling
                | {"seed": first_seed(seed, step, first_position + position)},
            }
            for position, prompt in enumerate(prompts)
        }
        """The unanswered requests, by the position of their prompt."""

    async def settle(self) -> None:
        """Nothing to wait for."""

    async def take(self, position: int, answer: Json, url: str) -> None:
        """Turn the answer of the engine at `url` into samples; there is no follow-up request.

        The answer itself, hundreds of bytes per token, is not kept.
        """
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        prompt = self._prompts[position]
        self._samples[position] = [self._sample(prompt, choice) for choice in choices]
        del self.open[position]
        self.engines.add(url)

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once no request is open."""
        assert not self.open, f"{len(self.open)} requests are open"
        return [sample for _, samples in sorted(self._samples.items()) for sample in samples]

    def _sample(self, prompt: Prompt, choice: Json) -> Sample:
        return Sample(
            prompt=prompt,
            sample_index=choice["index"],
            completion_ids=tuple(choice["token_ids"]),
            logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
            finish_reason=choice["finish_reason"],
            text=choice["text"],
            policy_version=self.policy_version,
        )
