"""Fields of `model.megatron` that change speed, memory or rounding change no number."""

from pathlib import Path

import pytest

from checkpoint_convert import read_shape
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import (
    LENGTHS,
    Numbers,
    OracleCase,
    layout_name,
    numbers_of,
    pack_all,
    tiny_config,
)
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.megatron_fields import PERFORMANCE_FIELDS
from megatron_grpo.policy.model import build_policy
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups

SELECTIVE = "recompute_granularity=selective"
SETTINGS = [
    ["batch_p2p_sync=false"],
    ["bias_activation_fusion=true"],
    ["bias_dropout_fusion=true"],
    ["clone_scatter_output_in_embedding=false"],
    ["deterministic_mode=true"],
    ["disable_bf16_reduced_precision_matmul=true"],
    ["moe_router_dtype=fp64"],
    ["moe_shared_expert_overlap=true"],
    ["moe_token_dispatcher_type=alltoall", "transformer_impl=local"],
    ["recompute_granularity=full", "recompute_method=block", "recompute_num_layers=1"],
    [
        "fine_grained_activation_offloading=true",
        "offload_modules=[attn_norm,qkv_linear,core_attn,attn_proj,mlp_norm]",
        "min_offloaded_tensor_size=64",
    ],
    [SELECTIVE, "recompute_modules=[core_attn,shared_experts]"],
    [SELECTIVE, "recompute_modules=[mlp,moe]", "moe_shared_expert_overlap=true"],
]
ON_GPUS = {
    "apply_rope_fusion",
    "attention_backend",
    "cp_comm_type",
    *("fp8", "fp8_recipe", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    "gradient_accumulation_fusion",
    "moe_flex_dispatcher_backend",
    "moe_permute_fusion",
    "moe_router_fusion",
}
"""Fields of Transformer Engine's layers: see tests/gpu."""


def test_every_field_is_tried():
    tried = {setting.partition("=")[0] for settings in SETTINGS for setting in settings}
    assert tried | ON_GPUS == {*PERFORMANCE_FIELDS}


def numbers_by_setting(rank: int, folder: Path, dims: ParallelDims) -> list[Numbers]:
    setup_device(rank)
    groups, shape = init_groups(dims), read_shape(folder)
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    policies = (
        build_policy(
            tiny_config(folder, dims, *map("model.megatron.{}".format, each)), shape, groups
        )
        for each in SETTINGS
    )
    return [numbers_of(policy, groups, share) for policy in policies]


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(ParallelDims(tensor=2, data=2, expert=2), marks=pytest.mark.slow),
        pytest.param(ParallelDims(tensor=2, context=2, expert=2), marks=pytest.mark.slow),
        ParallelDims(pipeline=2, virtual_pipeline=2, data=2, expert=2),
    ],
    ids=layout_name,
)
def test_logprobs_and_gradients_equal_transformers(tmp_path, dims):
    """A model with a dense layer, a shared expert and experts chosen by biased scores."""
    case = OracleCase.of(tiny_model(tmp_path, "glm4_moe", num_hidden_layers=4))
    ranks = run_ranks(dims.world_size, numbers_by_setting, case.folder, dims, timeout=240)
    for number, setting in enumerate(SETTINGS):
        print(setting)  # what failed, if it does
        case.check([rank[number] for rank in ranks])
