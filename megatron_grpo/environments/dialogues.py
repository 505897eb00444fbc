"""What environments (`multi_turn.py`) and agents (`agents.Agents`) have in common: dialogues."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.generation import SampleRequests
from megatron_grpo.engines.sampling_params import SamplingParams


class Dialogues(Protocol):
    """Makes dialogues, until `close`."""

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Wait until dialogues can begin with these rows of data; raises ValueError if they cannot.

        It is to be closed all the same.
        """

    def generation(
        self, prompts: Sequence[Prompt], params: SamplingParams, cfg: Config
    ) -> SampleRequests:
        """Dialogues for each prompt, which begin at once; `cfg` may be of an evaluation."""

    def generate(self, requests: SampleRequests) -> list[Sample]:
        """All samples, as by `RolloutClient.generate`, while engines do nothing else."""

    def close(self) -> None:
        """Kill what answers the model."""


class OneDialogue(Protocol):
    """One sample in progress."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""


D = TypeVar("D", bound=OneDialogue)


class DialogueRequests(SampleRequests, Generic[D]):
    """One dialogue for each sample of the prompts, in the order of the samples."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.dialogues: list[D] = []
        self._groups: dict[int, list[Sample]] = {}
        """The groups that `_on_group` was called with, by their first dialogue."""

    @abstractmethod
    def numbers(self) -> Iterable[int]:
        """All numbers of requests."""

    @abstractmethod
    def sample_of(self, dialogue: D) -> Sample:
        """The sample of a dialogue that has ended."""

    @property
    def open(self) -> dict[int, Json]:
        """The requests that engines can answer, by number; none of those that are `waiting`."""
        return {n: request for n in self.numbers() if (request := self.open_request(n))}

    @property
    def waiting(self) -> list[int]:
        """The numbers that wait for an environment or agent."""
        return [number for number in self.numbers() if self.is_waiting(number)]

    @property
    def is_complete(self) -> bool:
        """Whether every dialogue has ended."""
        return all(dialogue.is_over for dialogue in self.dialogues)

    def samples(self) -> list[Sample]:
        """All samples, in the order of the prompts, once every dialogue has ended."""
        assert self.is_complete
        firsts = range(0, len(self.dialogues), self._params.num_generations)
        groups = (self._groups.get(first) or self._group(first) for first in firsts)
        return [sample for group in groups for sample in group]

    def _complete_group(self, number: int) -> None:
        """Call `_on_group` with the samples of a prompt if `number` was the last of them to end."""
        size = self._params.num_generations
        first = number - number % size
        if not self._on_group or first in self._groups:
            return
        if all(dialogue.is_over for dialogue in self.dialogues[first : first + size]):
            group = self._groups[first] = self._group(first)
            self._on_group(group)

    def _group(self, first: int) -> list[Sample]:
        return [*map(self.sample_of, self.dialogues[first : first + self._params.num_generations])]
