"""Stop processes and their descendants, as Slurm suspends a job."""

import time

import psutil


def stop_for(seconds: float, *processes: int) -> None:
    """Stop the processes and their descendants for some seconds, then continue them."""
    found = [psutil.Process(process) for process in processes]
    tree = [*found, *(child for each in found for child in each.children(recursive=True))]
    for process in tree:
        process.suspend()
    time.sleep(seconds)
    for process in tree:
        process.resume()
