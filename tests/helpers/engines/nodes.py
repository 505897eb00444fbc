"""An engine over two nodes: two loopback addresses of this host."""

import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE
from megatron_grpo.workers.child_process import ChildProcess

TOKEN = "token-of-two-nodes"
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@contextmanager
def two_nodes(folder: Path, *overrides: str) -> Iterator[tuple[str, list[ChildProcess]]]:
    """The URL of an engine that `megatron-grpo serve` runs on both nodes, as in a Slurm step, and
    the process of each node. Their logs are in `folder`."""
    port, master_port = free_ports(2)
    command = [sys.executable, "-m", "megatron_grpo", "serve", str(TINY_CONFIG), *overrides]
    command += ["rollout.tensor_parallel_size=2", f"--port={port}"]
    command += ["--nnodes=2", f"--master-addr={ADDRESSES[0]}", f"--master-port={master_port}"]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN, "SLURM_STEP_NUM_NODES": "2"}
    nodes = []
    with ExitStack() as stack:
        for rank, address in enumerate(ADDRESSES):
            node_command = [*command, f"--host={address}", f"--node-rank={rank}"]
            log = stack.enter_context((folder / f"node_{rank}.log").open("wb"))
            nodes.append(ChildProcess.start(node_command, environment, log))
            stack.callback(nodes[-1].kill)
        yield f"http://{ADDRESSES[0]}:{port}", nodes


def free_ports(count: int) -> list[int]:
    """Free ports that no outgoing connection takes before an engine listens on them."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(20000, 32000)
        with suppress(OSError), socket.create_server((ADDRESSES[0], port)):
            found.append(port)
    return found
