"""An SGLang engine that answers the routes of vLLM that the trainer's client uses.

    MEGATRON_GRPO_TOKEN=... python -m megatron_grpo.engines.sglang.server --model-path FOLDER ...

takes SGLang's arguments. SGLang's own routes exist as well, all behind the token.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Annotated

from fastapi import HTTPException, Query, Request, Response
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import kill_process_tree

from megatron_grpo.engine_weights.protocol import Json
from megatron_grpo.engines.access import TokenGuard
from megatron_grpo.engines.arguments import reason
from megatron_grpo.engines.patches import apply
from megatron_grpo.engines.sglang.args import REFUSED
from megatron_grpo.engines.sglang.completions import gate, manager, router
from megatron_grpo.engines.sglang.model_folder import server_arguments
from megatron_grpo.engines.sglang.patches import PATCHES, run_scheduler_process
from megatron_grpo.engines.sglang.variables import RENDEZVOUS_VARIABLE, VARIABLES, check_variables
from megatron_grpo.engines.sglang.worker import call_of

PARTS = [GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_KV_CACHE]
"""Parts of GPU memory that sleep mode releases."""
asleep: set[str] = set()
"""Released `PARTS`."""
DRAIN_TRIES, DRAIN_SECONDS = 600, 0.05
"""Number and interval of a sleeping request's checks that no other request is left."""

UNGUARDED = {
    "tokenizer_worker_num": 1,
    "grpc_port": None,
    "grpc_mode": False,
    "smg_grpc_mode": False,
    "disaggregation_mode": "null",
}
"""Arguments that open servers without our guard, unless they have these values."""


@router.get("/load")
async def load() -> Json:
    return {"server_load": gate.num_requests}


@router.get("/metrics")
async def metrics() -> Response:
    """The counts that the client reads, in the format of Prometheus."""
    begun = [len(state.output_ids) for state in manager().rid_to_state.values()]
    num_started = sum(count > 0 for count in begun)
    # Aborted requests leave `rid_to_state`, but the client expects counts that never fall.
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
    """Hold requests back; with mode `abort`, end running ones with their tokens so far."""
    await gate.close(cut=mode == "abort")
    if mode == "abort":
        if get_parallel().num_dp_ranks > 1:
            # All groups answer this after their last requests have arrived: none misses the abort.
            await manager().get_internal_state()
        manager().abort_request(abort_all=True)
    else:
        await manager().pause_generation(PauseGenerationReqInput(mode="retract"))
    return {}


@router.post("/resume")
async def resume() -> Json:
    await manager().continue_generation(ContinueGenerationReqInput())
    await gate.open()
    return {}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache() -> Json:
    """Drop all cached keys and values; success if all groups of workers have done so."""
    manager().auto_create_handle_loop()  # before a first request, nothing reads the answers yet
    answers = await manager().flush_cache_communicator(FlushCacheReqInput())
    return {"success": all(each.success for each in answers)}


@router.post("/update_weight_version")
async def update_weight_version(request: Request) -> Json:
    """Label tokens from now on; SGLang's own route would abort all requests."""
    version = (await request.json())["new_version"]
    update = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
    await manager().update_weight_version(update)
    return {}


@router.post("/sleep")
async def sleep() -> Json:
    """Abort requests, and free the memory of weights and cache; CUDA graphs stay, as in vLLM. 503
    if requests do not end, or the engine was paused or resumed meanwhile."""
    await pause("abort")
    paused = gate.num_turns
    # `release_memory_occupation` asserts that no request is left, and takes the engine down if not.
    for _ in range(DRAIN_TRIES):
        if (await reset_prefix_cache())["success"]:
            break
        await asyncio.sleep(DRAIN_SECONDS)
    else:
        raise HTTPException(503, "aborted requests have not ended")
    if gate.num_turns != paused:
        raise HTTPException(503, "paused or resumed meanwhile")
    if tags := [tag for tag in PARTS if tag not in asleep]:
        asleep.update(tags)
        await manager().release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
    return {}


@router.post("/wake_up")
async def wake_up(tags: Annotated[list[str], Query()] = PARTS) -> Json:
    """Allocate the memory of these parts again, if they sleep."""
    if woken := [tag for tag in tags if tag in asleep]:  # SGLang dies of a part that is awake
        asleep.difference_update(woken)
        await manager().resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=woken))
    return {}


@router.get("/is_sleeping")
async def is_sleeping() -> Json:
    return {"is_sleeping": bool(asleep)}


@router.post("/collective_rpc")
async def collective_rpc(request: Request) -> Json:
    """Have every worker answer a call; returns the answers in rank order."""
    call = CheckWeightsReqInput(action=call_of((await request.json())["kwargs"]))
    succeeded, answers, *_ = await manager().check_weights(call)
    if not succeeded:
        raise RuntimeError(answers)
    # SGLang joins the groups' messages by " | "; only the first group has one.
    return {"results": json.loads(answers.strip(" |"))}


def launch(arguments: ServerArgs, folder: str) -> None:
    """Run an engine, or the workers of its further node, until it ends. The workers of one host
    rendezvous by a file in `folder`."""
    if arguments.nnodes == 1:
        os.environ[RENDEZVOUS_VARIABLE] = f"file://{folder}/workers"
    if arguments.node_rank == 0:
        http_server.launch_server(arguments, run_scheduler_process_func=run_scheduler_process)
        return
    # SGLang's own function for such a node would notice only the first worker's end, ignore
    # SIGTERM, and open a port.
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    Engine._launch_subprocesses(arguments, None, run_scheduler_process, None)
    connection.wait([worker.sentinel for worker in multiprocessing.active_children()])
    sys.exit("a worker of this node has ended")


def main() -> None:
    """Serve until SIGTERM, and leave no file behind. The environment has the token."""
    check_variables(os.environ)
    ours = {route.path for route in router.routes}
    routes = http_server.app.router.routes
    # FastAPI takes the first route of a path, which would be SGLang's own.
    routes[:] = [route for route in routes if getattr(route, "path", None) not in ours]
    http_server.app.include_router(router)
    http_server.app.add_middleware(TokenGuard)
    apply(PATCHES)
    # An exit by exception, which cleans up below: uvicorn may raise the signal again at its end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        tempfile.tempdir = own  # SGLang leaves its sockets behind
        os.environ |= VARIABLES | {"TMPDIR": own}
        arguments = prepare_server_args(server_arguments(sys.argv[1:], Path(own, "model")))
        for name, default in UNGUARDED.items():
            if getattr(arguments, name) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')} cannot be set: {reason(name, REFUSED)}"
                )
        try:
            launch(arguments, own)
        finally:
            # A worker that fails sends SIGQUIT, whose handler would kill this process before it has
            # cleaned up.
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
            # Python's resource tracker unlinks the shared memory that workers leave behind.
            tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
            kill_process_tree(os.getpid(), include_parent=False, skip_pid=tracker)
            if state := http_server._global_state:  # except the file of the workers' load
                Path(state.tokenizer_manager.load_snapshot_reader.path).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
