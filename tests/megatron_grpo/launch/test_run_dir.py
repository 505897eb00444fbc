"""The run directory's lock, the mount that holds it, its files, and the job's token."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.launch import run_dir
from megatron_grpo.launch.run_dir import (
    Mount,
    check_run_dir,
    check_token,
    interrupted_text,
    make_folder,
    new_token,
    resumable,
    run_lock,
    take_token,
)
from megatron_grpo.reporting.tracking import append_rows

HOLD = """
import sys, time
from pathlib import Path
from megatron_grpo.launch.run_dir import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_run_directory_is_for_one_process_until_that_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    environment = os.environ | {"SLURM_JOB_ID": "17"}
    holder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        who = rf"\(pid {holder.pid} on {socket.gethostname()}, Slurm job 17\)"
        expected = f"another process trains in {tmp_path} {who}"
        with pytest.raises(ValueError, match=expected), run_lock(tmp_path):
            pass
        with pytest.raises(ValueError, match=expected):
            check_run_dir(tmp_path, starts_here=True)
        check_run_dir(tmp_path, starts_here=False)
    finally:
        holder.kill()
        holder.communicate()
    with run_lock(tmp_path):
        pass
    assert (tmp_path / "lock").read_text().startswith(f"pid {os.getpid()} on ")


def test_a_run_directory_that_cannot_be_made_is_named_with_its_key():
    with pytest.raises(ValueError, match=r"train\.run_dir: the folder /proc/x cannot be made"):
        make_folder(Path("/proc/x"))


def test_check_run_dir_makes_a_folder_only_at_a_start(tmp_path, monkeypatch):
    first, second = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    check_run_dir(first, starts_here=False)
    check_run_dir(tmp_path, starts_here=False)
    assert not [*tmp_path.iterdir()]

    def make_beside(folder):
        folder.mkdir(parents=True)
        second.mkdir()

    monkeypatch.setattr(run_dir, "make_folder", make_beside)
    check_run_dir(first, starts_here=False)
    assert [*tmp_path.glob("runs/*")] == [second]
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"the folder /proc/x/logs cannot be made"):
        check_run_dir(Path("/proc/x"), starts_here=True)


def test_an_interrupted_run_says_where_the_same_command_resumes_it(tmp_path):
    assert interrupted_text(tmp_path).endswith("run the same command to begin from the start")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "LATEST").write_text("step_20\n")
    assert interrupted_text(tmp_path).endswith("run the same command to resume from step 20")


def test_run_lock_refuses_locks_others_do_not_see(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"fs@o2ib:/x {tmp_path.resolve()} lustre rw,localflock 0 0\n")
    monkeypatch.setattr(run_dir, "MOUNTS", mounts)
    expected = "cannot be locked: other hosts do not see locks with localflock; .*-o flock"
    with pytest.raises(ValueError, match=expected), run_lock(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_run_lock_refuses_a_file_system_without_locks(number, tmp_path, monkeypatch):
    """Errors of Lustre and NFS, which no test can mount."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    expected = f"{tmp_path / 'lock'} cannot be locked .*-o flock .* train.run_dir"
    with pytest.raises(ValueError, match=expected), run_lock(tmp_path):
        pass


MOUNTS = """/dev/sda1 / ext4 rw 0 0
fs@o2ib:/x /scratch lustre rw,flock,user_xattr 0 0
"""


def test_the_mount_is_the_nearest():
    assert Mount.holding(Path("/scratch/runs"), MOUNTS).kind == "lustre"
    assert Mount.holding(Path("/scratches"), MOUNTS).kind == "ext4"
    over = MOUNTS + "tmpfs /scratch tmpfs rw 0 0\n"
    assert Mount.holding(Path("/scratch"), over).kind == "tmpfs"
    assert Mount.holding(Path("/proc/self").resolve()).kind == "proc"
    assert Mount.holding(Path("/home"), "fs /scratch lustre rw 0 0").options == frozenset()


def test_the_kernel_writes_spaces_in_octal():
    mounts = MOUNTS + "s:/x /my\\040data nfs rw,nolock 0 0\n"
    assert Mount.holding(Path("/my data/runs"), mounts).local_locks == "nolock"


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
def test_local_locks_names_mount_options_with_locks_of_one_host(line, expected):
    assert Mount.holding(Path("/x/runs"), f"{MOUNTS}{line}\n").local_locks == expected


GOOD = "0123456789abcdef"


def test_new_tokens_differ_and_have_256_bits():
    tokens = {new_token() for _ in range(8)}
    assert len(tokens) == 8
    assert all(check_token(token) == token and len(token) == 64 for token in tokens)


def test_taken_token_is_not_inherited():
    environ = {"MEGATRON_GRPO_TOKEN": GOOD, "PATH": "/bin"}
    assert take_token(environ) == GOOD
    assert environ == {"PATH": "/bin"}
    assert take_token(environ) is None


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "is not set"),
        ("", "is not set"),
        (GOOD[1:], "has 15 characters, at least 16 are needed"),
        (GOOD + " ", "has spaces"),
        (GOOD + "\n", "has spaces"),
        (GOOD + "ä", "has spaces or other characters"),
    ],
)
def test_invalid_token_is_refused_and_not_shown(token, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_token(token)
    assert "export MEGATRON_GRPO_TOKEN=$(openssl rand -hex 32)" in str(refused.value)
    assert GOOD[1:] not in str(refused.value)


def test_resumable_names_the_file_and_the_step(tmp_path):
    with pytest.raises(OSError) as raised, resumable(tmp_path):
        append_rows(Path("/dev/full"), [{"step": 1}] * 9)
    assert str(raised.value) == (
        "/dev/full: No space left on device; run the same command to begin from the start"
    )
    assert raised.value.errno is None  # the message is whole, so the watchdog prints no stack
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "LATEST").write_text("step_4\n")
    raises_whole = pytest.raises(OSError, match=r"^step_6: full; run .* to resume from step 4$")
    with raises_whole, resumable(tmp_path):
        raise OSError("step_6: full")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        TimeoutError(),
        OSError(errno.EMFILE, "Too many open files"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ],
    ids=repr,
)
def test_resumable_keeps_other_tracebacks(error, tmp_path):
    with pytest.raises(type(error)) as found, resumable(tmp_path):
        raise error
    assert found.value is error


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EIO])
def test_resumable_words_errors_of_a_disk_alike(number, tmp_path):
    raises = pytest.raises(OSError, match=r"^a\.jsonl: broken; run the same command")
    with raises, resumable(tmp_path):
        raise OSError(number, "broken", "a.jsonl")
