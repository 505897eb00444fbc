"""The requests of one generation; each is answered once, by any engine."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_grpo.data.prompts import Prompt
from megatron_grpo.rollout.choice import Choice
from megatron_grpo.rollout.engine import Json
from megatron_grpo.rollout.samples import Sample, first_seed


class Requests(Protocol):
    """Requests that a `RolloutClient` has the engines answer."""

    policy_version: int
    are_movable: bool
    """Whether a request that has not been started may go to any engine; then `take` never waits."""

    @property
    def open(self) -> Mapping[int, Json]:
        """Unanswered requests, by number."""

    async def settle(self) -> None:
        """Wait until `open` holds everything that is left to do."""

    async def take(self, number: int, choice: Choice, url: str) -> Json | None:
        """Process the answer to an open request from the engine at `url`; returns the follow-up."""

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once no request is open."""


class Generation:
    """`num_generations` samples of each prompt: the open requests and the samples received.

    Each sample is a request of its own, so that a long answer does not wait for the others of its
    prompt, nor is lost with them. Requests of one prompt have successive numbers: most go to one
    engine, which has the prompt cached. Each sample has its own seed (`first_seed`), independent of
    when and where it is generated. If prompts are generated in several parts, `first_position` is
    the position of this part's first prompt in the whole. With `router_replay`, samples have the
    experts that processed their tokens.
    """

    are_movable = True

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
        stop: Sequence[str] = (),
        top_p: float = 1.0,
        top_k: int = -1,
        first_position: int = 0,
        router_replay: bool = False,
    ) -> None:
        self.policy_version = policy_version
        self.engines: set[str] = set()
        """Addresses of the engines that have answered."""
        self._prompts = prompts
        self._num_generations = num_generations
        self._samples: dict[int, Sample] = {}
        self._router_replay = router_replay
        sampling: Json = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": max_completion_length,
            "logprobs": 0,  # only of the sampled token
            "stop_token_ids": [*stop_token_ids],
            "stop": [*stop],
            "include_stop_str_in_output": bool(stop),
            "ignore_eos": True,  # the tokenizer's; all of the model's are stop tokens above
        }
        if router_replay:
            sampling["routed_experts_prompt_start"] = 0
        self.open: dict[int, Json] = {}
        """The unanswered requests, by the number of their sample."""
        for position, prompt in enumerate(prompts):
            first = first_seed(seed, step, first_position + position)
            token_ids = [*prompt.token_ids]
            for index in range(num_generations):
                number = position * num_generations + index
                self.open[number] = {
                    "token_ids": token_ids,
                    "output_mode": "text",
                    "priority": number,
                    "sampling_params": sampling | {"seed": first + index},
                }

    async def settle(self) -> None:
        """Nothing to wait for."""

    async def take(self, number: int, choice: Choice, url: str) -> None:
        """Turn the answer of the engine at `url` into a sample; there is no follow-up request.

        The answer itself, over a hundred bytes per token, is not kept.
        """
        self._samples[number] = self._sample(number, choice)
        del self.open[number]
        self.engines.add(url)

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once no request is open."""
        assert not self.open, f"{len(self.open)} requests are open"
        return [sample for _, sample in sorted(self._samples.items())]

    def _sample(self, number: int, choice: Choice) -> Sample:
        position, sample_index = divmod(number, self._num_generations)
        return Sample(
            prompt=self._prompts[position],
            sample_index=sample_index,
            completion_ids=choice.token_ids,
            logprobs=choice.token_logprobs,
            finish_reason=choice.finish_reason,
            text=choice.text,
            policy_version=self.policy_version,
            routed_experts=choice.routes if self._router_replay else None,
        )
