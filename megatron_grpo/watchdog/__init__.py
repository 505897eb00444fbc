"""Failure detection over all ranks: the first fault is reported once, and ends all in seconds."""

from megatron_grpo.watchdog.job import START, Limits
from megatron_grpo.watchdog.watchdog import Watchdog

__all__ = ["START", "Limits", "Watchdog"]
