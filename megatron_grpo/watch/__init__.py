"""The watch over the ranks of a job: a fault of one is named once, and ends them all in seconds."""

from megatron_grpo.watch.limits import START, Limits
from megatron_grpo.watch.watch import Watch

__all__ = ["START", "Limits", "Watch"]
