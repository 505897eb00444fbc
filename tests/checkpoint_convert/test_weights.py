"""Reading weights: only the requested boxes, converted; no parameter is filled in part."""

import json

import pytest
import torch

from checkpoint_convert import hf_tensors, read_shape
from checkpoint_convert.formats.safetensors_file import create_file
from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.weights import RowCache, open_weights, read_weights
from helpers.models.conversions import (
    ONE_RANK,
    edit_metadata,
    num_bytes_read,
    rank_parameters,
    read_tensor,
    variant,
    weights_of,
)
from parallel import Box, ParallelDims


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16,) * 2],
    ids=str,
)
def test_read_weights_converts_to_the_parameters_dtype(model, tmp_path, stored, wanted):
    weights = {name: value.to(stored) for name, value in weights_of(model).items()}
    _, parameters = rank_parameters(variant(model, tmp_path / "model", weights), dtype=wanted)
    for ours, theirs in {
        "0.output_layer.weight": "lm_head.weight",
        "0.decoder.layers.1.mlp.linear_fc2.weight": "model.layers.1.mlp.down_proj.weight",
    }.items():
        assert torch.equal(parameters[ours], weights[theirs].to(wanted))


def test_read_weights_fills_parameters_in_place(model):
    layout, values = rank_parameters(model, ParallelDims(tensor=2))
    parameters = {n: torch.nn.Parameter(t * torch.nan) for n, t in values.items()}
    reported: list[tuple[int, int]] = []
    read_weights(
        *(model, read_shape(model), layout, parameters), lambda *bytes_of: reported.append(bytes_of)
    )
    assert all(torch.equal(parameters[n].data, values[n]) for n in values)
    num_bytes = sum(p.nbytes for p in parameters.values())
    assert (reported[0], len(reported)) == ((0, num_bytes), len(parameters))
    assert reported[-1] == (num_bytes - [*parameters.values()][-1].nbytes, num_bytes)
    assert all(p.isfinite().all() and p.requires_grad for p in parameters.values())


def test_read_weights_refuses_before_it_fills_a_parameter(model, tmp_path):
    folder = variant(model, tmp_path / "lacking", {"model.norm.weight": None})
    layout, values = rank_parameters(model)
    parameters = {name: torch.full_like(value, torch.nan) for name, value in values.items()}
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        read_weights(folder, read_shape(model), layout, parameters)
    assert all(p.isnan().all() for p in parameters.values())


LARGE = {  # 180 GB: larger than memory
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8192,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 128,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 20,
}
EXPERTS = LARGE | {
    "model_type": "qwen3_moe",
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_experts": 512,
    "moe_intermediate_size": 4096,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("config", "dims"),
    [
        (LARGE, ParallelDims(tensor=4096, pipeline=2)),
        (EXPERTS, ParallelDims(data=4096, pipeline=2, expert=512, expert_tensor=8)),
    ],
    ids=["tensor", "experts"],
)
def test_read_weights_reads_only_the_bytes_of_its_boxes(tmp_path, config, dims):
    """Each rank needs less than 75 MB of a sparse file of more than 180 GB of zeros."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    tensors = {name: ("BF16", size) for name, size in hf_tensors(shape).items()}
    create_file(tmp_path / "model.safetensors", tensors)
    assert (tmp_path / "model.safetensors").stat().st_size > 180e9
    layout, parameters = rank_parameters(tmp_path, dims, 5, torch.bfloat16)
    before = num_bytes_read()
    read_weights(tmp_path, shape, layout, parameters)
    wanted = sum(p.numel() * p.element_size() for p in parameters.values())
    assert wanted < 75e6
    assert wanted <= num_bytes_read() - before < wanted + 500_000  # headers are read too
    assert not any(p.any() for p in parameters.values())


def test_open_weights_refuses_a_missing_part(model, tmp_path):
    def lose_a_layer(metadata):
        metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()

    checkpoint, shape = tmp_path / "checkpoint", read_shape(model)
    import_checkpoint(model, checkpoint, ONE_RANK)
    edit_metadata(checkpoint, lose_a_layer)
    with pytest.raises(ValueError, match=r"is damaged.*\n.*linear_fc2\.weight: \d+ of \d+ elem"):
        open_weights(checkpoint, shape)


# Rows are read once for all their columns.


class Counted:
    """A matrix; records the boxes that are read."""

    def __init__(self, values):
        self.values, self.dtypes, self.boxes = values, {"x": "F32"}, []

    def read_into(self, name, box, target):
        self.boxes.append(box)
        target.copy_(self.values[box.slices])


def columns(first, last, rows=(3, 9)):
    return Box((rows[0], first), (rows[1] - rows[0], last - first))


@pytest.fixture
def matrix():
    return Counted(torch.randn(64, 96))


@pytest.fixture
def cache(matrix):
    return RowCache(matrix, {"x": matrix.values.shape})


def test_row_cache_reads_rows_once(matrix, cache):
    for rows in ((3, 9), (9, 10), (0, 64), (3, 9)):
        for first, last in ((0, 7), (7, 50), (50, 96)):
            box = columns(first, last, rows)
            assert torch.equal(read_tensor(cache, "x", box), matrix.values[box.slices])
    assert [box.size for box in matrix.boxes] == [(count, 96) for count in (6, 1, 64, 6)]


@pytest.mark.parametrize("last_column", [7, 96])
def test_row_cache_passes_whole_and_large_rows(matrix, cache, monkeypatch, last_column):
    if last_column < 96:
        monkeypatch.setattr("checkpoint_convert.weights._MAX_BYTES", 100)
    box = columns(0, last_column)
    for _ in range(2):
        assert torch.equal(read_tensor(cache, "x", box), matrix.values[box.slices])
    assert matrix.boxes == [box, box]


def test_row_cache_forgets_a_failed_read(matrix, cache, monkeypatch):
    expected = read_tensor(cache, "x", columns(0, 7))
    other = columns(0, 7, rows=(10, 16))

    def fail(name, box, target):
        target.zero_()
        raise OSError("no more bytes")

    with monkeypatch.context() as patch:
        patch.setattr(matrix, "read_into", fail)
        for _ in range(2):
            with pytest.raises(OSError):
                read_tensor(cache, "x", other)
    assert torch.equal(read_tensor(cache, "x", columns(0, 7)), expected)
