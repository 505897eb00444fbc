"""Failure detection over all ranks: a fault of one is reported once and ends all in seconds."""

from megatron_grpo.watch.limits import START, Limits
from megatron_grpo.watch.watch import Watch

__all__ = ["START", "Limits", "Watch"]
