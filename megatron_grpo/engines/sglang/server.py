"""An SGLang engine that answers the routes of vLLM which the trainer's client asks for.

    MEGATRON_GRPO_TOKEN=... python -m megatron_grpo.engines.sglang.server --model-path FOLDER ...

takes SGLang's own arguments, and adds those that every engine needs. SGLang's own routes are there
as well, all behind the token.
"""

import asyncio
import base64
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree

from megatron_grpo.engines.access import TokenGuard
from megatron_grpo.engines.choice import NOT_FINITE, Choice, npy_of
from megatron_grpo.engines.http import EVENTS
from megatron_grpo.engines.push_protocol import Json
from megatron_grpo.engines.sglang.args import RENDEZVOUS_VARIABLE, TOLD_TOKENS, VARIABLES
from megatron_grpo.engines.sglang.images import read_prompts
from megatron_grpo.engines.sglang.model_folder import server_arguments
from megatron_grpo.engines.sglang.worker import call_of, run_scheduler_process

ABORTED: Json = msgspec.to_builtins(Choice.empty())
"""The completion of a request that was given up before SGLang had it."""

router = APIRouter()


class Gate:
    """Holds requests back while the engine is paused, and counts them."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Accepted and not answered."""
        self.num_answered = self.num_generated = 0
        """Requests answered since the start, and their tokens."""
        self.most_generated = self.most_started = 0
        """The counts of tokens and of started requests that were last told."""
        self.num_turns = 0
        """How often it was closed or opened."""
        self._is_open, self._num_cuts = True, 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[bool]:
        """Wait until the gate is open; yields False if the request was given up meanwhile."""
        self.num_requests += 1
        cuts = self._num_cuts
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._is_open or self._num_cuts > cuts)
            yield self._num_cuts == cuts
        finally:
            self.num_requests -= 1

    async def close(self, cut: bool) -> None:
        """Hold requests back from now on; with `cut`, give up those that wait."""
        async with self._changed:
            self._is_open = False
            self.num_turns += 1
            self._num_cuts += cut
            self._changed.notify_all()

    async def open(self) -> None:
        """Let all pass."""
        async with self._changed:
            self._is_open = True
            self.num_turns += 1
            self._changed.notify_all()


gate = Gate()
PARTS = [GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_KV_CACHE]
"""What sleeps."""
asleep: set[str] = set()
"""Those of `PARTS` that do."""
DRAIN_TRIES, DRAIN_SECONDS = 600, 0.05
"""How often, and how far apart, a request to sleep looks whether no other request is left."""


def manager() -> Any:
    """SGLang's `TokenizerManager`, which has the requests of this process."""
    return http_server._global_state.tokenizer_manager


