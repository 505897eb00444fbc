"""Runs with agents from other libraries, each installed in its own Python environment."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.engines.live import served_model, wait_until
from helpers.models.tiny import talkative
from helpers.runs.train import read_metrics, start_run

PROJECT = Path(__file__).parents[3]


class Adapter:
    """`megatron_grpo.integrations.MODULE`, run by the interpreter that has the library."""

    def __init__(
        self, python: Path, module: str, source: str, *options: str, **variables: str
    ) -> None:
        self._command = [str(python), "-m", f"megatron_grpo.integrations.{module}"]
        self._source, self._options = source, options
        self._variables = {"PYTHONPATH": str(PROJECT)} | variables

    def start(
        self, action: str, file: Path, *options: str, source: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start the action `rows` or `serve`; `source` replaces the adapter's own."""
        named = source or self._source
        command = [*self._command, action, named, str(file), *self._options, *options]
        return subprocess.Popen(command, env=os.environ | self._variables)

    def train(
        self, folder: Path, num_rows: int, *arguments: str, at_once: int, dataset: str = ""
    ) -> list[Mapping[str, Any]]:
        """Train two steps with vLLM on rows of the source or `dataset`; returns their metrics."""
        data, run_dir = folder / "data.jsonl", folder / "run"
        rows = self.start("rows", data, "--most", str(num_rows), source=dataset)
        assert rows.wait(120) == 0
        assert len(data.read_text(encoding="utf-8").splitlines()) == num_rows
        model = talkative(folder / "model", served_model(folder, "qwen3", tied=True))
        run = start_run(
            f"model.path={model}",
            f"data.path={data}",
            "data.answer_column=null",
            "agent.listen=127.0.0.1:0",
            "rollout.max_completion_length=60",
            "reward.functions=[]",
            "train.num_steps=2",
            f"train.run_dir={run_dir}",
            *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
            *arguments,
            mark="adapter",
        )
        try:
            agents_file = run_dir / "agents.json"
            assert wait_until(lambda: agents_file.exists() or run.poll() is not None, 300)
            with self.start("serve", agents_file, "--at-once", str(at_once)) as adapter:
                try:
                    output, _ = run.communicate(timeout=500)
                    assert run.returncode == 0, output
                    assert adapter.wait(60) == 0  # the run is over, and its file deleted
                finally:
                    adapter.kill()
        finally:
            run.kill()
        return read_metrics(run_dir)


def assert_token_for_token(records: list[Mapping[str, Any]]) -> None:
    """Assert that the trainer's log-probabilities are those of the engine's sampling."""
    assert len(records) == 2
    for record in records:
        assert record["agent/failed_ratio"] == 0
        assert record["rollout/logprob_gap_max"] < 1e-4
