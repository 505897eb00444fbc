"""How long the phases of a step may go without progress."""

from dataclasses import dataclass

from megatron_grpo.config.config import Config
from megatron_grpo.timing import WAIT
from parallel.transport import TIMEOUT

MARGIN_SECONDS = 15.0
"""What a wait with a time-out of its own gets on top: it then ends with its own message."""

START = "start"
"""The phase before the first step, when engines come up. Reading weights is another: `load`."""


@dataclass(frozen=True)
class Limit:
    """Seconds, and the config key that sets them."""

    seconds: float
    key: str


@dataclass(frozen=True)
class Limits:
    """The longest time, by phase of rank 0, in which no rank of the job makes progress."""

    start: Limit
    step: Limit
    generate: Limit
    push: Limit

    @classmethod
    def of(cls, cfg: Config) -> "Limits":
        """Those of a run."""
        rollout = cfg.rollout
        # A request to an engine that dies is made again, of another one or a restarted one.
        generate = 2 * rollout.request_timeout + rollout.startup_timeout
        if cfg.environment.name is not None:  # one such request a turn, and an answer to it
            turn = rollout.request_timeout + cfg.environment.timeout
            generate += cfg.environment.max_turns * turn
        # A link that brings nothing for so long is given up; then its engine is waited for before
        # it counts as lost, and the push is done once more.
        waits = TIMEOUT.total_seconds() + rollout.stall_timeout
        push = Limit(waits + MARGIN_SECONDS, "rollout.stall_timeout")
        step = Limit(cfg.train.hang_timeout, "train.hang_timeout")
        return cls(
            start=Limit(rollout.startup_timeout + MARGIN_SECONDS, "rollout.startup_timeout"),
            step=step,
            generate=Limit(generate + MARGIN_SECONDS, "rollout.request_timeout"),
            push=max(push, step, key=_seconds),
        )

    def of_phase(self, phase: str, *, is_first_step: bool) -> Limit | None:
        """The limit while rank 0 is in `phase`; None where nobody can say how long it takes.

        Files may be slow, and every call of a reward has its own limit. What is generated, rank 0
        then packs alone: of long completions that takes minutes, too. In the first step of a
        process, kernels are compiled and connections made.
        """
        match phase.removeprefix(f"{WAIT}_"):
            case "await_engines":
                return self.start
            case "load" | "score" | "eval_score" | "save" | "close":
                return None
            case "generate" | "eval_generate" | "pack":
                return self.generate
            case "push" | "verify_weights":
                usual = self.push
            case _:
                usual = self.step
        return max(self.start, usual, key=_seconds) if is_first_step else usual


def _seconds(limit: Limit) -> float:
    return limit.seconds
