"""A Slurm cluster: Debian's daemons with their own files and ports.

Its nodes are all on this host, or each is one of the hosts of `hosts.py`.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.runs.hosts import Host

PACKAGES = "slurmctld slurmd slurm-client munge"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
REPOSITORY = Path(__file__).parents[3]
DEVICES = "CPUs=8 Gres=gpu:8"
NODES = {f"n{number}": DEVICES for number in range(12)} | {
    "large": DEVICES,
    "small": "CPUs=6 Gres=gpu:4",
}
"""Two nodes for each concurrent job, and two for the partition `unlike`."""
NODE_MEGABYTES = 8000


def is_installed() -> bool:
    return all(shutil.which(program, path=_path()) for program in PROGRAMS)


@dataclass
class Cluster:
    """A running cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]]
    hosts: Sequence[Host]
    """Hosts of the nodes; the first has the controller, too. Empty: all are this host."""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, **variables: str) -> str:
        """The output of a Slurm command."""
        done = subprocess.run(
            self.hosts[0].command(*command) if self.hosts else command,
            env=self.environment | variables,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=30,
            encoding="utf-8",
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(
        self,
        script: str,
        log: Path,
        arguments: Sequence[str],
        num_nodes: int = 2,
        **variables: str,
    ) -> "Job":
        """`sbatch` a script of slurm/ as a user would."""
        options = ["--parsable", f"--nodes={num_nodes}", f"--output={log}"]
        job = self.run("sbatch", *options, f"slurm/{script}", *arguments, **variables)
        return Job(self, job, log)

    def start_daemon(self, node: str) -> None:
        command = ["slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node]
        log = self.folder / f"slurmd_{node}.log"
        host = next((host for host in self.hosts if host.name == node), None)
        self.daemons[node] = _start(command, log, host)

    def kill_daemon(self, node: str) -> None:
        self.daemons[node].kill()
        self.daemons[node].wait(10)


@dataclass(frozen=True)
class Job:
    """A job of a cluster."""

    cluster: Cluster
    number: str
    log: Path

    def fields(self) -> Mapping[str, str]:
        """The fields of `scontrol show job`."""
        shown = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def nodes(self) -> Sequence[str]:
        """The nodes that the job runs on."""
        return self.cluster.run("scontrol", "show", "hostnames", self.fields()["NodeList"]).split()

    @property
    def state(self) -> str:
        return self.fields()["JobState"]

    def await_state(self, *states: str, seconds: float) -> Mapping[str, str]:
        deadline = time.monotonic() + seconds
        while (fields := self.fields())["JobState"] not in states:
            assert time.monotonic() < deadline, f"{fields['JobState']}\n{self.output()}"
            time.sleep(0.2)
        return fields

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def signal(self, name: str) -> None:
        """Send a signal to the batch script, as Slurm does before the time limit."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.cluster.run("scancel", self.number)


@contextmanager
def running_cluster(folder: Path, hosts: Sequence[Host] = ()) -> Iterator[Cluster]:
    """Start a cluster with `NODES`, or with a node on each of `hosts`; leaving the block ends all
    of its processes."""
    nodes = [host.name for host in hosts] or [*NODES]
    for name in ("state", *nodes):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o755)
    # Each host has its own /dev/shm.
    munge = Path("/dev/shm" if hosts else folder) / "munge.socket"
    lines = _lines_of_hosts(hosts) if hosts else _lines_of_nodes()
    configuration = "\n".join([*lines, *_common_lines(folder, munge), ""])
    (folder / "slurm.conf").write_text(configuration, encoding="utf-8")
    for number in range(8):  # Slurm counts devices by their files
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n", encoding="utf-8")
    cluster = Cluster(folder, {}, hosts)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    # Clean up on SIGTERM too, or the daemons outlive `make test`, whose background jobs (`&`)
    # ignore Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for host in hosts or [None]:
            name = f"munged_{host.name}" if host else "munged"
            log = folder / f"{name}.log"
            cluster.daemons[name] = _start(_munged(folder, name, munge), log, host)
            root = f"/proc/{host.init}/root" if host else ""
            _wait_for(Path(f"{root}{munge}").exists, log)
        controller = ["slurmctld", "-D", "-f", str(folder / "slurm.conf")]
        log = folder / "slurmctld.log"
        cluster.daemons["slurmctld"] = _start(controller, log, hosts[0] if hosts else None)
        for node in nodes:
            cluster.start_daemon(node)
        _wait_for(lambda: _idle_nodes(cluster) == len(nodes), log)
        yield cluster
    finally:
        for daemon in reversed(cluster.daemons.values()):
            # The group: a daemon on another host is a child of the process started.
            os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in cluster.daemons.values():
            try:
                _wait_for(lambda daemon=daemon: _has_ended(daemon), folder / "slurmctld.log", 10)
            except AssertionError:
                os.killpg(daemon.pid, signal.SIGKILL)
        del os.environ["SLURM_CONF"]
        signal.signal(signal.SIGTERM, before)


def _lines_of_nodes() -> list[str]:
    """Lines of slurm.conf for `NODES`."""
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(1 + len(NODES))
    return [
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        *(
            # Each node has its own address: engines on different nodes may have the same port.
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.1.{number} Port={ports[number]} "
            f"RealMemory={NODE_MEGABYTES} State=UNKNOWN {devices}"
            for number, (node, devices) in enumerate(NODES.items(), start=1)
        ),
        "PartitionName=all Nodes=n[0-11] Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=unlike Nodes=large,small MaxTime=INFINITE State=UP",
    ]


def _lines_of_hosts(hosts: Sequence[Host]) -> list[str]:
    """Lines of slurm.conf for a node on each of `hosts`."""
    return [
        f"SlurmctldHost={hosts[0].name}({hosts[0].address})",
        *(
            f"NodeName={host.name} NodeAddr={host.address} RealMemory={NODE_MEGABYTES} "
            f"State=UNKNOWN {DEVICES}"
            for host in hosts
        ),
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]


def _common_lines(folder: Path, munge: Path) -> list[str]:
    return [
        "ClusterName=test",
        # A job's ports depend on its number: two clusters on this host must not both begin at 1.
        f"FirstJobId={random.randrange(1, 100_000)}",
        "SlurmUser=root",
        "SlurmdUser=root",
        # A requeued job waits until the credentials of its steps have expired.
        f"AuthInfo=socket={munge},cred_expire=5",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerNode=1000",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "GresTypes=gpu",
        "ReturnToService=2",
        "JobRequeue=1",
        "SlurmdTimeout=10",
        # The loss of a node is noticed after 17 s; with a time-out of 10 s, after 27 s.
        "MessageTimeout=5",
        "KillWait=10",
        "MinJobAge=86400",  # or Slurm forgets jobs that ended before the tests do
        "SchedulerParameters=sched_interval=1,batch_sched_delay=0",
        "SlurmdParameters=config_overrides",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/%n.pid",
    ]


def _munged(folder: Path, name: str, munge: Path) -> list[str]:
    files = [f"--socket={munge}", f"--key-file={folder}/munge.key"]
    files += [f"--{kind}-file={folder}/{name}.{kind}" for kind in ("pid", "log", "seed")]
    return ["munged", "--foreground", "--force", *files]


def _start(command: Sequence[str], log: Path, host: Host | None) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            host.command(*command) if host else command,
            env={**os.environ, "PATH": _path()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _has_ended(daemon: subprocess.Popen[bytes]) -> bool:
    """Whether a daemon and its children have ended."""
    daemon.poll()
    try:
        os.killpg(daemon.pid, 0)
    except ProcessLookupError:
        return True
    return False


def _idle_nodes(cluster: Cluster) -> int:
    try:
        shown = cluster.run("sinfo", "--noheader", "--Node", "--format=%t")
    except AssertionError:
        return 0
    return shown.split().count("idle")


def _wait_for(is_so, log: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def _path() -> str:
    """PATH with /usr/sbin, Debian's folder of daemons, which not every user's PATH has."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
