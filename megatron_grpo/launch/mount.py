"""How the file system of a folder is mounted."""

from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/mounts")
LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}
"""Options, of Lustre and NFS, by which another host does not see a lock."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/mounts."""

    point: str
    kind: str
    """Of the file system: ext4, lustre, nfs4 ..."""
    options: frozenset[str]

    @classmethod
    def of(cls, folder: Path, mounts: str | None = None) -> "Mount":
        """The one that holds `folder`, whose path is absolute and without links."""
        rows = [line.split()[1:4] for line in (mounts or MOUNTS.read_text()).splitlines()]
        holding = [row for row in rows if folder.is_relative_to(row[0])]
        if not holding:  # below a chroot
            return cls("/", "unknown", frozenset())
        # Of several mounted over each other the last is what one sees.
        point, kind, options = max(reversed(holding), key=lambda row: len(row[0]))
        return cls(point, kind, frozenset(options.split(",")))

    @property
    def local_locks(self) -> str:
        """The option by which locks hold within one host alone; empty where they hold for all."""
        return min(self.options & LOCAL_LOCKS, default="")
