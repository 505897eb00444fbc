"""A check for sandboxes on this host that does not use the project's own code."""

import os
import shutil
import subprocess

import pytest

SOMEBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]


def _makes_namespaces() -> bool:
    """Whether bubblewrap is installed and may create namespaces as this user."""
    if not shutil.which("bwrap"):
        return False
    user = SOMEBODY if os.geteuid() == 0 else []
    command = [*user, "bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


needs_bubblewrap = pytest.mark.skipif(
    not _makes_namespaces(), reason="needs bubblewrap, and a host where users can make namespaces"
)
