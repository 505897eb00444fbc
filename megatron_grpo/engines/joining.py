"""An engine that joins a run while it trains, and leaves it: its file in the run directory.

`megatron-grpo serve --join` writes `engines/HOST_PORT.json` once its engine answers; from its next
push on, the run uses the engine like one of `rollout.base_urls`. To leave, the file is renamed to
`HOST_PORT.leaving`: at the next push the run drops the engine and removes the file, and the engine
ends, as it does when the run is complete. A living engine touches its file: an unchanged file may
be left by a host that is gone.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from megatron_grpo.config.config import Config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.engines.arguments import PLANNED, engine_table
from megatron_grpo.engines.http import is_healthy
from megatron_grpo.launch.run_dir import make_folder
from megatron_grpo.workers.child_process import ChildProcess

FOLDER, JOINED, LEAVING = "engines", ".json", ".leaving"
PER_HOST_ARGUMENTS = tuple(names.memory_fraction for names in PLANNED.values())
"""Arguments that may differ between the engines of a run."""
LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
POLL_SECONDS = 1.0
TOUCH_SECONDS = 30.0
TERMINATE_SECONDS = 10.0


class JoinedEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of an engine's file."""

    url: str
    settings: dict[str, Any]
    """As returned by `settings_of`."""


def settings_of(model: ModelConfig, rollout: RolloutConfig, lora: LoraConfig) -> dict[str, Any]:
    """Settings that all engines of a run must share, by name, as JSON. Shapes and dtypes of weights
    are not among them: pushes compare these."""
    shape = (model.path / "config.json").read_bytes()
    table = engine_table(rollout).items()
    arguments = {name: value for name, value in table if name not in PER_HOST_ARGUMENTS}
    settings = {
        "sha256 of model.path/config.json": hashlib.sha256(shape).hexdigest(),
        "model.dtype": model.dtype,
        "rollout.engine": rollout.engine,
        "rollout.tensor_parallel_size": rollout.tensor_parallel_size,
        "rollout.data_parallel_size": rollout.data_parallel_size,
        "rollout.router_replay": rollout.router_replay,
        "rollout.indexer_replay": rollout.indexer_replay,
        "rollout.quantization": rollout.quantization,
        "rollout.quantization_ignore": rollout.quantization_ignore,
        f"rollout.{rollout.engine}": arguments,
        "lora": lora.model_dump(mode="json") if lora.is_served else None,
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
    return plain


def refusal(cfg: Config) -> str:
    """Reason why no engine can join the run of `cfg`; empty if engines can."""
    if cfg.train.replay is not None:
        return "train.replay takes generations from a file, so that the run has no engines"
    if cfg.rollout.enable_sleep_mode:
        return (
            "rollout.enable_sleep_mode true is for engines on the GPUs of the ranks: set it to "
            "false for a run that engines join"
        )
    return ""


def serve_joined(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    engine: JoinedEngine,
    is_complete: Callable[[], bool],
) -> NoReturn:
    """Run an engine; its file is in `folder` from its first answer until it leaves or ends.

    A signal makes it leave at the next push, a second one ends it at once, and so does
    `is_complete` of the run. The exit code is 1 if the engine ended by itself.
    """
    signals: list[int] = []
    for number in LEAVE_SIGNALS:
        signal.signal(number, lambda number, _: signals.append(number))
    make_folder(folder)
    parts = urlsplit(engine.url)
    file = folder / f"{parts.hostname}_{parts.port}{JOINED}"
    child = ChildProcess.start(command, environment, sys.stdout.buffer)
    try:
        _await_end(child, file, engine, signals, is_complete)
        end = child.end()
    finally:
        file.unlink(missing_ok=True)
        file.with_suffix(LEAVING).unlink(missing_ok=True)
        child.terminate(within=TERMINATE_SECONDS)
    if end:
        print(f"megatron-grpo: rollout engine {engine.url} {end}", file=sys.stderr)
    sys.exit(1 if end else 0)


def _await_end(
    child: ChildProcess,
    file: Path,
    engine: JoinedEngine,
    signals: Sequence[int],
    is_complete: Callable[[], bool],
) -> None:
    """Return when the engine has ended, or may be ended: it has left, or the run is complete."""
    while not is_healthy(engine.url):
        if signals or child.end():
            return
        time.sleep(POLL_SECONDS)
    leaving, whole = file.with_suffix(LEAVING), file.with_suffix(".tmp")
    leaving.unlink(missing_ok=True)  # of an earlier engine at this address
    # By rename: the run may read at any time, and would find half a file.
    whole.write_bytes(msgspec.json.encode(engine))
    whole.replace(file)
    print(f"{file}: the engine joins at the run's next push", file=sys.stderr, flush=True)
    touched = time.monotonic()
    while not signals and file.exists():
        if child.end(within=POLL_SECONDS):
            return
        if time.monotonic() - touched > TOUCH_SECONDS:
            touched = time.monotonic()
            with suppress(FileNotFoundError):
                os.utime(file)
        if is_complete():
            print("the run is complete: its engine ends", file=sys.stderr, flush=True)
            return
    with suppress(FileNotFoundError):  # renamed or removed by somebody else
        file.rename(leaving)
    if leaving.exists():
        message = "the engine leaves at the run's next push; another signal ends it at once"
        print(f"{leaving}: {message}", file=sys.stderr, flush=True)
    while len(signals) < 2 and leaving.exists() and not is_complete():
        if child.end(within=POLL_SECONDS):
            return
