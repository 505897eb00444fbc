"""Operations and bytes of a step, compared with hand calculations."""

from dataclasses import replace
from math import prod

import pytest

from checkpoint_convert import hf_tensors, read_shape
from helpers.models.published import write_config
from helpers.oracle.policies import tiny_config
from megatron_grpo.planning.card import CARDS
from megatron_grpo.planning.job_plan import plan_job
from megatron_grpo.planning.optimizers import planned_optimizer
from megatron_grpo.planning.state import state_bytes
from megatron_grpo.planning.step_time import forward_flops, stage_flops
from megatron_grpo.planning.workload import Computed, Job
from parallel import ParallelDims

CARD, ONE_RANK = CARDS["h100"], ParallelDims()
LONG = "train.max_tokens_per_microbatch=4096"
FULL = (
    "model.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}"
)


def model(tmp_path, name="Llama-3.1-8B"):
    folder = write_config(tmp_path, name)
    return folder, read_shape(folder)


def stages(folder, shape, *overrides, dims=ONE_RANK):
    """Operations of each stage for a sequence of 1,000 tokens."""
    return stage_flops(tiny_config(folder, dims, *overrides), shape, Computed.of([1000]))


def of_step(folder, shape, *overrides):
    return sum(stages(folder, shape, "grpo.beta=0.0", *overrides))


def test_a_step_is_six_operations_per_parameter_and_token_attention_and_the_head_once_more(
    tmp_path,
):
    folder, shape = model(tmp_path)
    embedding = shape.vocab_size * shape.hidden_size  # looked up, not multiplied
    matrices = sum(map(prod, hf_tensors(shape).values())) - embedding
    # Causal attention: queries with keys and weights with values, half of all pairs.
    attention = 2 * 2 * shape.num_layers * 4096 * 1000**2 / 2
    expected = 3 * (2 * matrices * 1000 + attention) + 2 * embedding * 1000
    assert of_step(folder, shape) == pytest.approx(expected, rel=1e-4)


def test_recomputation_and_other_passes_are_forwards_more(tmp_path):
    folder, shape = model(tmp_path)
    plain, layers = of_step(folder, shape), forward_flops(shape, Computed.of([1000]))
    forward = layers + 2 * shape.vocab_size * shape.hidden_size * 1000
    split = "grpo.steps_per_generation=4"  # the first has its old log-probabilities in training
    for overrides, more in (
        ([FULL], layers),
        (["grpo.beta=0.04"], forward),  # the reference
        (["grpo.num_iterations=2"], 0),
        ([split], 3 / 4 * forward),
        ([split, "grpo.num_iterations=3"], 1 / 4 * forward),
        ([split, "grpo.old_logprobs=rollout"], 0),  # the engines' own
        (["grpo.top_entropy_quantile=0.2"], forward),
        (["grpo.beta=0.04", "grpo.advantage_estimator=rloo"], 2 * forward),  # in the reward
    ):
        assert of_step(folder, shape, *overrides) == plain + more, overrides


def test_recomputation_runs_a_layer_to_draft_with_again(tmp_path):
    folder, shape = model(tmp_path, "DeepSeek-V3")
    drafting = replace(shape, trains_mtp=True)
    plain, again = (
        of_step(folder, drafting, *overrides) - of_step(folder, shape, *overrides)
        for overrides in ([], [FULL])
    )
    layer = replace(shape, num_layers=1, moe=replace(shape.moe, num_dense_layers=0))
    assert again - plain == pytest.approx(forward_flops(layer, Computed.of([1000])))


def of_matrix(rows, columns):
    return 10 * rows * (2 * rows * columns + rows**2)


OF_LLAMA = 2 * of_matrix(4096, 4096) + 2 * of_matrix(1024, 4096) + 3 * of_matrix(4096, 14336)
"""Operations of Newton-Schulz steps for the matrices of a layer of Llama-3.1-8B."""


