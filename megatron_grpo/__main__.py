"""The command `megatron-grpo`. Ctrl-C ends it with one line, even during imports."""

from checkpoint_convert.utf8_mode import enter_utf8_mode
from megatron_grpo.launch.process import exit_when_interrupted


def main() -> None:
    enter_utf8_mode()
    exit_when_interrupted(lambda: "interrupted")
    from megatron_grpo.cli import main as run  # takes a second

    run()


if __name__ == "__main__":
    main()
