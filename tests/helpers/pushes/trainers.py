"""A single-rank trainer in the test's process that pushes weights to engines and generates.

It starts the engines itself or uses running ones; the test may disturb them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_convert import read_shape
from helpers.engines.live import sampling_params, wait_until
from helpers.engines.sampling import Completions, event_loop, generate
from helpers.oracle.policies import tiny_config
from helpers.pushes.policies import rollout_overrides
from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engine_weights.checksums import loaded_sums
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.pool import EnginePool, JoinFolder
from megatron_grpo.engines.server import EngineServers
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import Layout, ParallelDims, Sender


@dataclass
class Trainer:
    """Rank 0's servers and client, and the `weights` that it pushes."""

    cfg: Config
    servers: EngineServers
    client: RolloutClient
    sync: WeightSync
    weights: Mapping[str, Tensor]
    version: int = 0

    @property
    def pool(self) -> EnginePool:
        return self.client.pool

    def push(self) -> None:
        """Push the weights as a new version."""
        self.version += 1
        self.push_again()

    def push_again(self) -> None:
        self.sync.push(lambda: self.weights, self.version, PhaseTimer(lambda name: None))

    def ask(self, prompts: Sequence[Prompt], **overrides: Any) -> Completions:
        """Completions for `generate`."""
        return Completions(prompts, sampling_params(**{"policy_version": self.version} | overrides))

    def generate(self, prompts: Sequence[Prompt], **overrides: Any) -> list[Sample]:
        return generate(self.client, self.ask(prompts, **overrides))

    def pid(self, url: str) -> int:
        return self.servers.processes[url].process.pid


def sender_of(weights: Mapping[str, Tensor]) -> Sender:
    """The sender of a rank that holds all of these whole tensors."""
    layout = Layout.of_whole_tensors({name: tuple(t.shape) for name, t in weights.items()})
    return Sender(0, layout, dict.fromkeys(weights, range(1)))


@contextmanager
def trainer(
    folder: Path,
    servers: EngineServers,
    rollout: RolloutConfig,
    *overrides: str,
    adapter: Mapping[str, Tensor] | None = None,
) -> Iterator[Trainer]:
    """A trainer with one rank that holds all weights in `folder`. With an `adapter` (`overrides`
    configure LoRA) it pushes only that, and further engines may join."""
    weights = load_file(folder / "model.safetensors")
    overrides = *rollout_overrides(rollout, servers.base_urls), *overrides
    is_first = not dist.is_initialized()  # the trainer of a module's fixture may run
    if is_first:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cfg, shape = tiny_config(folder, ParallelDims(), *overrides), read_shape(folder)
        joining = JoinFolder.of_run(cfg) if adapter else None
        client = RolloutClient(
            EnginePool(servers, rollout, joining), rollout, event_loop(), cfg.lora
        )
        loaded = loaded_sums(cfg, shape, sender_of(weights), weights)
        pushed, cpu = adapter or weights, torch.device("cpu")
        sync = WeightSync(cfg, shape, sender_of(pushed), cpu, 1, client, loaded=loaded)
        with closing(sync):
            yield Trainer(cfg, servers, client, sync, pushed)
    finally:
        if is_first:
            dist.destroy_process_group()


@contextmanager
def as_soon_as(condition: Callable[[], Any], deed: Callable[[], None]) -> Iterator[None]:
    """Run `deed` in another thread once `condition()` holds, which must be within 60 s."""
    came_true: list[bool] = []

    def wait() -> None:
        came_true.append(wait_until(condition, seconds=60, poll=0.005))
        deed()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert came_true == [True]
