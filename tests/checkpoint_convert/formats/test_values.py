"""Values without torch: conversions between all dtypes equal torch's."""

import numpy as np
import pytest
import torch

from checkpoint_convert.formats.torch_values import DTYPES, bit_view
from checkpoint_convert.formats.values import LARGEST, converted, floats
from helpers.conversions import tensor_of

NO_NUMBERS = [torch.inf, -torch.inf, torch.nan]
AT_THE_ENDS = [0.0, -0.0, 1e-42, 1e-8, 65519.9, 65520.0, 3.4e38, 1e300]


def values_of(dtype: str) -> torch.Tensor:
    """Values of all magnitudes of a dtype, including ties when rounding to smaller dtypes."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(100_000, dtype=torch.float64, generator=generator)
    numbers *= 2.0 ** torch.randint(-40, 40, numbers.shape, generator=generator)
    halfway = torch.randint(-(1 << 11), 1 << 11, (10_000,), generator=generator) / 8
    return torch.cat(
        [numbers, halfway, torch.tensor(NO_NUMBERS + AT_THE_ENDS, dtype=torch.float64)]
    ).to(DTYPES[dtype])


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_as_torch_rounds_them(dtype, wanted):
    values = values_of(dtype)
    expected = values.to(DTYPES[wanted])
    found = tensor_of(converted(bit_view(values), dtype, wanted), wanted)
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert np.array_equal(bit_view(found[~is_nan]), bit_view(expected[~is_nan]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_that_words_stand_for(dtype):
    values = values_of(dtype)
    assert np.array_equal(floats(bit_view(values), dtype), values.double().numpy(), equal_nan=True)


def test_what_keeps_its_dtype_keeps_its_bits():
    words = np.arange(1 << 16, dtype="<u2")
    for dtype in ("F16", "BF16"):
        assert converted(words, dtype, dtype) is words


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_value_of_a_dtype(dtype):
    assert torch.finfo(DTYPES[dtype]).max == LARGEST[dtype]


def test_a_tensor_and_its_words_share_their_memory():
    for name, dtype in DTYPES.items():
        tensor = torch.zeros(3, 4, dtype=dtype, requires_grad=True)
        bit_view(tensor)[1, 2] = 1
        assert tensor[1, 2] > 0 and tensor.count_nonzero() == 1
        assert torch.equal(tensor_of(bit_view(tensor), name), tensor)
