"""This host's part of a run over several hosts: `megatron-grpo train --nnodes` on each of them.

The launchers of all hosts meet at a store of the first one. Each starts its host's engines, which
it starts again if they end, and once they answer its ranks, by `launch.torchrun`.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError

from megatron_grpo.config.config import Config
from megatron_grpo.engines.http import is_healthy
from megatron_grpo.engines.processes import ServerProcess, ServerProcesses
from megatron_grpo.engines.support import num_gpus
from megatron_grpo.launch.launch import check_files
from megatron_grpo.launch.meeting import (
    FAILED,
    PREEMPTED,
    WATCH_SECONDS,
    HostFailed,
    HostPlace,
    Hosts,
)
from megatron_grpo.launch.network import in_url
from megatron_grpo.launch.placement import NODES_VARIABLE, EnginePlace, Placement
from megatron_grpo.launch.placement import place as place_run
from megatron_grpo.launch.process import (
    EXIT_PREEMPTED,
    PREEMPTION_SIGNALS,
    describe_exit,
)
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, check_token, make_folder
from megatron_grpo.workers.child_process import ChildProcess
from parallel.clock import running_time
from parallel.words import counted

ENGINE_PORT, RANKS_PORT, PARTS_PORT = 1, 62, 63
"""Ports counted from --master-port, where launchers meet: the first engine's, one for each GPU of a
host; where ranks meet; and where the parts of an engine over several hosts meet."""
MAX_RESTARTS = 3
ORPHAN_SECONDS = 20
"""Time that ranks have to end by themselves once another host has failed or the first has ended."""
PAUSE_SECONDS = 60
"""Further pause before each restart of an engine: its cause may last, such as ranks on the same
GPUs that need the memory until they have trained."""


@dataclass
class EnginePart:
    """This host's part of an engine, all of it in most cases."""

    number: int
    url: str
    command: list[str]
    log: Path
    num_nodes: int
    gpus: str | None = None
    """Its CUDA_VISIBLE_DEVICES; None on a host without GPUs."""
    restarts: int = 0
    waits_until: float | None = None
    """Time of the next restart."""
    has_served: bool = False

    @property
    def key(self) -> str:
        """Key of the end of a part of this engine, since its last restart."""
        return f"engine/{self.number}/{self.restarts}"


class HostEngines(ServerProcesses):
    """The engines of the run, of which this host has `parts`. All parts of an engine end, and
    start again, together."""

    def __init__(
        self,
        urls: Sequence[str],
        parts: Sequence[EnginePart],
        token: str,
        hosts: Hosts,
        logs: Path,
        *,
        are_ours: bool = True,
    ) -> None:
        """`are_ours`: whether the hosts of this run start the engines."""
        super().__init__(tuple(urls), logs)
        self._parts, self._hosts, self.are_ours = parts, hosts, are_ours
        for part in parts:
            own = {TOKEN_VARIABLE: token, NODES_VARIABLE: str(part.num_nodes)}
            if part.gpus is not None:
                own["CUDA_VISIBLE_DEVICES"] = part.gpus
            environment = os.environ | own
            # Slurm sends a signal to all processes of a step: ranks save on it, and engines stay.
            command = ["sh", "-c", 'trap "" USR1; exec "$@"', "engine", *part.command]
            server = ServerProcess.serve(command, environment, part.url, part.log)
            self.processes[part.url] = server
            hosts.watched.add(part.key)

    def log_tail(self, url: str) -> str:
        """The end of the engine's log, or its folder if another host of this run has it."""
        there = f"; its log is in {self._log_dir}" if self.are_ours else ""
        return super().log_tail(url) or there

    def check(self) -> None:
        """Raise HostFailed if an engine has ended that has not answered yet."""
        for part in self._parts:
            if not part.has_served and (end := self.end(part.url)):
                code = self.processes[part.url].process.returncode
                line = f"engine {part.number} on {socket.gethostname()} {end}"
                raise HostFailed(max(code, 1), f"{line}{self.log_tail(part.url)}")

    def have_served(self) -> None:
        """Note that all engines have answered."""
        for part in self._parts:
            part.has_served = True

    def keep(self) -> None:
        """Start engines again that have ended, three times at most."""
        for part in self._parts:
            part.has_served = part.has_served or is_healthy(part.url)
            if part.waits_until is None and self.end(part.url):
                self._hosts.publish(part.key, socket.gethostname())
            if part.key in self._hosts.seen and part.waits_until is None:
                self._end(part)
            elif part.waits_until is not None and running_time() >= part.waits_until:
                part.waits_until = None
                self.restart(part.url)

    def _end(self, part: EnginePart) -> None:
        """End a part whose engine has ended somewhere, and plan its restart."""
        end = self.kill(part.url) or f"is ended, as its part on {self._hosts.seen[part.key]} has"
        is_last = part.restarts == MAX_RESTARTS
        pause = part.restarts * PAUSE_SECONDS
        after = "and stays so" if is_last else f"and is started again in {pause} s"
        with part.log.open("a", encoding="utf-8") as log:
            print(f"this engine {end}, {after}", file=log)
        part.waits_until = float("inf") if is_last else running_time() + pause
        part.restarts += 1
        self._hosts.watched.add(part.key)


