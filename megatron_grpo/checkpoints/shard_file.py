"""A rank's own file of a checkpoint: copied to the host, written, and read box by box.

The file is in Megatron-Core's torch_dist format. Megatron's own writer forks a process for every
file, and its reader executes pickles. torch's FileSystemWriter does not hash its output, and its
FileSystemReader loads whole chunks: all of a tensor for an eighth of its columns.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.formats.torch_dist import StoredChunks, read_chunks
from checkpoint_convert.formats.torch_dist_writer import Chunk
from checkpoint_convert.formats.torch_dtypes import DTYPE_NAMES
from checkpoint_convert.weights import ShardLoader
from megatron_grpo.bars import Show
from megatron_grpo.checkpoints.state import REFERENCE, StatePart
from megatron_grpo.policy.optimizer_state import SplitFloats
from parallel import Box, Layout, ShardMapping
from parallel.page_locked import page_locked_bytes

MAX_CHUNK_BYTES = 1 << 30  # other loaders read chunks whole
_ALIGNMENT = 64  # bytes: `Tensor.view(dtype)` needs an offset that the dtype's size divides


class HostMemory:
    """Host memory for one copy of a rank's saved state, reused from save to save."""

    def __init__(self, *, borrows: bool = False) -> None:
        """With `borrows`, tensors that are in host memory already are not copied."""
        self._bytes, self.borrows = torch.empty(0, dtype=torch.uint8), borrows

    def copy(self, tensors: Sequence[Tensor | SplitFloats]) -> list[memoryview]:
        """Copy the tensors, row-major; the copies are valid until the next call.

        Borrowed tensors are returned as they are: valid until they change.
        """
        borrowed = [self._borrowed(tensor) for tensor in tensors]
        tensors = [t for t, own in zip(tensors, borrowed, strict=True) if own is None]
        copies = iter(self._copied(tensors))
        return [next(copies) if own is None else own for own in borrowed]

    def _borrowed(self, tensor: Tensor | SplitFloats) -> memoryview | None:
        if not self.borrows or isinstance(tensor, SplitFloats):
            return None
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return None
        return tensor.view(-1).view(torch.uint8).numpy().data

    def _copied(self, tensors: Sequence[Tensor | SplitFloats]) -> list[memoryview]:
        room = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if sum(room) > len(self._bytes):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # so old and new are never held at once
            self._bytes = page_locked_bytes(sum(room))
        copies, whole = [], self._bytes.numpy().data
        for tensor, offset in zip(tensors, accumulate(room, initial=0), strict=False):
            place = slice(offset, offset + tensor.nbytes)
            target = self._bytes[place].view(tensor.dtype).view(tensor.shape)
            values = tensor.joined() if isinstance(tensor, SplitFloats) else tensor
            target.copy_(values, non_blocking=True)
            copies.append(whole[place])
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are made
        return copies


def chunks_to_write(parts: Iterable[StatePart]) -> tuple[list[Chunk], list[Tensor | SplitFloats]]:
    """Chunks that this rank writes of its parts, and the values of each, as views."""
    chunks: list[Chunk] = []
    tensors: list[Tensor | SplitFloats] = []
    for part in parts:
        if part.is_replica:
            continue
        for box in part.box.cut(MAX_CHUNK_BYTES // part.values.itemsize):
            chunks.append(Chunk(part.key, box, part.shape, DTYPE_NAMES[part.values.dtype]))
            inside = box.moved(part.box.start, (0,) * len(part.box.start))
            tensors.append(part.values[inside.slices])
    return chunks, tensors


def read_parts(
    folder: Path,
    parts: Sequence[StatePart],
    show: Show = lambda done, total: None,
    *,
    is_resumed: bool = True,
) -> None:
    """Fill all parts, in place, from a checkpoint that was saved at any layout.

    Raises ValueError that names missing tensors and wrong shapes, or if only the checkpoint or only
    the resumed run has a reference that follows the policy: it would silently start over.
    """
    keys = {part.key for part in parts}
    done, num_bytes = 0, sum(part.values.nbytes for part in parts)
    stored = read_chunks(folder, lambda key: key in keys or key.startswith(REFERENCE))
    with closing(stored.tensors):
        if is_resumed:
            _check_reference(folder, set(stored.shapes), keys)
        _check_shapes(folder, stored, parts)
        names = [str(number) for number in range(len(parts))]
        pieces = tuple(
            ShardMapping(name, Box.whole(part.box.size), part.key, part.box)
            for name, part in zip(names, parts, strict=True)
        )
        layout = Layout({piece.local: piece.box.size for piece in pieces}, pieces)
        loader = ShardLoader(stored.tensors, stored.layout, layout)
        for name, part in zip(names, parts, strict=True):
            show(done, num_bytes)
            done += part.values.nbytes
            _fill(folder, loader, name, part, stored)


def _fill(
    folder: Path, loader: ShardLoader, name: str, part: StatePart, stored: StoredChunks
) -> None:
    there = part.box.overlap(Box.whole(stored.shapes[part.key]))
    num_elements = there.num_elements if there else 0
    if loader.num_elements(name) != num_elements:
        raise ValueError(f"{folder} does not hold all of {part.key}")
    values = part.values
    if isinstance(values, Tensor) and values.is_cpu:
        staged = values
    else:
        staged = torch.empty(values.shape, dtype=values.dtype)
    if num_elements < part.box.num_elements:
        staged.zero_()  # rows that this layout pads are in no checkpoint
    loader.fill(name, staged)
    if staged is not values:
        values.copy_(staged)


def _check_reference(folder: Path, stored: set[str], wanted: set[str]) -> None:
    is_stored, is_wanted = (any(key.startswith(REFERENCE) for key in k) for k in (stored, wanted))
    if is_stored != is_wanted:
        raise ValueError(
            f"{folder} holds {'the' if is_stored else 'no'} weights of a reference model that "
            f"follows the policy, but grpo.sync_ref_model is {str(is_wanted).lower()}: set it to "
            f"{str(is_stored).lower()}, or choose another train.run_dir"
        )


def _check_shapes(folder: Path, stored: StoredChunks, parts: Sequence[StatePart]) -> None:
    faults = []
    for key, shape, is_padded in {(part.key, part.shape, part.is_padded) for part in parts}:
        found = stored.shapes.get(key)
        if found is None:
            faults.append(f"{key} is missing")
        elif found != shape and not (is_padded and found[1:] == shape[1:]):
            faults.append(f"{key} has shape {list(found)}, not {list(shape)}")
    if faults:
        raise ValueError(f"{folder} belongs to another model:\n  " + "\n  ".join(sorted(faults)))
