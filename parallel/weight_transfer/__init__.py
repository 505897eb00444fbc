"""Transfers weights over links between trainer ranks and engine workers.

`Outbox` is the end of a rank and `Inbox` that of a worker. They find each other through a
`Meeting`, which one process opens and announces to all; everything else in here is internal.
"""

from parallel.weight_transfer.buckets import bucket_bytes_for
from parallel.weight_transfer.ends import TIMEOUT, Inbox, Outbox, refuse_all
from parallel.weight_transfer.rendezvous import (
    Board,
    Invitation,
    Meeting,
    join,
    local_address,
    open_meeting,
)
from parallel.weight_transfer.wire import LinkError

__all__ = [
    "TIMEOUT",
    "Board",
    "Inbox",
    "Invitation",
    "LinkError",
    "Meeting",
    "Outbox",
    "bucket_bytes_for",
    "join",
    "local_address",
    "open_meeting",
    "refuse_all",
]