def test_muon_computes_each_matrix_once_on_one_rank_of_its_stage(tmp_path):
    folder, shape = model(tmp_path)

    def time(optimizer):
        options = "model.dtype=bfloat16", LONG, f"optimizer.optimizer={optimizer}"
        cfg = tiny_config(folder, ParallelDims(tensor=2, pipeline=2, data=2), *options)
        return plan_job(Job(cfg, shape, CARD, [1024], 64)).time

    adam, muon = time("adam"), time("muon")
    seconds = 16 * OF_LLAMA / 4 / CARD.flops
    assert muon.flops - adam.flops == pytest.approx(32 * OF_LLAMA)
    assert muon.compute_seconds - adam.compute_seconds == pytest.approx(seconds)
    more = (muon.estimate - muon.waits) - (adam.estimate - adam.waits)
    assert more == pytest.approx(seconds / 0.5)
    # Of a single layer on eight ranks, three have a matrix of the MLP each.
    alone = tiny_config(folder, ParallelDims(tensor=8, pipeline=32), "optimizer.optimizer=muon")
    assert planned_optimizer(alone).flops(shape, alone.dims) == (
        32 * OF_LLAMA,
        of_matrix(4096, 14336),
    )


def test_muon_computes_the_matrices_of_a_layer_to_draft_with_on_the_last_stage(tmp_path):
    folder, shape = model(tmp_path, "DeepSeek-V3")
    cfg = tiny_config(folder, ParallelDims(pipeline=61), "optimizer.optimizer=muon")
    (plain, most), (drafting, last) = (
        planned_optimizer(cfg).flops(replace(shape, trains_mtp=trains_mtp), cfg.dims)
        for trains_mtp in (False, True)
    )
    # All layers with experts are alike, so its last stage has one of them twice, and what joins.
    assert drafting - plain == most + of_matrix(7168, 2 * 7168)
    assert last == most + drafting - plain


def test_attention_between_shared_prompts_takes_half_as_long_again(tmp_path):
    folder, shape = model(tmp_path)
    overrides = ["model.dtype=bfloat16", "grpo.beta=0.0", LONG, "data.max_prompt_length=512"]

    def plan(*more):
        cfg = tiny_config(folder, ONE_RANK, *overrides, *more)
        return plan_job(Job(cfg, shape, CARD, [1024], 64))

    plain, shared = plan(), plan("grpo.shared_prompts=true")
    assert plain.time.paced_seconds == plain.time.compute_seconds
    attention = 3 * 32 * 2 * 2 * 32 * 128 * shared.work.computed.pairs
    more = shared.time.paced_seconds - shared.time.compute_seconds
    assert more * CARD.flops == pytest.approx(0.5 * attention)


def traffic(folder, shape, dims, *overrides, card=CARD):
    """Bytes by purpose, of 16 sequences of 1,024 tokens in bfloat16."""
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16", "grpo.beta=0.0", LONG, *overrides)
    links = plan_job(Job(cfg, shape, card, [1024], 64)).time.links
    return {link.purpose: link.num_bytes for link in links}


def selective(modules):
    settings = f"recompute_granularity: selective, recompute_modules: [{modules}]"
    return f"model.megatron={{{settings}}}"


def block(layers):
    settings = "recompute_granularity: full, recompute_method: block"
    return f"model.megatron={{{settings}, recompute_num_layers: {layers}}}"


ATTENDING = 2 * 2 * 32 * 128 * 1000**2 / 2
"""Operations of a layer of Llama-3.1-8B in which half of all pairs of 1,000 tokens attend."""
GLM_EXPERT, GLM_ROUTER = 3 * 4096 * 1408, 128 * 4096
GLM_DENSE = 3 * 4096 * 10944
"""Weights of an expert, a router and a dense MLP of GLM-4.5-Air."""


@pytest.mark.parametrize(
    ("name", "modules", "again"),
    [
        ("Llama-3.1-8B", "core_attn", 32 * ATTENDING),
        ("Llama-3.1-8B", "mlp, core_attn", 32 * (ATTENDING + 2 * 3 * 4096 * 14336 * 1000)),
        ("Llama-3.1-8B", "moe, shared_experts", 0),  # it has none
        ("GLM-4.5-Air", "mlp", 2 * GLM_DENSE * 1000),  # in the first layer only
        ("GLM-4.5-Air", "shared_experts", 45 * 2 * GLM_EXPERT * 1000),
        ("GLM-4.5-Air", "moe", 45 * 2 * (9 * GLM_EXPERT + GLM_ROUTER) * 1000),
        # In one of four layers; the expert has a gate of one row.
        ("Qwen3-Next-80B-A3B", "core_attn", 12 * 2 * 2 * 16 * 256 * 1000**2 / 2),
        ("Qwen3-Next-80B-A3B", "shared_experts", 48 * 2 * (3 * 2048 * 512 + 2048) * 1000),
    ],
)
def test_selective_recomputation_runs_the_named_modules_again(name, modules, again, tmp_path):
    folder, shape = model(tmp_path, name)
    more = of_step(folder, shape, selective(modules)) - of_step(folder, shape)
    assert more == pytest.approx(again, rel=1e-3)


