"""Rollouts: inference engines in their own processes, and the trainer's client for them."""

from megatron_grpo.rollout.client import RolloutClient
from megatron_grpo.rollout.engine_error import EngineError, EnginesLost, EnginesOut
from megatron_grpo.rollout.fleet import Fleet
from megatron_grpo.rollout.generation import Generation
from megatron_grpo.rollout.push_check import WorkerSums
from megatron_grpo.rollout.samples import Sample
from megatron_grpo.rollout.server import EngineServers

__all__ = [
    "EngineError",
    "EngineServers",
    "EnginesLost",
    "EnginesOut",
    "Fleet",
    "Generation",
    "RolloutClient",
    "Sample",
    "WorkerSums",
]
