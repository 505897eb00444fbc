"""A store at which processes meet, which listens at one address alone."""

from torch.distributed import TCPStore

from parallel.addresses import listen_at


def serve_store(host: str, port: int = 0) -> TCPStore:
    """Serve a store at `port`, or a free one, of `host`, a name or address of this machine.

    It lives as long as it is referenced. torch's own rendezvous in this process at the same port
    takes it. Raises OSError if `host` is another machine's, or the port is taken.
    """
    # A listener of ours: TCPStore by itself listens on all addresses.
    listener = listen_at(host, port)
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
