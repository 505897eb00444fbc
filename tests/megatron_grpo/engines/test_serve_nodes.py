"""One vLLM engine over two nodes, which are two loopback addresses of this host."""

import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from helpers.engines import largest_logprob_error, random_prompts, running_engine, served_model
from helpers.runs import TINY_CONFIG
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE
from megatron_grpo.workers.child_process import ChildProcess

TOKEN = "token-of-two-nodes"
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@contextmanager
def two_nodes(model: Path, folder: Path) -> Iterator[str]:
    """The URL of an engine that `megatron-grpo serve` runs on both nodes, as in a Slurm step."""
    port, master_port = free_ports(2)
    command = [sys.executable, "-m", "megatron_grpo", "serve", str(TINY_CONFIG)]
    command += [f"model.path={model}", "rollout.tensor_parallel_size=2", f"--port={port}"]
    command += ["--nnodes=2", f"--master-addr={ADDRESSES[0]}", f"--master-port={master_port}"]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN, "SLURM_STEP_NUM_NODES": "2"}
    with ExitStack() as stack:
        for rank, address in enumerate(ADDRESSES):
            of_node = [*command, f"--host={address}", f"--node-rank={rank}"]
            log = stack.enter_context((folder / f"node_{rank}.log").open("wb"))
            stack.callback(ChildProcess.start(of_node, environment, log).kill)
        yield f"http://{ADDRESSES[0]}:{port}"


@pytest.mark.slow
def test_an_engine_over_two_nodes_is_one_engine(tied_model, tmp_path):
    other = served_model(tmp_path / "other", "qwen3", tied=True, seed=1)
    with (
        two_nodes(tied_model, tmp_path) as url,
        running_engine(
            "vllm", tied_model, tmp_path, TOKEN, base_urls=(url,), tensor_parallel_size=2
        ) as engine,
    ):
        for model in (other, tied_model):
            engine.push(model)
            assert largest_logprob_error(model, engine.generate(random_prompts(4))) < 1e-4


def free_ports(count: int) -> list[int]:
    """Ports that no outgoing connection takes before vLLM listens there."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(20000, 32000)
        with suppress(OSError), socket.create_server((ADDRESSES[0], port)):
            found.append(port)
    return found
