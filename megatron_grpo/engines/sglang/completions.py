"""Completions of an SGLang engine, by the routes of vLLM that the trainer's client uses."""

import asyncio
import base64
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from megatron_grpo.engine_weights.protocol import Json
from megatron_grpo.engines.choice import NOT_FINITE, Choice, npy_of, smallest
from megatron_grpo.engines.http import EVENTS
from megatron_grpo.engines.sglang.variables import REPORTED_TOKENS
from megatron_grpo.unicode import as_unicode

ABORTED: Json = msgspec.to_builtins(Choice.empty())
"""Answer to a request that was aborted before SGLang had it."""

router = APIRouter()
"""Router of completions; `server.py` adds the other routes."""


class Gate:
    """Holds requests back while the engine is paused, and counts them."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Open requests: accepted and not answered."""
        self.num_answered = self.num_generated = 0
        """Requests answered since the start, and their tokens."""
        self.most_generated = self.most_started = 0
        """Largest counts of tokens and of started requests reported so far."""
        self.num_turns = 0
        """Number of times that it was closed or opened."""
        self._is_open, self._num_cuts = True, 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[bool]:
        """Wait until the gate is open; yields False if the request was cut meanwhile."""
        self.num_requests += 1
        cuts = self._num_cuts
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._is_open or self._num_cuts > cuts)
            yield self._num_cuts == cuts
        finally:
            self.num_requests -= 1

    async def close(self, cut: bool) -> None:
        """Hold requests back from now on; with `cut`, end those that wait."""
        async with self._changed:
            self._is_open = False
            self.num_turns += 1
            self._num_cuts += cut
            self._changed.notify_all()

    async def open(self) -> None:
        async with self._changed:
            self._is_open = True
            self.num_turns += 1
            self._changed.notify_all()


gate = Gate()


def manager() -> Any:
    """SGLang's `TokenizerManager`, which holds the requests of this process."""
    return http_server._global_state.tokenizer_manager


@router.post("/inference/v1/generate")
async def generate(request: Request) -> Response:
    """Complete `token_ids`, streamed if asked for; aborted if the client disconnects."""
    body = await request.json()
    if body.get("stream"):
        return StreamingResponse(events(body), media_type=EVENTS)
    made = asyncio.ensure_future(completion(body))
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            return Response(status_code=499)
        return Response(msgspec.json.encode({"choices": [await made]}))
    finally:
        made.cancel()
        gone.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def completion(body: Json) -> Json:
    """Complete a request once the gate is open."""
    async with gate.admitted() as is_wanted:
        if not is_wanted:
            return ABORTED
        try:
            answer = await anext(manager().generate_request(sglang_request(body)))
        except ValueError as error:  # the request's fault, such as a prompt that is too long
            raise HTTPException(400, str(error)) from error
    choice = choice_of(answer, body)
    gate.num_answered += 1
    gate.num_generated += len(choice["token_ids"])
    return choice


async def events(body: Json) -> AsyncIterator[bytes]:
    """Stream a completion as server-sent events: chunks, or an error."""
    num_sent, interval = 0, body["sampling_params"].get("stream_interval") or 1
    async with gate.admitted() as is_wanted:
        if not is_wanted:
            yield event(choices=[ABORTED])
            return
        try:
            async for answer in manager().generate_request(sglang_request(body)):
                end = answer["meta_info"]["finish_reason"] or {}
                if code := end.get("status_code"):  # SGLang refused or failed
                    yield event(error={"message": end["message"], "code": code})
                    return
                # The first token goes out at once: it shows that the request has started.
                if num_sent and len(answer["output_ids"]) - num_sent < interval and not end:
                    continue
                chunk = choice_of(answer, body, num_sent)
                num_sent += len(chunk["token_ids"])
                yield event(choices=[chunk])
        except ValueError as error:  # as above
            yield event(error={"message": str(error), "code": 400})
            return
    gate.num_answered += 1
    gate.num_generated += num_sent


