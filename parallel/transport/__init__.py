"""The push of weights, carried out: links between trainer ranks and engine workers, and their ends.

`Outbox` is a rank's end and `Inbox` a worker's. They find each other at a `Meeting`, which one
process opens and all are told of; what else lies between is nobody else's business.
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
