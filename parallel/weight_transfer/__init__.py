"""Transfers weights over channels between trainer ranks and engine workers.

`WeightSender` is a trainer rank's end, and `WeightReceiver` a worker's. They find each other
through a `Rendezvous`, which rank 0 opens; everything else in here is internal.
"""

from parallel.weight_transfer.channels import ChannelError
from parallel.weight_transfer.rendezvous import (
    Rendezvous,
    RendezvousAddress,
    TransferInitInfo,
    join,
    local_address,
    open_rendezvous,
    rendezvous_address,
)
from parallel.weight_transfer.streams import bucket_bytes_for, most_channels
from parallel.weight_transfer.transfer import TIMEOUT, WeightReceiver, WeightSender

__all__ = [
    "TIMEOUT",
    "ChannelError",
    "Rendezvous",
    "RendezvousAddress",
    "TransferInitInfo",
    "WeightReceiver",
    "WeightSender",
    "bucket_bytes_for",
    "join",
    "local_address",
    "most_channels",
    "open_rendezvous",
    "rendezvous_address",
]
