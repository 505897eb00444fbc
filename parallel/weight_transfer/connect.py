"""Opens channels.

Every receiver publishes the memory domain of its buffers. The sender of a channel chooses the best
kind of channel that both support, and publishes the address where it listens. Before that, it
publishes its plan, the boxes that will arrive: validated JSON, not pickles.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from parallel.layout import Box, Copy, Layout
from parallel.reshard import check_arrivals
from parallel.weight_transfer.channels import (
    Channel,
    ChannelError,
    ChannelSet,
    ControlSocket,
    Listener,
    connect,
)
from parallel.weight_transfer.local_channels import LocalChannel
from parallel.weight_transfer.network_channels import NetworkChannel
from parallel.weight_transfer.rendezvous import (
    Rendezvous,
    TransferInitInfo,
    local_address,
    memory_domain,
)


@dataclass(frozen=True)
class Worker:
    """One worker of one engine."""

    engine: int
    number: int

    def __str__(self) -> str:
        return f"engine {self.engine} worker {self.number}"

    @property
    def key(self) -> str:
        """Key of its memory domain in the rendezvous."""
        return f"memory/{self.engine}/{self.number}"


def open_channel(
    control: ControlSocket, bucket_bytes: int, device: torch.device, *, is_sender: bool
) -> Channel:
    """Open one end of a channel: in shared memory if the control socket is local."""
    backend = LocalChannel if control.is_local else NetworkChannel
    try:
        return backend(control, bucket_bytes, device, is_sender=is_sender)
    except BaseException:
        control.close()
        raise


@dataclass(frozen=True)
class Peer:
    """One process of the rendezvous, with the settings of all its channels."""

    name: str
    """Its name in error messages of other processes."""
    init_info: TransferInitInfo
    rendezvous: Rendezvous
    """The rendezvous of the init info."""
    device: torch.device
    """The device of its channels' buffers."""
    timeout: timedelta
    """Most time to wait for another process."""

    def open_channels(
        self, channels: ChannelSet, receivers: Mapping[str, Worker], senders: Mapping[str, str]
    ) -> tuple[list[Channel], list[Channel]]:
        """Open a channel to each of `receivers` and from each of `senders`, by channel name.

        Adds them to `channels`. Returns channels to receivers and channels from senders, in order.
        Raises ChannelError if any process has failed or one is late.
        """
        secret = self.init_info.rendezvous.secret
        # In this order, the others read why this process failed before its listeners close.
        with ExitStack() as stack, self.rendezvous.publishing_failures(self.name):
            domains = self.rendezvous.await_texts(
                {worker.key: str(worker) for worker in receivers.values()}, self.timeout
            )
            # A worker has a channel from each of its ranks, but one memory domain.
            sharing = {
                worker.key: self.shares_memory(worker, domain)
                for worker, domain in zip(dict.fromkeys(receivers.values()), domains, strict=True)
            }
            accepting = []
            for name, worker in receivers.items():
                host = None if sharing[worker.key] else local_address(self.init_info.rendezvous)
                listener = Listener(host, secret)
                stack.callback(listener.close)
                self.rendezvous.publish(f"channel/{name}", json.dumps(listener.address))
                check = self.rendezvous.check_failure
                accept = partial(listener.accept, str(worker), self.timeout, check)
                accepting.append(partial(self._open, accept, is_sender=True))
            names = {f"channel/{name}": sender for name, sender in senders.items()}
            addresses = self.rendezvous.await_texts(names, self.timeout)
            sockets = [
                partial(connect, json.loads(address), sender, self.timeout, secret)
                for address, sender in zip(addresses, senders.values(), strict=True)
            ]
            connecting = [partial(self._open, each, is_sender=False) for each in sockets]
            # All at the same time: otherwise the last of many engines would wait for all before it.
            made = channels.open_all([*accepting, *connecting])
            return made[: len(accepting)], made[len(accepting) :]

    def shares_memory(self, worker: Worker, domain: str) -> bool:
        """Whether the channel to `worker`, which published its memory `domain`, shares memory."""
        here = memory_domain(self.device)
        if domain == here and not self.init_info.network_only:
            return True
        # The last part of a domain is the GPU, see `memory_domain`.
        if self.device.type == "cuda" and domain.split()[-1] == here.split()[-1]:
            raise ChannelError(
                f"{worker} and {self.name} are on one GPU, and NCCL cannot connect a GPU to "
                "itself: leave rollout.weight_transport at auto, and run both in the same network, "
                "IPC and PID namespaces (docker: --network=host --ipc=host --pid=host)"
            )
        return False

    def _open(self, control: Callable[[], ControlSocket], *, is_sender: bool) -> Channel:
        # A published failure ends the waits of channels that are being opened here or elsewhere.
        with self.rendezvous.publishing_failures(self.name):
            size, device = self.init_info.bucket_bytes, self.device
            return open_channel(control(), size, device, is_sender=is_sender)


Arrival = tuple[str, str, Box]
"""A box that a worker receives: (parameter, dtype such as "bfloat16", place in the parameter)."""

_Sizes = list[NonNegativeInt]
_PLAN = TypeAdapter(list[tuple[str, str, _Sizes, _Sizes]])


def plan_text(copies: Sequence[Copy], dtypes: Mapping[str, torch.dtype]) -> str:
    """Arrivals of `copies` at a worker as JSON, in order; `dtypes` are of its parameters."""
    return json.dumps(
        [
            (name, str(dtypes[name]).removeprefix("torch."), box.start, box.size)
            for name, box in ((copy.destination, copy.destination_box) for copy in copies)
        ]
    )


def read_plan(text: str) -> list[Arrival]:
    """Inverse of `plan_text`; ValueError, naming the fault, for any other text."""
    try:
        rows = _PLAN.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"not a plan of arriving weights: {error}") from error
    return [(name, dtype, Box(tuple(start), tuple(size))) for name, dtype, start, size in rows]


def check_arriving(
    arrivals: Sequence[Arrival],
    parameters: Mapping[str, Tensor],
    zeros: tuple[tuple[str, Box], ...],
) -> None:
    """Raise ValueError, naming every parameter at fault, unless `arrivals` fit a worker.

    Every element of `parameters` must arrive exactly once, in the dtype of the parameter, except
    for the padding `zeros`, which must not arrive.
    """
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    # A dict, not a list: a parameter that arrives in many boxes has each fault once.
    faults = {
        f"{name} is {parameters[name].dtype}, and arrives as torch.{dtype}": None
        for name, dtype, _ in arrivals
        if name in parameters and str(parameters[name].dtype) != f"torch.{dtype}"
    }
    for name, box in (*((name, box) for name, _, box in arrivals), *zeros):
        if name in shapes and {len(box.start), len(box.size)} != {len(shapes[name])}:
            faults[f"{name}: {box} is not a box of its shape {shapes[name]}"] = None
    if faults:
        raise ValueError("the weights do not fit the parameters:\n  " + "\n  ".join(faults))
    check_arrivals(
        Layout(shapes, (), zeros), [Copy(name, box, name, box) for name, _, box in arrivals]
    )
