"""Session: one sample while its agent acts, with its tokens and its requests at engines."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_grpo.agents.chat import BadRequest, ChatTemplate, Found, Turn, image_digest
from megatron_grpo.agents.token_tree import Place, TokenTree
from megatron_grpo.config.agent import AgentConfig
from megatron_grpo.data.images import PromptSources
from megatron_grpo.data.messages import shown_text
from megatron_grpo.data.samples import Heard, Sample
from megatron_grpo.engines.choice import Choice
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.group import PartnerGroup
from megatron_grpo.engines.request import Request, features_at
from megatron_grpo.engines.router import RequestRouter

NOTHING: Mapping[str, float] = {}
MOST_AT_ONCE = 8
"""Limit of a session's turns that are at the engines at a time; further requests wait."""


class SessionOver(Exception):
    """The session has ended: the agent is late, or has ended already."""


class Session:
    """Samples an agent's turns through a router, and keeps their tokens in a tree."""

    def __init__(
        self,
        group: PartnerGroup,
        sample_index: int,
        router: RequestRouter,
        template: ChatTemplate,
        cfg: AgentConfig,
        max_prompt_length: int,
        images: Sequence[str] = (),
    ) -> None:
        """`images` are the `data_url`s of the row's images."""
        self.prompt, self.sample_index, self.template = group.prompt, sample_index, template
        self.images = {image_digest(url): number for number, url in enumerate(images)}
        # Tokens of the tree are those of `PromptSources.expand`.
        self.tree, self.turns = TokenTree(), list[Turn]()
        self.finish_reason = "stop"
        self.failure = ""
        """Reason of the failure; empty without one."""
        self.reward: float | None = None
        self.metrics: Mapping[str, float] = {}
        self.is_over = False
        """Whether the agent has ended; no more turns are sampled."""
        self._group, self._router, self._cfg, self._params = group, router, cfg, group.params
        self._longest = max_prompt_length + self._params.max_completion_length
        """Most tokens of a prompt with its answer."""
        self._num_requests = 0
        self._url = ""
        """Address of the engine that sampled the last turn: it has cached the prefix."""
        self._free = asyncio.Semaphore(MOST_AT_ONCE)
        self._open: set[Request] = set()

    async def sample(
        self, found: Found, max_tokens: int | None, stop: Sequence[str]
    ) -> tuple[Choice, str, Place, Place]:
        """Have the engines sample one turn after `found`.

        Returns the completion, the engine's address, and the places at the end of the prompt and of
        the turn. Raises BadRequest at a limit, SessionOver if the session ends before.
        """
        place, context = self._prompt_of(found)
        body = self._request(place, context, max_tokens, stop)
        choice, self._url = await self._ask(body, stop)
        return choice, self._url, *self._keep(place, context, found.rest, choice)

    async def _ask(self, body: Json, stop: Sequence[str]) -> tuple[Choice, str]:
        """Request a turn and wait for it; raises SessionOver if the session ends before."""
        async with self._free:
            if self.is_over:
                raise SessionOver("this session is over")
            priority = self._group.priority + self.sample_index
            request = Request(body, priority, [*self._params.stop, *stop], self._url)
            self._open.add(request)
            self._router.submit([request])
            try:
                answer = await request.answer
            except asyncio.CancelledError:
                if self.is_over:
                    raise SessionOver("this session is over") from None
                raise  # the handler was cancelled: the agent has closed its connection
            finally:
                self._open.discard(request)
        # `end` may run between the answer and this line: it finds no open answer to cancel, and the
        # tree must not grow behind the end.
        if self.is_over:
            raise SessionOver("this session is over")
        self._group.engines.add(answer[1])
        return answer

    def num_tokens(self, found: Found) -> int:
        return (found.place.length if found.place else 0) + len(self._encode(found.rest))

    def end(
        self, reward: float | None, metrics: Mapping[str, float] = NOTHING, failure: str = ""
    ) -> None:
        """Record the agent's end and cancel its open requests; later calls have no effect."""
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
        self.is_over = True
        for request in self._open:
            request.answer.cancel()

    def to_sample(self) -> Sample:
        """The sample of a session that is over: own tokens of all branches, end to end."""
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
        token_ids: list[int] = []
        if branches:
            first = branches[0].first
            own = [token for each in branches for token in each.path[each.first :]]
            token_ids, images = self._placed([*branches[0].path[:first], *own])
            prompt = replace(
                prompt,
                token_ids=token_ids[:first],
                text=tree.prompt_text,
                is_own=True,
                images=images,
            )
        spans = tree.spans
        return Sample(
            prompt=prompt,
            sample_index=self.sample_index,
            completion_ids=token_ids[len(prompt.token_ids) :],
            logprobs=[p for each in branches for p in each.logprobs],
            finish_reason=self.finish_reason,
            text="".join([each.text for each in branches]),
            policy_version=spans[0][0] if spans else self._params.policy_version,
            versions=tuple(spans) if len(spans) > 1 else (),
            temperature=self._params.own_temperature,
            loss_mask=[m for each in branches for m in each.loss_mask],
            routes=self._routes() if self._params.has_routes and branches else None,
            step_rewards=tuple(steps),
            heard=tuple(heard),
            branches=tree.sequences() if len(branches) > 1 else (),
            metrics=self.metrics,
            failure=self.failure,
        )

    def _prompt_of(self, found: Found) -> tuple[Place | None, list[int]]:
        """Place in the tree that the prompt goes on from, and the new tokens behind it."""
        if found.place is not None:
            return found.place, self._encode(found.rest) if found.rest else []
        # A rewritten history: tokens before the first change stay shared, the rest is a branch.
        ids = self._encode(found.rest)
        place = self.tree.shared(ids)
        if place is None:
            return None, ids
        if self._cfg.on_rewrite == "drop":
            other, _ = self._placed(ids[place.length : place.length + 1])
            token = self.template.tokenizer.convert_ids_to_tokens(other)
            self._refuse(
                "failed",
                f"its messages rewrite the history: the token at {place.length} is {token}, where "
                "the session has another (agent.on_rewrite is drop)",
            )
        return place, ids[place.length :]

    def _encode(self, text: str) -> list[int]:
        return self.template.encode(text, self.prompt.images)

    def _placed(self, expanded: Sequence[int]) -> tuple[list[int], PromptSources | None]:
        images = self.prompt.images
        return images.placed(expanded) if images else ([*expanded], None)

    def _request(
        self, place: Place | None, context: list[int], max_tokens: int | None, stop: Sequence[str]
    ) -> Json:
        """Body of a turn's request; raises BadRequest if a limit is reached."""
        cfg, tree, params = self._cfg, self.tree, self._params
        if self._num_requests >= cfg.max_turns:
            self._refuse("max_turns", f"agent.max_turns {cfg.max_turns} is reached")
        if cfg.max_tokens is not None and tree.num_sampled >= cfg.max_tokens:
            self._refuse("length", f"agent.max_tokens {cfg.max_tokens} is reached")
        token_ids, images = self._placed([*(tree.tokens(place) if place else ()), *context])
        if images and len(images.places) > images.reader.most:
            raise BadRequest(f"more images than {images.reader.limit}.image {images.reader.most}")
        features = self._group.features
        if (room := self._longest - len(token_ids)) < 1:
            self._refuse(
                "length",
                f"maximum context length is {self._longest} tokens, and the messages have "
                f"{len(token_ids)} (data.max_prompt_length and rollout.max_completion_length)",
            )
        if max_tokens is None or max_tokens > room:
            max_tokens = room
        # Counted before the request is sent: concurrent turns get different seeds.
        turn, self._num_requests = self._num_requests, self._num_requests + 1
        body = params.request(
            token_ids,
            seed=params.turn_seed(self.sample_index, turn),
            max_tokens=max_tokens,
            routes_start=tree.num_routed(place) if place else 0,
            features=features_at(features, images.places) if features and images else None,
        )
        if stop:
            # The stop string stays in the tokens that are trained on; `Endpoint._sample` cuts the
            # agent's text.
            both = {"stop": [*params.stop, *stop], "include_stop_str_in_output": True}
            body["sampling_params"] |= both
        return body

    def _keep(
        self, place: Place | None, context: list[int], text: str, choice: Choice
    ) -> tuple[Place, Place]:
        """Add a sampled turn to the tree; returns the ends of its prompt and of the turn."""
        # A concurrent request was answered first and has begun the tree: look again for the place.
        if place is None and self.tree.branches:
            place = self.tree.shared(context)
            context = context[place.length if place else 0 :]
        end = self.tree.add(place, context, self.template.unmarked(text), choice)
        if self._params.has_routes:
            # Not `routes_start` of the request: a concurrent turn may have added routes since.
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

    def _routes(self) -> np.ndarray:
        found = []
        for branch in self.tree.branches:
            routes = np.concatenate(branch.routes)
            # Engines return no routes of a last token; inside the sample, zeros stand for them.
            last = np.zeros_like(routes[:1])
            own = routes if branch.root is None else routes[branch.first :]
            found += [own, last]
        return np.concatenate(found[:-1])


def _heard(turn: Turn | None) -> Heard:
    if turn is None:  # the session ended before the turn was parsed
        return Heard((), ())
    return Heard(
        tuple(message["role"] for message in turn.heard),
        tuple(call["name"] for call in turn.answer.get("tool_calls", ())),
        tuple(shown_text(message["content"]) for message in turn.heard),
    )
