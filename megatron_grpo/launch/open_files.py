"""How many files and connections this process may have open."""

import resource


def allow_open_files() -> None:
    """As many as the system lets it have; what it starts gets the same limit.

    Rank 0 has a connection for each open request, a rank one to each other over gloo, and an
    engine's end of the requests is as many again: some systems begin with 1,024.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
