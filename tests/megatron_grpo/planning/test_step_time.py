"""Operations and bytes of a step, and what computation hides of them, by hand."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from math import prod

import pytest

from checkpoint_convert import hf_tensors
from checkpoint_convert.shape import MoeShape
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.mlp import copies_to_experts
from megatron_grpo.planning.optimizers import planned_optimizer
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.planning.step_time import forward_flops, stage_flops
from megatron_grpo.planning.workload import Computed
from parallel import ParallelDims

CARD, ROOMY = CARDS["h100"], replace(CARDS["h100"], memory=10**15)
LLAMA, AIR, NEXT, V3 = "Llama-3.1-8B", "GLM-4.5-Air", "Qwen3-Next-80B-A3B", "DeepSeek-V3"
WORK = Computed.of([1000])
ONE_RANK = ParallelDims()
SPLIT = ParallelDims(tensor=8, pipeline=2, context=2, data=2)


def megatron(**fields):
    return "model.megatron={" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"


def selective(modules):
    return megatron(recompute_granularity="selective", recompute_modules=f"[{modules}]")


def block(layers):
    return megatron(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=layers
    )


FULL = megatron(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.fixture
def flops(job_of):
    """Operations of each stage for a sequence of 1,000 tokens."""

    def flops(name, *overrides, dims=ONE_RANK, drafts=False):
        job = job_of(name, *overrides, dims=dims)
        return stage_flops(job.cfg, replace(job.shape, trains_mtp=drafts), WORK)

    return flops


@pytest.fixture
def plan(job_of):
    """A step of 16 sequences of a length, one in a microbatch."""

    def plan(dims, *overrides, name=LLAMA, length=1024, num_gpus=64, **options):
        engines = "rollout.tensor_parallel_size=8"
        given = options | {"dims": dims, "lengths": (length,), "num_gpus": num_gpus}
        return plan_job(job_of(name, engines, *overrides, **given))

    return plan


@pytest.fixture
def link(plan):
    def link(purpose, dims, *overrides, **options):
        found = plan(dims, *overrides, **options).time.links
        return next(use for use in found if use.purpose == purpose)

    return link


@pytest.fixture
def traffic(plan):
    """Bytes by purpose."""

    def traffic(dims, *overrides, **options):
        links = plan(dims, *overrides, **options).time.links
        return {link.purpose: link.num_bytes for link in links}

    return traffic


# Operations


def test_stage_flops_are_six_per_weight_and_token(flops, job_of):
    shape = job_of(LLAMA).shape
    embedding = shape.vocab_size * shape.hidden_size  # looked up, not multiplied
    matrices = sum(map(prod, hf_tensors(shape).values())) - embedding
    # Causal attention: queries with keys and weights with values, half of all pairs. And the head
    # once more.
    attention = 2 * 2 * shape.num_layers * 4096 * 1000**2 / 2
    expected = 3 * (2 * matrices * 1000 + attention) + 2 * embedding * 1000
    assert flops(LLAMA) == [pytest.approx(expected, rel=1e-4)]


def test_stage_flops_count_recomputation_and_other_passes(flops, job_of):
    shape = job_of(LLAMA).shape
    [plain], layers = flops(LLAMA), forward_flops(shape, WORK)
    forward = layers + 2 * shape.vocab_size * shape.hidden_size * 1000
    split = "grpo.steps_per_generation=4"  # the first has its old log-probabilities in training
    for overrides, more in (
        ([FULL], layers),
        (["grpo.beta=0.04"], forward),  # the reference
        (["grpo.num_iterations=2"], 0),
        ([split], 3 / 4 * forward),
        ([split, "grpo.num_iterations=3"], 1 / 4 * forward),
        ([split, "grpo.old_logprobs=rollout"], 0),  # the engines' log-probabilities
        (["grpo.top_entropy_quantile=0.2"], forward),
        (["grpo.beta=0.04", "grpo.advantage_estimator=rloo"], 2 * forward),  # KL in the reward
    ):
        assert flops(LLAMA, *overrides) == [plain + more], overrides


ATTENDING = 2 * 2 * 32 * 128 * 1000**2 / 2
"""Operations of a layer of Llama-3.1-8B in which half of all pairs of 1,000 tokens attend."""
EXPERT, ROUTER, DENSE = 3 * 4096 * 1408, 128 * 4096, 3 * 4096 * 10944
"""Weights of an expert, a router and a dense MLP of GLM-4.5-Air."""


@pytest.mark.parametrize(
    ("name", "modules", "again"),
    [
        (LLAMA, "core_attn", 32 * ATTENDING),
        (LLAMA, "mlp, core_attn", 32 * (ATTENDING + 2 * 3 * 4096 * 14336 * 1000)),
        (LLAMA, "moe, shared_experts", 0),  # no such module
        (AIR, "mlp", 2 * DENSE * 1000),  # in the first layer only
        (AIR, "shared_experts", 45 * 2 * EXPERT * 1000),
        (AIR, "moe", 45 * 2 * (9 * EXPERT + ROUTER) * 1000),
        # In one of four layers; the expert has a gate of one row.
        (NEXT, "core_attn", 12 * 2 * 2 * 16 * 256 * 1000**2 / 2),
        (NEXT, "shared_experts", 48 * 2 * (3 * 2048 * 512 + 2048) * 1000),
    ],
)
def test_stage_flops_run_recomputed_modules_again(name, modules, again, flops):
    more = flops(name, selective(modules))[0] - flops(name)[0]
    assert more == pytest.approx(again, rel=1e-3)


def test_stage_flops_recompute_linear_attention_in_full_only(flops, job_of):
    more = flops(NEXT, FULL)[0] - flops(NEXT)[0]
    assert more == pytest.approx(forward_flops(job_of(NEXT).shape, WORK))


def test_stage_flops_recompute_the_first_layers_of_each_chunk(flops, traffic, job_of):
    dims = replace(SPLIT, data=1, virtual_pipeline=2)
    layer = forward_flops(job_of(LLAMA).shape, WORK) / 32
    some, none, most, full = (
        flops(LLAMA, *given, dims=dims) for given in ([block(3)], [], [block(9)], [FULL])
    )
    more = [a - b for a, b in zip(some, none, strict=True)]
    assert more == pytest.approx([2 * 3 * layer] * 2)  # of two chunks of eight layers
    assert most == full
    # 10 of 16 layers exchange as without recomputation; see `test_links_by_hand`.
    plain, some = (traffic(dims, *each) for each in ([], [block(3)]))
    assert some["tensor"] == pytest.approx(plain["tensor"] * (10 * 10 + 6 * 14) / (16 * 10))
    assert some["context"] == pytest.approx(plain["context"] * (10 * 3 + 6 * 4) / (16 * 3))
    assert some["pipeline"] == plain["pipeline"]


@pytest.mark.parametrize(
    ("name", "pipeline", "last", "stage", "layers", "has_head"),
    [
        ("Llama-3.3-70B", 8, None, -1, 10, True),  # as many layers, and the head
        ("Llama-3.3-70B", 8, 9, 1, 11, False),
        ("Llama-3.1-405B", 16, None, 1, 8, False),  # one layer more than the last stage
    ],
)
def test_step_time_is_that_of_the_busiest_stage(
    name, pipeline, last, stage, layers, has_head, job_of
):
    dims = ParallelDims(tensor=2, pipeline=pipeline, data=2, num_layers_in_last_pipeline_stage=last)
    job = job_of(name, dims=dims, lengths=(1000,), card=ROOMY, num_gpus=4 * pipeline)
    work = Computed.of([1000] * 16)
    flops, shape = stage_flops(job.cfg, job.shape, work), job.shape
    head = 4 * 2 * shape.vocab_size * shape.hidden_size * 16_000 * has_head
    busiest = 3 * forward_flops(shape, work) / shape.num_layers * layers + head
    assert flops[stage] == max(flops) == pytest.approx(busiest)
    time = plan_job(job).time
    assert time.flops == pytest.approx(sum(flops))
    assert time.compute_seconds == pytest.approx(busiest / 4 / ROOMY.flops)


def of_matrix(rows, columns):
    return 10 * rows * (2 * rows * columns + rows**2)


OF_LLAMA = 2 * of_matrix(4096, 4096) + 2 * of_matrix(1024, 4096) + 3 * of_matrix(4096, 14336)
"""Operations of Newton-Schulz steps for the matrices of a layer of Llama-3.1-8B."""
MUON = "optimizer.optimizer=muon"


def test_muon_computes_each_matrix_once_on_a_rank_of_its_stage(plan, job_of):
    dims = ParallelDims(tensor=2, pipeline=2, data=2)
    adam, muon = plan(dims).time, plan(dims, MUON).time
    seconds = 16 * OF_LLAMA / 4 / CARD.flops
    assert muon.flops - adam.flops == pytest.approx(32 * OF_LLAMA)
    assert muon.compute_seconds - adam.compute_seconds == pytest.approx(seconds)
    more = (muon.estimate - muon.waits) - (adam.estimate - adam.waits)
    assert more == pytest.approx(seconds / 0.5)
    # Eight ranks of a single layer: three have a matrix of the MLP each.
    alone = job_of(LLAMA, MUON, dims=ParallelDims(tensor=8, pipeline=32))
    of_mlp = of_matrix(4096, 14336)
    assert planned_optimizer(alone.cfg).flops(alone.shape, alone.cfg.dims) == (
        32 * OF_LLAMA,
        of_mlp,
    )


def test_step_time_has_slower_attention_between_shared_prompts(plan):
    length = "data.max_prompt_length=512"
    plain, shared = (
        plan(ONE_RANK, length, f"grpo.shared_prompts={on}", "train.max_tokens_per_microbatch=4096")
        for on in ("false", "true")
    )
    assert plain.time.paced_seconds == plain.time.compute_seconds
    attention = 3 * 32 * 2 * 2 * 32 * 128 * shared.work.computed.pairs
    more = shared.time.paced_seconds - shared.time.compute_seconds
    assert more * CARD.flops == pytest.approx(0.5 * attention)


@pytest.mark.parametrize(("name", "share"), [(LLAMA, 0.5), ("Qwen3-30B-A3B", 0.3)])
def test_estimate_counts_on_a_part_of_the_peak_and_of_the_links(name, share, plan):
    time = plan(ParallelDims(tensor=2, pipeline=4), name=name, num_gpus=16).time
    compute = time.compute_seconds / share * (1 + time.bubble)
    waits = sum(link.num_bytes / (450e9 if link.in_node else 50e9) for link in time.links)
    assert time.estimate == pytest.approx(compute + waits / 0.8)


def test_bubble_shrinks_with_microbatches_and_virtual_stages(plan):
    stages, virtual = ParallelDims(pipeline=4), ParallelDims(pipeline=4, virtual_pipeline=2)
    assert plan(stages).time.bubble == 3 / 16
    assert plan(stages, "grpo.generation_batch_size=32").time.bubble == 3 / 32
    assert plan(virtual).time.bubble == 3 / 32


# Traffic


@pytest.mark.parametrize(
    ("overrides", "gathers", "rings", "sends"),
    [
        ([], 10, 3, 1),
        ([FULL], 14, 4, 1),
        (["grpo.beta=0.04"], 14, 4, 2),  # of the first of two stages
    ],
)
def test_links_by_hand(plan, overrides, gathers, rings, sends):
    found = plan(SPLIT, *overrides)
    links = {link.purpose: link for link in found.time.links}
    # 16 sequences over 2 copies and 2 context ranks; a row has 4096 elements of 2 bytes. All 16
    # layers gather and reduce-scatter.
    width = 16 * 1024 / 4 * 4096 * 2
    assert links["tensor"].num_bytes == pytest.approx(7 / 8 * width * 16 * gathers)
    # Keys and values of an eighth of 8 heads of 128, to one neighbour; gradients twice as much.
    keys = 16 * 1024 / 4 * 2 * 128 * 2
    assert links["context"].num_bytes == pytest.approx(keys * 16 * rings)
    # Of two stages the first sends outputs, the second gradients.
    assert links["pipeline"].num_bytes == pytest.approx(sends * width / 8)
    parameters = found.stages[1].state.weights / 2  # with the last norm
    assert links["data"].num_bytes == pytest.approx(3 / 4 * 6 * parameters)
    assert [use.purpose for use in found.time.links if use.in_node] == ["tensor"]
    assert links["data"].seconds == links["data"].num_bytes / CARD.network_rate


@pytest.mark.parametrize(
    ("pipeline", "virtual", "sends"),
    [
        (2, 1, 2),  # the first stage: outputs of two forwards
        (2, 2, 5),  # the first: two chunks' outputs, twice, and one chunk's gradients
        (4, 2, 6),
    ],
)
def test_pipeline_traffic_is_that_of_the_busiest_stage(pipeline, virtual, sends, traffic):
    dims = ParallelDims(pipeline=pipeline, virtual_pipeline=virtual)
    # 16 sequences; a row has 4096 elements of 2 bytes.
    assert traffic(dims, "grpo.beta=0.04")["pipeline"] == sends * 16 * 1024 * 4096 * 2


@pytest.mark.parametrize(("expert", "expert_tensor"), [(8, 1), (2, 4), (1, 4)])
def test_links_of_a_mixture_by_hand(expert, expert_tensor, traffic, job_of):
    dims = ParallelDims(tensor=4, data=4, expert=expert, expert_tensor=expert_tensor)
    links = traffic(dims, name="Qwen3-30B-A3B")
    # 16 sequences over 4 copies; a row has 2048 elements of 2 bytes.
    rows = 16 * 1024 / 4 * 2048 * 2 * 48
    assert links["tensor"] == pytest.approx(3 / 4 * rows * 5)  # around the attention alone
    # A quarter of the rows goes to 8 experts each and back, and so do gradients; what has arrived
    # goes to the other ranks of its expert.
    arriving = rows / 4 * 8
    dispatched = arriving * (expert - 1) / expert + arriving * (expert_tensor - 1)
    assert links["expert"] == pytest.approx(4 * dispatched)
    of_experts = 48 * 128 * 3 * 2048 * 768 / (expert * expert_tensor)
    copies = 16 / (expert * expert_tensor)  # of an expert; there are 4 of all else
    job = job_of("Qwen3-30B-A3B", dims=dims)
    others = state_bytes(job.cfg, job.shape, 0).weights / 2 - of_experts
    shares = 3 / 4 * others + (copies - 1) / copies * of_experts
    assert links["data"] == pytest.approx(6 * shares)


@pytest.mark.parametrize(
    ("query_rank", "inputs", "recompute"), [(1536, 1536 + 512, False), (None, 7168 + 512, True)]
)
def test_links_of_latent_attention_by_hand(query_rank, inputs, recompute, traffic):
    dims = ParallelDims(tensor=4, context=2, expert=8, expert_tensor=1)
    model = {"q_lora_rank": query_rank, "num_hidden_layers": 9}
    sent = traffic(dims, *([FULL] if recompute else []), name=V3, card=ROOMY, **model)
    tokens, forwards = 16 * 1024 / 2, 2 if recompute else 1
    # Forwards gather latents and the rotated part of keys, and reduce hidden states; the backward
    # the other way round, and it gathers latents again. Likewise around dense MLPs and the shared
    # expert, with hidden states.
    attention = (forwards + 1) * (inputs + 64 + 7168) + inputs
    mlp = (forwards + 1) * 2 * 7168 + 7168
    assert sent["tensor"] == pytest.approx(3 / 4 * 2 * tokens * 9 * (attention + mlp))
    # A quarter of 128 heads to the other rank; gradients are as much as a forward and are summed.
    keys_and_values = 128 / 4 * (192 + 128)
    assert sent["context"] == pytest.approx(2 * tokens * keys_and_values * 9 * (forwards + 2))


@pytest.mark.parametrize("recompute", [False, True])
def test_links_of_linear_attention_exchange_tokens_for_heads(recompute, traffic):
    dims = ParallelDims(tensor=2, context=4)
    sent = traffic(dims, *([FULL] if recompute else []), name="Qwen3.5-9B")
    tokens, forwards = 16 * 1024 / 4, 2 if recompute else 1
    # Queries, keys, values, gates and rates there; outputs back. Of its tokens a rank keeps the
    # heads that it computes.
    elements = 2048 + 2048 + 4096 + 4096 + 2 * 32 + 4096
    exchanged = 3 / 4 * 24 * (forwards + 1) * elements / 2
    assert sent["linear attention"] == pytest.approx(2 * tokens * exchanged)
    keys_and_values = 8 * (forwards + 2) * 2 * 256 * 4 / 2  # in 8 layers, to three ranks
    assert sent["context"] == pytest.approx(3 * 2 * tokens * keys_and_values)


# Traffic behind computation

SUMS, WEIGHTS = "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"
IN_FOUR = ["grpo.steps_per_generation=4", "grpo.generation_batch_size=64"]


@pytest.mark.parametrize(
    ("switches", "length", "hidden"),
    [
        ([], 4096, lambda sums, weights, forward: 0),
        # Microbatches of 4,096 tokens compute for longer than everything takes.
        ([SUMS], 4096, lambda sums, weights, forward: sums),
        ([SUMS, WEIGHTS], 4096, lambda sums, weights, forward: sums),  # each step pushes
        ([SUMS, WEIGHTS, *IN_FOUR], 4096, lambda sums, weights, forward: sums + 3 / 4 * weights),
        # Microbatches of 128 tokens do not.
        ([SUMS], 128, lambda sums, weights, forward: 2 * forward),
        ([SUMS, WEIGHTS, *IN_FOUR], 128, lambda sums, weights, forward: (2 + 3 / 4) * forward),
    ],
)
def test_sums_hide_in_the_last_backward_and_weights_in_the_first_forward(
    switches, length, hidden, link, job_of
):
    data = link("data", ParallelDims(data=8), *switches, length=length)
    in_buckets = (1 - 40e6 / 8.03e9) * data.seconds / 0.8  # but a bucket of 40e6 elements
    # Sums are of 4 bytes, weights of 2. A forward of a sequence runs at half the card's peak.
    forward = forward_flops(job_of(LLAMA).shape, Computed.of([length])) / CARD.flops / 0.5
    expected = hidden(in_buckets * 4 / 6, in_buckets * 2 / 6, forward)
    assert data.hidden_seconds == pytest.approx(expected, rel=1e-3)
    assert data.exposed == pytest.approx(data.seconds / 0.8 - expected, abs=1e-3)


def test_no_gathering_hides_where_a_vision_tower_is_trained(link):
    def hidden(*overrides):
        switches = [SUMS, *IN_FOUR, "data.image_column=image", *overrides]
        return link("data", ParallelDims(data=8), *switches, name="Qwen3-VL-30B-A3B").hidden_seconds

    trained = "model.freeze_vision=false"
    assert hidden(trained, WEIGHTS) == hidden(trained) < hidden(WEIGHTS)


def test_context_ranks_attend_while_keys_and_values_travel_in_a_ring(link):
    dims = ParallelDims(context=2)
    # Attention grows by the square of the length.
    short, long = (link("context", dims, length=length) for length in (1024, 65536))
    attention = 3 * 16 * 32 * 2 * 2 * 32 * 128 * 1024**2 / 2 / 2
    assert short.hidden_seconds == pytest.approx(attention / CARD.flops / 0.5 / 2)
    assert short.exposed > 0 and long.exposed == pytest.approx(0)
    heads = link("context", dims, megatron(cp_comm_type="a2a"))
    # In a forward and a backward, half of 8,192 tokens' queries, keys, values and outputs.
    assert heads.num_bytes == 2 * 32 * 2 * 8192 * (4096 + 1024 + 1024 + 4096) / 2
    assert heads.hidden_seconds == 0
    shared = link("context", dims, "grpo.shared_prompts=true", "data.max_prompt_length=512")
    assert shared.hidden_seconds == 0  # gathered before


def test_virtual_stages_hide_sends_but_in_warm_up(link):
    plain, virtual = (
        link("pipeline", ParallelDims(pipeline=4, virtual_pipeline=chunks)) for chunks in (1, 2)
    )
    assert plain.hidden_seconds == 0
    # Of 16 microbatches in 2 chunks, 2 * 3 + 4 are computed before a backward is.
    assert virtual.exposed == pytest.approx(virtual.seconds / 0.8 * 10 / 32)


FLEX = "model.megatron.moe_token_dispatcher_type=flex"
OVER_EIGHT = ParallelDims(data=8, expert=8, expert_tensor=1)


def test_tokens_travel_to_experts_while_the_shared_expert_computes(link):
    overlaps = megatron(moe_shared_expert_overlap="true")
    plain, overlapped, flex = (
        link("expert", OVER_EIGHT, *given, name=AIR) for given in ([], [overlaps], [FLEX])
    )
    shared = 3 * 45 * 2 * 3 * 4096 * 1408 * 16 * 1024 / 8
    assert plain.hidden_seconds == 0
    assert overlapped.hidden_seconds == pytest.approx(shared / CARD.flops / 0.3, rel=1e-3)
    # By flex, one copy for each GPU. A token has 8 of 128 experts: none of 16 with the chance of
    # 112 / 128 and so on.
    missed = prod((112 - n) / (128 - n) for n in range(8))
    assert flex.num_bytes / plain.num_bytes == pytest.approx(1 - missed)


def choices(moe: MoeShape) -> Iterator[list[int]]:
    """The experts of a token: any, or equally many of each of any of the groups."""
    size = moe.num_experts // moe.num_groups
    for groups in combinations(range(moe.num_groups), moe.groups_per_token):
        of_group = moe.experts_per_token // moe.groups_per_token
        members = (range(group * size, (group + 1) * size) for group in groups)
        for each in product(*(combinations(experts, of_group) for experts in members)):
            yield [*chain(*each)]


def sent(moe: MoeShape, expert: int, expert_tensor: int, per_node: int, flex: bool) -> list[float]:
    """Mean copies of a token to other nodes and within nodes, over choices and senders."""
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


ANY = MoeShape(num_experts=8, experts_per_token=3, intermediate_size=1, normalize_topk=True)
OF_GROUPS = replace(ANY, num_experts=16, experts_per_token=4, num_groups=4, groups_per_token=2)


@pytest.mark.parametrize("moe", [ANY, OF_GROUPS], ids=["any", "of groups"])
@pytest.mark.parametrize(("expert", "expert_tensor"), [(2, 1), (4, 1), (8, 1), (4, 2), (1, 2)])
@pytest.mark.parametrize("overrides", [[], [FLEX]], ids=["alltoall", "flex"])
def test_copies_to_experts_are_those_of_all_choices(moe, expert, expert_tensor, overrides, job_of):
    dims = ParallelDims(
        tensor=expert_tensor, data=expert, expert=expert, expert_tensor=expert_tensor
    )
    cfg = job_of("Qwen3-30B-A3B", *overrides, dims=dims).cfg
    ranks, per_node = expert * expert_tensor, 2
    expected = sent(moe, expert, expert_tensor, per_node, flex=bool(overrides))
    for rate, (network, in_node) in (1e-9, expected), (1e9, [0, expected[1]]):  # the busier link
        card = replace(CARD, per_node=per_node, network_rate=rate * CARD.node_rate)
        span, copies = copies_to_experts(cfg, moe, card)
        assert copies == pytest.approx(network if network else in_node)
        assert span == (ranks if network else per_node)
