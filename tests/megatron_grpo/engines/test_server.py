"""Engines as processes: named when they die, and ended when we end."""

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from helpers.engines.live import largest_logprob_error, random_prompts, running_engine, wait_until
from helpers.engines.nodes import TOKEN as NODES_TOKEN
from helpers.engines.nodes import two_nodes
from helpers.models.towers import tiny_multimodal
from helpers.ranks.processes import shared_memory
from helpers.runs.train import RUN_MARK, TINY_CONFIG, marked_processes
from megatron_grpo.config.file import load_config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engine_weights.protocol import LOADED_VERSION
from megatron_grpo.engines.arguments import EngineNode
from megatron_grpo.engines.http import EngineError, EngineStale, NoServingEngine
from megatron_grpo.engines.processes import ServerProcess
from megatron_grpo.engines.server import (
    EngineServers,
    engine_command,
    engine_devices,
    engine_environment,
    serve,
    share_gpus,
)
from megatron_grpo.launch.network import interface_towards

# A trainer that starts an engine, says when it is ready, and waits to be killed.
TRAINER = """
import sys
from pathlib import Path
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.server import EngineServers
model, engine, size, logs = sys.argv[1:]
rollout = RolloutConfig(engine=engine, tensor_parallel_size=int(size), max_completion_length=8)
servers = EngineServers(ModelConfig(path=model, dtype="float32"), rollout, Path(logs), None)
print("started", flush=True)
servers.wait_ready(240)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder with a path short enough for sockets, unlike perhaps `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "size", "moment"),
    [
        ("vllm", 1, "started"),
        pytest.param("vllm", 1, "ready", marks=pytest.mark.slow),
        pytest.param("vllm", 2, "ready", marks=pytest.mark.slow),
    ],
)
def test_servers_leave_nothing_of_a_killed_trainer(
    tied_model, tmp_path, short_folder, engine, size, moment
):
    mark = uuid.uuid4().hex
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tied_model), engine, str(size), str(tmp_path)],
        env=os.environ | {RUN_MARK: mark, "TMPDIR": short_folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while (line := trainer.stdout.readline().strip()) != moment:
        assert line, (tmp_path / "engine_0.log").read_text()[-2000:]
    wait_until(lambda: len(marked_processes(mark)) > 1, 30)
    if moment == "started":
        time.sleep(2)  # somewhere within the imports
    assert len(marked_processes(mark)) > 1
    memory = shared_memory([process.pid for process in marked_processes(mark)])
    assert list(Path(short_folder).glob("engine_*"))
    trainer.kill()
    trainer.communicate()
    assert wait_until(lambda: not marked_processes(mark), 30), marked_processes(mark)
    assert wait_until(lambda: not any(file.exists() for file in memory), 30), memory
    assert not list(Path(short_folder).glob("engine_*"))


USES_MEMORY = """
import multiprocessing, os, subprocess, tempfile, time
from multiprocessing.shared_memory import SharedMemory
memory, lock = SharedMemory(create=True, size=1), multiprocessing.get_context("spawn").Lock()
folder = os.environ["TMPDIR"]
open(f"{folder}/file", "w").close()
os.mkfifo(f"{folder}/socket")
core = subprocess.Popen(["sleep", "100"]).pid
files = f"/dev/shm/{memory.name}", f"/dev/shm/sem.{lock._semlock.name[1:]}", folder, f"/proc/{core}"
print(*files, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("name", ["short", "long" * 20])
def test_server_process_leaves_nothing_when_killed(tmp_path, short_folder, monkeypatch, name):
    """With a temporary folder of a long path its sockets lie elsewhere, else it could not start."""
    place, log = Path(short_folder) / name, tmp_path / "log"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    command = [sys.executable, "-c", USES_MEMORY]
    engine = ServerProcess.serve(command, os.environ, "http://a", log)
    assert wait_until(lambda: log.exists() and log.read_text().endswith("\n"), 30)
    *memory, folder, core = map(Path, log.read_text().split())
    assert all(path.exists() for path in (*memory, core))
    assert len(list(folder.iterdir())) == 2 and folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent == (place if name == "short" else Path("/tmp"))
    # vLLM's core would wait for minutes for an API server that was killed while both started.
    engine.process.kill()
    engine.process.wait()
    assert wait_until(lambda: not core.exists(), 30)
    engine.kill()
    assert not any(path.exists() for path in (*memory, folder))


@pytest.mark.long
def test_wait_ready_says_why_an_engine_cannot_start(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": "many"}')
    rollout, model = RolloutConfig(max_completion_length=8), ModelConfig(path=tmp_path)
    with (
        closing(EngineServers(model, rollout, tmp_path / "logs", None)) as servers,
        pytest.raises(
            EngineError, match=r"engine http://127.*exit code 1.*\n.*vocab_size"
        ) as error,
    ):
        servers.wait_ready(240)
    assert str(tmp_path / "logs" / "engine_0.log") in str(error.value)


def test_wait_ready_names_an_engine_that_is_late(tied_model, tmp_path):
    rollout = RolloutConfig(max_completion_length=8)
    servers = EngineServers(ModelConfig(path=tied_model), rollout, tmp_path, None)
    reports: set[tuple[int, int]] = set()
    with (
        closing(servers),
        pytest.raises(TimeoutError, match=f"{servers.base_urls[0]} .* within 0.2 s"),
    ):
        servers.wait_ready(0.2, lambda ready, num: reports.add((ready, num)))
    assert reports == {(0, 1)}


@pytest.mark.long
def test_serve_loaded_serves_until_a_push(tied_model, tmp_path):
    prompts = random_prompts(2)
    with running_engine("reference", tied_model, tmp_path) as engine:
        with pytest.raises(NoServingEngine, match="it was restarted"):
            engine.generate(prompts, policy_version=LOADED_VERSION)
        client = engine.client()
        client.await_engines(lambda workers: None)
        client.serve_loaded()
        samples = engine.generate(prompts, policy_version=LOADED_VERSION)
        assert largest_logprob_error(tied_model, samples) < 1e-4
        engine.push(tied_model)
        with pytest.raises(EngineStale, match="a trainer has pushed others"):
            client.serve_loaded()
        assert engine.generate(prompts)  # still serves the pushed weights


@pytest.mark.slow
def test_serve_over_two_nodes_is_one_engine(tied_model, other_model, tmp_path):
    with two_nodes(tmp_path, f"model.path={tied_model}") as (url, nodes):
        of_both = {"base_urls": (url,), "tensor_parallel_size": 2}
        with running_engine("vllm", tied_model, tmp_path, NODES_TOKEN, **of_both) as engine:
            for model in (other_model, tied_model):
                engine.push(model)
                assert largest_logprob_error(model, engine.generate(random_prompts(4))) < 1e-4
        # A job ends all nodes when one has failed, which the end of a worker is.
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("VLLM::Worker_TP1"):
                process.kill()
        assert nodes[1].end(within=60) == "ended with exit code 1"


def test_engine_devices_are_behind_the_trainers():
    rollout = RolloutConfig(num_engines=2, tensor_parallel_size=2, max_completion_length=8)
    assert engine_devices(rollout, 0, 4, {}) == [None, None]
    assert engine_devices(rollout, 8, 4, {}) == ["4,5", "6,7"]
    chosen = {"CUDA_VISIBLE_DEVICES": "7,5,3,2,1,0"}
    assert engine_devices(rollout, 6, 1, chosen) == ["5,3", "2,1"]
    assert not any(share_gpus(rollout, gpus, ranks) for gpus, ranks in ((0, 4), (8, 4), (4, 0)))


def test_engine_devices_are_shared_where_few_are_left():
    """As in a job of Slurm; their share of a GPU must then be set."""
    half = {"gpu_memory_utilization": 0.5}
    rollout = RolloutConfig(
        num_engines=2, tensor_parallel_size=2, max_completion_length=8, vllm=half
    )
    assert engine_devices(rollout, 8, 5, {}) == ["0,1", "2,3"]
    assert engine_devices(rollout, 4, 4, {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3"}) == ["7,6", "5,4"]
    assert share_gpus(rollout, 8, 5)
    silent = rollout.model_copy(update={"vllm": {}})
    with pytest.raises(ValueError, match=r"take 5 of 8 GPUs, .* need 4.*gpu_memory_utilization"):
        engine_devices(silent, 8, 5, {})
    ahead = rollout.model_copy(update={"max_staleness": 1})
    assert engine_devices(ahead, 8, 4, {}) == ["4,5", "6,7"]
    with pytest.raises(ValueError, match=r"5 ranks would share 8 GPUs .* of 4.*max_staleness=0"):
        engine_devices(ahead, 8, 5, {})
    one = ahead.model_copy(update={"num_engines": 1, "tensor_parallel_size": 1})
    assert engine_devices(one, 1, 1, {}) == ["0"]  # there is nothing to divide
    with pytest.raises(ValueError, match=r"num_engines 2 of .* 2 need 4 GPUs, .* host has 3"):
        engine_devices(rollout, 3, 1, {})


def test_engine_environment_has_no_variables_of_ranks():
    torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME")
    torchrun += ("MASTER_ADDR", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "TORCH_GLOO_LAZY_INIT")
    trainer = dict.fromkeys((*torchrun, "PYTORCH_CUDA_ALLOC_CONF"), "8")
    users = {"PATH": "/bin", "HOME": "/root"}
    environment = engine_environment(trainer | users, devices="2,3")
    assert environment == users | {"CUDA_VISIBLE_DEVICES": "2,3"}
    on_cpus = engine_environment(trainer, devices=None, num_threads=4)
    assert on_cpus["OMP_NUM_THREADS"] == "4" and on_cpus["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engine_command_has_the_address_of_each_node(tied_model, engine):
    """The default is any address of the host, on any network."""
    rollout = RolloutConfig(engine=engine, tensor_parallel_size=2, max_completion_length=8)
    for rank, host in enumerate(("10.0.0.7", "10.0.0.8")):
        node = EngineNode(2, rank, "10.0.0.7", 29501)
        model = ModelConfig(path=tied_model)
        _, environment = engine_command(model, rollout, host, 8000, None, "token", node)
        assert environment[f"{engine.upper()}_HOST_IP"] == host
        assert environment["GLOO_SOCKET_IFNAME"] == interface_towards("10.0.0.7")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.tensor_parallel_size=3", r"tensor_parallel_size\(3\) cannot split the model"),
        ("rollout.router_replay=true", "rollout.router_replay true needs a mixture"),
        ("rollout.quantization=int8", "rollout.quantization is int8, and model.path"),
    ],
)
def test_serve_refuses_what_it_could_not_serve(tmp_path, override, message):
    path = tiny_multimodal(tmp_path / "towers", "mistral3")
    cfg = load_config(TINY_CONFIG, [f"model.path={path}", "model.dtype=bfloat16", override])
    alone = EngineNode(1, 0, "127.0.0.1", 29501)
    with pytest.raises(ValueError, match=message):
        serve(cfg, "127.0.0.1", 0, "token", alone)


def test_serve_refuses_groups_of_sglang_over_nodes(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    cfg = load_config(TINY_CONFIG, [])
    sizes = {"engine": "sglang", "tensor_parallel_size": 2, "data_parallel_size": 4}
    cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=sizes)})
    with pytest.raises(ValueError, match=r"size 4: .* rollout.data_parallel_size to 2 at "):
        serve(cfg, "127.0.0.1", 0, "token", EngineNode(2, 1, "127.0.0.2", 29501))
