"""What goes over one link in a push: boxes of tensors, packed into its buffers and unpacked."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from parallel.checksum import NamedSum, copy_and_sum
from parallel.cpu_checksum import BoxCopy, PreparedCopies
from parallel.layout import Box, Copy, Shape
from parallel.transport.buckets import Bucket, bucketed
from parallel.transport.links import Incoming, Link, Outgoing, own_stream
from parallel.views import as_local, as_whole


class Packing:
    """How boxes, as `dtype`, lie in the buffers of a link; the same at both ends.

    Raises ValueError when a box is larger than a buffer.
    """

    def __init__(self, boxes: Sequence[Box], dtype: torch.dtype, bucket_bytes: int) -> None:
        sizes = [box.num_elements * dtype.itemsize for box in boxes]
        if max(sizes, default=0) > bucket_bytes:
            raise ValueError(f"{max(sizes)} bytes in one piece exceed a bucket of {bucket_bytes}")
        self.num_bytes = sum(sizes)
        self.buckets = bucketed(sizes, bucket_bytes)
        self._boxes = boxes
        self._dtype = dtype

    def views(self, bucket: Bucket, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The boxes in a buffer, each with its number."""
        for number, offset in enumerate(bucket.offsets, bucket.first):
            box = self._boxes[number]
            data = buffer[offset : offset + box.num_elements * self._dtype.itemsize]
            yield number, data.view(self._dtype).view(box.size)


class PreparedBuckets:
    """What a stream on a CPU does with each bucket, prepared when it first does it.

    To find the places in memory takes as long as to copy a hundred KB.
    """

    def __init__(self) -> None:
        self._places: list[tuple[object, ...]] = []
        self._prepared: dict[tuple[int, int], PreparedCopies] = {}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Forget all where `tensors` are not in the places where they were."""
        places: list[tuple[object, ...]] = [
            (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            for name, tensor in tensors.items()
        ]
        if places != self._places:
            self._places = places
            self._prepared.clear()

    def make(self, bucket: Bucket, buffer: Tensor, copies: Iterator[BoxCopy]) -> list[NamedSum]:
        """Make the `copies` of a bucket in `buffer`, the same each time; their sums by tensor."""
        key = bucket.first, buffer.data_ptr()
        if key not in self._prepared:
            self._prepared[key] = PreparedCopies([*copies])
        return self._prepared[key].make()


class OutStream:
    """What a trainer rank sends over one link: `packing` has the destinations of `copies`.

    `shapes` are those of the parameters at its end.
    """

    def __init__(
        self,
        link: Outgoing,
        copies: Sequence[Copy],
        shapes: Mapping[str, Shape],
        packing: Packing,
        device: torch.device,
    ) -> None:
        self.link = link
        self._copies = copies
        self._shapes = shapes
        self._packing = packing
        self._device = device
        self._prepared = PreparedBuckets()

    @property
    def num_bytes(self) -> int:
        """Of a push."""
        return self._packing.num_bytes

    def send(self, tensors: Mapping[str, Tensor]) -> list[NamedSum]:
        """Send the boxes of `tensors`; returns when the receiver has taken them.

        Returns what each is to add to the checksum of its parameter: in the engines' dtype, taken
        before the buffer is handed over.
        """
        sums: list[NamedSum] = []
        if self._device.type == "cpu":
            self._prepared.check(tensors)
        with own_stream(self._device), torch.inference_mode():
            for bucket in self._packing.buckets:
                buffer = self.link.next_buffer()
                copies = self._box_copies(bucket, buffer, tensors)
                if self._device.type == "cpu":
                    sums += self._prepared.make(bucket, buffer, copies)
                else:
                    for each in copies:
                        added = copy_and_sum(each.source, each.target, each.box, each.shape)
                        sums.append((each.name, added))
                self.link.hand_over(bucket.num_bytes)
            self.link.flush()
        return sums

    def _box_copies(
        self, bucket: Bucket, buffer: Tensor, tensors: Mapping[str, Tensor]
    ) -> Iterator[BoxCopy]:
        for number, target in self._packing.views(bucket, buffer):
            copy = self._copies[number]
            name, box = copy.destination, copy.destination_box
            yield BoxCopy(name, _payload(copy, tensors), target, box, self._shapes[name])


def _payload(copy: Copy, tensors: Mapping[str, Tensor]) -> Tensor:
    """What `copy` moves, with the dimensions of its destination."""
    whole = as_whole(tensors[copy.source][copy.source_box.slices], copy.source_axes)
    return as_local(whole, copy.destination_axes, len(copy.destination_box.size))


class InStream:
    """What a worker takes from one link into boxes of its parameters, and passes on.

    `onward` is the link to the same worker of the next engine, if there is one.
    """

    def __init__(
        self,
        link: Incoming,
        onward: Outgoing | None,
        arrivals: Sequence[tuple[str, Box]],
        packing: Packing,
        device: torch.device,
    ) -> None:
        self._link = link
        self._onward = onward
        self._arrivals = arrivals
        self._packing = packing
        self._device = device
        self._prepared = PreparedBuckets()

    @property
    def links(self) -> list[Link]:
        """The one that it takes from, and the one to the next engine."""
        return [self._link] if self._onward is None else [self._link, self._onward]

    @property
    def num_bytes(self) -> int:
        """Of a push."""
        return self._packing.num_bytes

    def receive(self, parameters: Mapping[str, Tensor]) -> list[NamedSum]:
        """Fill the boxes of `parameters`; returns when the next engine has taken them, too.

        On a CPU returns what each box, as its parameter holds it now, adds to the checksum.
        """
        sums: list[NamedSum] = []
        buckets = self._packing.buckets
        arrivals = self._link.arrivals([bucket.num_bytes for bucket in buckets])
        if self._device.type == "cpu":
            self._prepared.check(parameters)
        # The parameters may be inference tensors, which are written to in inference mode only, or
        # views of what requires gradients, which autograd refuses to read once it knows of a change
        # (`.data` hides it).
        with own_stream(self._device), torch.inference_mode():
            for buffer, bucket in zip(arrivals, buckets, strict=True):
                if self._onward is not None:
                    self._onward.next_buffer()[: bucket.num_bytes].copy_(buffer)
                    self._onward.hand_over(bucket.num_bytes)
                copies = self._box_copies(bucket, buffer, parameters)
                if self._device.type == "cpu":
                    sums += self._prepared.make(bucket, buffer, copies)
                else:
                    # Not summed: a GPU reads its memory faster than any link fills it, and kernels
                    # for each box take longer than those of one pass for each parameter.
                    for copy in copies:
                        copy.target.copy_(copy.source)
            if self._onward is not None:
                self._onward.flush()
        return sums

    def _box_copies(
        self, bucket: Bucket, buffer: Tensor, parameters: Mapping[str, Tensor]
    ) -> Iterator[BoxCopy]:
        for number, values in self._packing.views(bucket, buffer):
            name, box = self._arrivals[number]
            parameter = parameters[name].data
            yield BoxCopy(name, values, parameter[box.slices], box, tuple(parameter.shape))