def test_block_recomputation_runs_the_first_layers_of_each_chunk_again(tmp_path):
    folder, shape = model(tmp_path)
    dims = ParallelDims(tensor=8, pipeline=2, virtual_pipeline=2, context=2)

    def flops(*overrides):
        return stages(folder, shape, "grpo.beta=0.0", *overrides, dims=dims)

    layer = forward_flops(shape, Computed.of([1000])) / 32
    more = [some - none for some, none in zip(flops(block(3)), flops(), strict=True)]
    assert more == pytest.approx([2 * 3 * layer] * 2)  # of two chunks of eight layers
    assert flops(block(9)) == flops(FULL)
    # Of 16 layers 10 exchange as without recomputation; see `test_traffic_by_hand`.
    plain, some = (traffic(folder, shape, dims, *each) for each in ([], [block(3)]))
    assert some["tensor"] == pytest.approx(plain["tensor"] * (10 * 10 + 6 * 14) / (16 * 10))
    assert some["context"] == pytest.approx(plain["context"] * (10 * 3 + 6 * 4) / (16 * 3))
    assert some["pipeline"] == plain["pipeline"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("modules", "tensor", "context", "expert"),
    [
        ("core_attn", 0, 1 / 3, 0),
        ("mlp", 2 / (46 * 10), 0, 0),  # of the dense layer
        ("shared_experts", 45 * 2 / (46 * 10), 0, 0),
        ("moe", 45 * 2 / (46 * 10), 0, 1 / 2),  # with its shared expert
        ("moe_act", 0, 0, 0),
    ],
)
def test_a_recomputed_module_repeats_its_own_traffic(modules, tensor, context, expert, tmp_path):
    folder, shape = model(tmp_path, "GLM-4.5-Air")
    dims = ParallelDims(tensor=2, context=2, data=2, expert=4, expert_tensor=1)
    engine = "rollout.tensor_parallel_size=8"
    plain, more = (
        traffic(folder, shape, dims, engine, *recomputed)
        for recomputed in ([], [selective(modules)])
    )
    growth = {purpose: more[purpose] / plain[purpose] - 1 for purpose in plain}
    expected = {"tensor": tensor, "context": context, "data": 0, "expert": expert}
    assert growth == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "pipeline", "virtual", "last", "stage", "layers", "has_head"),
    [
        ("Llama-3.3-70B", 8, 1, None, -1, 10, True),  # as many layers as the others, and the head
        ("Llama-3.3-70B", 8, 1, 9, 1, 11, False),
        ("Llama-3.1-405B", 16, 1, None, 1, 8, False),  # one layer more than the last stage
    ],
)
def test_a_step_takes_as_long_as_its_busiest_stage(
    name, pipeline, virtual, last, stage, layers, has_head, tmp_path
):
    folder, shape = model(tmp_path, name)
    dims = ParallelDims(
        tensor=2,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        data=2,
        num_layers_in_last_pipeline_stage=last,
    )
    cfg = tiny_config(folder, dims, "grpo.beta=0.0", LONG)
    lengths = [1000] * 16
    flops = stage_flops(cfg, shape, Computed.of(lengths))
    head = 4 * 2 * shape.vocab_size * shape.hidden_size * sum(lengths) * has_head
    busiest = 3 * forward_flops(shape, Computed.of(lengths)) / shape.num_layers * layers + head
    assert flops[stage] == max(flops) == pytest.approx(busiest)
    card = replace(CARD, memory=10**15)
    time = plan_job(Job(cfg, shape, card, [1000], 4 * pipeline)).time
    assert time.flops == pytest.approx(sum(flops))
    assert time.compute_seconds == pytest.approx(busiest / 4 / card.flops)


def test_stages_compute_the_layers_that_they_have(tmp_path):
    folder, shape = model(tmp_path, "GLM-4.5")
    attention = 5120 * 128 * (96 + 8 + 8 + 96)
    mixture = 160 * 5120 + (8 + 1) * 3 * 5120 * 1536
    # Of four stages of 23 layers, the first has the dense ones.
    cfg = tiny_config(folder, ParallelDims(pipeline=4), "grpo.beta=0.0")
    first, second, *_ = stage_flops(cfg, shape, Computed.of([1]))
    dense = 3 * 3 * 5120 * 12288
    assert first == pytest.approx(6 * (23 * attention + dense + 20 * mixture), rel=1e-3)
    assert second == pytest.approx(6 * 23 * (attention + mixture), rel=1e-3)