@router.post("/inference/v1/generate")
async def generate(request: Request) -> Response:
    """A completion of `token_ids`, streamed if asked for; given up if the client is gone."""
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
    """Return when its client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def completion(body: Json) -> Json:
    """A completion, once the gate is open."""
    async with gate.admitted() as is_wanted:
        if not is_wanted:
            return ABORTED
        try:
            choice = choice_of(await anext(manager().generate_request(sglang_request(body))))
        except ValueError as error:  # the request's fault, such as a prompt that is too long
            raise HTTPException(400, str(error)) from error
    gate.num_answered += 1
    gate.num_generated += len(choice["token_ids"])
    return choice


async def events(body: Json) -> AsyncIterator[bytes]:
    """A completion as server-sent events, each a chunk of it or why there is none."""
    num_sent, interval = 0, body["sampling_params"].get("stream_interval") or 1
    async with gate.admitted() as is_wanted:
        if not is_wanted:
            yield event(choices=[ABORTED])
            return
        try:
            async for answer in manager().generate_request(sglang_request(body)):
                end = answer["meta_info"]["finish_reason"] or {}
                if code := end.get("status_code"):  # it cannot be generated
                    yield event(error={"message": end["message"], "code": code})
                    return
                if num_sent and len(answer["output_ids"]) - num_sent < interval and not end:
                    continue
                chunk = choice_of(answer, num_sent)
                num_sent += len(chunk["token_ids"])
                yield event(choices=[chunk])
        except ValueError as error:  # as above
            yield event(error={"message": str(error), "code": 400})
            return
    gate.num_answered += 1
    gate.num_generated += num_sent


def event(**fields: Any) -> bytes:
    """One server-sent event with these fields."""
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def sglang_request(body: Json) -> GenerateReqInput:
    """A request to vLLM's route as one to SGLang's /generate."""
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
            "sampling_seed": params["seed"] % 2**31,  # followed by its deterministic inference
            "stream_interval": min(params.get("stream_interval") or 1, TOLD_TOKENS),
        },
        stream=body.get("stream", False),
        return_routed_experts="routed_experts_prompt_start" in params,
        routed_experts_start_len=params.get("routed_experts_prompt_start", 0),
        return_logprob=True,
        logprob_start_len=-1,
        priority=body["priority"],
    )


def choice_of(answer: Json, start: int | None = None) -> Json:
    """SGLang's answer as vLLM's; of a stream, the chunk that begins with the token at `start`."""
    meta = answer["meta_info"]
    end = meta["finish_reason"]
    if start is None and not meta.get("weight_versions"):
        span = {"version": meta["weight_version"], "start": 0, "end": len(answer["output_ids"])}
        meta["weight_versions"] = [span]
    told = (logprob for logprob, *_ in meta["output_token_logprobs"][start:])
    logprobs = [logprob if math.isfinite(logprob) else NOT_FINITE for logprob in told]
    return {
        "token_ids": answer["output_ids"][start:],
        "logprobs": {"content": [{"logprob": each} for each in logprobs]},
        "finish_reason": end and end["type"],
        "text": answer["text"] if end else "",  # SGLang's is of all tokens so far
        "weight_versions": meta["weight_versions"],
        "routed_experts": encoded(meta["routed_experts"]) if "routed_experts" in meta else None,
    }


def encoded(routed_experts: str) -> str:
    """SGLang's experts of tokens, base64 of int32 [tokens, layers, topk], in the form of vLLM."""
    config = manager().model_config.hf_text_config
    flat = np.frombuffer(base64.b64decode(routed_experts), np.int32)
    routes = flat.reshape(-1, config.num_hidden_layers, config.num_experts_per_tok)
    small = routes.astype(np.uint8 if routes.max(initial=0) < 256 else np.int16)
    return base64.b64encode(npy_of(small)).decode()


@router.post("/v1/chat/completions/derender")
async def derender(request: Request) -> Json:
    """The assistant's message that a turn of an agent is, by SGLang's own parsers."""
    body = await request.json()
    [turn] = body["generate_response"]["choices"]
    asked = ChatCompletionRequest(model="any", **body["chat_request"])
    chat = request.app.state.openai_serving_chat
    ids = turn["token_ids"]
    # Marks of calls and of reasoning may be special tokens.
    plain = not asked.tools and chat.reasoning_parser is None
    meta = {"id": "turn", "prompt_tokens": 0, "completion_tokens": len(ids), "weight_version": ""}
    meta["finish_reason"] = {"type": turn["finish_reason"]}
    text = manager().tokenizer.decode(ids, skip_special_tokens=plain)
    made = {"text": text, "output_ids": ids, "meta_info": meta}
    answer = chat._build_chat_response(asked, [made], created=0)
    message = json.loads(answer.model_dump_json())["choices"][0]["message"]
    return {"choices": [{"message": message | {"reasoning": message.pop("reasoning_content")}}]}


@router.get("/load")
async def load() -> Json:
    """Number of requests accepted but not answered."""
    return {"server_load": gate.num_requests}


@router.get("/metrics")
async def metrics() -> Response:
    """The counts that the client reads, in the format of Prometheus."""
    begun = [len(state.output_ids) for state in manager().rid_to_state.values()]
    num_started = sum(count > 0 for count in begun)
    # What is given up is no longer counted; the client expects counts since the start.
    gate.most_generated = max(gate.most_generated, gate.num_generated + sum(begun))
    gate.most_started = max(gate.most_started, gate.num_answered + num_started)
    counts = {
        "generation_tokens_total": gate.most_generated,
        "time_to_first_token_seconds_count": gate.most_started,
        "num_requests_waiting": gate.num_requests - num_started,
    }
    return Response("".join(f"vllm:{name} {count}\n" for name, count in counts.items()))


