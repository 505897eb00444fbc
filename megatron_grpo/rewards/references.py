"""Finds rows whose reference answer a reward function cannot read, before a run begins."""

import reprlib
from collections.abc import Callable

from megatron_grpo.config.reward_config import RewardConfig, RewardFunction
from megatron_grpo.data.invalid_rows import Fault
from megatron_grpo.data.rows import Row


def reference_fault(cfg: RewardConfig) -> Callable[[Row], Fault | None]:
    """Return a function that tells why `cfg`'s reward functions cannot read a row's `answer`."""
    readers = [function.name for function in cfg.functions if _reads_mathematics(function)]
    if not readers:
        return lambda row: None
    # Imported here because SymPy takes a second to import, and other functions do not need it.
    from megatron_grpo.rewards.math_answer import can_read  # noqa: PLC0415

    def fault(row: Row) -> Fault | None:
        if "answer" not in row or can_read(row["answer"]):
            return None
        return Fault(f"no answer that {readers[0]} can read", reprlib.repr(row["answer"]))

    return fault


def _reads_mathematics(function: RewardFunction) -> bool:
    accuracy = function.arguments.get("accuracy", "math_answer")
    return function.name == "math_answer" or (
        function.name == "cosine" and accuracy == "math_answer"
    )
