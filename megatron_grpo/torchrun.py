"""torchrun, except that a failed rank is told in lines and not in pages."""

import logging
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

NUM_LINES_SHOWN = 30


def main() -> None:
    """Run torchrun on the command line; the exit code is that of the first rank that failed."""
    arguments = run.parse_args(sys.argv[1:])
    logging.disable(logging.ERROR)  # torchrun's account of a failure: ours is below
    try:
        run.run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if rank > 0:  # rank 0 has told its own: it has the terminal
            print(_account(rank, failure, Path(arguments.log_dir)), file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as ended:
        sys.exit(128 + ended.sigval)


def _account(rank: int, failure: ProcessFailure, log_dir: Path) -> str:
    logs = log_dir.glob(f"*/attempt_0/{failure.local_rank}/stderr.log")
    log = max(logs, key=lambda path: path.stat().st_mtime)
    lines = log.read_text(errors="replace").splitlines()[-NUM_LINES_SHOWN:]
    return "\n".join([f"rank {rank} failed first; {log} ends with", *lines])


if __name__ == "__main__":
    main()
