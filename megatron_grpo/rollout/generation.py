"""The requests of one generation, each of which is answered once, whichever engine does it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.engine import Json
from megatron_grpo.rollout.samples import Sample, first_seed


class Requests(Protocol):
    """What a client has engines answer."""

    policy_version: int

    @property
    def open(self) -> Mapping[int, Json]:
        """Requests that nobody has answered, by their number."""

    async def settle(self) -> None:
        """Wait until all that is left to do is in `open`."""

    async def take(self, number: int, answer: Json, url: str) -> Json | None:
        """Take in the answer of the engine at `url` to an open request; the one that follows it."""

    def samples(self) -> list[Sample]:
        """All of them, in the order of the prompts, once no request is open."""


class Generation:
    """`num_generations` samples of each prompt, as they are asked for, and those that have come.

    One request asks for all samples of a prompt, which then share its prefix; each sample has a
    seed of its own (`first_seed`), the same whenever and wherever it is asked for. Where prompts
    are generated for part by part, `first_position` is that of the first of them in the whole.
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
        """Addresses of those that have answered."""
        self._prompts = prompts
        self._samples: dict[int, list[Sample]] = {}
        sampling: Json = {
            "n": num_generations,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": max_completion_length,
            "logprobs": 0,  # of the sampled token alone
            "stop_token_ids": [*stop_token_ids],
            "ignore_eos": True,  # the tokenizer's one end token; those of the model are above
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
        """The requests that nobody has answered, by the position of their prompt."""

    async def settle(self) -> None:
        """Nothing else is waited for."""

    async def take(self, position: int, answer: Json, url: str) -> None:
        """Make samples of the answer of the engine at `url` to an open request; none follows it.

        Of the answer itself, hundreds of bytes for each token, nothing is kept.
        """
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        prompt = self._prompts[position]
        self._samples[position] = [self._sample(prompt, choice) for choice in choices]
        del self.open[position]
        self.engines.add(url)

    def samples(self) -> list[Sample]:
        """All of them, in the order of the prompts, once no request is open."""
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