class Ranks:
    """The ranks of this host: a torchrun, to which signals are forwarded."""

    def __init__(self) -> None:
        """Handle signals from now on."""
        self._torchrun: ChildProcess | None = None
        self.hosts: Hosts | None = None
        """On a host without ranks, once it has met the others: they get its preemption signal, as
        their ranks save; this host ends after the first one."""
        self._forwarded = set[int]()
        self._handled = [
            number
            for number in (*PREEMPTION_SIGNALS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
            if signal.getsignal(number) != signal.SIG_IGN  # as by `nohup`
        ]
        for number in self._handled:
            signal.signal(number, lambda number, _: self.forward(number))

    def start(self, command: list[str], token: str | None) -> None:
        own = {TOKEN_VARIABLE: token} if token else {}
        # Not a folder that is removed at the end: compiled kernels are kept there.
        command = ["env", f"TMPDIR={tempfile.gettempdir()}", *command]
        output, errors = sys.stdout.buffer, sys.stderr.buffer
        self._torchrun = ChildProcess.start(command, {**os.environ, **own}, output, errors)

    @property
    def are_started(self) -> bool:
        return self._torchrun is not None

    @property
    def are_preempted(self) -> bool:
        """Whether they save and stop."""
        return not self._forwarded.isdisjoint(PREEMPTION_SIGNALS)

    @property
    def code(self) -> int | None:
        """Exit code of torchrun; None while it runs, or before."""
        code = self._torchrun.process.poll() if self._torchrun else None
        # It dies of a signal that comes before it has a handler, while it imports torch.
        return _signalled(-code) if code and -code in self._forwarded else code

    def wait(self, seconds: float) -> None:
        """Wait until torchrun has ended, up to `seconds`."""
        if self._torchrun:
            self._torchrun.end(within=seconds)
        else:
            time.sleep(seconds)

    def close(self) -> None:
        """Kill what runs, and ignore signals while engines end."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)
        if self._torchrun:
            self._torchrun.kill()

    def forward(self, number: int) -> None:
        """Send a signal to torchrun; before there is one, exit."""
        is_first = number not in self._forwarded
        self._forwarded.add(number)
        if self._torchrun:
            with suppress(ProcessLookupError):
                self._torchrun.process.send_signal(number)
        elif self.hosts and number in PREEMPTION_SIGNALS and is_first:
            self.hosts.publish(PREEMPTED, socket.gethostname())
        else:
            sys.exit(_signalled(number))


def _signalled(number: int) -> int:
    """Exit code after a signal."""
    return EXIT_PREEMPTED if number in PREEMPTION_SIGNALS else 128 + number


@dataclass(frozen=True)
class HostPart:
    """Command lines of this host in a run of `train ARGUMENTS`, by the hosts' `addresses`."""

    place: HostPlace
    placed: Placement
    arguments: Sequence[str]
    log_dir: Path
    devices: Sequence[str]
    """Elements of CUDA_VISIBLE_DEVICES for all GPUs of this host; empty without GPUs."""

    @property
    def has_ranks(self) -> bool:
        return str(self.place.node_rank) in self.placed.trainer_nodes

    @property
    def digest(self) -> str:
        """Equal on all hosts that run the same job."""
        job = json.dumps([str(self.placed), *self.arguments])
        return hashlib.sha256(job.encode()).hexdigest()[:16]

    def urls(self, addresses: Sequence[str]) -> list[str]:
        """The engines that the hosts start."""
        return [self._url(engine, addresses) for engine in self.placed.engines]

    def engines(self, addresses: Sequence[str]) -> Iterator[EnginePart]:
        this, master_port = str(self.place.node_rank), self.place.master_port
        for number, engine in enumerate(self.placed.engines):
            if this not in engine.nodes:
                continue
            node, first = engine.nodes.index(this), addresses[int(engine.nodes[0])]
            command = [sys.executable, "-m", "megatron_grpo", "serve", *self.arguments]
            command += [f"--host={addresses[int(this)]}", f"--port={self._port(engine)}"]
            command += [f"--nnodes={len(engine.nodes)}", f"--node-rank={node}"]
            command += [f"--master-addr={first}", f"--master-port={master_port + PARTS_PORT}"]
            name = f"engine_{number}_node_{node}.log" if node else f"engine_{number}.log"
            gpus = ",".join(self.devices[gpu] for gpu in engine.gpus) if self.devices else None
            log, url = self.log_dir / name, self._url(engine, addresses)
            yield EnginePart(number, url, command, log, len(engine.nodes), gpus)

    def torchrun(self, addresses: Sequence[str]) -> list[str]:
        command = [sys.executable, "-m", "megatron_grpo.launch.torchrun"]
        command += [f"--nnodes={len(self.placed.trainer_nodes)}"]
        command += [f"--node-rank={self.place.node_rank}", f"--master-addr={addresses[0]}"]
        command += [f"--master-port={self.place.master_port + RANKS_PORT}", "--rdzv-id=ranks"]
        command += [f"--nproc-per-node={self.placed.ranks_per_node}"]
        command += [f"--log-dir={self.log_dir / f'host_{self.place.node_rank}'}"]
        command += ["-m", "megatron_grpo", "train", *self.arguments]
        if urls := self.urls(addresses):
            command.append(f"rollout.base_urls={json.dumps(urls)}")  # IPv6 has brackets
        return command

    def _port(self, engine: EnginePlace) -> int:
        return self.place.master_port + ENGINE_PORT + engine.gpus.start

    def _url(self, engine: EnginePlace, addresses: Sequence[str]) -> str:
        return f"http://{in_url(addresses[int(engine.nodes[0])])}:{self._port(engine)}"


def host_part(
    cfg: Config,
    arguments: Sequence[str],
    place: HostPlace,
    gpus_per_node: int | None,
    log_dir: Path | None,
) -> HostPart:
    """Find this host's part; ValueError for a placement that is not possible."""
    if place.node_rank >= place.nnodes:
        raise ValueError(f"--node-rank {place.node_rank} of --nnodes {place.nnodes}: count from 0")
    found = num_gpus()
    per_node = gpus_per_node or found or -(-cfg.dims.world_size // place.nnodes)
    if per_node >= RANKS_PORT or 0 < found < per_node:
        raise ValueError(
            f"--gpus-per-node {per_node}: this host has {counted(found, 'GPU')}, and "
            f"{RANKS_PORT - 1} are possible"
        )
    placed = place_run(cfg, [str(rank) for rank in range(place.nnodes)], per_node)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
    devices = visible.split(",")[:found]
    return HostPart(place, placed, arguments, log_dir or cfg.train.run_dir / "logs", devices)


def run_host(cfg: Config, part: HostPart, token: str | None) -> NoReturn:
    """Run this host's part; exits with the code of its ranks, or without ranks with 0 when the
    first host has ended.

    Raises ValueError, before the hosts meet, for missing files and a missing token.
    """
    check_files(cfg)
    if cfg.train.replay is None:
        check_token(token)
    make_folder(part.log_dir)
    ranks = Ranks()
    try:
        hosts = Hosts(part.place, part.digest)
    except DistError:
        sys.exit("megatron-grpo: the first host left before all hosts had joined")
    except HostFailed as error:
        print(f"megatron-grpo: {error.args[1]}", file=sys.stderr)
        sys.exit(error.args[0])
    own, parts = part.urls(hosts.addresses), [*part.engines(hosts.addresses)]
    urls, logs = own or cfg.rollout.base_urls, part.log_dir
    opened = HostEngines(urls, parts, token or "", hosts, logs, are_ours=bool(own))
    with closing(hosts), closing(opened) as engines, closing(ranks):
        failure = None
        try:
            if part.has_ranks:
                _await_engines(cfg, part, engines, hosts)
                ranks.start(part.torchrun(hosts.addresses), token)
            else:
                ranks.hosts = hosts
            code = _await_end(ranks, engines, hosts)
            if part.has_ranks and code not in (0, EXIT_PREEMPTED):
                failure = f"the ranks on {socket.gethostname()} ended with {describe_exit(code)}"
        except (HostFailed, TimeoutError) as error:
            code, failure = error.args if isinstance(error, HostFailed) else (1, str(error))
            print(f"megatron-grpo: {failure}", file=sys.stderr)
        except SystemExit as ended:  # by a signal, before there are ranks
            code = int(ended.code or 0)
            if part.has_ranks:
                failure = f"{part.place} got a signal before the ranks started"
        if failure:
            hosts.publish(FAILED, f"{max(code, 1)} {failure}")
            time.sleep(3 * WATCH_SECONDS)  # so that all hosts read it, and end with the same code
            code = hosts.failed_code or max(code, 1)
    sys.exit(code)


def _await_engines(cfg: Config, part: HostPart, engines: HostEngines, hosts: Hosts) -> None:
    """Wait until all engines answer: those on the ranks' GPUs measure their free memory first."""
    if engines.base_urls and part.place.node_rank == 0:
        print(f"megatron-grpo waits: {engines.awaited}", flush=True)
    engines.wait_ready(cfg.rollout.startup_timeout, lambda done, total: hosts.check())
    engines.have_served()


def _await_end(ranks: Ranks, engines: HostEngines, hosts: Hosts) -> int:
    """Keep the engines until the ranks have ended, whose exit code it returns; or without ranks
    until the first host's launcher has.

    Raises HostFailed if an engine here cannot start, and ORPHAN_SECONDS after another host has
    failed, or the first has ended: ranks that have met are ended by their watchdog, which says
    more.
    """
    deadline = None
    while (code := ranks.code) is None:
        if hosts.is_over and not ranks.are_started:
            return hosts.failed_code or 0
        engines.check()
        engines.keep()
        if PREEMPTED in hosts.seen and ranks.are_started and not ranks.are_preempted:
            ranks.forward(signal.SIGTERM)
        if FAILED in hosts.seen or hosts.is_over:
            deadline = deadline or running_time() + ORPHAN_SECONDS
            if running_time() >= deadline:
                hosts.check()
        ranks.wait(WATCH_SECONDS)
    return code
