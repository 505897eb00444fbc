"""A Slurm cluster of many nodes on this host: Debian's daemons with their own files and ports."""

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

PACKAGES = "slurmctld slurmd slurm-client munge"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
REPOSITORY = Path(__file__).parents[3]
NODES = {f"n{number}": "CPUs=8 Gres=gpu:8" for number in range(12)} | {
    "large": "CPUs=8 Gres=gpu:8",
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

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, **variables: str) -> str:
        """The output of a Slurm command."""
        done = subprocess.run(
            command,
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
        self.daemons[node] = _start(command, self.folder / f"slurmd_{node}.log")

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
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster; leaving the block ends all of its processes."""
    for name in ("state", *NODES):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    folder.chmod(0o755)
    (folder / "slurm.conf").write_text(_configuration(folder), encoding="utf-8")
    for number in range(8):  # Slurm counts devices by their files
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n", encoding="utf-8")
    cluster = Cluster(folder, {})
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    # Clean up on SIGTERM too, or the daemons outlive `make test`, whose background jobs (`&`)
    # ignore Ctrl-C.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cluster.daemons["munged"] = _start(_munged(folder), folder / "munged.log")
        _wait_for((folder / "munge.socket").exists, folder / "munged.log")
        controller = ["slurmctld", "-D", "-f", str(folder / "slurm.conf")]
        cluster.daemons["slurmctld"] = _start(controller, folder / "slurmctld.log")
        for node in NODES:
            cluster.start_daemon(node)
        _wait_for(lambda: _idle_nodes(cluster) == len(NODES), folder / "slurmctld.log")
        yield cluster
    finally:
        for daemon in reversed(cluster.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in cluster.daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        del os.environ["SLURM_CONF"]
        signal.signal(signal.SIGTERM, before)


def _configuration(folder: Path) -> str:
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(1 + len(NODES))
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        # A job's ports depend on its number: two clusters on this host must not both begin at 1.
        f"FirstJobId={random.randrange(1, 100_000)}",
        "SlurmUser=root",
        "SlurmdUser=root",
        # A requeued job waits until the credentials of its steps have expired.
        f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
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
        *(
            # Each node has its own address: engines on different nodes may have the same port.
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.1.{number} Port={ports[number]} "
            f"RealMemory={NODE_MEGABYTES} State=UNKNOWN {devices}"
            for number, (node, devices) in enumerate(NODES.items(), start=1)
        ),
        "PartitionName=all Nodes=n[0-11] Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=unlike Nodes=large,small MaxTime=INFINITE State=UP",
    ]
    return "\n".join(lines) + "\n"


def _munged(folder: Path) -> list[str]:
    files = [f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    files += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "log", "seed")]
    return ["munged", "--foreground", "--force", *files]


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, "PATH": _path()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


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
