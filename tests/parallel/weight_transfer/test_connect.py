"""Shared memory of a channel, by the places of its two ends."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from parallel.weight_transfer import ChannelError, TransferInitInfo, rendezvous
from parallel.weight_transfer import connect as connect_module
from parallel.weight_transfer.rendezvous import RendezvousAddress

HERE = "boot net ipc pid GPU-1"
OTHER_NAMESPACE = "boot net other pid GPU-1"
OTHER_GPU = "boot net ipc pid GPU-2"
OTHER_HOST = "other net ipc pid GPU-3"


@pytest.fixture
def shares_memory(monkeypatch):
    """A function: whether a trainer on GPU 1 shares memory with a receiver at a place."""
    monkeypatch.setattr(connect_module, "memory_domain", lambda device: HERE)

    def shares_memory(network_only, receiver):
        init_info = TransferInitInfo(
            RendezvousAddress("127.0.0.1", 1), 1, 1, network_only, senders=[[0]], zeros=[[]]
        )
        trainer = connect_module.Peer(
            "trainer rank 0", init_info, None, torch.device("cuda"), timedelta(seconds=1)
        )
        return trainer.shares_memory(connect_module.Worker(0, 0), receiver)

    return shares_memory


@pytest.mark.parametrize(
    ("network_only", "receiver"), [(True, HERE), (False, OTHER_NAMESPACE), (True, OTHER_NAMESPACE)]
)
def test_processes_on_one_gpu_without_shared_memory_get_advice(
    shares_memory, network_only, receiver
):
    with pytest.raises(ChannelError, match=r"engine 0 worker 0 and trainer rank 0 are on one GPU"):
        shares_memory(network_only, receiver)


@pytest.mark.parametrize(
    ("network_only", "receiver"),
    [(False, HERE), (False, OTHER_GPU), (True, OTHER_GPU), (False, OTHER_HOST)],
)
def test_memory_is_shared_on_one_gpu_only(shares_memory, network_only, receiver):
    assert shares_memory(network_only, receiver) == (receiver == HERE)


@pytest.mark.parametrize("other", ["net", "ipc", "pid"])
def test_containers_share_memory_of_a_gpu_in_the_same_namespaces_only(monkeypatch, other):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=1))
    here = rendezvous.memory_domain(torch.device("cuda"))
    inside = rendezvous._namespace
    monkeypatch.setattr(rendezvous, "_namespace", lambda kind: inside(kind) + (kind == other))
    assert rendezvous.memory_domain(torch.device("cuda")) != here
