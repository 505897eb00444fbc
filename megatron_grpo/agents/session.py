"""One sample of a prompt while its agent acts: its tokens so far, and the turns it waits for.

Two threads meet here: that of the endpoint, where the agent's requests arrive, and that of the
engines, which asks for what to generate next.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_grpo.agents.chat import BadRequest, ChatTemplate, Found, Turn
from megatron_grpo.agents.token_tree import Place, TokenTree
from megatron_grpo.config.agent import AgentConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Heard, Sample
from megatron_grpo.engines.choice import Choice
from megatron_grpo.workers.tasks import lasting_future

NOTHING: Mapping[str, float] = {}
MOST_AT_ONCE = 8
"""Turns of one session at the engines at a time; further requests wait."""


@dataclass(frozen=True)
class TurnRequest:
    """What an engine is to sample next for a session."""

    number: int
    """Counted from 0 in the session, for its seed."""
    token_ids: Sequence[int]
    max_tokens: int
    stop: Sequence[str]
    num_routed: int
    """Tokens whose experts are known."""
    answer: "Future[tuple[Choice, str]]" = field(default_factory=Future)
    """What was sampled, and the address of the engine."""


class SessionOver(Exception):
    """The agent's time is over, or it has ended already."""


class Session:
    """The endpoint's and the engines' view of one sample."""

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        template: ChatTemplate,
        cfg: AgentConfig,
        *,
        longest: int,
        policy_version: int,
        has_routes: bool,
    ) -> None:
        """`longest` is the most tokens that a prompt with its answer may have."""
        self.prompt, self.sample_index, self.template = prompt, sample_index, template
        self.tree, self.turns = TokenTree(), list[Turn]()
        self.finish_reason = "stop"
        self.failure = ""
        """Why it has failed; empty if it has not."""
        self.reward: float | None = None
        self.metrics: Mapping[str, float] = {}
        self._cfg, self._longest, self._version = cfg, longest, policy_version
        self._has_routes = has_routes
        self._lock = threading.Lock()
        self._num_requests = 0
        self._pending: deque[TurnRequest] = deque()
        self._at_engines: dict[int, TurnRequest] = {}
        """By place, of `MOST_AT_ONCE`."""
        self.is_over = False
        """Whether there is nothing more to ask engines for."""
        self._changed = lasting_future()

    # The endpoint's side

    async def sample(
        self, found: Found, max_tokens: int | None, stop: Sequence[str]
    ) -> tuple[Choice, str, Place, Place]:
        """Have the engines sample one turn after `found`.

        Returns it, the engine's address, and the places where its prompt and the turn end. Raises
        BadRequest if a limit is reached, and SessionOver.
        """
        place, context = self._prompt_of(found)
        request = self._request(place, context, max_tokens, stop)
        with self._lock:
            if self.is_over:
                raise SessionOver("this session is over")
            self._pending.append(request)
            self._notify()
        try:
            choice, url = await asyncio.wrap_future(request.answer)
        except asyncio.CancelledError:  # the agent does not wait any more: it will never see it
            with self._lock:
                if request in self._pending:
                    self._pending.remove(request)
            raise
        with self._lock:
            if self.is_over:
                raise SessionOver("this session is over")
            return choice, url, *self._keep(place, context, found.rest, choice)

    def num_tokens(self, found: Found) -> int:
        """Number of tokens of a prompt that goes on from `found`."""
        return (found.place.length if found.place else 0) + len(self.template.encode(found.rest))

    def end(
        self, reward: float | None, metrics: Mapping[str, float] = NOTHING, failure: str = ""
    ) -> None:
        """The agent has ended, with the reward and the metrics that it gave."""
        with self._lock:
            if self.is_over:
                return
            failure = failure or self.failure
            if not (failure or self.tree.branches):
                failure = "it ended without asking for a turn"
            if reward is None and self._cfg.weight and not failure:
                failure = "it gave no reward: set agent.weight=0 if reward functions alone judge"
            self.reward, self.metrics, self.failure = reward, metrics, failure
            if failure:
                self.finish_reason = "failed"
            waiting = [*self._pending, *self._at_engines.values()]
            self._pending.clear()
            self.is_over = True  # last: then others read the above, without the lock
            self._notify()
        for request in waiting:
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(SessionOver("this session is over"))

    # The engines' side

    async def next_request(self, place: int) -> TurnRequest | None:
        """Wait for a request to be answered next at one of `MOST_AT_ONCE` places; None at the
        session's end. If this is cancelled, nothing is lost."""
        while True:
            with self._lock:
                if self.is_over:
                    return None
                if place in self._at_engines:
                    return self._at_engines[place]
                if self._pending:
                    request = self._at_engines[place] = self._pending.popleft()
                    return request
                changed = self._changed
            await asyncio.wrap_future(changed)

    @property
    def open(self) -> dict[int, TurnRequest]:
        """The requests at engines, by place."""
        with self._lock:
            return {} if self.is_over else dict(self._at_engines)

    def answer(self, place: int, choice: Choice, url: str) -> None:
        """An engine has answered the request at a place."""
        with self._lock:
            request = self._at_engines.pop(place, None)
            if request is None or self.is_over:
                return
        if request.answer.set_running_or_notify_cancel():  # else nobody waits any more
            request.answer.set_result((choice, url))

    def to_sample(self) -> Sample:
        """The sample, once the session is over."""
        assert self.is_over
        steps, prompt, tree = [], self.prompt, self.tree
        branches = tree.branches
        offset, heard, turns = 0, [], {turn.end: turn for turn in self.turns}
        for number, branch in enumerate(branches):
            heard += [_heard(turns.get(Place(number, end))) for end in branch.ends]
            steps += [(offset + end - branch.first - 1, 0.0) for end in branch.ends]
            offset += len(branch.logprobs)
        if steps and self.reward is not None:
            steps[-1] = (steps[-1][0], self.reward)
        if branches:
            first = branches[0]
            prompt = replace(
                prompt,
                token_ids=first.path[: first.first],
                text=tree.prompt_text,
                is_own=True,
            )
        spans = tree.spans
        return Sample(
            prompt=prompt,
            sample_index=self.sample_index,
            completion_ids=[t for each in branches for t in each.path[each.first :]],
            logprobs=[p for each in branches for p in each.logprobs],
            finish_reason=self.finish_reason,
            text="".join(each.text for each in branches),
            policy_version=spans[0][0] if spans else self._version,
            versions=tuple(spans) if len(spans) > 1 else (),
            loss_mask=[m for each in branches for m in each.loss_mask],
            routes=self._routes(),
            step_rewards=tuple(steps),
            heard=tuple(heard),
            branches=tree.sequences() if len(branches) > 1 else (),
            metrics=self.metrics,
        )

    def _prompt_of(self, found: Found) -> tuple[Place | None, list[int]]:
        template = self.template
        if found.place is not None:
            return found.place, template.encode(found.rest) if found.rest else []
        ids = template.encode(found.rest)
        place = self.tree.shared(ids)
        if place is None:
            return None, ids
        if self._cfg.on_rewrite == "drop":
            token = template.tokenizer.convert_ids_to_tokens(ids[place.length : place.length + 1])
            self._refuse(
                "failed",
                f"its messages are none that it had before: the token at {place.length} is "
                f"{token}, and the session has another one there (agent.on_rewrite is drop)",
            )
        return place, ids[place.length :]

    def _request(
        self, place: Place | None, context: list[int], max_tokens: int | None, stop: Sequence[str]
    ) -> TurnRequest:
        cfg, tree = self._cfg, self.tree
        if self._num_requests >= cfg.max_turns:
            self._refuse("max_turns", f"agent.max_turns {cfg.max_turns} is reached")
        if cfg.max_tokens is not None and tree.num_sampled >= cfg.max_tokens:
            self._refuse("length", f"agent.max_tokens {cfg.max_tokens} is reached")
        token_ids = [*(tree.tokens(place) if place else ()), *context]
        if (room := self._longest - len(token_ids)) < 1:
            self._refuse(
                "length",
                f"maximum context length is {self._longest} tokens, and the messages have "
                f"{len(token_ids)} (data.max_prompt_length and rollout.max_completion_length)",
            )
        if max_tokens is None or max_tokens > room:
            max_tokens = room
        number, self._num_requests = self._num_requests, self._num_requests + 1
        num_routed = tree.num_routed(place) if place else 0
        return TurnRequest(number, token_ids, max_tokens, stop, num_routed)

    def _keep(
        self,
        place: Place | None,
        context: list[int],
        text: str,
        choice: Choice,
    ) -> tuple[Place, Place]:
        """Add an answered turn to the tree."""
        if place is None and self.tree.branches:  # another request has come first
            place = self.tree.shared(context)
            context = context[place.length if place else 0 :]
        end = self.tree.add(place, context, text, choice)
        if self._has_routes:
            num_new = end.length - 1 - self.tree.num_routed(end)
            self.tree.add_routes(end, choice.routes[len(choice.routes) - num_new :])
        if choice.finish_reason == "length" and end.length == self._longest:
            self.finish_reason = "length"
        return Place(end.branch, end.length - len(choice.token_ids)), end

    def _refuse(self, finish_reason: str, text: str) -> None:
        if finish_reason == "failed":
            self.failure = self.failure or text
        self.finish_reason = finish_reason
        codes = {"length": "context_length_exceeded", "max_turns": "limit_reached"}
        raise BadRequest(text, codes.get(finish_reason))

    def _routes(self) -> np.ndarray | None:
        if not (self._has_routes and self.tree.branches):
            return None
        found = []
        for branch in self.tree.branches:
            routes = np.concatenate(branch.routes)
            last = np.zeros_like(routes[:1])
            own = routes if branch.root is None else routes[branch.first :]
            found += [own, last]
        return np.concatenate(found[:-1])

    def _notify(self) -> None:
        changed, self._changed = self._changed, lasting_future()
        changed.set_result(None)


def _heard(turn: Turn | None) -> Heard:
    if turn is None:  # the session ended before it was parsed
        return Heard((), ())
    return Heard(turn.roles, tuple(call["name"] for call in turn.answer.get("tool_calls", ())))
