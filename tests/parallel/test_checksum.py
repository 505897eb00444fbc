"""Checksums of tensors as sums over boxes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel import Box
from parallel.checksum import (
    CPU_BLOCK_BYTES,
    BoxCopy,
    added_up,
    checksum,
    copied_and_summed,
    joined,
    whole_checksum,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written_out(tensor: torch.Tensor) -> int:
    """The formula of parallel.checksum's docstring, with Python's unbounded integers."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    per_word = 8 // tensor.element_size()
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % per_word))
    words = rows.contiguous().view(torch.int64).tolist()

    def random(index: int) -> int:
        def shifted(x: int, bits: int) -> int:
            return (x - (1 << 64) if x >> 63 else x) >> bits

        x = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ shifted(x, 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ shifted(x, 27)) * 0x94D049BB133111EB % 2**64
        return (x ^ shifted(x, 31)) % 2**64

    total = sum(
        ((random(2 * r) | 1) + (random(2 * c + 1) & ~1)) * word
        for r, row in enumerate(words)
        for c, word in enumerate(row)
    )
    return (total + 2**63) % 2**64 - 2**63


def test_a_large_tensor_and_its_transposed_copy():
    tensor = random_tensor(1024, 1536)
    top, bottom = tensor.split([1000, 24])
    parts = checksum(top, Box((0, 0), (1000, 1536)), (1024, 1536)) + checksum(
        bottom, Box((1000, 0), (24, 1536)), (1024, 1536)
    )
    assert parts == whole_checksum(tensor)
    assert whole_checksum(tensor.T) == whole_checksum(tensor.T.contiguous())
    assert whole_checksum(tensor.T) != whole_checksum(tensor)


@st.composite
def boxes(draw, max_extent: int = 21) -> tuple[Box, tuple[int, ...]]:
    """A box and the shape of the tensor that it belongs to."""
    shape = draw(st.lists(st.integers(1, max_extent), min_size=1, max_size=4))
    start = [draw(st.integers(0, extent - 1)) for extent in shape]
    size = [draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)]
    return Box(tuple(start), tuple(size)), tuple(shape)