def test_only_full_recomputation_repeats_the_chunks_of_linear_attention(tmp_path):
    folder, shape = model(tmp_path, "Qwen3-Next-80B-A3B")
    more = of_step(folder, shape, FULL) - of_step(folder, shape)
    assert more == pytest.approx(forward_flops(shape, Computed.of([1000])))


@pytest.mark.parametrize("recompute", [False, True])
def test_traffic_by_hand(tmp_path, recompute):
    folder, shape = model(tmp_path)
    dims = ParallelDims(tensor=8, pipeline=2, context=2, data=2)
    options = ["model.dtype=bfloat16", "grpo.beta=0.0", LONG, *([FULL] if recompute else [])]
    cfg = tiny_config(folder, dims, *options)
    plan = plan_job(Job(cfg, shape, CARD, [1024], 64))
    links = {link.purpose: link for link in plan.time.links}
    # 16 sequences over 2 copies and 2 context ranks; a row has 4096 elements of 2 bytes.
    width, layers = 16 * 1024 / 4 * 4096 * 2, 16
    passes = 14 if recompute else 10  # all-gathers and reduce-scatters of a layer
    assert links["tensor"].num_bytes == pytest.approx(7 / 8 * width * layers * passes)
    # Keys and values of an eighth of 8 heads of 128, to one neighbour; gradients twice as much.
    keys = 16 * 1024 / 4 * 2 * 128 * 2
    assert links["context"].num_bytes == pytest.approx(keys * layers * (4 if recompute else 3))
    # Of two stages the first sends outputs, the second gradients.
    assert links["pipeline"].num_bytes == pytest.approx(width / 8)
    parameters = plan.stages[1].state.weights / 2  # with the last norm
    assert links["data"].num_bytes == pytest.approx(3 / 4 * 6 * parameters)
    assert [use.purpose for use in plan.time.links if use.in_node] == ["tensor"]
    assert links["data"].seconds == links["data"].num_bytes / CARD.network_rate


def test_a_pass_of_the_reference_is_a_forward_of_traffic(tmp_path):
    folder, shape = model(tmp_path)
    dims = ParallelDims(tensor=8, pipeline=2, context=2, data=2)
    plain, more = (
        traffic(folder, shape, dims, beta) for beta in ("grpo.beta=0.0", "grpo.beta=0.04")
    )
    assert more["tensor"] == pytest.approx(plain["tensor"] * 14 / 10)
    assert more["context"] == pytest.approx(plain["context"] * 4 / 3)
    assert more["pipeline"] == pytest.approx(plain["pipeline"] * 2)  # of the first of two stages
    assert more["data"] == plain["data"]


@pytest.mark.parametrize(
    ("pipeline", "virtual", "sends"),
    [
        (2, 1, 2),  # the first stage: outputs of two forwards
        (2, 2, 5),  # the first: two chunks' outputs, twice, and one chunk's gradients
        (4, 2, 6),
    ],
)
def test_pipeline_traffic_is_that_of_the_busiest_stage(pipeline, virtual, sends, tmp_path):
    folder, shape = model(tmp_path)
    dims = ParallelDims(pipeline=pipeline, virtual_pipeline=virtual)
    # 16 sequences; a row has 4096 elements of 2 bytes.
    sent = traffic(folder, shape, dims, "grpo.beta=0.04")["pipeline"]
    assert sent == sends * 16 * 1024 * 4096 * 2


@pytest.mark.parametrize(("expert", "expert_tensor"), [(8, 1), (2, 4), (1, 4)])
def test_traffic_of_a_mixture_by_hand(expert, expert_tensor, tmp_path):
    folder, shape = model(tmp_path, "Qwen3-30B-A3B")
    dims = ParallelDims(tensor=4, data=4, expert=expert, expert_tensor=expert_tensor)
    links = traffic(folder, shape, dims)
    # 16 sequences over 4 copies; a row has 2048 elements of 2 bytes.
    rows = 16 * 1024 / 4 * 2048 * 2 * 48
    assert links["tensor"] == pytest.approx(3 / 4 * rows * 5)  # around the attention alone
    # A quarter of them, to 8 experts each and back, and so the gradients; and what has arrived, to
    # the other ranks of its expert.
    arriving = rows / 4 * 8
    dispatched = arriving * (expert - 1) / expert + arriving * (expert_tensor - 1)
    assert links["expert"] == pytest.approx(4 * dispatched)
    of_experts = 48 * 128 * 3 * 2048 * 768 / (expert * expert_tensor)
    copies = 16 / (expert * expert_tensor)  # of the same experts; of all else there are 4
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16")
    others = state_bytes(cfg, shape, 0).weights / 2 - of_experts
    shares = 3 / 4 * others + (copies - 1) / copies * of_experts
    assert links["data"] == pytest.approx(6 * shares)


