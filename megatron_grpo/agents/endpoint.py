"""HTTP server that agents ask for the model's turns: OpenAI's routes, and Anthropic's.

    POST /v1/chat/completions, /v1/completions, /v1/messages, /v1/messages/count_tokens
    GET /v1/models

Each session has an API key (`Authorization: Bearer`, `x-api-key`); for programs that cannot be
given a key, all routes also exist below `/KEY`. The server runs in rank 0's event loop.
"""

import asyncio
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from aiohttp import web

from megatron_grpo.agents import anthropic_api, openai_api
from megatron_grpo.agents.chat import (
    BadRequest,
    Found,
    Message,
    Start,
    Turn,
    as_openai,
    check_calls,
    digests,
    messages_of,
    since_answer,
)
from megatron_grpo.agents.openai_api import CHAT, TEXT, Answered, Json, Options, Route
from megatron_grpo.agents.session import Session, SessionOver
from megatron_grpo.agents.task_queue import TaskQueue
from megatron_grpo.data.messages import shown_text
from megatron_grpo.engines.choice import Choice
from megatron_grpo.unicode import as_unicode

LOOPBACK, ANY_HOST = "127.0.0.1", ("0.0.0.0", "::")
MAX_BODY = 1 << 30
"""Limit of a request's bytes: more than the longest context and the images of a row have."""
NO_SESSION = "no open session has this API key"
STOP_SECONDS = 2.0
"""Time for open connections to end when the server stops."""

ErrorBody = Callable[[str, str, str | None], Json]
Parse = Callable[[Choice, Json, str], Awaitable[Json]]
"""(turn, request, engine's address) -> the assistant's message; see `Agents._parse`."""


@dataclass(frozen=True)
class AgentRequest:
    """A request with its session; `options` are the fields of `body` that have an effect."""

    session: Session
    body: Json
    options: Options


Answer = Callable[[web.Request, AgentRequest], Awaitable[web.StreamResponse]]


