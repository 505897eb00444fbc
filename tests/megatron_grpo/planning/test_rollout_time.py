"""The least time of a generation, by hand."""

from math import comb, prod

import pytest

from checkpoint_convert.vllm import engine_parameters
from megatron_grpo.planning.engine_memory import engine_bytes
from megatron_grpo.planning.rollout_time import rollout_time

FEWER = {"DeepSeek-V3": {"num_hidden_layers": 9}}
"""Fewer layers than 61 suffice for what is proportional to their number."""
GROUPS = "grpo={num_generations: 4, generation_batch_size: 16, beta: 0.0}"


@pytest.fixture
def time_of(job_of):
    """`rollout_time` of a published model, with prompts of 100 tokens."""

    def time_of(name, lengths, *overrides):
        length = "data.max_prompt_length=100", "rollout.max_completion_length=8000"
        room = "train.max_tokens_per_microbatch=8192"
        options = [room, *length, GROUPS, *overrides]
        job = job_of(name, *options, lengths=lengths, **FEWER.get(name, {}))
        return rollout_time(job, engine_bytes(job.cfg, job.shape, job.card)), job.shape

    return time_of


def test_rollout_time_reads_weights_for_each_token_and_all_caches(time_of):
    time, shape = time_of("Llama-3.1-8B", [600, 1100], "rollout.num_engines=2")
    # An engine has 8 of 16 completions: half of 500 tokens, half of 1,000.
    assert (time.completions, time.tokens, time.passes) == (16, 8 * 500 + 8 * 1000, 1000)
    embedding = shape.vocab_size * shape.hidden_size  # no product
    weights = 2 * (8_030_261_248 - embedding)
    token = 2 * 2 * 32 * 8 * 128
    read = 4 * (100 * 500 + 500**2 / 2) + 4 * (100 * 1000 + 1000**2 / 2)
    assert time.seconds == pytest.approx((1000 * weights + read * token) / 3.35e12)


def test_rollout_time_needs_a_length_of_prompts(time_of):
    assert time_of("Llama-3.1-8B", [1100], "data.max_prompt_length=null")[0] is None


def test_rollout_time_shares_weights_and_cache_between_ranks(time_of):
    whole, _ = time_of("Llama-3.1-8B", [1100])
    split, _ = time_of("Llama-3.1-8B", [1100], "rollout.tensor_parallel_size=4")
    assert split.memory_seconds == pytest.approx(whole.memory_seconds / 4, rel=1e-3)
    assert split.network_seconds == 0 and split.seconds == split.memory_seconds
    assert split.compute_seconds == pytest.approx(whole.compute_seconds / 4)


@pytest.mark.parametrize(
    ("name", "num_nodes", "layers", "hidden"),
    [("Llama-3.1-8B", 2, 32, 4096), ("DeepSeek-V3", 4, 9, 7168)],
)
def test_rollout_time_adds_hidden_states_of_nodes_twice_in_a_layer(
    name, num_nodes, layers, hidden, time_of
):
    engine = "rollout.num_engines=2", f"rollout.tensor_parallel_size={8 * num_nodes}"
    time, _ = time_of(name, [600, 1100], *engine)
    # An engine generates half of 16 completions, and computes two prompts once.
    tokens = 4 * 500 + 4 * 1000 + 2 * 100
    num_bytes = tokens * layers * 2 * 2 * hidden
    assert time.network_seconds == pytest.approx(num_bytes / (8 * 50e9))
    assert time.seconds == time.memory_seconds + time.network_seconds


