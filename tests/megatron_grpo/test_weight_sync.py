"""A push from the shards of ranks into a real vLLM, repeated when it failed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_convert import read_shape
from helpers.engines.live import largest_logprob_error, random_prompts, served_model
from helpers.engines.sampling import event_loop
from helpers.oracle.policies import start_policy, tiny_config
from helpers.pushes.policies import push_policy, push_whole, rollout_overrides
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.offload import Phase
from megatron_grpo.engines import pool as pool_module
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import EngineDown, EngineError
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.policy.model import weight_sender
from megatron_grpo.policy.residency import Residency
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import Layout, ParallelDims, Sender
from parallel.weight_transfer import rendezvous, rendezvous_address

pytestmark = [pytest.mark.fast, pytest.mark.engines]

TP2_PP2 = ParallelDims(tensor=2, pipeline=2)


@pytest.mark.parametrize("transport", ["auto", "network", "disk"])
@pytest.mark.parametrize(
    ("dims", "num_flips"),
    [(ParallelDims(data=2), 0), (TP2_PP2, 1)],
    ids=["at once", "at the second attempt"],
)
def test_push_brings_the_shards_to_the_engine(
    live_engine, tied_model, tmp_path, dims, num_flips, transport
):
    live_engine.push(served_model(tmp_path, "qwen3", tied=True, seed=1))
    live_engine.version += 1
    overrides = [
        *rollout_overrides(live_engine.rollout, live_engine.servers.base_urls),
        f"rollout.weight_transport={transport}",
        f"train.run_dir={tmp_path / 'run'}",
    ]
    token = live_engine.servers.token
    arguments = (tied_model, dims, token, overrides, live_engine.version, num_flips)
    results = run_ranks(dims.world_size, push_policy, *arguments)
    assert {error for error, _ in results} == {""}
    phases = ["time/await_engines", "time/push", "time/verify_weights", "time/step"]
    assert results[0][1] == phases
    samples = live_engine.generate(random_prompts(2))
    assert largest_logprob_error(tied_model, samples) < 1e-4
    assert not [*tmp_path.glob("run/pushed")]


def test_push_that_cannot_be_written_ends_all_ranks(live_engine, tied_model, tmp_path):
    (tmp_path / "run").write_text("not a folder")
    overrides = [
        *rollout_overrides(live_engine.rollout, live_engine.servers.base_urls),
        "rollout.weight_transport=disk",
        f"train.run_dir={tmp_path / 'run'}",
    ]
    live_engine.version += 1
    arguments = (tied_model, ParallelDims(data=2), live_engine.servers.token, overrides)
    results = run_ranks(2, push_policy, *arguments, live_engine.version)
    assert all("weights of a push cannot be written: " in error for error, _ in results)
    live_engine.push(tied_model)


def test_push_raises_after_two_failures(live_engine, tied_model):
    live_engine.version += 1
    [url] = live_engine.servers.base_urls
    overrides = rollout_overrides(live_engine.rollout, [url])
    arguments = (tied_model, live_engine.servers.token, overrides, live_engine.version, 2)
    [(error, _)] = run_ranks(1, push_whole, *arguments)
    assert f"rollout engine {url} worker 0: 1 of 18 parameters differ from what was pushed" in error
    with pytest.raises(EngineError, match="holds no complete weights"):
        live_engine.generate(random_prompts(1))
    live_engine.push(tied_model)


def test_rendezvous_address_is_loopback_where_it_will_do():
    environ = {"MASTER_ADDR": "127.0.0.9"}
    assert (
        rendezvous_address(["http://localhost:1", "http://127.0.0.1:2"], 1, environ) == "127.0.0.1"
    )
    assert rendezvous_address([], 1, {}) == "127.0.0.1"
    assert rendezvous_address([], 2, environ) == "127.0.0.9"
    # The address from which this host reaches the engine: a loopback one, on the same host.
    assert rendezvous_address(["http://127.0.0.7:1"], 1, environ).startswith("127.")


class Recorded(Residency):
    """Residency of a rank that moves all state; records the phases."""

    def __init__(self, events: list[str]) -> None:
        super().__init__("all", (), torch.device("cpu"))
        self._events = events

    def enter(self, phase: Phase) -> None:
        self._events.append(f"ranks: {phase}")
        super().enter(phase)


class RecordedEngines:
    """An engine that fails once, as it takes its cache back."""

    def __init__(self, events: list[str]) -> None:
        self._events, self._fails = events, True

    def begin_push(self, push: str) -> None:
        self._events.append("engine: weights")

    def check_push(self, push: str, expected: object) -> None:
        self._events.append("verified")

    def finish_push(self, push: str, policy_version: int) -> None:
        self._events.append("engine: cache")
        if self._fails:
            self._fails = False
            raise EngineError("no memory")

    def sleep(self) -> None:
        self._events.append("engine: sleep")


def test_weight_sync_frees_weights_before_engines_take_cache(alone, tied_model, monkeypatch):
    events: list[str] = []
    weights = load_file(tied_model / "model.safetensors")
    layout = Layout.of_whole_tensors({name: tuple(t.shape) for name, t in weights.items()})
    sender = Sender(0, layout, dict.fromkeys(weights, range(1)))
    engines: Any = RecordedEngines(events)
    cfg, cpu = tiny_config(tied_model, ParallelDims()), torch.device("cpu")
    residency = Recorded(events)
    sync = WeightSync(cfg, read_shape(tied_model), sender, cpu, 1, engines, residency)
    monkeypatch.setattr(sync, "_agree_on_engines", lambda: False)
    monkeypatch.setattr(sync._transport, "open", lambda engines, num_engines: None)
    monkeypatch.setattr(sync._transport, "prepare", lambda parameters: None)
    monkeypatch.setattr(sync._transport, "send", lambda engines, push, parameters: {})

    def made() -> dict[str, Tensor]:
        events.append("ranks: weights")
        return weights

    sync.push(made, 1, PhaseTimer(lambda name: None))
    one = ["ranks: push", "ranks: weights", "engine: weights", "verified"]
    one += ["ranks: generate", "engine: cache"]
    assert events == [*one, "engine: sleep", *one]
    events.clear()
    residency.enter("train")
    sync.push(made, 2, PhaseTimer(lambda name: None))
    assert events == ["ranks: train", *one]


def address_of_meeting(rank: int, folder: Path) -> str:
    # Of this process alone.
    rendezvous.address_of = {"head": f"127.0.0.{rank + 1}"}.__getitem__
    os.environ["MASTER_ADDR"] = "head"
    dims = ParallelDims(data=2)
    policy, groups = start_policy(rank, folder, dims)
    sender, cfg = weight_sender(policy, groups), tiny_config(folder, dims)
    sync = WeightSync(
        cfg, read_shape(folder), sender, torch.device("cpu"), num_hosts=2, engines=None
    )
    return sync._transport._address


class Servers:
    """Two engines of the run at which nothing listens; the second has ended."""

    token, are_ours = "0123456789abcdef", True
    base_urls = ("http://127.0.0.1:9", "http://127.0.0.1:10")

    def __init__(self) -> None:
        self.ends: dict[str, str] = {}
        self.restarted: list[str] = []

    def end(self, url: str) -> str:
        return self.ends.get(url, "")

    def kill(self, url: str) -> str:
        return self.ends.pop(url, "")

    def restart(self, url: str) -> None:
        self.restarted.append(url)

    def log_tail(self, url: str) -> str:
        return ""


def events_of_assembling(rank: int, folder: Path, loss: str) -> list[str]:
    """Events on a rank, with all its state on the GPU, before it knows the engines of a push.

    `loss` is how an engine was lost, or empty; rank 0 also records restarts.
    """
    dims, events = ParallelDims(data=2), list[str]()
    policy, groups = start_policy(rank, folder, dims)
    sender, cfg = weight_sender(policy, groups), tiny_config(folder, dims)
    torch.cuda.empty_cache = lambda: events.append("memory")  # of this process alone
    pool_module.is_healthy = lambda url, timeout: not url.endswith(":10") or not loss
    engines, servers = None, Servers()
    if rank == 0:
        of_servers: Any = servers
        engines = RolloutClient(EnginePool(of_servers, cfg.rollout), cfg.rollout, event_loop())
        second = servers.base_urls[1]
        if loss == "died":
            servers.ends[second] = "ended with signal SIGKILL"
        elif loss == "failed in a push":
            engines._failed[second] = EngineDown("it cannot be reached")
    sync = WeightSync(
        cfg, read_shape(folder), sender, torch.device("cpu"), 1, engines, Recorded(events)
    )
    sync._agree_on_engines()
    if engines is not None:
        assert sync._num_engines == len(engines.pool.up) == 2 - bool(loss)
    return [*dict.fromkeys(events), *servers.restarted]


@pytest.mark.parametrize("loss", ["", "died", "failed in a push"])
def test_weight_sync_makes_room_for_an_engine(tied_model, loss):
    """The engine may share the GPU, and vLLM ends at once if its share is not free."""
    first, second = run_ranks(2, events_of_assembling, tied_model, loss)
    room = ["ranks: generate", "memory"] if loss else []
    assert first == [*room, *([Servers.base_urls[1]] if loss else [])]
    assert second == room


def test_weight_sync_meets_where_the_last_rank_finds_rank_0(tied_model):
    """On rank 0's own host its name may stand for loopback."""
    assert run_ranks(2, address_of_meeting, tied_model) == ["127.0.0.2"] * 2
