"""One vLLM engine over two nodes, which are two loopback addresses of this host."""

import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import STDOUT, Popen

import psutil
import pytest

from engines import largest_logprob_error, random_prompts, running_engine, served_model, wait_until
from megatron_grpo.config.config_file import load_config
from megatron_grpo.launch.engine_node import EngineNode
from megatron_grpo.launch.job_token import TOKEN_VARIABLE
from megatron_grpo.rollout.serve import serve
from processes import is_alive, shared_memory
from runs import TINY_CONFIG

TOKEN = "token-of-two-nodes"
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@contextmanager
def two_nodes(model: Path, logs: Path, ports: Sequence[int]) -> Iterator[Sequence[Popen[bytes]]]:
    """`megatron-grpo serve` on both nodes, with the ports of the engine and between the nodes."""
    command = [sys.executable, "-m", "megatron_grpo.cli", "serve", TINY_CONFIG]
    command += [f"model.path={model}", "rollout.tensor_parallel_size=2", f"--port={ports[0]}"]
    command += ["--nnodes=2", f"--master-addr={ADDRESSES[0]}", f"--master-port={ports[1]}"]
    nodes = []
    for rank, address in enumerate(ADDRESSES):
        with (logs / f"node_{rank}.log").open("wb") as log:
            nodes.append(
                Popen(
                    [*command, f"--host={address}", f"--node-rank={rank}"],
                    env=os.environ | {TOKEN_VARIABLE: TOKEN, "TMPDIR": str(logs)},
                    stdout=log,
                    stderr=STDOUT,
                )
            )
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def kill_worker_of(node: int) -> Callable[[Sequence[Popen[bytes]]], None]:
    def kill(nodes: Sequence[Popen[bytes]]) -> None:
        [worker] = [child for child in children(nodes[node]) if is_worker(child)]
        worker.kill()

    return kill


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("end", "codes"),
    [
        (kill_worker_of(1), [1, 1]),
        pytest.param(kill_worker_of(0), [1, 1], marks=pytest.mark.slow),
        pytest.param(lambda nodes: nodes[1].kill(), [1, -signal.SIGKILL], marks=pytest.mark.slow),
        pytest.param(lambda nodes: nodes[0].terminate(), [143, 1], marks=pytest.mark.slow),
    ],
    ids=["worker of node 1 dies", "worker of node 0 dies", "node 1 is killed", "node 0 is told"],
)
def test_an_engine_over_two_nodes_is_one_engine_and_ends_on_both(tied_model, tmp_path, end, codes):
    other = served_model(tmp_path / "other", "qwen3", tied=True, seed=1)
    with (
        tempfile.TemporaryDirectory() as logs,  # short, for the sockets in it
        two_nodes(tied_model, Path(logs), ports := free_ports(2)) as nodes,
    ):
        address = f"http://{ADDRESSES[0]}:{ports[0]}"
        with running_engine(
            "vllm", tied_model, tmp_path, TOKEN, base_urls=(address,), tensor_parallel_size=2
        ) as engine:
            engine.push(other)
            assert largest_logprob_error(other, engine.generate(random_prompts(4))) < 1e-4
            engine.push(tied_model)
            assert largest_logprob_error(tied_model, engine.generate(random_prompts(4))) < 1e-4
        started = [child for node in nodes for child in children(node)]
        memory = shared_memory([child.pid for child in started])
        assert memory
        end(nodes)
        assert [node.wait(60) for node in nodes] == codes
        said = [Path(logs, f"node_{rank}.log").read_text() for rank in range(2)]
        assert any("megatron-grpo: another node of this engine has ended" in log for log in said)
        assert wait_until(lambda: not any(is_alive(child.pid) for child in started), 30)
        assert not list(Path(logs).glob("engine_*"))
        assert wait_until(lambda: not any(file.exists() for file in memory), 30)


def free_ports(count: int) -> list[int]:
    """Ports that no outgoing connection takes before vLLM listens there."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(20000, 32000)
        with suppress(OSError), socket.create_server((ADDRESSES[0], port)):
            found.append(port)
    return found


def is_worker(child: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "Worker_TP" in " ".join(child.cmdline())
    return False


def children(node: Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(node.pid).children(recursive=True)


def test_a_node_that_the_others_cannot_reach_is_refused(tied_model):
    config = load_config(
        TINY_CONFIG, [f"model.path={tied_model}", "rollout.tensor_parallel_size=2"]
    )
    node = EngineNode(2, 1, master_addr="10.0.0.1")
    with pytest.raises(ValueError, match=r"host 127\.0\.0\.1 and .* do not reach each other"):
        serve(config.model, config.rollout, "127.0.0.1", 8000, TOKEN, node)


def test_on_cpus_a_node_has_one_worker(tied_model):
    overrides = [f"model.path={tied_model}", "rollout.tensor_parallel_size=4"]
    config = load_config(TINY_CONFIG, overrides)
    with pytest.raises(ValueError, match=r"2 puts 2 workers .* on CPUs vLLM takes one: use 4"):
        serve(config.model, config.rollout, "127.0.0.1", 8000, TOKEN, EngineNode(2, 0))
