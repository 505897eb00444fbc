"""How the weights of a push come to a worker: over channels, or from a folder that ranks wrote."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.weights import read_weights
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import worker_layouts
from megatron_grpo.engine_weights.protocol import Json
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
