"""Jobs of several ranks, started as `srun` would start them, for tests that break them.

The ranks are forked from a process that has already imported torch and Megatron-Core, so a job
starts in a second or two. Each is the real `megatron-grpo train` in its own process; a test may
change a rank before it begins (`sabotage`), or signal it from outside.
"""

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from demo.make_sums import sums as all_sums
from helpers.engines.live import TestEngine
from helpers.ranks.processes import CONTEXT
from helpers.runs.hosts import Host
from helpers.runs.train import (
    RUN_MARK,
    TINY_CONFIG,
    marked_processes,
    read_completions,
    read_json_lines,
)
from megatron_grpo.config.file import load_config
from megatron_grpo.engines.processes import reserve_port
from megatron_grpo.launch.launch import LAUNCHER_VARIABLE, OWN_LOGS_VARIABLE
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE

NAMESPACES = os.CLONE_NEWNET | os.CLONE_NEWUTS | os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWPID

Sabotage = Callable[[int], None]
"""Called in every rank with its number, before training begins."""


@dataclass(frozen=True)
class Ended:
    """A finished job."""

    exit_codes: list[int]
    """Exit code by rank; negative: the number of the signal that ended it."""
    outputs: list[str]
    """stdout and stderr of each rank."""
    seconds: float
    """From the call of `end` until all ranks and the processes they started have ended."""
    survivors: list[str]
    """Command lines of the job's processes that outlived it."""

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


class Job:
    """A running job; leaving the `with` block ends all of its processes."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        num_ranks: int,
        log_dir: Path,
        *,
        config: Path = TINY_CONFIG,
        token: str = "",
        sabotage: Sabotage | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        """Ranks on this host, or evenly on `hosts`."""
        self.mark = uuid.uuid4().hex
        log_dir.mkdir(parents=True, exist_ok=True)
        self._reserved = reserve_port()  # rank 0 imports for seconds first
        self.port: int = self._reserved.getsockname()[1]
        self.logs = [log_dir / f"rank_{rank}_{self.mark[:6]}.log" for rank in range(num_ranks)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            num_hosts = max(1, len(hosts))
            host, local_rank = divmod(rank, num_ranks // num_hosts)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks // num_hosts),
                "GROUP_WORLD_SIZE": str(num_hosts),
                "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "OMP_NUM_THREADS": "1",
                RUN_MARK: self.mark,
                TOKEN_VARIABLE: token,
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            }
            if not hosts:
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            command = ["train", str(config), *map(str, arguments)]
            init = hosts[host].init if hosts else None
            process = CONTEXT.Process(
                target=_be_rank, args=(rank, command, environment, log, sabotage, init)
            )
            process.start()
            self.ranks.append(process)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()
        for left in marked_processes(self.mark):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        self._reserved.close()

    @property
    def output(self) -> str:
        """The output of the ranks so far."""
        return "\n".join(log.read_text(encoding="utf-8") for log in self.logs if log.exists())

    @property
    def is_running(self) -> bool:
        return any(process.is_alive() for process in self.ranks)

    @property
    def have_met(self) -> bool:
        """Whether every rank has connected to the store of rank 0.

        A rank tries for an hour, since rank 0 checks the job first. Until all have connected, only
        the launcher can end a job that has lost a rank.
        """
        return all(_is_connected(process.pid, self.port) for process in self.ranks)

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to `ranks`, or to all."""
        for rank in ranks or range(len(self.ranks)):
            with suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, number)

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> None:
        """Wait until `condition` holds, while the job runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.is_running, f"the job ended too early:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.output}"
            time.sleep(0.01)

    def end(self, seconds: float) -> Ended:
        """Wait until all ranks and the processes that they started have ended.

        Raises AssertionError if a rank still runs after `seconds`.
        """
        start = time.monotonic()
        for rank, process in enumerate(self.ranks):
            process.join(max(0.0, start + seconds - time.monotonic()))
            assert process.exitcode is not None, (
                f"rank {rank} still runs after {seconds} s:\n{self.output}"
            )
        while marked_processes(self.mark) and time.monotonic() < start + seconds:
            time.sleep(0.05)
        took = time.monotonic() - start
        left = [" ".join(process.cmdline()) for process in marked_processes(self.mark)]
        codes = [process.exitcode for process in self.ranks]
        return Ended(codes, [log.read_text(encoding="utf-8") for log in self.logs], took, left)


def _is_connected(pid: int, port: int) -> bool:
    with suppress(psutil.Error):  # it has ended
        return any(c.raddr and c.raddr.port == port for c in psutil.Process(pid).net_connections())
    return False


def _enter_host(init: int) -> None:
    """Go on as a new process on the host whose process 1 is `init`; this one waits, passes signals
    on, and ends as the new one does."""
    folder = Path.cwd()
    os.setns(os.pidfd_open(init), NAMESPACES)
    os.chdir(folder)  # another mount namespace has another root
    if (child := os.fork()) == 0:
        return
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _be_rank(
    rank: int,
    command: list[str],
    environment: Mapping[str, str],
    log: Path,
    sabotage: Sabotage | None,
    init: int | None,
) -> None:
    import sys

    import torch

    os.setsid()
    if init is not None:
        _enter_host(init)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A fork has the server's buffers. Line-buffered, so that the file is complete if a rank dies.
    sys.stdout, sys.stderr = (
        os.fdopen(fd, "w", buffering=1, closefd=False, encoding="utf-8") for fd in (1, 2)
    )
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SLURM_"))]:
        del os.environ[name]
    os.environ |= dict(environment)
    os.environ[OWN_LOGS_VARIABLE] = "1"
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())  # skips the preflight
    torch.set_num_threads(1)
    sys.argv = ["megatron-grpo", *command]
    from megatron_grpo import cli

    if sabotage is not None:
        sabotage(rank)
    cli.main()


AXES = ("tensor", "pipeline", "context", "data")


def layout(*axes: str) -> list[str]:
    """Overrides that give the named axes size 2 and the others size 1."""
    return [f"parallel.{axis}_parallel_size={2 if axis in axes else 1}" for axis in AXES]


def write_sums(folder: Path) -> Path:
    """Write the demo's data, of 81 prompts."""
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in all_sums()), encoding="utf-8")
    return path


