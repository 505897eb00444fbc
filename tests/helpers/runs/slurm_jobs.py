"""Training jobs of the tiny config on a Slurm cluster."""

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from helpers.runs.jobs import write_sums
from helpers.runs.slurm_cluster import Cluster, Job
from helpers.runs.train import RUN_MARK, TINY_CONFIG, marked_processes, steps_of
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE

VENV = Path(sys.executable).parents[1]


@contextmanager
def submitter(cluster: Cluster, model: Path) -> Iterator[Any]:
    """Submits jobs of the tiny config with more arguments; leaving the block ends them all."""
    submitted = []

    def submit(*arguments: str, **options: Any) -> Submitted:
        submitted.append(Submitted(cluster, model, *arguments, **options))
        return submitted[-1]

    yield submit
    for run in submitted:
        if run.job.state in ("PENDING", "RUNNING", "COMPLETING"):
            run.job.cancel()
        for process in run.await_silence():
            with suppress(psutil.NoSuchProcess):
                process.kill()


class Submitted:
    """A job of the tiny config over `num_nodes`, with `ranks_per_node` GPUs each."""

    def __init__(
        self,
        cluster: Cluster,
        model: Path,
        *arguments: str,
        folder: Path,
        venv: Path = VENV,
        num_nodes: int = 2,
        ranks_per_node: int = 1,
        token: str = "",
    ) -> None:
        self.folder, self.venv, self._cluster = folder, venv, cluster
        self.run_dir, self.mark = folder / "run", uuid.uuid4().hex
        self._variables = {
            # For the ranks and engines of a node; Slurm itself is configured with eight.
            "GPUS_PER_NODE": str(ranks_per_node),
            "NETWORK_INTERFACE": "" if cluster.hosts else "lo",
            "VENV": str(venv),
            "OMP_NUM_THREADS": "1",
            TOKEN_VARIABLE: token,
            RUN_MARK: self.mark,
        }
        self.job: Job = cluster.submit(
            "grpo_70b.sh",
            folder / "job.log",
            [
                f"model.path={model}",
                f"data.path={write_sums(folder)}",
                f"train.run_dir={self.run_dir}",
                "train.save_interval=1",
                "parallel.context_parallel_size=1",
                f"parallel.tensor_parallel_size={ranks_per_node}",
                *arguments,
            ],
            num_nodes,
            CONFIG=str(TINY_CONFIG),
            **self._variables,
        )

    def add_engine(self, name: str) -> Job:
        """Submit a job of one engine that joins this one's run."""
        log, arguments = self.folder / f"{name}.log", [str(self.run_dir)]
        return self._cluster.submit("engines.sh", log, arguments, num_nodes=1, **self._variables)

    def steps(self) -> list[int]:
        return steps_of(self.run_dir)

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def await_step(self, step: int, seconds: float = 300) -> None:
        def is_there() -> bool:
            assert self.job.state in ("PENDING", "RUNNING", "COMPLETING"), self.logs()
            return step in self.steps()

        self.wait_for(is_there, seconds)

    def engines(self) -> list[psutil.Process]:
        """The running engine processes (vLLM), ordered by address."""
        return self.processes_of("vllm.entrypoints.openai.api_server")

    def processes_of(self, module: str) -> list[psutil.Process]:
        """The job's processes that run `module`, ordered by their arguments."""
        found = {}
        for process in marked_processes(self.mark):
            with suppress(psutil.Error):
                command = process.cmdline()
                if command[2:4] == ["-m", module]:
                    found[tuple(command)] = process
        return [found[command] for command in sorted(found)]

    def await_engines(self, number: int) -> list[psutil.Process]:
        self.wait_for(lambda: len(self.engines()) >= number, 180)
        return self.engines()

    def await_words(self, words: str, seconds: float = 120) -> None:
        """Wait until the job's own log contains `words`."""
        self.wait_for(lambda: words in self.job.output(), seconds)

    def logs(self) -> str:
        files = sorted(self.run_dir.glob("logs/slurm_*/*.log"))
        return "\n".join(
            [self.job.output(), *(f"{f.name}: {f.read_text(encoding='utf-8')}" for f in files)]
        )

    def restarts(self) -> int:
        return int(self.job.fields()["Restarts"])

    def await_restart(self, number: int = 1) -> None:
        self.wait_for(lambda: self.restarts() >= number, 240)

    def await_end(self) -> None:
        """Wait until the job is complete and none of its processes is left."""
        ended = self.job.await_state("COMPLETED", "FAILED", "CANCELLED", seconds=300)
        assert ended["JobState"] == "COMPLETED", self.logs()
        assert self.await_silence() == []

    def await_silence(self, seconds: float = 60) -> list[psutil.Process]:
        """Wait until no process of the job runs; returns those left after `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left