def test_a_shared_expert_is_exchanged_like_an_mlp_and_dense_layers_have_no_experts(tmp_path):
    folder, shape = model(tmp_path, "GLM-4.5-Air")
    dims = ParallelDims(tensor=2, data=2, expert=4, expert_tensor=1)
    links = traffic(folder, shape, dims, "rollout.tensor_parallel_size=8")
    rows = 16 * 1024 / 2 * 4096 * 2  # of 16 sequences over 2 copies, 4096 elements of 2 bytes
    assert links["tensor"] == pytest.approx(1 / 2 * rows * 46 * 10)
    # Half of them from each rank, of 8 experts each three in four on other ranks; four times.
    assert links["expert"] == pytest.approx(4 * rows / 2 * 8 * 3 / 4 * 45)


@pytest.mark.parametrize(
    ("query_rank", "inputs", "recompute"), [(1536, 1536 + 512, False), (None, 7168 + 512, True)]
)
def test_tensor_ranks_gather_latents_and_context_ranks_keys_and_values_of_all_heads(
    query_rank, inputs, recompute, tmp_path
):
    folder = write_config(tmp_path, "DeepSeek-V3", q_lora_rank=query_rank, num_hidden_layers=9)
    dims = ParallelDims(tensor=4, context=2, expert=8, expert_tensor=1)
    options = ["rollout.tensor_parallel_size=8", *([FULL] if recompute else [])]
    card = replace(CARD, memory=10**15)
    sent = traffic(folder, read_shape(folder), dims, *options, card=card)
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
def test_context_ranks_exchange_tokens_for_heads_of_linear_attention(recompute, tmp_path):
    folder, shape = model(tmp_path, "Qwen3.5-9B")
    dims = ParallelDims(tensor=2, context=4)
    sent = traffic(folder, shape, dims, *([FULL] if recompute else []))
    tokens, forwards = 16 * 1024 / 4, 2 if recompute else 1
    # Queries, keys, values, gates and rates there; outputs back. Of its tokens a rank keeps the
    # heads that it computes.
    elements = 2048 + 2048 + 4096 + 4096 + 2 * 32 + 4096
    exchanged = 3 / 4 * 24 * (forwards + 1) * elements / 2
    assert sent["linear attention"] == pytest.approx(2 * tokens * exchanged)
    keys_and_values = 8 * (forwards + 2) * 2 * 256 * 4 / 2  # in 8 layers, to three ranks
    assert sent["context"] == pytest.approx(3 * 2 * tokens * keys_and_values)


@pytest.mark.parametrize(("name", "share"), [("Llama-3.1-8B", 0.5), ("Qwen3-30B-A3B", 0.3)])
def test_the_estimate_counts_on_a_part_of_the_peak_and_of_the_links(name, share, tmp_path):
    folder, shape = model(tmp_path, name)
    dims = ParallelDims(tensor=2, pipeline=4)
    cfg = tiny_config(folder, dims, "model.dtype=bfloat16", LONG)
    time = plan_job(Job(cfg, shape, CARD, [1024], 16)).time
    compute = time.compute_seconds / share * (1 + time.bubble)
    waits = sum(link.num_bytes / (450e9 if link.in_node else 50e9) for link in time.links)
    assert time.estimate == pytest.approx(compute + waits / 0.8)


def test_the_bubble_shrinks_with_microbatches_and_virtual_stages(tmp_path):
    folder, shape = model(tmp_path)

    def bubble(virtual, *overrides):
        dims = ParallelDims(pipeline=4, virtual_pipeline=virtual)
        cfg = tiny_config(folder, dims, "train.max_tokens_per_microbatch=1024", *overrides)
        return plan_job(Job(cfg, shape, CARD, [1024], 8)).time.bubble

    assert bubble(1) == 3 / 16
    assert bubble(1, "grpo.generation_batch_size=32") == 3 / 32
    assert bubble(2) == 3 / 32
