"""Floor 2: the GRPO trainer, and its names for Python: `from megatron_grpo import train`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_grpo.api import Report, Run, check, load_config, plan, train

__all__ = ["Report", "Run", "check", "load_config", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not above: every process of a run imports this package, and few need the config.
    from megatron_grpo import api

    return getattr(api, name)