def test_rollout_time_shares_experts_and_completions_of_groups(time_of):
    """Each of 32 groups keeps an eighth of the experts on each of 4 nodes, and its own latents."""
    groups = "rollout.data_parallel_size=32", "rollout.vllm.enable_expert_parallel=true"
    split, shape = time_of("DeepSeek-V3", [600, 1100], "rollout.tensor_parallel_size=32")
    shared, _ = time_of("DeepSeek-V3", [600, 1100], *groups)
    assert shared.compute_seconds == split.compute_seconds
    tokens = 8 * 500 + 8 * 1000 + 4 * 100
    # A node has two of eight groups of experts, a token chooses four: of 70 choices, 15 have
    # neither.
    num_bytes = tokens / 4 * (9 - 3) * 2 * 2 * 7168 * 3 * (1 - 15 / 70)
    assert shared.network_seconds == pytest.approx(num_bytes / (8 * 50e9))
    # Prompts of 100 tokens, and their completions: latents of 576 elements in each layer.
    cached = 8 * (100 * 500 + 500**2 / 2) + 8 * (100 * 1000 + 1000**2 / 2)
    experts = 6 * 256 * 3 * 2048 * 7168 * 2 / 32
    reached = sum(1 - (1 - 8 / 256) ** running for running in [16] * 500 + [8] * 500)
    weights = sum(
        prod(parameter.shape) * (4 if parameter.vllm.is_float32 else 2)
        for parameter in engine_parameters(shape)
        if not parameter.is_expert and ".embed_tokens." not in parameter.sources[0].name
    )
    num_bytes = 1000 * weights + reached * experts + cached / 32 * 9 * 576 * 2
    assert shared.memory_seconds == pytest.approx(num_bytes / 3.35e12, rel=1e-6)


WHOLE = "rollout.vllm.enable_expert_parallel=true"


@pytest.mark.parametrize(
    ("engine", "sums"),
    [
        # A node has 32 of 128 experts, and a token chooses 8.
        ((8, 4, WHOLE), 2 * 3 / 4 * (1 - comb(96, 8) / comb(128, 8))),
        # Every node has a part of all experts.
        ((8, 4), 2 * 3 / 4),
        # A group of two nodes adds up after attention, and gathers what experts return.
        ((16, 2, WHOLE), 1 / 2 + 2 * 3 / 4 * (1 - comb(96, 8) / comb(128, 8)) + 1 / 4),
    ],
    ids=str,
)
def test_rollout_time_sends_tokens_to_nodes_with_their_experts(engine, sums, time_of):
    tensor, groups, *more = engine
    sizes = f"rollout.tensor_parallel_size={tensor}", f"rollout.data_parallel_size={groups}"
    time, shape = time_of("Qwen3-235B-A22B", [600, 1100], *sizes, *more)
    tokens = 8 * 500 + 8 * 1000 + 4 * 100
    num_bytes = tokens * shape.num_layers * 2 * 4096 * sums
    assert time.network_seconds == pytest.approx(num_bytes / (8 * 50e9))


@pytest.mark.parametrize(
    "limit", ["max_num_seqs: 4", "kv_cache_memory_bytes: 286261248"], ids=["requests", "cache"]
)
def test_rollout_time_has_more_passes_where_not_all_run_at_once(limit, time_of):
    # 16 completions of 1,000 tokens: four at once, or as many as 2,184 tokens of 131,072 bytes
    # hold; a completion has a quarter of its prompt and on average half of itself.
    time, _ = time_of("Llama-3.1-8B", [1100], f"rollout.vllm={{{limit}}}")
    assert time.passes == {"m": 4000, "k": -(-16 * (25 + 500) * 1000 // 2184)}[limit[0]]


def test_rollout_time_counts_memories_of_linear_attention_as_cached(time_of):
    # 8 of 32 layers have 4 heads of keys and values of 256. The cache of 20,000 tokens also holds
    # the states of linear attention.
    token, memory = 8 * 2 * 4 * 256 * 2, 24 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    limit = f"rollout.vllm.kv_cache_memory_bytes={20_000 * token}"
    few, _ = time_of("Qwen3.5-9B", [1100], limit)
    assert few.passes == -(-16 * (25 + 500 + memory / token) * 1000 // 20_000)


def test_rollout_time_is_of_products_where_very_many_run_at_once(time_of):
    many = "grpo={num_generations: 4, generation_batch_size: 4096, beta: 0.0}"
    time, shape = time_of("Llama-3.1-8B", [110], many)
    matrices = 8_030_261_248 - 2 * shape.vocab_size * shape.hidden_size
    head = shape.vocab_size * shape.hidden_size
    tokens, prompts = 4096 * 10, 1024 * 100  # a prompt is computed once per group
    attention = 4 * 32 * 128 * 32 * 4096 * (100 * 10 + 10**2 / 2)
    flops = 2 * matrices * (tokens + prompts) + 2 * head * tokens + attention
    assert time.seconds == time.compute_seconds == pytest.approx(flops / 989e12, rel=1e-3)
