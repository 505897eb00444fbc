"""How the file system of a folder is mounted."""

import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/mounts")
OCTAL = re.compile(r"\\([0-7]{3})")
LOCAL_LOCKS = {"localflock", "nolock", "local_lock=flock", "local_lock=all"}
"""Mount options of Lustre and NFS with which other hosts do not see a lock."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/mounts."""

    point: str
    kind: str
    """Type of the file system: ext4, lustre, nfs4 ..."""
    options: frozenset[str]

    @classmethod
    def of(cls, folder: Path, mounts: str | None = None) -> "Mount":
        """The mount that holds `folder`, an absolute path without symbolic links."""
        lines = (mounts or MOUNTS.read_text()).splitlines()
        rows = [[_decoded(field) for field in line.split()[1:4]] for line in lines]
        holding = [row for row in rows if folder.is_relative_to(row[0])]
        if not holding:  # inside a chroot
            return cls("/", "unknown", frozenset())
        # If several are mounted over each other, the last one is visible.
        point, kind, options = max(reversed(holding), key=lambda row: len(row[0]))
        return cls(point, kind, frozenset(options.split(",")))

    @property
    def local_locks(self) -> str:
        """The option that limits locks to one host; empty if other hosts see them."""
        return min(self.options & LOCAL_LOCKS, default="")


def _decoded(field: str) -> str:
    """The kernel writes spaces and backslashes in octal: ``\\040``."""
    return OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
