"""The receiving end of pushes in a worker of an engine, and the calls that it answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.weights import read_stored, read_weights
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import quantized_engine, worker_layouts
from megatron_grpo.engine_weights.protocol import Json, PushState, parameter_table
from parallel import Layout
from parallel.checksum import checksums
from parallel.weight_transfer import TransferInitInfo, WeightReceiver


class FolderReceiver:
    """Reads a worker's part of the folder that `WeightFolder` writes."""

    def __init__(self, folder: Path, layout: Layout, is_quantized: bool) -> None:
        self._folder, self._layout, self._is_quantized = folder, layout, is_quantized

    def receive_weights(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Fill `parameters` in place; returns their checksums. OSError or ValueError if this host
        does not see the folder, or it is incomplete."""
        if self._is_quantized:
            read_stored(self._folder, self._layout, parameters)
        else:
            read_weights(self._folder, read_shape(self._folder), self._layout, parameters)
        return checksums(parameters)

    def close(self) -> None:
        """Nothing is open."""


Receiver = WeightReceiver | FolderReceiver
"""Fills the tensors of a worker, once per push."""


def open_receiver(
    transfer: Json, engine: int, worker: int, parameters: Mapping[str, Tensor], device: torch.device
) -> Receiver:
    """Open the receiver for `transfer`, a `TransferInitInfo` or `WeightFolder.init_info`; raises
    ValueError or ChannelError."""
    if "folder" not in transfer:
        info = TransferInitInfo.from_json(transfer)
        return WeightReceiver(info, engine, worker, parameters, device)
    shape, rollout = read_shape(Path(transfer["model"])), RolloutConfig(**transfer["rollout"])
    model = quantized_engine(rollout, shape, transfer["dtype"])
    layouts = worker_layouts(shape, rollout, model)
    return FolderReceiver(Path(transfer["folder"]), layouts[worker], model is not None)


class PushWorker(ABC):
    """Receives its shard of the weights over channels of its own, directly into its tensors.

    Its state knows the push of the weights. The engine's version label does not prove it: another
    process holds the label, and changes it at another time.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.state = PushState()
        self._receiver: Receiver | None = None
        self._received: dict[str, Tensor] = {}
        # Names come by HTTP: no other method can be called.
        self._calls: dict[str, Callable[..., Json | None]] = {
            "describe_parameters": self.describe_parameters,
            "open_channels": self.open_channels,
            "begin_push": self.state.begin_push,
            "receive_push": self.receive_push,
            "push_report": self.state.push_report,
            "finish_push": self.state.finish_push,
            "hold_loaded": self.state.hold_loaded,
            "held_push": self.state.held_push,
            "drop_weights": self.drop_weights,
        }

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a push fills, by name."""

    def can_sleep(self) -> bool:
        """Whether the engine can free the memory of its weights."""
        return False

    def receive(self, receiver: Receiver, received: dict[str, Tensor]) -> Mapping[str, int]:
        """Receive a push into `received`, the `tensors`; returns checksums for `check_reports`."""
        return receiver.receive_weights(received)

    def answer(self, call: str, question: str, **arguments: Any) -> Json:
        """Answer a `call`, one of `_calls`, with plain data. The answer repeats `question`, which
        is new for every call: the client recognises answers to earlier calls."""
        return {"question": question, **(self._calls[call](**arguments) or {})}

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def open_channels(self, transfer: Json, engine: int, channels: str) -> None:
        """Open channels to all ranks that send to this worker, replacing earlier ones."""
        # Before anything may fail: the last trainer owns the worker even without channels.
        self.state.use_channels(channels)
        # Errors are kept, not raised: vLLM would pass on the first worker's error, and return the
        # unread answers of the other workers to the next calls.
        with self.state.keep_error():
            self.close()
            self._received = self.tensors()
            self._receiver = open_receiver(
                transfer, engine, self.number, self._received, self.device
            )

    def describe_parameters(self) -> Json:
        return {"parameters": parameter_table(self.tensors())}

    def receive_push(self, push: str) -> None:
        """Fill the tensors, or record the error in the state."""
        if push != self.state.push or self._receiver is None:
            return  # another push has begun, or there are no channels: `state.error` says why
        with self.state.keep_error():
            self.state.mark_loaded(self.receive(self._receiver, self._received))

    def drop_weights(self) -> Json:
        """Hold no weights until the next push; says whether the engine can sleep."""
        self.state.drop_weights()
        return {"can_sleep": self.can_sleep()}
