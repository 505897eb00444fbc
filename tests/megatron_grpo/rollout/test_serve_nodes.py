"""One vLLM engine over two nodes, which are two loopback addresses of this host."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engines import largest_logprob_error, random_prompts, running_engine, served_model, wait_until
from megatron_grpo.config.config_file import load_config
from megatron_grpo.launch.engine_node import EngineNode
from megatron_grpo.launch.job_token import TOKEN_VARIABLE
from megatron_grpo.rollout.serve import serve
from megatron_grpo.rollout.server import reserve_port
from processes import is_alive
from runs import TINY_CONFIG

TOKEN = "token-of-two-nodes"
ADDRESSES = ("127.0.0.2", "127.0.0.3")


@contextmanager
def two_nodes(
    model: Path, logs: Path, ports: Sequence[int]
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """`megatron-grpo serve` on both nodes, with the ports of the engine and between the nodes."""
    command = [sys.executable, "-m", "megatron_grpo.cli", "serve", TINY_CONFIG]
    command += [f"model.path={model}", "rollout.tensor_parallel_size=2", f"--port={ports[0]}"]
    command += ["--nnodes=2", f"--master-addr={ADDRESSES[0]}", f"--master-port={ports[1]}"]
    nodes = []
    for rank, address in enumerate(ADDRESSES):
        with (logs / f"node_{rank}.log").open("wb") as log:
            nodes.append(
                subprocess.Popen(
                    [*command, f"--host={address}", f"--node-rank={rank}"],
                    env=os.environ | {TOKEN_VARIABLE: TOKEN, "TMPDIR": str(logs)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.mark.timeout(300)
def test_an_engine_over_two_nodes_is_one_engine_and_ends_on_both(tied_model, tmp_path):
    other = served_model(tmp_path / "other", "qwen3", tied=True, seed=1)
    with reserve_port() as http, reserve_port() as master:
        ports = [reserved.getsockname()[1] for reserved in (http, master)]
    with (
        tempfile.TemporaryDirectory() as logs,  # short, for the sockets in it
        two_nodes(tied_model, Path(logs), ports) as nodes,
    ):
        log = Path(logs, "node_0.log")
        address = f"http://{ADDRESSES[0]}:{ports[0]}"
        with running_engine(
            "vllm", tied_model, tmp_path, TOKEN, base_urls=(address,), tensor_parallel_size=2
        ) as engine:
            engine.push(other)
            assert largest_logprob_error(other, engine.generate(random_prompts(4))) < 1e-4
            engine.push(tied_model)
            assert largest_logprob_error(tied_model, engine.generate(random_prompts(4))) < 1e-4
        started = [child for node in nodes for child in children(node)]
        [worker] = [child for child in children(nodes[1]) if "Worker_TP1" in child.cmdline()[0]]
        worker.kill()
        assert [node.wait(60) for node in nodes] == [1, 1]
        assert "megatron-grpo: another node of this engine has ended" in log.read_text()
        assert "vLLM on this node of the engine ended" in Path(logs, "node_1.log").read_text()
        assert wait_until(lambda: not any(is_alive(child.pid) for child in started), 30)
        assert not list(Path(logs).glob("engine_*"))


def children(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(node.pid).children(recursive=True)


def test_a_node_that_the_others_cannot_reach_is_refused(tied_model):
    config = load_config(
        TINY_CONFIG, [f"model.path={tied_model}", "rollout.tensor_parallel_size=2"]
    )
    node = EngineNode(2, 1, master_addr="10.0.0.1")
    with pytest.raises(ValueError, match=r"--host 127.0.0.1 is out of reach for 10.0.0.1"):
        serve(config.model, config.rollout, "127.0.0.1", 8000, TOKEN, node)
