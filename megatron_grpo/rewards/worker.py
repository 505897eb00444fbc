"""Process that runs reward functions: `python -m megatron_grpo.rewards.worker FD MEGABYTES`.

It reads the config's functions and `reward.timeout` from the socket FD, and answers in JSON with
(required columns, accepted columns, is asynchronous) of each function, or with the reason why they
cannot be loaded. Then it answers calls by their number, until the socket closes. Calls of ordinary
functions run one after the other in the main thread, calls of asynchronous functions concurrently
in one event loop. The trainer sends calls of one kind only when no call of the other is open.
"""

import asyncio
import json
import re
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from megatron_grpo.rewards.functions import LOAD, Answer, LoadedFunction, NoScores, load_function
from megatron_grpo.workers.supervised import attempt, begin_worker, forks_end_here
from megatron_grpo.workers.user_file import error_text
from parallel.clock import RunningLoop

STRING_ERRORS = re.compile(r"string indices must be integers|'str' object has no attribute 'get'")
"""Python's errors for `completion[0]["content"]`, which functions for TRL's chats contain."""
COMPLETIONS_ARE_STRINGS = (
    "completions are strings here, where TRL has lists of messages: see docs/rewards.md"
)


class RewardWorker:
    """Loads the functions and answers calls until the trainer closes the socket."""

    def __init__(self, trainer: Connection, memory_megabytes: int) -> None:
        self._trainer = trainer
        self._limit = f"reward.memory_megabytes {memory_megabytes}"
        self._functions: list[LoadedFunction] = []
        self._timeout = 0.0

    def serve(self) -> None:
        specs, self._timeout = self._trainer.recv()
        is_loaded, loaded = attempt(lambda: [*map(load_function, specs)], self._limit)
        if not is_loaded:
            self._send([LOAD, loaded])
            return
        self._functions = loaded
        self._send([LOAD, [(f.wanted_columns, f.accepted_columns, f.is_async) for f in loaded]])
        with asyncio.Runner(loop_factory=RunningLoop) as runner:
            call = self._next_call()
            while call:
                number, index, columns = call
                if self._functions[index].is_async:
                    call = runner.run(self._answer_concurrently(call)) or self._next_call()
                else:
                    self._send([number, asdict(self._score(index, columns))])
                    call = self._next_call()

    def _score(self, index: int, columns: Any) -> Answer:
        try:
            with forks_end_here():
                return self._functions[index](columns, self._timeout)
        except BaseException as error:  # sys.exit() in a user's function fails the call only
            return self._failed(error)

    async def _answer_concurrently(self, first: Any) -> Any:
        """Run `first` and asynchronous calls that arrive meanwhile, until none is open. Returns the
        next ordinary call if it arrives before the last task has ended, else None."""
        loop = asyncio.get_running_loop()
        tasks = set[asyncio.Task[None]]()
        ordinary: list[Any] = []
        sending = asyncio.Lock()

        def begin(call: Any) -> None:
            # The trainer has closed the socket: nobody waits for open calls, so they need no end.
            if call is None:
                sys.exit()
            _, index, _ = call
            if self._functions[index].is_async:
                tasks.add(loop.create_task(self._answer(call, sending)))
            else:
                ordinary.append(call)
                loop.remove_reader(self._trainer.fileno())

        loop.add_reader(self._trainer.fileno(), lambda: begin(self._next_call()))
        begin(first)
        while tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks -= ended
        loop.remove_reader(self._trainer.fileno())
        return ordinary[0] if ordinary else None

    async def _answer(self, call: Any, sending: asyncio.Lock) -> None:
        number, index, columns = call
        answer = await self._score_async(index, columns)
        # In a thread: if the loop waited for the trainer to read, and the trainer for the loop,
        # with full buffers on both sides, neither would go on.
        async with sending:
            await asyncio.to_thread(self._send, [number, asdict(answer)])

    async def _score_async(self, index: int, columns: Any) -> Answer:
        try:
            async with asyncio.timeout(self._timeout) as limit:
                with forks_end_here():
                    return await self._functions[index].call_async(columns, self._timeout)
        except BaseException as error:
            if limit.expired():
                return Answer(None, f"no result after {self._timeout} s: cancelled")
            return self._failed(error)

    def _failed(self, error: BaseException) -> Answer:
        if isinstance(error, NoScores):
            return Answer(None, str(error), is_misuse=True)
        is_out_of_memory = isinstance(error, MemoryError)
        text = error_text(error, self._limit)
        if isinstance(error, TypeError | AttributeError) and STRING_ERRORS.search(str(error)):
            text += f"\n{COMPLETIONS_ARE_STRINGS}"
        return Answer(None, text, is_out_of_memory=is_out_of_memory)

    def _next_call(self) -> Any:
        try:
            return self._trainer.recv()
        except EOFError:
            return None

    def _send(self, message: Any) -> None:
        self._trainer.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    RewardWorker(*begin_worker()).serve()
