"""`megatron-grpo plan --instantiate`: every rank of a large job, built in one small process."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from checkpoint_convert import megatron_layout, read_shape
from checkpoint_convert.families.multimodal import MULTIMODAL
from helpers.models.images import PATCH_SIZES, tiny_vision_model
from helpers.models.published import write_config
from helpers.models.tiny import tiny_model
from helpers.models.towers import tiny_multimodal
from helpers.oracle.policies import tiny_config
from helpers.ranks.processes import run_ranks
from helpers.runs.train import TINY_CONFIG
from megatron_grpo import cli
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.planning import instantiate as built_rank
from megatron_grpo.planning.instantiate import BuiltRank, build_ranks, distinct_ranks, instantiate
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.policy import model
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups


def config(folder, *overrides, **sizes):
    return tiny_config(folder, ParallelDims(**sizes), "model.dtype=bfloat16", *overrides)


@pytest.mark.slow
def test_instantiate_405b_on_512_ranks_as_planned(elsewhere, tmp_path):
    folder = write_config(tmp_path, "Llama-3.1-405B")
    sizes = {"tensor": 8, "pipeline": 16, "virtual_pipeline": 2, "data": 4}
    found = elsewhere(instantiate, config(folder, "rollout.tensor_parallel_size=16", **sizes))
    assert found.faults == []
    table = found.table
    assert "llama, 405.85 B parameters in bfloat16, on 512 ranks" in table
    assert "128 of 512 ranks, one of each kind, were built" in table
    # The first and the last chunk are a layer shorter: they hold the embedding and the head.
    assert "0-31                 0  3+4 " in table and "480-511             15  4+3 " in table


MTP_LAYERS = "num_nextn_predict_layers"
ODD = [
    # Fewer key-value heads than tensor ranks, and a vocabulary that they do not divide.
    ("llama", {"num_key_value_heads": 1}, {"tensor": 4, "data": 2}),
    # An embedding tied over two stages, which are not equally high.
    ("qwen3", {"tied": True, "num_hidden_layers": 3}, {"tensor": 2, "pipeline": 2}),
    (
        "qwen2",
        {"num_hidden_layers": 7},
        {"pipeline": 2, "virtual_pipeline": 2, "num_layers_in_last_pipeline_stage": 5},
    ),
    # Experts over data and context ranks, each split over fewer tensor ranks than attention.
    (
        "qwen3_moe",
        {"tied": True, "mlp_only_layers": [1]},
        {"tensor": 4, "context": 2, "data": 2, "expert": 4, "expert_tensor": 2, "pipeline": 2},
    ),
    ("mixtral", {}, {"data": 4, "expert": 2, "expert_tensor": 2}),
    # A text tower whose weight files stack experts.
    ("qwen3_vl_moe", {}, {"tensor": 2, "data": 2, "expert": 2, "pipeline": 2}),
    # Dense layers first: the first chunk has a dense layer only, the second one of each kind.
    (
        "glm4_moe",
        {"num_hidden_layers": 5, "first_k_dense_replace": 2},
        {"tensor": 4, "data": 2, "expert": 2, "pipeline": 2, "virtual_pipeline": 2},
    ),
    ("deepseek_v3", {}, {"tensor": 2, "data": 2, "expert": 4, "expert_tensor": 1, "pipeline": 3}),
    # A module in each layer: the last chunk has no experts.
    ("nemotron_h", {}, {"tensor": 2, "data": 2, "expert": 4, "expert_tensor": 1, "pipeline": 2}),
    # Indexers, which are not trained, and have a norm in float32.
    ("deepseek_v32", {}, {"tensor": 2, "data": 2, "expert": 4, "expert_tensor": 1}),
    # A layer for multi-token prediction, which is trained; with one stage, and with two.
    ("deepseek_v3", {MTP_LAYERS: 1}, {"tensor": 2, "data": 2, "expert": 2}),
    ("glm4_moe", {MTP_LAYERS: 1}, {"tensor": 2, "expert_tensor": 1, "pipeline": 2, "data": 2}),
    ("qwen3_next", {MTP_LAYERS: 1}, {"tensor": 2, "expert_tensor": 1, "pipeline": 3, "data": 2}),
]


@pytest.mark.parametrize(("family", "own", "sizes"), ODD, ids=str)
def test_instantiate_odd_layouts_of_every_family_as_planned(
    elsewhere, tmp_path, family, own, sizes
):
    make = tiny_multimodal if family in MULTIMODAL else tiny_model
    options = [f"model.mtp_num_layers={own.get(MTP_LAYERS, 0)}"]
    if family == "mixtral":
        options.append("model.freeze_moe_router=true")
    if family == "qwen3_moe":
        leave = "fine_grained_activation_offloading: true, offload_modules: [core_attn]"
        options.append(f"model.megatron={{{leave}}}")
    cfg = config(make(tmp_path, family, **own), *options, **sizes)
    assert elsewhere(instantiate, cfg).faults == []


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_build_ranks_with_a_vision_tower_as_planned(elsewhere, tmp_path, family):
    folder = tiny_vision_model(tmp_path / "model", family)
    trained = "model.freeze_vision=false", "data.image_column=image", "optimizer.optimizer=muon"
    last = {"num_layers_in_last_pipeline_stage": 1}
    cfg = config(folder, *trained, tensor=2, pipeline=2, data=3, **last)
    for rank in elsewhere(fake_ranks, cfg):
        planned = state_bytes(cfg, trained_shape(cfg), rank.sender.rank)
        assert rank.faults == () and (planned.weights, planned.gradients, planned.optimizer) == (
            *(rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes),
        )


def real_bytes(rank, cfg):
    """Bytes of weights, gradients and optimizer of a real rank with its peers and weights."""
    setup_device(rank)
    policy = model.build_policy(cfg, read_shape(cfg.model.path), init_groups(cfg.dims))
    weights = sum(each.nbytes for each in policy.parameters().values())
    return weights, built_rank.gradient_bytes(policy), built_rank.optimizer_bytes(policy)


def fake_ranks(cfg) -> list[BuiltRank]:
    return build_ranks(cfg, trained_shape(cfg))


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_build_ranks_with_the_bytes_of_real_ones_and_of_the_plan(elsewhere, tmp_path, optimizer):
    folder = tiny_model(tmp_path, "qwen3", tied=True)
    cfg = config(folder, f"optimizer.optimizer={optimizer}", tensor=2, pipeline=2)
    built = elsewhere(fake_ranks, cfg)
    assert [rank.sender.rank for rank in built] == [0, 1, 2, 3]
    real = run_ranks(4, real_bytes, cfg)
    assert [
        (rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes) for rank in built
    ] == real
    planned = [state_bytes(cfg, read_shape(folder), rank) for rank in range(4)]
    assert [(each.weights, each.gradients, each.optimizer) for each in planned] == real
    assert [rank.weight_bytes for rank in built] == [
        rank.sender.layout.num_elements * torch.bfloat16.itemsize for rank in built
    ]


LINEAR, ATTENDING = "linear_attention", "full_attention"
LAYER_TYPES = [LINEAR, ATTENDING, LINEAR, LINEAR] * 2
IN_BUCKETS = [
    # Numbers of ranks that do not divide the parameters, so that buckets are padded at their ends.
    # An embedding tied over two stages: on the second they do not divide the gradients, either.
    ("SmolLM2-135M", {}, {"data": 7, "pipeline": 2}),
    # Larger buckets for more data ranks; context ranks do not count.
    ("SmolLM2-135M", {}, {"data": 61, "context": 2}),
    ("Qwen3-30B-A3B", {"num_hidden_layers": 4}, {"data": 10, "expert": 2, "pipeline": 2}),
    # Small parameters of linear attention, in the order of layers: not kind by kind.
    (
        "Qwen3-Next-80B-A3B",
        {"num_hidden_layers": 8, "num_experts": 16, "layer_types": LAYER_TYPES},
        {"data": 10, "expert": 2, "pipeline": 2},
    ),
]


@pytest.mark.parametrize(("name", "own", "sizes"), IN_BUCKETS, ids=str)
def test_build_ranks_with_gradients_in_buckets_as_planned(elsewhere, tmp_path, name, own, sizes):
    folder = write_config(tmp_path, name, **own)
    cfg = config(folder, "parallel.overlap_grad_reduce=true", **sizes)
    for rank in elsewhere(fake_ranks, cfg):
        planned = state_bytes(cfg, read_shape(folder), rank.sender.rank)
        assert planned.gradients == rank.gradient_bytes
        assert planned.optimizer == rank.optimizer_bytes


def test_distinct_ranks_leave_out_copies_alone():
    assert distinct_ranks(ParallelDims(tensor=2, data=3, pipeline=2)) == [0, 1, 6, 7]
    assert distinct_ranks(ParallelDims(tensor=2, context=2, data=3)) == [0, 1, 2, 3]
    # Experts differ between data ranks 0 and 1, and are copies on 2 and 3.
    assert distinct_ranks(ParallelDims(data=4, expert=2)) == [0, 1]


def neighbours_layout(shape, dims, at, **options):
    """The layout of the neighbouring tensor rank: all shapes are right."""
    return megatron_layout(shape, dims, replace(at, tensor=dims.tensor - 1 - at.tensor), **options)


def layout_of_a_wider_mlp(shape, dims, at, **options):
    wider = replace(shape, intermediate_size=shape.intermediate_size + dims.tensor)
    return megatron_layout(wider, dims, at, **options)


def instantiate_with(layout_function, cfg) -> list[str]:
    with patch.object(model, "megatron_layout", layout_function):
        return instantiate(cfg).faults


@pytest.mark.parametrize(
    ("layout_function", "expected"),
    [
        (
            neighbours_layout,
            "rank 1: 0.decoder.layers.1.mlp.linear_fc2.weight holds "
            "model.layers.1.mlp.down_proj.weight[0:64, 48:96] at [0, 0] as built and "
            "model.layers.1.mlp.down_proj.weight[0:64, 0:48] at [0, 0] as planned",
        ),
        (
            layout_of_a_wider_mlp,
            "rank 0: 0.decoder.layers.1.mlp.linear_fc2.weight is [64, 48] bfloat16 as built and "
            "[64, 49] bfloat16 as planned",
        ),
    ],
    ids=["place", "shape"],
)
def test_instantiate_reports_parameters_of_another_place_or_shape(
    elsewhere, layout_function, expected, tmp_path
):
    cfg = config(tiny_model(tmp_path, "qwen3"), tensor=2)
    faults = elsewhere(instantiate_with, layout_function, cfg)
    assert expected in faults
    assert not any("layernorm" in fault for fault in faults)  # unsplit parameters are right


def instantiate_without_the_last_rank(cfg) -> list[str]:
    def all_but_one(dims):
        return distinct_ranks(dims)[:-1]

    with patch("megatron_grpo.planning.instantiate.distinct_ranks", all_but_one):
        return instantiate(cfg).faults


def test_instantiate_reports_parts_that_no_rank_holds(elsewhere, tmp_path):
    cfg = config(tiny_model(tmp_path, "qwen3"), tensor=2)
    (fault,) = elsewhere(instantiate_without_the_last_rank, cfg)
    assert "model.layers.1.mlp.down_proj.weight: 3072 of 6144 elements are in no piece" in fault


def run_plan(layout_function, *arguments):
    """Exit code, stdout and stderr of `megatron-grpo plan`."""
    with patch.object(model, "megatron_layout", layout_function):
        ended = CliRunner().invoke(cli.app, ["plan", str(TINY_CONFIG), "--instantiate", *arguments])
    return ended.exit_code, ended.stdout, ended.stderr


def test_plan_instantiate_prints_a_table_or_faults(elsewhere, tmp_path):
    path = f"model.path={tiny_model(tmp_path, 'qwen3')}"
    exit_code, stdout, stderr = elsewhere(run_plan, megatron_layout, path)
    assert (exit_code, stderr) == (0, "")
    assert "\ntrainer: tp(2) * pp(2) * cp(2) * dp(1) = 8 ranks\n" in stdout
    exit_code, stdout, stderr = elsewhere(run_plan, layout_of_a_wider_mlp, path)
    assert (exit_code, stdout) == (1, "")
    assert stderr.startswith("megatron-grpo: 16 differences from the plan\nrank 0: 0.decoder.")
