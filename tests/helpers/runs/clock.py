"""A clock that is wrong on one of the hosts of `hosts.py`, whose kernel has a single one."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.runs.hosts import Host

AHEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*kernel)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = kernel(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += SECONDS;
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec at;
    int code = clock_gettime(CLOCK_REALTIME, &at);
    *now = (struct timeval){at.tv_sec, at.tv_nsec / 1000};
    return code;
}
time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return now ? (*now = at.tv_sec) : at.tv_sec;
}
"""
"""The time of day for programs that are linked dynamically; times of files are the kernel's."""


@contextmanager
def wrong_clock(host: Host, seconds: int) -> Iterator[None]:
    """Let programs that start on `host` see a clock that is `seconds` ahead."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "clock.so"
        compile_it = ["gcc", "-shared", "-fPIC", f"-DSECONDS={seconds}", "-x", "c", "-"]
        subprocess.run([*compile_it, "-o", library], input=AHEAD, text=True, check=True)
        host.variables = [f"LD_PRELOAD={library}"]
        try:
            yield
        finally:
            host.variables = ()
