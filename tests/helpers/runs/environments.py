"""Well-behaved and faulty environments, in a file as a user would write it."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from megatron_grpo.agents.fork_pool import ForkPool
from megatron_grpo.config.reward import EnvironmentConfig

LONG_SLEEP = str(20_000_000 + os.getpid())  # seconds, so that the process can be recognised
MINE = """
import os, random, signal, subprocess, sys, time
import numpy

RUN_AWAY = "import os, time\\nwhile not os.fork(): os.setsid(); time.sleep(0.002)"

# Of the worker, which imports this file: how long an instance may leave a turn unread.
sys.modules["__main__"].SEND_SECONDS = 1.5

class Echo:
    '''Says back what it has heard, and rewards its length.'''
    def __init__(self, last=100): self.last = last
    def reset(self, prompt, **columns):
        self.heard, self.first = [], columns.get("first")
        return self.first
    def step(self, text):
        self.heard.append(text)
        return f"{len(self.heard)}: {text}", len(text), len(self.heard) == self.last

class Odd(Echo):
    '''The same, but what a row says happens in the turn that it says.'''
    def reset(self, prompt, deed, turn):
        super().reset(prompt)
        self.deed, self.turn = deed, turn
        if turn == 0: getattr(self, deed)()
    def step(self, text):
        answer = super().step(text)
        if len(self.heard) == self.turn:
            answer = getattr(self, self.deed)()
        return answer
    def go_on(self): return "go on", 0.0, False
    def fail(self): return 1 / 0
    def refuse(self): raise ValueError("cannot do this")
    def hang(self): subprocess.run(["sleep", "LONG_SLEEP"])
    def run_away(self):
        '''Starts a process that starts its successor and ends, in a session of its own.'''
        subprocess.Popen([sys.executable, "-c", RUN_AWAY, "LONG_SLEEP"])
        self.hang()
    def spin(self):
        while True: pass
    def die(self): os.kill(os.getpid(), signal.SIGKILL)
    def leave_politely(self): sys.exit("enough")
    def hang_up(self):
        os.closerange(3, 100)
        while True: time.sleep(1)
    def allocate(self): return bytearray(1 << 40)
    def nothing(self): return None
    def number(self): return 7, 0.0, False
    def nan(self): return "", float("nan"), False
    def unsure(self): return "", 0.0, None
    def endless(self): return "x" * (1 << 21), 0.0, False
    def pid(self): return str(os.getpid()), 0.0, False
    def fork(self):
        if os.fork() == 0: return "a fork", 0.0, True
        os.wait()
        return "the instance", 1.0, False

class Attentive:
    '''Says what it knows of a turn.'''
    def reset(self, prompt, **columns): pass
    def step(self, text, finish_reason, token_ids=(), tokens_left=0):
        return f"{text}: {finish_reason} {token_ids} {tokens_left}", 0.0, False

class Demanding(Attentive):
    def step(self, text, tokens_left, colour): return "", 0.0, True

class Slow(Echo):
    '''Takes its time.'''
    def __init__(self, seconds=0.5): super().__init__(); self.seconds = seconds
    def step(self, text):
        time.sleep(self.seconds)
        return super().step(text)

class Together(Echo):
    '''Takes no step before eight instances have begun one.'''
    def __init__(self, folder): super().__init__(); self.folder = folder
    def step(self, text):
        open(f"{self.folder}/{os.getpid()}", "w").close()
        while len(os.listdir(self.folder)) < 8: time.sleep(0.01)
        return super().step(text)

class Dice:
    '''Says what it has thrown.'''
    def reset(self, prompt, **columns): return self.throw()
    def step(self, text): return self.throw(), 0.0, False
    def throw(self): return f"{random.random()} {numpy.random.random()}"

class Curious:
    def reset(self, prompt, colour): pass
    def step(self, text): return "", 0.0, True

class Rigid(Curious):
    def __init__(self, size): pass

class Halved:
    def reset(self, prompt, **_): pass

class Counting:
    '''Leaves a line for each step in a file, and is slow.'''
    def __init__(self, file): self.file = file
    def reset(self, prompt, **columns): self.turn = 0
    def step(self, text):
        with open(self.file, "a") as file: file.write(f"{os.getpid()} {self.turn}\\n")
        self.turn += 1
        time.sleep(0.3)
        return "go on", 1.0, False
"""


def sleepers() -> list[psutil.Process]:
    """Processes that the classes have started, recognised by their seconds of sleep."""
    return [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", LONG_SLEEP]
    ]


def write_environments(folder: Path) -> Path:
    """Write the environment classes to a file."""
    path = folder / "mine.py"
    path.write_text(MINE.replace("LONG_SLEEP", LONG_SLEEP), encoding="utf-8")
    return path


@contextmanager
def environment_pool(folder: Path, name: str, **config: Any) -> Iterator[ForkPool]:
    """A pool of the class `name` of that file."""
    cfg = EnvironmentConfig(name=f"{write_environments(folder)}:{name}", **config)
    with closing(ForkPool(cfg)) as pool:
        yield pool
