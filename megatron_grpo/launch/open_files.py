"""How many files and connections this process may have open."""

import resource


def allow_open_files() -> None:
    """As many as the system lets it have; what it starts gets the same limit."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
