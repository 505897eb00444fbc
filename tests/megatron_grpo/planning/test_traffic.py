"""What computation hides of a step's traffic, compared with hand calculations."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from math import prod

import pytest

from checkpoint_convert import read_shape
from checkpoint_convert.shape import MoeShape
from helpers.models.published import write_config
from helpers.oracle.policies import tiny_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.mlp import copies_to_experts
from megatron_grpo.planning.step_time import forward_flops
from megatron_grpo.planning.workload import Computed, Job
from parallel import ParallelDims

CARD = CARDS["h100"]
SUMS, WEIGHTS = "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"
IN_FOUR = ["grpo.steps_per_generation=4", "grpo.generation_batch_size=64"]
SHARED = ["grpo.shared_prompts=true", "data.max_prompt_length=512"]


def plan(tmp_path, dims, *overrides, name="Llama-3.1-8B", length=1024, card="h100"):
    """A step of 16 sequences of a length, one in a microbatch."""
    folder = write_config(tmp_path, name)
    options = ["model.dtype=bfloat16", "grpo.beta=0.0", "rollout.tensor_parallel_size=8"]
    options += [f"train.max_tokens_per_microbatch={length}", *overrides]
    cfg = tiny_config(folder, dims, *options)
    return plan_job(Job(cfg, read_shape(folder), CARDS[card], [length], 64))


def link(found, purpose):
    return next(use for use in found.time.links if use.purpose == purpose)


BUCKET = 40e6
"""Elements of a bucket, of the 8.03e9 of Llama-3.1-8B."""


@pytest.mark.parametrize(
    ("switches", "length", "hidden"),
    [
        ([], 4096, lambda sums, weights, forward: 0),
        # Microbatches of 4,096 tokens compute for longer than everything takes.
        ([SUMS], 4096, lambda sums, weights, forward: sums),
        ([SUMS, WEIGHTS], 4096, lambda sums, weights, forward: sums),  # each step pushes
        ([SUMS, WEIGHTS, *IN_FOUR], 4096, lambda sums, weights, forward: sums + 3 / 4 * weights),
        # Those of 128 tokens do not.
        ([SUMS], 128, lambda sums, weights, forward: 2 * forward),
        ([SUMS, WEIGHTS, *IN_FOUR], 128, lambda sums, weights, forward: (2 + 3 / 4) * forward),
    ],
)
def test_sums_of_gradients_hide_in_the_last_backward_and_weights_in_the_first_forward(
    switches, length, hidden, tmp_path
):
    data = link(plan(tmp_path, ParallelDims(data=8), *switches, length=length), "data")
    in_buckets = (1 - BUCKET / 8.03e9) * data.seconds / 0.8
    # Sums are of 4 bytes, weights of 2. A forward of a sequence runs at half the card's peak.
    forward = forward_flops(read_shape(tmp_path), Computed.of([length])) / CARD.flops / 0.5
    expected = hidden(in_buckets * 4 / 6, in_buckets * 2 / 6, forward)
    assert data.hidden_seconds == pytest.approx(expected, rel=1e-3)
    assert data.exposed == pytest.approx(data.seconds / 0.8 - expected, abs=1e-3)


def test_no_gathering_hides_where_a_vision_tower_is_trained(tmp_path):
    def hidden(*overrides):
        switches = [SUMS, *IN_FOUR, "data.image_column=image", *overrides]
        job = plan(tmp_path, ParallelDims(data=8), *switches, name="Qwen3-VL-30B-A3B")
        return link(job, "data").hidden_seconds

    trained = "model.freeze_vision=false"
    assert hidden(trained, WEIGHTS) == hidden(trained) < hidden(WEIGHTS)


def test_context_ranks_attend_while_keys_and_values_travel_in_a_ring(tmp_path):
    dims = ParallelDims(context=2)

    def context(*overrides, length=1024):
        return link(plan(tmp_path, dims, *overrides, length=length), "context")

    # Attention grows by the square of the length.
    short, long = context(), context(length=65536)
    attention = 3 * 16 * 32 * 2 * 2 * 32 * 128 * 1024**2 / 2 / 2
    assert short.hidden_seconds == pytest.approx(attention / CARD.flops / 0.5 / 2)
    assert short.exposed > 0
    assert long.exposed == pytest.approx(0)
    heads = context("model.megatron.cp_comm_type=a2a")
    # In a forward and a backward, half of 8,192 tokens' queries, keys, values and outputs.
    assert heads.num_bytes == 2 * 32 * 2 * 8192 * (4096 + 1024 + 1024 + 4096) / 2
    assert heads.hidden_seconds == 0
    assert context(*SHARED).hidden_seconds == 0  # gathered before


def test_virtual_stages_hide_sends_but_in_warm_up(tmp_path):
    plain, virtual = (
        link(plan(tmp_path, ParallelDims(pipeline=4, virtual_pipeline=chunks)), "pipeline")
        for chunks in (1, 2)
    )
    assert plain.hidden_seconds == 0
    # Of 16 microbatches in 2 chunks, 2 * 3 + 4 are computed before a backward is.
    assert virtual.exposed == pytest.approx(virtual.seconds / 0.8 * 10 / 32)


def test_tokens_travel_to_experts_while_the_shared_expert_computes(tmp_path):
    dims = ParallelDims(data=8, expert=8, expert_tensor=1)

    def expert(*overrides):
        return link(plan(tmp_path, dims, *overrides, name="GLM-4.5-Air"), "expert")

    shared = 3 * 45 * 2 * 3 * 4096 * 1408 * 16 * 1024 / 8
    overlapped = expert("model.megatron.moe_shared_expert_overlap=true")
    assert expert().hidden_seconds == 0
    assert overlapped.hidden_seconds == pytest.approx(shared / CARD.flops / 0.3, rel=1e-3)


def choices(moe: MoeShape) -> Iterator[list[int]]:
    """The experts of a token: any, or equally many of each of any of the groups."""
    size = moe.num_experts // moe.num_groups
    for groups in combinations(range(moe.num_groups), moe.groups_per_token):
        of_group = moe.experts_per_token // moe.groups_per_token
        members = (range(group * size, (group + 1) * size) for group in groups)
        for each in product(*(combinations(experts, of_group) for experts in members)):
            yield [*chain(*each)]


def sent(moe: MoeShape, expert: int, expert_tensor: int, per_node: int, flex: bool) -> list[float]:
    """Copies of a token to other nodes, and within nodes, in the mean over choices and senders."""
    ranks, counts = expert * expert_tensor, []
    for sender, chosen in product(range(ranks), choices(moe)):
        node, index = divmod(sender, per_node)
        owners = [each // (moe.num_experts // expert) for each in chosen]
        if flex:
            parts = range(expert_tensor)
            reached = {owner * expert_tensor + part for owner, part in product(owners, parts)}
            nodes = {rank // per_node for rank in reached}
            passed_on = sum(rank % per_node != index for rank in reached)
            counts.append((len(nodes - {node}), passed_on))
            continue
        slices = [owner * expert_tensor + sender % expert_tensor for owner in owners]
        others = [rank // per_node != node for rank in slices if rank != sender]
        gathered = len(chosen) * (expert_tensor - 1)
        counts.append((sum(others), len(others) - sum(others) + gathered))
    return [sum(each) / len(counts) for each in zip(*counts, strict=True)]


FLEX = "model.megatron.moe_token_dispatcher_type=flex"
ANY = MoeShape(num_experts=8, experts_per_token=3, intermediate_size=1, normalize_topk=True)
OF_GROUPS = replace(ANY, num_experts=16, experts_per_token=4, num_groups=4, groups_per_token=2)


@pytest.mark.parametrize("moe", [ANY, OF_GROUPS], ids=["any", "of groups"])
@pytest.mark.parametrize(("expert", "expert_tensor"), [(2, 1), (4, 1), (8, 1), (4, 2), (1, 2)])
@pytest.mark.parametrize("overrides", [[], [FLEX]], ids=["alltoall", "flex"])
def test_copies_to_experts_are_those_of_all_choices(
    moe, expert, expert_tensor, overrides, tmp_path
):
    dims = ParallelDims(
        tensor=expert_tensor, data=expert, expert=expert, expert_tensor=expert_tensor
    )
    cfg = tiny_config(write_config(tmp_path, "Qwen3-30B-A3B"), dims, *overrides)
    ranks, per_node = expert * expert_tensor, 2
    expected = sent(moe, expert, expert_tensor, per_node, flex=bool(overrides))
    for rate, (network, in_node) in (1e-9, expected), (1e9, [0, expected[1]]):  # the busier link
        card = replace(CARD, per_node=per_node, network_rate=rate * CARD.node_rate)
        span, copies = copies_to_experts(cfg, moe, card)
        assert copies == pytest.approx(network if network else in_node)
        assert span == (ranks if network else per_node)


def test_copies_to_experts_by_flex_are_one_for_each_gpu(tmp_path):
    dims = ParallelDims(data=8, expert=8, expert_tensor=1)
    many, few = (
        link(plan(tmp_path, dims, *overrides, name="GLM-4.5-Air"), "expert")
        for overrides in ([], [FLEX])
    )
    # Of 128 experts a token has 8; so it has none of 16 with the chance of 112 / 128 and so on.
    missed = prod((112 - n) / (128 - n) for n in range(8))
    assert few.num_bytes / many.num_bytes == pytest.approx(7 * (1 - missed) / 7)


@pytest.mark.parametrize("card", ["h100", "b200"])
def test_activations_hide_behind_the_layers_that_compute_them(card, tmp_path):
    modules = "offload_modules: [qkv_linear, core_attn, attn_proj]"
    fields = f"model.megatron={{fine_grained_activation_offloading: true, {modules}}}"
    plain, moved = (
        plan(tmp_path, ParallelDims(data=8), *overrides, card=card) for overrides in ([], [fields])
    )
    # Of 32 layers: hidden states before and after a norm, queries, keys, values and output, and a
    # float32 per row and head.
    of_layer = 4 * 4096 + 4 + 2 * (2 * 4096 + 2 * 1024) + 4 * 32
    one_way = 2 * 1024 * 32 * of_layer / CARDS[card].host_rate
    work = Computed.of([1024, 1024])
    forward = forward_flops(read_shape(tmp_path), work) / CARDS[card].flops / 0.5
    bus = link(moved, "activations")
    assert (bus.seconds, bus.to_host) == (pytest.approx(2 * one_way), True)
    attainable = one_way / 0.8
    hidden = min(attainable, forward) + min(attainable, 2 * forward)
    assert bus.hidden_seconds == pytest.approx(hidden, rel=1e-3)
    assert (attainable > forward) == (card == "b200")
    # On the GPU remain those of two layers, and a node has those of eight ranks.
    saved = plain.fullest.phases["train"] - moved.fullest.phases["train"]
    assert saved == pytest.approx(30 * 1024 * of_layer)
    assert (plain.host, moved.host.activations) == (None, 2 * 8 * 1024 * 32 * of_layer)
