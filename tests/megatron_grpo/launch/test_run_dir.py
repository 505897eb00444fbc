import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from megatron_grpo.launch import run_dir as mount
from megatron_grpo.launch.run_dir import run_lock

HOLD = """
import sys, time
from pathlib import Path
from megatron_grpo.launch.run_dir import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_directory_is_for_one_process_until_it_ends_however_it_ends(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = os.environ | {"SLURM_JOB_ID": "17"}
    holder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        who = rf"\(pid {holder.pid} on {socket.gethostname()}, Slurm job 17\)"
        expected = f"another process trains in {tmp_path} {who}"
        with pytest.raises(ValueError, match=expected), run_lock(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with run_lock(tmp_path):
        pass
    assert (tmp_path / "lock").read_text().startswith(f"pid {os.getpid()} on ")


def test_a_lock_that_other_hosts_do_not_see_is_refused(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"fs@o2ib:/x {tmp_path.resolve()} lustre rw,localflock 0 0\n")
    monkeypatch.setattr(mount, "MOUNTS", mounts)
    expected = "cannot be locked: other hosts do not see locks with localflock; .*-o flock"
    with pytest.raises(ValueError, match=expected), run_lock(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_with_the_option_that_gives_it_some(
    number, tmp_path, monkeypatch
):
    """As Lustre and NFS answer, which no test can mount."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    expected = f"{tmp_path / 'lock'} cannot be locked .*-o flock .* train.run_dir"
    with pytest.raises(ValueError, match=expected), run_lock(tmp_path):
        pass
