"""Hosts on one machine: each has its own network, names, processes and shared memory.

A host is a set of Linux namespaces with an address on a common switch; the file system is shared,
as on a cluster. Cables can be pulled, and hosts killed. Needs root, `ip`, `nsenter` and `unshare`.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

NETWORK = "10.77.0"
CABLE = "eth0"
NOTHING_PASSES = ["tbf", "rate", "1kbit", "burst", "10", "limit", "10"]
"""A token bucket in which no packet has room."""
# Process 1 of a host reaps orphans, as an init does: bash does so while it waits.
INIT = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount --rbind /sys/fs/cgroup /mnt && mount -t sysfs sys /sys && mount --move /mnt /sys/fs/cgroup
mount -t tmpfs shm /dev/shm
ip link set lo up
echo up
while :; do sleep 1d & wait $!; done
"""


def can_make_hosts() -> bool:
    """Whether this process may make namespaces and links between them."""
    made = "ip link add end0 type veth peer name end1 && ip link add switch type bridge"
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "sh", "-c", made]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@dataclass
class Host:
    """A host; after `kill`, `reboot` starts it again."""

    name: str
    number: int
    switch: int
    """Process in the network namespace of the switch."""
    known: Path
    """Its /etc/hosts."""
    init: int = 0
    """Process 1 of the host, by its number outside."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    variables: Sequence[str] = ()
    """Of the environment of all its programs: NAME=value."""

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    def boot(self) -> None:
        """Make the namespaces, and lay the cable to the switch."""
        kinds = ["--net", "--uts", "--mount", "--ipc", "--mount-proc"]
        self.started.append(_hold(kinds, INIT, self.name, str(self.known)))
        self.init = _inner(self.started[-1])
        # With the same address after a reboot: the others remember it.
        peer = ["peer", "name", CABLE, "address", f"02:00:00:00:00:{self.number:02x}"]
        peer += ["netns", str(self.init)]
        in_network(self.switch, "ip", "link", "add", self._port, "type", "veth", *peer)
        in_network(self.switch, "ip", "link", "set", self._port, "master", "switch", "up")
        in_network(self.init, "ip", "address", "add", f"{self.address}/24", "dev", CABLE)
        in_network(self.init, "ip", "link", "set", CABLE, "up")

    def command(self, *command: str | Path) -> list[str]:
        """The command line that runs `command` on this host."""
        entered = [f"--{kind}" for kind in ("net", "uts", "mount", "pid", "ipc")]
        enter = ["nsenter", f"--target={self.init}", *entered, "--", "env", f"--chdir={Path.cwd()}"]
        return [*enter, *self.variables, *map(str, command)]

    def start(
        self, *command: str | Path, log: Path, environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[str]:
        """Start a program on this host, with its output in `log`."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
                text=True,
            )
        self.started.append(process)
        return process

    def run(self, *command: str, **how: Any) -> str:
        """The output of a program that runs on this host and must succeed."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, **how)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self) -> set[str]:
        """Command lines of the programs that run on this host."""
        lines = self.run("ps", "-eo", "args=").splitlines()
        return {line for line in lines if not line.startswith(("bash -c", "sleep 1d", "ps -eo"))}

    def listeners(self) -> set[tuple[str, int]]:
        """Addresses and ports of this host at which TCP connections are accepted."""
        places = [line.split()[3] for line in self.run("ss", "-Hltn").splitlines()]
        return {(address, int(port)) for address, _, port in (at.rpartition(":") for at in places)}

    def pull(self) -> None:
        """Take the cable out of the switch: packets are lost in both directions, silently."""
        in_network(self.switch, "ip", "link", "set", self._port, "nomaster")

    def plug(self, switch: str = "switch") -> None:
        """Put the cable back, or into another switch."""
        in_network(self.switch, "ip", "link", "set", self._port, "master", switch)

    def mute(self) -> None:
        """Lose every packet that this host sends; it still receives."""
        in_network(self.init, "tc", "qdisc", "replace", "dev", CABLE, "root", *NOTHING_PASSES)

    def unmute(self) -> None:
        in_network(self.init, "tc", "qdisc", "delete", "dev", CABLE, "root")

    def kill(self) -> None:
        """End all programs of this host at once; its kernel still closes their connections."""
        os.kill(self.init, signal.SIGKILL)

    def reboot(self) -> None:
        """Boot a killed host. The kernel may still have its network, and with it the cable."""
        in_network(self.switch, "ip", "link", "delete", self._port, check=False)
        self.boot()

    def end(self) -> None:
        """Kill the host, and wait for the programs of `start`."""
        for process in self.started:
            process.kill()
            process.wait()

    @property
    def _port(self) -> str:
        return f"cable{self.number}"


@contextmanager
def running_hosts(folder: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts that know each other by name; leaving the block ends all programs on them."""
    known = folder / "hosts"
    lines = [f"{NETWORK}.{number} {name}" for number, name in enumerate(names, start=1)]
    known.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="utf-8")
    holder = _hold(["--net"], "echo up; exec sleep infinity")
    switch = _inner(holder)
    hosts = [Host(name, number, switch, known) for number, name in enumerate(names, start=1)]
    try:
        in_network(switch, "ip", "link", "add", "switch", "type", "bridge")
        in_network(switch, "ip", "link", "set", "switch", "up")
        for host in hosts:
            host.boot()
        yield hosts
    finally:
        for host in hosts:
            host.end()
        holder.kill()
        holder.wait()


def _hold(kinds: Sequence[str], script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start process 1 of new namespaces; it ends with the process returned, or with this one."""
    tied = ["setpriv", "--pdeathsig=KILL", "unshare", *kinds, "--pid", "--fork", "--kill-child"]
    command = [*tied, "bash", "-c", script, "init", *arguments]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None and holder.stdout.readline() == "up\n", "no namespaces"
    return holder


def _inner(holder: subprocess.Popen[str]) -> int:
    """Process 1 of the namespaces, by its number outside."""
    (child,) = psutil.Process(holder.pid).children()
    return child.pid


def in_network(process: int, *command: str, check: bool = True) -> None:
    """Run a command in the network namespace of a process."""
    subprocess.run(["nsenter", f"--target={process}", "--net", "--", *command], check=check)
