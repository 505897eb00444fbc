"""The receiving end of pushes in a worker of an engine, and the calls that it answers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.weights import read_weights
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import worker_layouts
from megatron_grpo.engine_weights.protocol import Json, PushState, parameter_table
from parallel import Layout
from parallel.checksum import checksums
from parallel.weight_transfer import TransferInitInfo, WeightReceiver


class FolderReceiver:
    """Reads a worker's part of the folder that `WeightFolder` writes."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder, self._layout = folder, layout

    def receive_weights(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Fill `parameters` in place; returns the checksum of each.

        Raises OSError or ValueError if the folder cannot be seen from here, or is not complete.
        """
        read_weights(self._folder, read_shape(self._folder), self._layout, parameters)
        return checksums(parameters)

    def close(self) -> None:
        """Nothing is open."""


Receiver = WeightReceiver | FolderReceiver
"""Fills the tensors of a worker, once per push."""


def open_receiver(
    transfer: Json,
    engine: int,
    worker: int,
    parameters: Mapping[str, Tensor],
    device: torch.device,
) -> Receiver:
    """What `transfer` describes: a `TransferInitInfo`, or `WeightFolder.init_info`.

    Raises ValueError or ChannelError as `WeightReceiver` does.
    """
    if "folder" not in transfer:
        info = TransferInitInfo.from_json(transfer)
        return WeightReceiver(info, engine, worker, parameters, device)
    folder, model = Path(transfer["folder"]), Path(transfer["model"])
    layouts = worker_layouts(read_shape(model), RolloutConfig(**transfer["rollout"]))
    return FolderReceiver(folder, layouts[worker])


class PushWorker(ABC):
    """Receives its shard of the weights over channels of its own, directly into its tensors.

    Its state has the push that the weights belong to. The version that engines put on samples is
    not enough: another process holds it, and it changes at another time.

    A failure is kept in the state, for the client to read: the other workers do not wait for it. If
    it were raised, vLLM would pass on the first worker's and leave the other workers' answers
    unread; the next calls would take these for their own.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.state = PushState()
        self._receiver: Receiver | None = None
        self._received: dict[str, Tensor] = {}

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What a push fills, by name."""

    def receive(self, receiver: Receiver, received: dict[str, Tensor]) -> Mapping[str, int]:
        """Receive a push into these `tensors`; returns the checksums that the ranks expect."""
        return receiver.receive_weights(received)

    def answer(self, call: str, question: str, **arguments: Any) -> Json:
        """The answer to a `call` of the client, one of the methods below: plain data.

        It repeats `question`, which the client makes up anew for every call, so that it recognizes
        an answer to a different one.
        """
        called = getattr(self, f"_{call}")
        return {"question": question, **(called(**arguments) or {})}

    def close(self) -> None:
        """Close the channels."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _open_channels(self, transfer: Json, engine: int, channels: str) -> None:
        """Open channels to all ranks that send to this worker, replacing earlier ones."""
        self.state.use_channels(channels)
        with self.state.keep_error():
            self.close()
            self._received = self.tensors()
            self._receiver = open_receiver(
                transfer, engine, self.number, self._received, self.device
            )

    def _describe_parameters(self) -> Json:
        return {"parameters": parameter_table(self.tensors())}

    def _begin_push(self, push: str, channels: str) -> None:
        """The trainer that connected last owns the engine; reports tell the others."""
        self.state.begin_push(push, channels)

    def _receive_push(self, push: str) -> None:
        if push != self.state.push or self._receiver is None:
            return  # another push has begun, or there are no channels and the state says why
        with self.state.keep_error():
            self.state.mark_loaded(self.receive(self._receiver, self._received))

    def _push_report(self) -> Json:
        return self.state.push_report()

    def _finish_push(self, push: str) -> None:
        if push == self.state.push:
            self.state.finish_push()

    def _hold_loaded(self) -> None:
        self.state.hold_loaded()

    def _held_push(self) -> Json:
        return {"push": self.state.held}