class Endpoint:
    """The server: on the loopback address for agents of the run; agents elsewhere have the address
    `agent.listen` and take `tasks`."""

    def __init__(self, parse: Parse, model: str, tasks: TaskQueue | None = None) -> None:
        self._parse, self._model, self._tasks = parse, model, tasks
        self.sessions: dict[str, Session] = {}
        """Open sessions by their API key."""
        self.url = ""
        """Address without /v1; empty before `start`."""

    def admit(self, session: Session) -> str:
        """Open a session to requests; returns its key."""
        key = secrets.token_urlsafe(24)
        self.sessions[key] = session
        return key

    async def start(self, host: str = LOOPBACK, port: int = 0) -> None:
        """Listen; raises ValueError for an address that another run has."""
        application = web.Application(client_max_size=MAX_BODY)
        openai = partial(self._handle, openai_api.error_body, None)
        anthropic = partial(self._handle, anthropic_api.error_body, anthropic_api.as_chat)
        for path, handler in (
            ("/v1/chat/completions", partial(openai, partial(self._openai, CHAT))),
            ("/v1/completions", partial(openai, partial(self._openai, TEXT))),
            ("/v1/messages", partial(anthropic, self._messages)),
            ("/v1/messages/count_tokens", partial(anthropic, self._count)),
        ):
            application.router.add_post(path, handler)
            application.router.add_post(f"/{{key}}{path}", handler)
        if self._tasks:
            self._tasks.serve(application)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/{key}/v1/models", self._models)
        # `handler_cancellation`, which aiohttp leaves off: when a client disconnects, its handler
        # is cancelled, and with it the request at the engines.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=STOP_SECONDS, access_log=None
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ValueError(f"agent.listen {host}:{port}: {error}") from None
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        if self._tasks:
            name = socket.getfqdn() if host in ANY_HOST else host
            self._tasks.publish_address(f"http://{name}:{port}")

    async def close(self) -> None:
        """Stop the server; open requests stay unanswered."""
        await self._runner.cleanup()

    async def _models(self, http: web.Request) -> web.Response:
        if self._session_of(http) is None:
            return _refused(openai_api.error_body, 401, NO_SESSION)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "megatron-grpo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _handle(
        self,
        error_body: ErrorBody,
        as_chat: Callable[[Json], Json] | None,
        answer: Answer,
        http: web.Request,
    ) -> web.StreamResponse:
        """Answer a request, or refuse it in its API's form: 401, 400, or 403 after the end."""
        session = self._session_of(http)
        if session is None:
            return _refused(error_body, 401, NO_SESSION)
        try:
            body, options = await _read(http, as_chat)
            return await answer(http, AgentRequest(session, body, options))
        except BadRequest as error:
            return _refused(error_body, 400, str(error), error.code)
        except RecursionError:  # json.loads raises this, and no ValueError, for deep nesting
            return _refused(error_body, 400, "the request is nested too deep")
        except SessionOver as error:
            return _refused(error_body, 403, str(error))

    async def _openai(
        self, route: Route, http: web.Request, request: AgentRequest
    ) -> web.StreamResponse:
        take_turns = self._chat_turns if route is CHAT else self._text_turns
        turns, name = await take_turns(request), f"chatcmpl-{uuid4().hex}"
        if not request.options.is_streamed:
            return web.json_response(route.answer(turns, self._model, name))
        chunks = route.stream(turns, self._model, name, request.options)
        return await _stream(http, [("", part) for part in chunks], end="data: [DONE]\n\n")

    async def _messages(self, http: web.Request, request: AgentRequest) -> web.StreamResponse:
        [turn] = await self._chat_turns(request)
        name = f"msg_{uuid4().hex}"
        if not request.options.is_streamed:
            return web.json_response(anthropic_api.answer(turn, self._model, name))
        events = anthropic_api.events(turn, self._model, name)
        return await _stream(http, [(event["type"], event) for event in events])

    async def _count(self, http: web.Request, request: AgentRequest) -> web.StreamResponse:
        session = request.session
        chat = await asyncio.to_thread(_chat_of, request)
        found = session.template.find(session.turns, *chat)
        return web.json_response({"input_tokens": session.num_tokens(found)})

    def _session_of(self, http: web.Request) -> Session | None:
        bearer = http.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        for key in (http.match_info.get("key"), http.headers.get("x-api-key"), bearer):
            if key in self.sessions:
                return self.sessions[key]
        return None

    async def _chat_turns(self, request: AgentRequest) -> list[Answered]:
        body, session = request.body, request.session
        # In a thread: rendering a long chat would block the event loop, which also asks engines.
        messages, tools, text = await asyncio.to_thread(_chat_of, request)

        async def take_turn() -> Answered:
            found = session.template.find(session.turns, messages, tools, text)
            turn, choice, url, text_of = await self._sample(request, found, text)
            texts = [{**each, "content": shown_text(each["content"])} for each in messages]
            chat_request = {**body, "messages": as_openai(texts), "tools": tools}
            message = await self._parse(choice, chat_request, url)
            # Parsers have found nothing: the agent gets the text, cut before its stop string.
            if not message.get("tool_calls") and not message.get("reasoning"):
                message = {"role": "assistant", "content": text_of}
            message = _without(session.template.image_token, message)
            [answer] = messages_of([message], {})
            history, heard = digests(messages, tools), since_answer(messages)
            turn = replace(turn, history=history, answer=answer, heard=heard)
            session.turns.append(turn)
            return self._answered(turn, choice, message, request)

        return await asyncio.gather(*[take_turn() for _ in range(request.options.num)])

    async def _text_turns(self, request: AgentRequest) -> list[Answered]:
        session, prompt = request.session, request.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            [prompt] = prompt
        if not isinstance(prompt, str) or not prompt:
            raise BadRequest("prompt must be one text that is not empty")
        if (token := session.template.image_token) and token in prompt:
            raise BadRequest(f"{token} in a text shows no image: use /v1/chat/completions")
        if request.body.get("echo") or request.body.get("suffix"):
            raise BadRequest("echo and suffix are not supported")

        async def take_turn() -> Answered:
            found = session.template.find_text(session.turns, prompt)
            turn, choice, _, text = await self._sample(request, found, prompt)
            session.turns.append(turn)
            return self._answered(turn, choice, {"role": "assistant", "content": text}, request)

        return await asyncio.gather(*[take_turn() for _ in range(request.options.num)])

    async def _sample(
        self, request: AgentRequest, found: Found, prompt_text: str
    ) -> tuple[Turn, Choice, str, str]:
        """Sample a turn. Returns it without its history, with the engine's choice and address, and
        the text for the agent, cut before the first of the request's stop strings."""
        options = request.options
        choice, url, prompt, end = await request.session.sample(
            found, options.max_tokens, options.stop
        )
        text = choice.text
        start = Start.of(prompt_text)
        turn = Turn((), {}, start, text, prompt, end, choice.token_ids[-1])
        cuts = [at for each in options.stop if (at := text.find(each)) >= 0]
        return turn, choice, url, text[: min(cuts, default=None)]

    def _answered(
        self, turn: Turn, choice: Choice, message: Json, request: AgentRequest
    ) -> Answered:
        tokens: Sequence[tuple[str, float]] = ()
        if request.options.has_logprobs:
            texts = [
                request.session.template.tokenizer.decode([token]) for token in choice.token_ids
            ]
            tokens = [*zip(texts, choice.token_logprobs, strict=True)]
        reason = "tool_calls" if message.get("tool_calls") else choice.finish_reason
        return Answered(message, reason, turn.prompt.length, len(choice.token_ids), tokens)


def _chat_of(request: AgentRequest) -> tuple[list[Message], Any, str]:
    """Messages and tools of a request, and both rendered by the template."""
    body = request.body
    session, tools = request.session, openai_api.tools_of(body)
    messages = messages_of(body.get("messages"), session.images)
    check_calls(messages, session.turns)
    return messages, tools, session.template.render(messages, tools, is_prompt=True)


def _without(image_token: str, message: Json) -> Json:
    """An answer without the text of images, which a model may sample: it shows none, and no later
    request could contain it."""
    names = [name for name in ("content", "reasoning") if image_token and message.get(name)]
    return message | {name: message[name].replace(image_token, "") for name in names}


async def _read(http: web.Request, as_chat: Callable[[Json], Json] | None) -> tuple[Json, Options]:
    """Body of a request, converted by `as_chat` to OpenAI's form, and its checked fields."""
    try:
        body = json.loads(await http.text(), parse_constant=_refuse_constant)
        if not isinstance(body, dict):
            raise BadRequest("the body must be an object")
        body = as_chat(body) if as_chat else body
        return as_unicode(body), Options.of(body)
    except BadRequest:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BadRequest(f"the request cannot be read: {error!r}") from None


def _refuse_constant(name: str) -> None:
    raise BadRequest(f"{name} is no value of JSON")


def _refused(
    error_body: ErrorBody, status: int, text: str, code: str | None = None
) -> web.Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return web.json_response(error_body(text, kind, code), status=status)


async def _stream(
    http: web.Request, events: Sequence[tuple[str, Mapping[str, Any]]], end: str = ""
) -> web.StreamResponse:
    """Send (name, data) pairs as server-sent events; an empty name is left out."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    for name, event in events:
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {json.dumps(event)}\n\n".encode())
    await response.write(end.encode())
    await response.write_eof()
    return response
