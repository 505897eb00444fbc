"""The limit on open files and connections of this process."""

import resource


def allow_open_files() -> None:
    """Raise the soft limit to the hard limit; child processes inherit it.

    Rank 0 has a connection for each open request (and so has the engine at the other end), and
    several to every other rank: the default of 1,024 on some systems is too low.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
