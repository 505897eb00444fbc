from pathlib import Path

import pytest

from megatron_grpo.launch.run_dir import Mount

MOUNTS = """/dev/sda1 / ext4 rw 0 0
fs@o2ib:/x /scratch lustre rw,flock,user_xattr 0 0
"""


def test_the_mount_is_the_nearest():
    assert Mount.of(Path("/scratch/runs"), MOUNTS).kind == "lustre"
    assert Mount.of(Path("/scratches"), MOUNTS).kind == "ext4"
    over = MOUNTS + "tmpfs /scratch tmpfs rw 0 0\n"
    assert Mount.of(Path("/scratch"), over).kind == "tmpfs"
    assert Mount.of(Path("/proc/self").resolve()).kind == "proc"
    assert Mount.of(Path("/home"), "fs /scratch lustre rw 0 0").options == frozenset()


def test_the_kernel_writes_spaces_in_octal():
    mounts = MOUNTS + "s:/x /my\\040data nfs rw,nolock 0 0\n"
    assert Mount.of(Path("/my data/runs"), mounts).local_locks == "nolock"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fs@o2ib:/x /x lustre rw,flock 0 0", ""),
        ("fs@o2ib:/x /x lustre rw,localflock 0 0", "localflock"),
        ("s:/x /x nfs4 rw,vers=4.2,local_lock=none,addr=10.0.0.9 0 0", ""),
        ("s:/x /x nfs rw,vers=3,local_lock=none 0 0", ""),
        ("s:/x /x nfs rw,vers=3,local_lock=flock 0 0", "local_lock=flock"),
        ("s:/x /x nfs rw,vers=3,local_lock=posix 0 0", ""),
        ("s:/x /x nfs rw,nolock,vers=3,local_lock=all 0 0", "local_lock=all"),
    ],
)
def test_a_mount_whose_locks_other_hosts_do_not_see_is_known_by_its_options(line, expected):
    assert Mount.of(Path("/x/runs"), f"{MOUNTS}{line}\n").local_locks == expected