def start_job(
    run_dir: Path,
    *arguments: str,
    engine: TestEngine | None = None,
    axes: Sequence[str] = (),
    config: Path = TINY_CONFIG,
    sabotage: Sabotage | None = None,
) -> Job:
    """A run with two ranks along each of `axes`; without an `engine` it starts its own."""
    given = [*layout(*axes), *arguments, f"train.run_dir={run_dir}"]
    if engine:
        given = [f"rollout.base_urls=[{engine.servers.base_urls[0]}]", *given]
    if engine and engine.rollout.engine == "sglang":
        given = ["rollout.engine=sglang", f"rollout.python={engine.rollout.python}", *given]
    return Job(
        given,
        2 ** len(axes),
        run_dir.parent / f"{run_dir.name}_logs",
        config=config,
        token=engine.servers.token if engine else "",
        sabotage=sabotage,
    )


def finish_job(
    run_dir: Path, *arguments: str, code: int = 0, seconds: float = 200, **how: Any
) -> Ended:
    """Run `start_job` to its end: all ranks must exit with `code` and leave no process behind."""
    with start_job(run_dir, *arguments, **how) as job:
        ended = job.end(seconds)
    assert ended.exit_codes == [code] * len(job.ranks), ended.output
    assert ended.survivors == []
    return ended


@dataclass(frozen=True)
class Runs:
    """Starts runs of one config, each in its own folder."""

    arguments: list[str]
    engine: TestEngine
    folder: Path
    axes: Sequence[str] = ()

    def start(self, name: str | Path, *arguments: str, **how: Any) -> Job:
        """A run in the folder `name`."""
        return start_job(self.folder / name, *self.arguments, *arguments, **self._own | how)

    def finish(self, name: str | Path, *arguments: str, **how: Any) -> Ended:
        return finish_job(self.folder / name, *self.arguments, *arguments, **self._own | how)

    @property
    def _own(self) -> dict[str, Any]:
        return {"engine": self.engine, "axes": self.axes}


# Runs of one tiny config on four ranks, and the result that they must reach despite faults.

NUM_RANKS = 4
NUM_STEPS = 6


def make_runs(model: Path, engine: TestEngine, folder: Path) -> Runs:
    """Three generations of two optimizer steps each, with a checkpoint after each."""
    arguments = [
        f"model.path={model}",
        f"data.path={write_sums(folder)}",
        f"train.num_steps={NUM_STEPS}",
        "train.save_interval=1",
        "grpo.steps_per_generation=2",
    ]
    return Runs(arguments, engine, folder, ("tensor", "pipeline"))


def assert_same_run(run_dir: Path, undisturbed: Path) -> None:
    """Assert bitwise equal weights, samples, rewards and losses.

    SGLang has no seeds on CPUs: with it, only the prompts of every step must be equal.
    """
    if load_config(run_dir / "config.yaml").rollout.engine == "sglang":
        ours, theirs = (
            [(row["step"], row["prompt"]) for row in read_completions(d)]
            for d in (run_dir, undisturbed)
        )
        assert ours == theirs
        return
    (name,) = (path.name for path in (undisturbed / "hf").glob("*model.safetensors"))
    assert (run_dir / "hf" / name).read_bytes() == (undisturbed / "hf" / name).read_bytes(), name
    assert read_completions(run_dir) == read_completions(undisturbed)
    ours, theirs = (read_json_lines(d / "metrics.jsonl") for d in (run_dir, undisturbed))
    for key in ("step", "loss", "grad_norm", "kl", "reward", "lr"):
        assert [record[key] for record in ours] == [record[key] for record in theirs], key


def assert_resumes(runs: Runs, run_dir: Path, undisturbed: Path) -> None:
    runs.finish(run_dir)
    assert_same_run(run_dir, undisturbed)