@router.post("/pause")
async def pause(mode: str) -> Json:
    """Hold requests back; with mode `abort`, answer those that run with what they have."""
    await gate.close(cut=mode == "abort")
    if mode == "abort":
        manager().abort_request(abort_all=True)
    else:
        await manager().pause_generation(PauseGenerationReqInput(mode="retract"))
    return {}


@router.post("/resume")
async def resume() -> Json:
    """Let requests run."""
    await manager().continue_generation(ContinueGenerationReqInput())
    await gate.open()
    return {}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache() -> Json:
    """Drop keys and values of the weights so far."""
    return {"success": (await manager().flush_cache()).success}


@router.post("/update_weight_version")
async def update_weight_version(request: Request) -> Json:
    """Label what is sampled from now on; SGLang's own route would give up all requests."""
    version = (await request.json())["new_version"]
    update = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
    await manager().update_weight_version(update)
    return {}


@router.post("/sleep")
async def sleep() -> Json:
    """Give requests up, and the memory of weights and cache back with what is in it.

    Of CUDA graphs it stays, as in vLLM. 503 if requests do not end, or the engine was paused or
    resumed meanwhile, as by a push.
    """
    await pause("abort")
    paused = gate.num_turns
    for _ in range(DRAIN_TRIES):  # SGLang ends at once if it has requests
        if (await reset_prefix_cache())["success"]:
            break
        await asyncio.sleep(DRAIN_SECONDS)
    else:
        raise HTTPException(503, "requests that were given up have not ended")
    if gate.num_turns != paused:
        raise HTTPException(503, "paused or resumed meanwhile")
    if tags := [tag for tag in PARTS if tag not in asleep]:
        asleep.update(tags)
        await manager().release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
    return {}


@router.post("/wake_up")
async def wake_up(tags: Annotated[list[str], Query()] = PARTS) -> Json:
    """Take the memory of these parts again, if they sleep."""
    if woken := [tag for tag in tags if tag in asleep]:  # SGLang ends at any other
        asleep.difference_update(woken)
        await manager().resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=woken))
    return {}


@router.get("/is_sleeping")
async def is_sleeping() -> Json:
    """Whether any part sleeps."""
    return {"is_sleeping": bool(asleep)}


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request) -> Json:
    """Let the workers open channels to all ranks that send to this engine."""
    info = (await request.json())["init_info"]
    await ask_workers("open_channels", {"question": "", **info})
    return {}


@router.post("/collective_rpc")
async def collective_rpc(request: Request) -> Json:
    """Call a method of `PushWorker` in every worker; their answers in rank order."""
    body = await request.json()
    return {"results": await ask_workers(body["method"], body["kwargs"])}


async def ask_workers(method: str, arguments: Json) -> list[Json]:
    """The answers of all workers."""
    call = CheckWeightsReqInput(action=call_of(method, arguments))
    succeeded, answers, *_ = await manager().check_weights(call)
    if not succeeded:
        raise RuntimeError(f"{method}: {answers}")
    found: list[Json] = json.loads(answers)
    return found


def main() -> None:
    """Serve until told to end, and leave no file behind. The token comes by the environment."""
    ours = {route.path for route in router.routes}
    routes = http_server.app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", None) not in ours]
    http_server.app.include_router(router)
    http_server.app.add_middleware(TokenGuard)
    read_prompts()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())  # uvicorn may raise it again
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        tempfile.tempdir = own  # SGLang leaves its sockets behind
        os.environ |= VARIABLES | {RENDEZVOUS_VARIABLE: f"file://{own}/workers", "TMPDIR": own}
        arguments = prepare_server_args(server_arguments(sys.argv[1:], Path(own, "model")))
        try:
            http_server.launch_server(arguments, run_scheduler_process_func=run_scheduler_process)
        finally:
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # else the end of a worker kills us
            # Python's own child unlinks the shared memory that the others leave behind.
            tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
            kill_process_tree(os.getpid(), include_parent=False, skip_pid=tracker)


if __name__ == "__main__":
    main()
