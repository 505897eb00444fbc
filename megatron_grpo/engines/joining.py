"""Engines that join a run while it trains, and leave it: each has a file in the run directory.

`megatron-grpo serve --join` writes `engines/HOST_PORT.json` once its engine answers; from its next
push on, the run uses the engine like one of `rollout.base_urls`. The file is renamed to
`HOST_PORT.leaving` when the engine is to leave: the run gives it no more requests from the next
push on and removes the file, whereupon the engine ends. It also ends when the run is complete; an
interrupted run finds its engines again. The file is touched now and then: one that stays as it is
may be left by a host that is gone.
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
OF_EACH_HOST = tuple(names.memory_fraction for names in PLANNED.values())
"""Arguments that may differ between the engines of a run."""
LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
POLL_SECONDS = 1.0
TOUCH_SECONDS = 30.0
TERMINATE_SECONDS = 10.0


class JoinedEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of an engine's file in the folder."""

    url: str
    settings: dict[str, Any]
    """Settings as returned by `settings_of`."""


def settings_of(model: ModelConfig, rollout: RolloutConfig, lora: LoraConfig) -> dict[str, Any]:
    """Settings that all engines of a run must share, by name, as JSON.

    The shapes and dtypes of their weights are compared as well, before a push.
    """
    shape = (model.path / "config.json").read_bytes()
    table = engine_table(rollout).items()
    arguments = {name: value for name, value in table if name not in OF_EACH_HOST}
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
    """Why no engine can join the run of `cfg`; empty if its engines may be of other jobs."""
    if cfg.train.replay is not None:
        return "train.replay takes generations from a file, so that the run has no engines"
    if cfg.rollout.enable_sleep_mode:
        return (
            "rollout.enable_sleep_mode true is for engines on the GPUs of the ranks: set it to "
            "false for a run that engines join"
        )
    return ""


class JoinFolder:
    """The files of the engines that have joined a run, as rank 0 reads them before each push.

    `refusal` says why none can join, if so. The ranks listen for the engines of `base_urls` only:
    where these are all on rank 0's host by a loopback address, engines of other hosts are refused.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], base_urls: Sequence[str], refusal: str
    ) -> None:
        self._folder, self._settings, self._refusal = folder, settings, refusal
        self._is_local = all(map(_is_loopback, base_urls))
        self._told: set[tuple[str, str]] = set()

    @classmethod
    def of_run(cls, cfg: Config) -> "JoinFolder":
        """The folder of the run of `cfg`."""
        urls, reason = cfg.rollout.base_urls, refusal(cfg)
        if not urls:
            reason = reason or (
                "the run starts its engines itself, with a token that no other has: start them by "
                "`megatron-grpo serve` and give rollout.base_urls, as the jobs in slurm/ do"
            )
        settings = settings_of(cfg.model, cfg.rollout, cfg.lora)
        return cls(cfg.train.run_dir / FOLDER, settings, urls, reason)

    def joined(self) -> dict[str, int]:
        """Address of each engine that takes part, and when its file changed, in nanoseconds; says
        once of each other file why its engine does not."""
        return dict(filter(None, map(self._read, sorted(self._folder.glob(f"*{JOINED}")))))

    def leavers(self) -> list[Path]:
        """The files of the engines that wait until the run has dropped them."""
        return [*self._folder.glob(f"*{LEAVING}")]

    def _read(self, file: Path) -> tuple[str, int] | None:
        """An item of `joined`; None if the engine has no part in the run."""
        try:
            changed = file.stat().st_mtime_ns
            engine = msgspec.json.decode(file.read_bytes(), type=JoinedEngine)
        except FileNotFoundError:  # it has left since
            return None
        except (OSError, msgspec.MsgspecError) as error:
            fault = f"the file cannot be read: {error}"
        else:
            fault = self._fault(engine)
            if not fault:
                return engine.url, changed
        if (file.name, fault) not in self._told:
            self._told.add((file.name, fault))
            print(f"the engine of {file} cannot join: {fault}", file=sys.stderr, flush=True)
        return None

    def _fault(self, engine: JoinedEngine) -> str:
        if self._refusal:
            return self._refusal
        parts = urlsplit(engine.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return f"{engine.url!r} is not an address like http://host:8000"
        if self._is_local and not _is_loopback(engine.url):
            return (
                f"{engine.url} is on another network than rollout.base_urls, for which the ranks "
                "listen on loopback alone: give these the address of their host, too"
            )
        for name, ours in self._settings.items():
            if (theirs := engine.settings.get(name)) != ours:
                return f"its {name} is {theirs}, the run's {ours}: start it with the run's config"
        return ""


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def serve_joined(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    engine: JoinedEngine,
    is_complete: Callable[[], bool],
) -> NoReturn:
    """Run an engine, with its file in `folder` from when it answers until it leaves or ends.

    A signal makes it leave, a second one ends it at once; so does `is_complete`, which says whether
    the run is. The exit code is 1 if it has ended by itself.
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
    """Return when the engine has ended, or may."""
    while not is_healthy(engine.url):
        if signals or child.end():
            return
        time.sleep(POLL_SECONDS)
    leaving, whole = file.with_suffix(LEAVING), file.with_suffix(".tmp")
    leaving.unlink(missing_ok=True)  # of an earlier engine at this address
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
        told = "the engine leaves at the run's next push; another signal ends it at once"
        print(f"{leaving}: {told}", file=sys.stderr, flush=True)
    while len(signals) < 2 and leaving.exists() and not is_complete():
        if child.end(within=POLL_SECONDS):
            return
