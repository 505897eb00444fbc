"""The data of one channel in a push: boxes of tensors, packed into its buffers and unpacked."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from parallel.checksum import BoxCopy, NamedSum, PreparedCopies, copied_and_summed
from parallel.layout import Box, Copy, Shape
from parallel.views import as_local, as_whole
from parallel.weight_transfer.buckets import Bucket, bucketed
from parallel.weight_transfer.channels import Channel, own_stream


class Packing:
    """How boxes, each as its dtype, are placed in the buffers of a channel; the same at both ends.

    Raises ValueError if a box is larger than a buffer.
    """

    def __init__(
        self, boxes: Sequence[Box], dtypes: Sequence[torch.dtype], bucket_bytes: int
    ) -> None:
        sizes = [
            box.num_elements * dtype.itemsize for box, dtype in zip(boxes, dtypes, strict=True)
        ]
        if max(sizes, default=0) > bucket_bytes:
            raise ValueError(f"{max(sizes)} bytes in one piece exceed a bucket of {bucket_bytes}")
        self.num_bytes = sum(sizes)
        self.buckets = bucketed(sizes, bucket_bytes)
        self._boxes = boxes
        self._dtypes = dtypes

    def views(self, bucket: Bucket, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The boxes in a buffer, each with its number."""
        for number, offset in enumerate(bucket.offsets, bucket.first):
            box, dtype = self._boxes[number], self._dtypes[number]
            data = buffer[offset : offset + box.num_elements * dtype.itemsize]
            yield number, data.view(dtype).view(box.size)


class _Stream:
    def __init__(self, channel: Channel, packing: Packing, device: torch.device) -> None:
        self.channel, self.packing, self._device = channel, packing, device
        self._addresses: list[tuple[object, ...]] = []
        self._prepared: dict[tuple[int, int], PreparedCopies] = {}
        """On a CPU, the copies of each bucket, by its first box and its buffer's address: looking
        up the addresses takes as long as copying a hundred KB."""

    def _clear_if_moved(self, tensors: Mapping[str, Tensor]) -> None:
        """Drop the prepared copies if any of `tensors` has moved in memory."""
        addresses: list[tuple[object, ...]] = [
            (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            for name, tensor in tensors.items()
        ]
        if addresses != self._addresses:
            self._addresses = addresses
            self._prepared.clear()

    def _copy_on_cpu(
        self, bucket: Bucket, buffer: Tensor, copies: Iterator[BoxCopy]
    ) -> list[NamedSum]:
        """Make the `copies` of a bucket in `buffer`, the same each time; returns sums by tensor."""
        key = bucket.first, buffer.data_ptr()
        if key not in self._prepared:
            self._prepared[key] = PreparedCopies([*copies])
        return self._prepared[key].make()


class OutStream(_Stream):
    """What a trainer rank sends over one channel: `packing` contains the destinations of `copies`.

    `shapes` are those of the receiver's parameters.
    """

    def __init__(
        self,
        channel: Channel,
        copies: Sequence[Copy],
        shapes: Mapping[str, Shape],
        packing: Packing,
        device: torch.device,
    ) -> None:
        super().__init__(channel, packing, device)
        self._copies, self._shapes = copies, shapes

    def send_boxes(self, tensors: Mapping[str, Tensor]) -> list[NamedSum]:
        """Send the boxes of `tensors`; returns when the receiver has taken them.

        Returns the contribution of each to the checksum of its parameter, computed in the engines'
        dtype before the buffer is sent.
        """
        sums: list[NamedSum] = []
        # A mapping that computes its tensors on access has them in new memory each time.
        are_repeated = self._device.type == "cpu" and isinstance(tensors, dict)
        if are_repeated:
            self._clear_if_moved(tensors)
        with own_stream(self._device), torch.inference_mode():
            for bucket in self.packing.buckets:
                buffer = self.channel.next_buffer()
                copies = self._box_copies(bucket, buffer, tensors)
                if are_repeated:
                    sums += self._copy_on_cpu(bucket, buffer, copies)
                else:
                    sums += copied_and_summed(copies)
                self.channel.send_bucket(bucket.num_bytes)
            self.channel.flush()
        return sums

    def _box_copies(
        self, bucket: Bucket, buffer: Tensor, tensors: Mapping[str, Tensor]
    ) -> Iterator[BoxCopy]:
        for number, target in self.packing.views(bucket, buffer):
            copy = self._copies[number]
            name, box = copy.destination, copy.destination_box
            whole = as_whole(tensors[copy.source][copy.source_box.slices], copy.source_axes)
            source = as_local(whole, copy.destination_axes, len(box.size))
            yield BoxCopy(name, source, target, box, self._shapes[name])


class InStream(_Stream):
    """What a worker receives on one channel, copies to boxes of its parameters, and forwards.

    `onward` is the channel to the same worker of the next engine, if there is one.
    """

    def __init__(
        self,
        channel: Channel,
        onward: Channel | None,
        arrivals: Sequence[tuple[str, Box]],
        packing: Packing,
        device: torch.device,
    ) -> None:
        super().__init__(channel, packing, device)
        self._onward, self._arrivals = onward, arrivals

    def receive_boxes(self, parameters: Mapping[str, Tensor]) -> list[NamedSum]:
        """Fill the boxes of `parameters`; returns when the next engine has taken them, too.

        On a CPU, returns the contribution of each box to the checksum, as the parameter now holds
        it; on a GPU, an empty list.
        """
        sums: list[NamedSum] = []
        buckets = self.packing.buckets
        buffers = self.channel.receive_buckets([bucket.num_bytes for bucket in buckets])
        if self._device.type == "cpu":
            self._clear_if_moved(parameters)
        # The parameters may be inference tensors, which can be written only in inference mode, or
        # views of tensors that require gradients, which autograd refuses to read once it knows of a
        # change (`.data` hides it).
        with own_stream(self._device), torch.inference_mode():
            for buffer, bucket in zip(buffers, buckets, strict=True):
                if self._onward is not None:
                    self._onward.next_buffer()[: bucket.num_bytes].copy_(buffer)
                    self._onward.send_bucket(bucket.num_bytes)
                copies = self._box_copies(bucket, buffer, parameters)
                if self._device.type == "cpu":
                    sums += self._copy_on_cpu(bucket, buffer, copies)
                else:
                    # Checksums come later: a GPU reads its memory faster than any channel fills it,
                    # and kernels for each box take longer than one pass over each parameter.
                    for copy in copies:
                        copy.target.copy_(copy.source)
            if self._onward is not None:
                self._onward.flush()
        return sums

    def _box_copies(
        self, bucket: Bucket, buffer: Tensor, parameters: Mapping[str, Tensor]
    ) -> Iterator[BoxCopy]:
        for number, values in self.packing.views(bucket, buffer):
            name, box = self._arrivals[number]
            parameter = parameters[name].data
            yield BoxCopy(name, values, parameter[box.slices], box, tuple(parameter.shape))
