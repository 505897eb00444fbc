"""The push of weights, carried out: links between trainer ranks and engine workers, and their ends.

`Outbox` is a rank's end and `Inbox` a worker's; what lies between is nobody else's business.
"""

from parallel.transport.buckets import bucket_bytes_for
from parallel.transport.ends import TIMEOUT, Inbox, Outbox, refuse_all
from parallel.transport.invitation import Invitation
from parallel.transport.wire import LinkError

__all__ = [
    "TIMEOUT",
    "Inbox",
    "Invitation",
    "LinkError",
    "Outbox",
    "bucket_bytes_for",
    "refuse_all",
]
