"""The process that runs reward functions: `python -m megatron_grpo.rewards.worker FD MEGABYTES`.

It reads the config's functions from the socket FD, answers with the columns that each one wants,
then answers every call. An answer is [true, result] or [false, text of the error] in JSON: what a
worker sends is not unpickled. It ends when the socket closes.
"""

import json
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megatron_grpo.rewards.functions import LoadedFunction, load_function
from megatron_grpo.rewards.supervisor import SCHEDULERS

MAX_TEXT = 4000
"""Characters of an error that are told: its end, where a traceback says what happened."""


def serve(trainer: Connection, memory_megabytes: int) -> None:
    """Load the functions and score until the trainer hangs up."""
    # Heap, stacks of threads and other private memory, but no files that are mapped to be read.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_megabytes << 20,) * 2)
    functions: list[LoadedFunction] = []

    def load(specs: Any) -> list[list[str]]:
        functions.extend(load_function(spec) for spec in specs)
        return [function.wanted_columns for function in functions]

    def score(call: Any) -> list[float]:
        index, completions, prompts, columns = call
        return functions[index](completions, prompts, columns)

    action: Callable[[Any], Any] = load
    while True:
        try:
            request = trainer.recv()
        except EOFError:
            return
        answer = _attempt(action, request, memory_megabytes)
        trainer.send_bytes(json.dumps(answer).encode())
        action = score


def _attempt(action: Callable[[Any], Any], request: Any, memory_megabytes: int) -> tuple[bool, Any]:
    try:
        return True, action(request)
    except MemoryError:
        return False, f"more memory than reward.memory_megabytes {memory_megabytes} allows"
    except ValueError as error:
        text = str(error)
    except BaseException as error:  # sys.exit() in a user's function too is told to the trainer
        text = "".join(traceback.format_exception(error))
    return False, text[-MAX_TEXT:]


if __name__ == "__main__":
    for number in SCHEDULERS:  # a handler, which programs that a function starts do not inherit
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SCHEDULERS)
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
