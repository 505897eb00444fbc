"""Rollouts: inference engines in their own processes, and the trainer's client for them."""

from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.generation import Generation
from megatron_grpo.engines.http import EngineError, NoServingEngine, RolloutAborted
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.engines.push_protocol import WorkerSums
from megatron_grpo.engines.server import EngineServers

__all__ = [
    "EngineError",
    "EnginePool",
    "EngineServers",
    "Generation",
    "NoServingEngine",
    "RolloutAborted",
    "RolloutClient",
    "Sample",
    "WorkerSums",
]
