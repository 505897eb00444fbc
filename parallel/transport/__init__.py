"""Transfers weights over links between trainer ranks and engine workers.

`Outbox` is the end of a rank and `Inbox` that of a worker. They find each other through a
`Meeting`, which one process opens and announces to all; everything else in here is internal.
"""

from parallel.transport.buckets import bucket_bytes_for
from parallel.transport.ends import TIMEOUT, Inbox, Outbox, refuse_all
from parallel.transport.invitation import Invitation
from parallel.transport.meeting import Board, Meeting, join, local_address, open_meeting
from parallel.transport.wire import LinkError

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
