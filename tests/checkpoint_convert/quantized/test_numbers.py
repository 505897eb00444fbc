"""The quantiser against compressed-tensors' and against the error bound of each format."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

from checkpoint_convert.quantized.numbers import (
    block_maxima,
    dequantized,
    packed,
    quantized,
    relative_scales,
    scales_of,
    unpacked,
    whole_scale,
)
from helpers.models.conversions import assert_same
from helpers.models.quantized import from_nvfp4, nvfp4
from parallel import Box

ROWS, COLUMNS = 384, 512
E4M3 = torch.float8_e4m3fn
KINDS = {
    "fp8": (E4M3, (128, 128), "float", "block"),
    "fp8_channel": (E4M3, (1, COLUMNS), "float", "channel"),
    "int8": (torch.int8, (1, COLUMNS), "int", "channel"),
}


def matrix(rows=ROWS, columns=COLUMNS):
    """Values of many sizes, a block of zeros, and an outlier."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 2, rows)[:, None]
    values[:128, :128] = 0
    values[5] = 0
    values[100, 128] = 3e4
    return values.bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_equals_compressed_tensors(kind):
    dtype, block, name, strategy = KINDS[kind]
    structure = {"block_structure": [*block]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=8, type=name, symmetric=True, strategy=strategy, **structure)
    values = matrix().float()
    tiles = values.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    scales, zeros = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
    found = scales_of(block_maxima(matrix(), block), dtype)
    assert torch.equal(found, scales)
    expected = quantize(values, scales, zeros.to(dtype), args, dtype=dtype)
    numbers = quantized(matrix(), found, dtype, block)
    assert numbers.dtype == dtype
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_errs_by_at_most_half_a_step(kind):
    dtype, block, *_ = KINDS[kind]
    values = matrix().double()
    scales = scales_of(block_maxima(matrix(), block), dtype)
    found = dequantized(quantized(matrix(), scales, dtype, block), scales, block, (0, 0))
    step = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    # FP8 has 3 mantissa bits, and subnormal steps of 2^-9.
    bound = step / 2 if dtype == torch.int8 else torch.maximum(values.abs() / 16, step * 2**-10)
    assert bool(((found - values).abs() <= bound * (1 + 1e-4)).all())
    assert found[:128, :128].count_nonzero() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(384, 512), (200, 300), (130, 129)], ids=str)
def test_quantized_parts_equal_slices_of_the_whole(kind, shape):
    dtype, block, *_ = KINDS[kind]
    block = block if kind == "fp8" else (1, shape[1])
    values = matrix(*shape)
    maxima = block_maxima(values, block)
    scales = scales_of(maxima, dtype)
    whole = quantized(values, scales, dtype, block)
    agreed = torch.zeros_like(maxima)
    for row, height in ((0, 50), (50, 77), (127, shape[0] - 127)):
        for column, width in ((0, 100), (100, shape[1] - 100)):
            box = Box((row, column), (height, width))
            offset = (row % block[0], column % block[1])
            part = block_maxima(values[box.slices], block, offset)
            here = agreed[Box((row // block[0], column // block[1]), tuple(part.shape)).slices]
            here.copy_(torch.maximum(here, part))
            numbers = quantized(values[box.slices], scales, dtype, block, box.start)
            assert torch.equal(numbers.view(torch.uint8), whole[box.slices].view(torch.uint8))
    assert torch.equal(agreed, maxima)


# NVFP4.


def normal(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def hard_values():
    """Values of many sizes, zeros of both signs, ties, and a block far below the others."""
    values = normal(96, 64) * torch.logspace(-6, 2, 96)[:, None]
    values[3], values[4, :16], values[5, ::2] = 0, -0.0, -0.0
    values[6, 0], values[6, 1:9] = 6, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25])
    return values.bfloat16()


@pytest.mark.parametrize(
    "values",
    [hard_values(), torch.zeros(2, 32), torch.full((2, 32), 1e-37), normal(8, 32).half()],
    ids=["hard", "zeros", "tiny", "half"],
)
def test_relative_scales_equal_compressed_tensors(values):
    [expected] = nvfp4([values])
    maxima = block_maxima(values, (1, 16))
    whole = whole_scale(maxima.amax())
    scales = relative_scales(maxima, whole)
    numbers = packed(quantized(values, scales.float() / whole, torch.uint8, (1, 16)))
    found = {"weight_packed": numbers, "weight_scale": scales, "weight_global_scale": whole}
    assert_same(found, expected)
    assert torch.equal(packed(unpacked(numbers)), numbers)


def test_nvfp4_changes_normal_weights_by_a_tenth():
    values = normal(1024, 1024).bfloat16()
    [stored] = nvfp4([values])
    error = (from_nvfp4(stored).float() - values.float()).norm() / values.float().norm()
    assert error == pytest.approx(0.095, abs=0.001)