def event(**fields: Any) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def sglang_request(body: Json) -> GenerateReqInput:
    """Convert a request to vLLM's route into one to SGLang's /generate."""
    params = body["sampling_params"]
    return GenerateReqInput(
        input_ids=body["token_ids"],
        image_data=body.get("features"),
        sampling_params={
            "max_new_tokens": params["max_tokens"],
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "top_k": params["top_k"],
            "stop_token_ids": params["stop_token_ids"],
            "stop": params["stop"],
            "no_stop_trim": params["include_stop_str_in_output"],
            "sampling_seed": params["seed"] % 2**31,  # used by SGLang's deterministic inference
            "stream_interval": min(params.get("stream_interval") or 1, REPORTED_TOKENS),
        },
        stream=body.get("stream", False),
        return_routed_experts="routed_experts_prompt_start" in params,
        return_indexer_topk="index_topk" in params,
        routed_experts_start_len=params.get("routed_experts_prompt_start", 0),
        return_logprob=True,
        logprob_start_len=-1,
        priority=body["priority"],
    )


def choice_of(answer: Json, body: Json, start: int | None = None) -> Json:
    """Convert SGLang's answer into vLLM's; of a stream, the chunk of tokens from `start` on."""
    meta = answer["meta_info"]
    end = meta["finish_reason"]
    if start is None and not meta.get("weight_versions"):
        span = {"version": meta["weight_version"], "start": 0, "end": len(answer["output_ids"])}
        meta["weight_versions"] = [span]
    sampled = (logprob for logprob, *_ in meta["output_token_logprobs"][start:])
    logprobs = [logprob if math.isfinite(logprob) else NOT_FINITE for logprob in sampled]
    return {
        "token_ids": answer["output_ids"][start:],
        "logprobs": {"content": [{"logprob": each} for each in logprobs]},
        "finish_reason": end and end["type"],
        "text": answer["text"] if end else "",  # SGLang sends the whole text each time
        "weight_versions": meta["weight_versions"],
        "routed_experts": encoded_routes(meta, body["sampling_params"]),
    }


def encoded_routes(meta: Json, params: Json) -> str | None:
    """Convert SGLang's routes to vLLM's form: experts, then tokens chosen by indexers.

    SGLang sends both as base64 of int32 [tokens, layers, columns]; the rows of the first
    `index_topk` tokens hold whatever its buffer had before.
    """
    config, kinds = manager().model_config.hf_text_config, []
    for name, columns in (
        ("routed_experts", "num_experts_per_tok"),
        ("indexer_topk", "index_topk"),
    ):
        if name in meta:
            flat = np.frombuffer(base64.b64decode(meta[name]), np.int32)
            shape = -1, config.num_hidden_layers, getattr(config, columns)
            kinds.append(flat.reshape(shape))
    if not kinds:
        return None
    if "indexer_topk" in meta:
        chosen = kinds.pop().copy()
        chosen[: params["index_topk"]] = 0
        kinds.append(chosen[params["routed_experts_prompt_start"] :])
    return base64.b64encode(npy_of(smallest(np.concatenate(kinds, axis=2)))).decode()


@router.post("/v1/chat/completions/derender")
async def derender(request: Request) -> Json:
    """Convert the tokens of an agent's turn into a chat message, by SGLang's own parsers."""
    body = await request.json()
    [turn] = body["generate_response"]["choices"]
    try:
        chat_request = ChatCompletionRequest(model="any", **body["chat_request"])
    except ValueError as error:  # the agent's fault
        raise HTTPException(400, str(error)) from None
    chat = request.app.state.openai_serving_chat
    ids = turn["token_ids"]
    # Markers of tool calls and of reasoning may be special tokens.
    plain = not chat_request.tools and chat.reasoning_parser is None
    meta = {"id": "turn", "prompt_tokens": 0, "completion_tokens": len(ids), "weight_version": ""}
    meta["finish_reason"] = {"type": turn["finish_reason"]}
    text = manager().tokenizer.decode(ids, skip_special_tokens=plain)
    made = {"text": text, "output_ids": ids, "meta_info": meta}
    answer = chat._build_chat_response(chat_request, [made], created=0)
    # Not as JSON: a model may write half of a surrogate pair.
    message = as_unicode(answer.choices[0].message.model_dump())
    return {"choices": [{"message": message | {"reasoning": message.pop("reasoning_content")}}]}
