"""Sessions of agents for each prompt of a generation, as requests for the engines."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_grpo.agents.session import MOST_AT_ONCE, Session, TurnRequest
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.cuts import num_until_stop
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.sampling_params import SamplingParams
from megatron_grpo.environments.dialogues import DialogueRequests

if TYPE_CHECKING:
    from megatron_grpo.agents.agents import Agents


class AgentGeneration(DialogueRequests[Session]):
    """Agents act on each prompt, by `params`; to be answered through an `InFlight`.

    A session has `MOST_AT_ONCE` numbers, each for one turn at a time, so that an agent may ask for
    several turns at once.
    """

    answerer = "agent"

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        agents: "Agents",
        begin: Callable[[Prompt, int, SamplingParams, int], Session],
    ) -> None:
        """`begin` opens the session of a sample, and starts its agent with a seed."""
        super().__init__(params)
        self._agents = agents
        samples = ((each, index) for each in prompts for index in range(params.num_generations))
        self.dialogues = [
            begin(prompt, index, params, params.turn_seed(number, turn=-1))
            for number, (prompt, index) in enumerate(samples)
        ]

    def numbers(self) -> range:
        """Those of the places of all sessions."""
        return range(len(self.dialogues) * MOST_AT_ONCE)

    def open_request(self, number: int) -> Json | None:
        """The request of a number that is at an engine."""
        session, place = self._place(number)
        request = session.open.get(place)
        return self._json(number, request) if request else None

    def is_waiting(self, number: int) -> bool:
        """Whether a number waits for an agent to ask for a turn."""
        session, place = self._place(number)
        return not session.is_over and place not in session.open

    @property
    def failures(self) -> list[str]:
        """One line per session that has failed."""
        return [
            f"prompt {session.prompt.index}, sample {session.sample_index}: {session.failure}"
            for session in self.dialogues
            if session.failure
        ]

    def add_answer(self, number: int, choice: Choice, url: str) -> None:
        """Give a turn from the engine at `url` to its agent."""
        self.begun.pop(number, None)
        self.engines.add(url)
        session, place = self._place(number)
        request = session.open.get(place)
        # An engine does not see a stop string that lies on both sides of a cut.
        if request and request.stop:
            decode, ids = self._agents.decode, choice.token_ids
            if num_tokens := num_until_stop([], ids, decode, request.stop):
                text = decode(ids[:num_tokens])
                choice = choice.stopped(num_tokens)
                choice.text = text
        session.answer(place, choice, url)

    async def next_request(self, number: int) -> Json | None:
        """Wait until the agent asks for a turn; returns the request, None when it has ended."""
        session, place = self._place(number)
        if request := await session.next_request(place):
            return self._json(number, request)
        self._complete_group(number // MOST_AT_ONCE)
        return None

    def samples(self) -> list[Sample]:
        """As of the base class; raises EnvironmentsLost if no agent can be started any more."""
        self._agents.raise_if_lost()
        return super().samples()

    def sample_of(self, dialogue: Session) -> Sample:
        """The sample of a session that is over."""
        return dialogue.to_sample()

    def abandon(self) -> None:
        """End all agents, even in mid-turn."""
        for session in self.dialogues:
            self._agents.end(session)

    def _place(self, number: int) -> tuple[Session, int]:
        session, place = divmod(number, MOST_AT_ONCE)
        return self.dialogues[session], place

    def _json(self, number: int, request: TurnRequest) -> Json:
        body = self._params.request(
            [*request.token_ids],
            number=number,
            seed=self._params.turn_seed(number // MOST_AT_ONCE, turn=request.number),
            max_tokens=request.max_tokens,
            routes_start=request.num_routed,
        )
        if request.stop:
            stop = [*self._params.stop, *request.stop]
            body["sampling_params"] |= {"stop": stop, "include_stop_str_in_output": True}
        return body
