"""Checkpoints and steps of training in the environment of another release of Megatron-Core."""

import os
import subprocess
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert import read_shape
from checkpoint_convert.megatron import hf_tensors
from helpers.policies import (
    LENGTHS,
    accumulate,
    checkpoints_of,
    gradient_boxes,
    pack_all,
    save_checkpoint,
    start_policy,
)
from helpers.ranks import run_ranks
from megatron_grpo.policy.optimizer import apply_gradient, gradient_norm
from parallel import Box, ParallelDims

ROOT = Path(__file__).parents[2]
OTHER_PYTHON = os.environ.get("OTHER_PYTHON")
"""The interpreter of an environment with another release."""

Boxes = list[tuple[str, Box, Tensor]]


def run_steps(
    rank: int, model: Path, dims: ParallelDims, resumed: Path | None, saved: Path
) -> Boxes:
    """Take a step from the model or a checkpoint, save the state *before* it, and return gradients.

    They are those of the step and of one after it, which also depends on the moments.
    """
    policy, groups = start_policy(rank, model, dims)
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    if resumed:
        checkpoints_of(resumed, policy, model, dims).load()
    else:  # a checkpoint with moments that are not zero
        accumulate(policy, groups, share)
        apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
    save_checkpoint(saved, 1, policy, model, dims)
    boxes: Boxes = []
    for number in (1, 2):
        accumulate(policy, groups, share)
        apply_gradient(policy.optimizer, gradient_norm(policy.optimizer))
        boxes += [(f"{number} {name}", box, values) for name, box, values in gradient_boxes(policy)]
    return boxes


def gradients(
    model: Path, dims: ParallelDims, resumed: Path | None, saved: Path
) -> dict[str, Tensor]:
    """`run_steps` on the ranks of `dims`: whole gradients by number of the step and name."""
    shapes = hf_tensors(read_shape(model))
    whole: dict[str, Tensor] = {}
    for boxes in run_ranks(dims.world_size, run_steps, model, dims, resumed, saved):
        for key, box, values in boxes:
            shape = shapes[key.split(" ", 1)[1]]
            whole.setdefault(key, torch.zeros(shape))[box.slices] = values
    return whole


class Elsewhere:
    """A process in the environment of `OTHER_PYTHON`: one, as it imports for half a minute."""

    def __init__(self) -> None:
        assert OTHER_PYTHON
        self._connection, theirs = Pipe()
        code = f"from helpers import releases; releases.main({theirs.fileno()})"
        self._process = subprocess.Popen(
            [OTHER_PYTHON, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def gradients(
        self, model: Path, dims: ParallelDims, resumed: Path | None, saved: Path
    ) -> dict[str, Tensor]:
        """`gradients`, computed there."""
        result = saved.with_suffix(".pt")
        paths = [each and str(each) for each in (model, resumed, saved, result)]
        self._connection.send((asdict(dims), *paths))  # a Path is another class in Python 3.13
        assert self._connection.poll(200), "the other release does not answer"
        self._connection.recv()  # raises EOFError if it has failed
        found: dict[str, Tensor] = torch.load(result)
        return found

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def main(fd: int) -> None:
    """The other environment's part of `Elsewhere`."""
    connection = Connection(fd)
    while True:
        sizes, model, resumed, saved, result = connection.recv()
        start = Path(resumed) if resumed else None
        torch.save(gradients(Path(model), ParallelDims(**sizes), start, Path(saved)), result)
        connection.send("done")