def somewhere(data: st.DataObject, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random values of `size` with any offset, gaps and order of dimensions in memory."""
    order = data.draw(st.permutations(range(len(size))))
    before = [data.draw(st.integers(0, 3)) for _ in size]
    after = [data.draw(st.integers(0, 3)) for _ in size]
    outer = [a + n + b for a, n, b in zip(before, size, after, strict=True)]
    tensor = random_tensor(*(outer[dim] for dim in order), dtype=dtype, seed=len(size))
    tensor = tensor.permute([order.index(dim) for dim in range(len(size))])
    return tensor[tuple(slice(a, a + n) for a, n in zip(before, size, strict=True))]


@pytest.mark.long
@settings(max_examples=200)
@given(boxes(), st.sampled_from([*DTYPES, torch.int8]), st.data())
def test_checksum_of_a_box_in_any_memory_is_a_part_of_its_tensors(place, dtype, data):
    box, shape = place
    values = somewhere(data, box.size, dtype)
    whole = torch.zeros(shape, dtype=dtype)
    whole[box.slices] = values
    assert checksum(values, box, shape) == whole_checksum(whole) == written_out(whole)


@pytest.mark.parametrize("start, end", [(0, 40_000), (1, 39_998), (4, 32_772), (3, 32_773)])
@pytest.mark.parametrize("num_rows", [1, 30])
def test_rows_of_more_than_one_block(num_rows, start, end):
    whole = random_tensor(num_rows, 40_000)
    assert num_rows == 1 or whole.nbytes > 2 * CPU_BLOCK_BYTES
    box, shape = Box((0, start), (num_rows, end - start)), (num_rows, 40_000)
    target = torch.zeros(shape, dtype=whole.dtype)
    target[box.slices] = whole[box.slices]
    assert checksum(whole[box.slices], box, shape) == whole_checksum(target) == written_out(target)


@pytest.mark.parametrize("shape", [(300, 1000), (3, 100_000)])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_a_copy_may_change_the_dtype(shape, dtypes):
    source = random_tensor(*shape, dtype=dtypes[0])
    target = torch.zeros(shape, dtype=dtypes[1])
    copies = [BoxCopy("", source, target, Box.whole(shape), shape)]
    assert added_up(copied_and_summed(copies)) == {"": written_out(target)}
    assert torch.equal(target, source.to(dtypes[1]))


HALVES = [Box((expert, half, 4), (1, 3, 8)) for expert in range(4) for half in (0, 3)]
"""Columns from the fourth on of the upper and of the lower three rows of four experts."""


@pytest.mark.parametrize(
    ("boxes", "sizes"),
    [
        (HALVES, [(24, 8)]),
        (HALVES[1:4] + HALVES[5:], [(9, 8), (9, 8)]),
        (HALVES[1::-1], [(1, 3, 8)] * 2),
        ([Box((0, 0, 4), (1, 6, 8)), Box((1, 0, 4), (3, 6, 8))], [(24, 8)]),
        ([Box((0, 0, 4), (2, 3, 8)), Box((2, 0, 4), (2, 3, 8))], [(2, 3, 8)] * 2),
        ([Box((0, 0, 4), (1, 3, 8)), Box((0, 3, 0), (1, 3, 4))], [(1, 3, 8), (1, 3, 4)]),
    ],
    ids=["all", "one is missing", "backwards", "several experts", "rows apart", "other columns"],
)
def test_boxes_of_consecutive_rows_in_one_buffer_are_summed_as_one(boxes, sizes):
    whole, shape = random_tensor(4, 6, 12), (4, 6, 12)
    buffer = torch.zeros(whole.numel(), dtype=whole.dtype)
    copies, end = [], 0
    for box in boxes:
        target = buffer[end : end + box.num_elements].view(box.size)
        copies.append(BoxCopy("experts", whole[box.slices], target, box, shape))
        end += box.num_elements
    assert [copy.box.size for copy in joined(copies)] == sizes
    arrived = torch.zeros_like(whole)
    for box in boxes:
        arrived[box.slices] = whole[box.slices]
    assert added_up(copied_and_summed(copies)) == {"experts": written_out(arrived)}


def test_boxes_of_two_tensors_or_with_a_gap_are_not_joined():
    whole, buffer = random_tensor(4, 8), torch.zeros(5, 8, dtype=torch.bfloat16)
    top, bottom = Box((0, 0), (2, 8)), Box((2, 0), (2, 8))

    def copies(name: str, first_row: int) -> list[BoxCopy]:
        rows = buffer[first_row : first_row + 2]
        return [
            BoxCopy("a", whole[:2], buffer[:2], top, (4, 8)),
            BoxCopy(name, whole[2:], rows, bottom, (4, 8)),
        ]

    assert [len([*joined(copies(*each))]) for each in (("a", 2), ("b", 2), ("a", 3))] == [1, 2, 2]


def test_a_parameter_that_is_trained_can_be_summed():
    tensor = random_tensor(6, 8)
    parameter = torch.nn.Parameter(tensor.clone())
    assert whole_checksum(parameter) == whole_checksum(tensor)
    assert whole_checksum(parameter.T) == whole_checksum(tensor.T)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: torch.cat([t[8:], t[:8]]),  # gate and up swapped
        lambda t: torch.cat([t[:, 16:], t[:, :16]], 1),
        lambda t: t.roll(1, 0),
        lambda t: t.roll(1, 1),
        lambda t: t.flip(1),
        lambda t: torch.cat([t[:8], t[:8]]),  # one box written twice, the other missing
        lambda t: torch.cat([t[:8], torch.zeros_like(t[8:])]),
        lambda t: -t,
    ],
)
def test_checksum_differs_for_misplaced_elements(change):
    tensor = random_tensor(16, 32)
    assert whole_checksum(change(tensor)) != whole_checksum(tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_checksum_on_a_gpu_is_equal():
    tensor = random_tensor(300, 129)
    assert int(whole_checksum(tensor.cuda())) == int(whole_checksum(tensor))
    box, target = Box((0, 0), (300, 129)), torch.zeros(300, 129, dtype=tensor.dtype, device="cuda")
    copy = BoxCopy("", tensor.cuda(), target, box, (300, 129))
    assert added_up(copied_and_summed([copy])) == {"": written_out(tensor)}
    assert torch.equal(target.cpu(), tensor)
