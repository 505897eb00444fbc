import errno
import json
import socket
from pathlib import Path

import pytest

from megatron_grpo.launch.disk import append_lines, resumable

FULL = Path("/dev/full")


def test_lines_that_cannot_be_written_are_told_by_file_and_the_step_to_resume_from(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError) as told, resumable(tmp_path):
        append_lines(FULL, [json.dumps({"step": 1})] * 9)
    assert str(told.value) == (
        "/dev/full: No space left on device; run the same command to begin from the start"
    )
    assert told.value.errno is None  # the message is whole, so the watchdog prints no stack
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "LATEST").write_text("step_4\n")
    told_whole = pytest.raises(OSError, match=r"^step_6: full; run .* to resume from step 4$")
    with told_whole, resumable(tmp_path):
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
def test_what_names_no_file_and_is_not_of_a_disk_keeps_its_traceback(
    error: OSError, tmp_path: Path
) -> None:
    with pytest.raises(type(error)) as found, resumable(tmp_path):
        raise error
    assert found.value is error


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EIO])
def test_other_errors_of_a_disk_are_told_alike(number: int, tmp_path: Path) -> None:
    told = pytest.raises(OSError, match=r"^a\.jsonl: broken; run the same command")
    with told, resumable(tmp_path):
        raise OSError(number, "broken", "a.jsonl")
