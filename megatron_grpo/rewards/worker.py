"""The process that runs reward functions: `python -m megatron_grpo.rewards.worker FD`.

It reads the config's functions from the socket FD, answers with the columns that each one wants,
then answers every call. An answer is (True, result) or (False, text of the error). It ends when the
socket closes.
"""

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megatron_grpo.rewards.functions import LoadedFunction, load_function


def serve(trainer: Connection) -> None:
    """Load the functions and score until the trainer hangs up."""
    functions: list[LoadedFunction] = []

    def load() -> list[list[str]]:
        functions.extend(load_function(spec) for spec in trainer.recv())
        return [function.wanted_columns for function in functions]

    def score() -> list[float]:
        index, completions, prompts, columns = trainer.recv()
        return functions[index](completions, prompts, columns)

    try:
        trainer.send(_attempt(load))
        while True:
            trainer.send(_attempt(score))
    except (EOFError, BrokenPipeError):
        return


def _attempt(action: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, action()
    except EOFError:
        raise
    except Exception as error:  # whatever a user's function raises is told to the trainer
        if isinstance(error, ValueError):
            return False, str(error)
        return False, "".join(traceback.format_exception(error))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
