"""Dialogues of several sources in one generation, beside completions of a single turn."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.generation import CompletionRequests, GroupCallback, SampleRequests
from megatron_grpo.engines.in_flight import InFlight
from megatron_grpo.engines.sampling_params import SamplingParams
from megatron_grpo.environments.dialogues import Dialogues

MOST_OF_A_PART = 1 << 24
"""More requests than a generation has of one source."""


class MixedGeneration(SampleRequests):
    """The requests of several parts as those of one: request n of part k has the number
    `k * MOST_OF_A_PART + n`. `places` are those of a part's prompts in the generation."""

    def __init__(
        self,
        parts: Sequence[SampleRequests],
        places: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> None:
        super().__init__(params)
        self._parts, self._places, self._size = parts, places, params.num_generations

    @property
    def open(self) -> dict[int, Json]:
        """The requests that can be answered, by number."""
        return {
            k * MOST_OF_A_PART + number: request
            for k, part in enumerate(self._parts)
            for number, request in part.open.items()
        }

    def open_request(self, number: int) -> Json | None:
        """The request of the number, as its part has it."""
        part, own = self._part(number)
        return part.open_request(own)

    @property
    def waiting(self) -> list[int]:
        """The numbers that wait for an environment or an agent."""
        return [
            k * MOST_OF_A_PART + number
            for k, part in enumerate(self._parts)
            for number in part.waiting
        ]

    def is_waiting(self, number: int) -> bool:
        """Whether a number is among the `waiting`."""
        part, own = self._part(number)
        return part.is_waiting(own)

    @property
    def is_complete(self) -> bool:
        """Whether all parts are."""
        return all(part.is_complete for part in self._parts)

    def add_answer(self, number: int, choice: Choice, url: str) -> None:
        """Give an answer from the engine at `url` to its part."""
        self.begun.pop(number, None)
        self.engines.add(url)
        part, own = self._part(number)
        part.add_answer(own, choice, url)

    async def next_request(self, number: int) -> Json | None:
        """The next request of the number, as its part has it."""
        part, own = self._part(number)
        return await part.next_request(own)

    def on_group_complete(self, callback: GroupCallback) -> None:
        """Have every part call this."""
        for part in self._parts:
            part.on_group_complete(callback)

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once every part is complete."""
        found: dict[int, list[Sample]] = {}
        for part, places in zip(self._parts, self._places, strict=True):
            samples = part.samples()
            for i, place in enumerate(places):
                found[place] = samples[i * self._size : (i + 1) * self._size]
        return [sample for place in sorted(found) for sample in found[place]]

    def print_failures(self) -> None:
        """Have each part print its failures."""
        for part in self._parts:
            part.print_failures()

    def abandon(self) -> None:
        """End all dialogues that have not ended."""
        for part in self._parts:
            part.abandon()

    def _part(self, number: int) -> tuple[SampleRequests, int]:
        k, own = divmod(number, MOST_OF_A_PART)
        return self._parts[k], own


class MixedDialogues:
    """Has the prompts of each source answered as its config says: by its environment or agent, or,
    without one, in a single turn."""

    def __init__(
        self,
        cfg: Config,
        opened: Callable[[Config], Dialogues | None],
        in_flight: InFlight,
        is_own: bool,
    ) -> None:
        """`opened` opens the dialogues of one source; they are answered through `in_flight`, which
        ends with them if it `is_own`."""
        self._cfg, self._in_flight, self._is_own = cfg, in_flight, is_own
        self._by_source: dict[str, Dialogues | None] = {}
        with ExitStack() as stack:
            stack.callback(self.close)
            for name, view in cfg.by_source.items():
                self._by_source[name] = opened(view)
            stack.pop_all()

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Wait until dialogues can begin with these rows; raises ValueError if they cannot."""
        by_source: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            by_source.setdefault(self._cfg.sources.of(row), []).append(row)
        for name, dialogues in self._by_source.items():
            if dialogues:
                dialogues.wait_ready(by_source.get(name, []))

    def generation(
        self, prompts: Sequence[Prompt], params: SamplingParams, cfg: Config
    ) -> MixedGeneration:
        """What answers each prompt; all begins at once."""
        parts: list[SampleRequests] = []
        places: list[list[int]] = []
        first = params.first_position
        for name, view in cfg.by_source.items():
            own = [place for place, prompt in enumerate(prompts) if prompt.source == name]
            if not own:
                continue
            # Seeds are of positions: those of all parts differ.
            of_part = replace(params, first_position=first)
            dialogues, asked = self._by_source[name], [prompts[place] for place in own]
            parts.append(
                dialogues.generation(asked, of_part, view)
                if dialogues
                else CompletionRequests(asked, of_part)
            )
            places.append(own)
            first += len(own)
        return MixedGeneration(parts, places, params)

    def generate(self, requests: SampleRequests) -> list[Sample]:
        """All samples of `requests`, made while no other generation is."""
        return self._in_flight.generate_alone(requests)

    def close(self) -> None:
        """Kill what answers the model."""
        with ExitStack() as stack:
            if self._is_own:
                stack.callback(self._in_flight.close)
                stack.callback(self._in_flight.end)
            for dialogues in self._by_source.values():
                if dialogues:
                    stack.enter_context(closing(dialogues))
