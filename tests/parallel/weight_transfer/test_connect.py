"""Which kind of channel a receiver is offered, depending on where both ends run."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from parallel.weight_transfer import ChannelError, TransferInitInfo
from parallel.weight_transfer import connect as peer
from parallel.weight_transfer.rendezvous import RendezvousAddress

HERE = "boot net ipc GPU-1"
OTHER_NAMESPACE = "boot net other GPU-1"
OTHER_GPU = "boot net ipc GPU-2"
OTHER_HOST = "other net ipc GPU-3"


@pytest.mark.parametrize(
    ("network_only", "receiver"), [(True, HERE), (False, OTHER_NAMESPACE), (True, OTHER_NAMESPACE)]
)
def test_two_processes_on_one_gpu_that_share_no_memory_are_told_what_to_do(
    monkeypatch, network_only, receiver
):
    with pytest.raises(ChannelError, match=r"engine 0 worker 0 and trainer rank 0 are on one GPU"):
        offer(monkeypatch, network_only, receiver)


@pytest.mark.parametrize(
    ("network_only", "receiver"),
    [(False, HERE), (False, OTHER_GPU), (True, OTHER_GPU), (False, OTHER_HOST)],
)
def test_others_are_offered_a_channel(monkeypatch, network_only, receiver):
    assert offer(monkeypatch, network_only, receiver) == (receiver == HERE)


def offer(monkeypatch, network_only, receiver):
    """Whether the trainer, which is on GPU 1, offers shared memory to a receiver at this place."""
    monkeypatch.setattr(peer, "memory_domain", lambda device: HERE)
    init_info = TransferInitInfo(
        RendezvousAddress("127.0.0.1", 1), 1, 1, network_only, senders=[[0]], zeros=[[]]
    )
    published = {}
    rendezvous = SimpleNamespace(
        await_texts=lambda names, timeout: [receiver],
        publish=published.__setitem__,
        check_failure=None,
    )
    trainer = peer.Peer(
        "trainer rank 0", init_info, rendezvous, torch.device("cuda"), timedelta(seconds=1)
    )
    monkeypatch.setattr(peer, "Listener", lambda address: SimpleNamespace(address=address))
    monkeypatch.setattr(peer, "local_address", lambda address: "127.0.0.1")
    trainer.listen({"0/0/0": peer.Worker(0, 0)})
    return published["channel/0/0/0"] == "null"
