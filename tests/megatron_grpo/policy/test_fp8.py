"""Weights in FP8: made in the first microbatch of each pass, and gone after it."""

from pathlib import Path

import pytest

from helpers.models.tiny import tiny_model
from helpers.oracle.policies import LENGTHS, accumulate, layout_name, pack_all, start_policy
from helpers.ranks.processes import run_ranks
from megatron_grpo.policy.forward import compute_logprobs
from megatron_grpo.policy.model import unwrapped
from parallel import ParallelDims


def passes(rank: int, folder: Path, dims: ParallelDims) -> list[list[tuple[int, int]]]:
    """By pass and layer: products that quantised the weight, and products that did not.

    Layers have the two attributes of Transformer Engine's, which runs on GPUs only.
    """
    policy, groups = start_policy(rank, folder, dims)
    layers = []

    def multiply(layer, _):
        layer.seen.append(layer.is_first_microbatch)
        layer._fp8_workspaces["weight"] = layer.weight
        layer.is_first_microbatch = False

    for chunk in policy.chunks:
        unwrapped(chunk).config.fp8 = "e4m3"
        layers += [each for name, each in chunk.named_modules() if name.endswith("linear_fc1")]
    for layer in layers:
        layer.is_first_microbatch, layer._fp8_workspaces, layer.seen = True, {}, []
        layer.register_forward_pre_hook(multiply)
    share = pack_all(LENGTHS, dims)
    found = []
    for run in (
        lambda: compute_logprobs(policy, share, 1.0, groups),
        lambda: accumulate(policy, groups, share),
        lambda: accumulate(policy, groups, share[:2]),
    ):
        run()
        assert not any(layer._fp8_workspaces for layer in layers)
        assert all(layer.seen[0] for layer in layers)
        found.append([(sum(each.seen), len(each.seen)) for each in layers])
        for layer in layers:
            layer.seen.clear()
    return found


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(ParallelDims(), marks=pytest.mark.slow),
        ParallelDims(pipeline=2),
        ParallelDims(pipeline=2, virtual_pipeline=2),
    ],
    ids=layout_name,
)
def test_each_pass_quantises_each_weight_once_and_leaves_nothing(dims, tmp_path):
    folder = tiny_model(tmp_path, "qwen3", num_hidden_layers=4)
    for found in run_ranks(dims.world_size, passes, folder, dims, timeout=120):
        for microbatches, of_layers in zip((4, 4, 2), found, strict=True):
            assert of_layers == (4 // dims.pipeline) * [(1, microbatches)]
