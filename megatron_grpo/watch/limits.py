"""Time limits for phases of a step without progress."""

from dataclasses import dataclass

from megatron_grpo.config.config import Config
from megatron_grpo.timing import WAIT
from parallel.transport import TIMEOUT

MARGIN_SECONDS = 15.0
"""Added to the limits of waits with their own timeout, so that these fail first."""

START = "start"
"""The phase before the first step, while engines start. Reading weights is another one: `load`."""


@dataclass(frozen=True)
class Limit:
    """A limit in seconds, and the config key that sets it."""

    seconds: float
    key: str


@dataclass(frozen=True)
class Limits:
    """The longest times without progress on any rank, by phase of rank 0."""

    start: Limit
    step: Limit
    push: Limit

    @classmethod
    def of(cls, cfg: Config) -> "Limits":
        """The limits of a run."""
        rollout = cfg.rollout
        # A link without traffic for TIMEOUT is given up; then its engine is waited for until it
        # counts as lost, and the push is repeated.
        waits = TIMEOUT.total_seconds() + rollout.stall_timeout
        push = Limit(waits + MARGIN_SECONDS, "rollout.stall_timeout")
        step = Limit(cfg.train.hang_timeout, "train.hang_timeout")
        return cls(
            start=Limit(rollout.startup_timeout + MARGIN_SECONDS, "rollout.startup_timeout"),
            step=step,
            push=max(push, step, key=_seconds),
        )

    def of_phase(self, phase: str, *, is_first_step: bool) -> Limit | None:
        """The limit while rank 0 is in `phase`; None if it may take any time.

        Files may be slow, an engine that generates nothing or does not start counts as lost, and
        every call of a reward or an environment has its own limit. The first step of a process gets
        more time, for compiling kernels and making connections.
        """
        match phase.removeprefix(f"{WAIT}_"):
            case "await_engines":
                return self.start
            case "load" | "generate" | "eval_generate" | "score" | "eval_score":
                return None
            case "log" | "eval_log" | "save" | "close" | "sleep":
                return None
            case "push" | "verify_weights":
                usual = self.push
            case _:
                usual = self.step
        return max(self.start, usual, key=_seconds) if is_first_step else usual


def _seconds(limit: Limit) -> float:
    return limit.seconds
