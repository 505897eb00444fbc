"""Lower bound on the time of one generation, and the inputs of a simulated run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from checkpoint_convert import ModelShape
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.engine_weights.layouts import engine_dims
from megatron_grpo.engines.arguments import PLANNED, engine_number
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec
from megatron_grpo.planning.engine_memory import EngineBytes, worker_tensors
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.planning.mlp import reached_share
from megatron_grpo.planning.simulation import Loop, Mode
from megatron_grpo.planning.step_time import LinkUse, active_weights
from megatron_grpo.planning.workload import Job, spread


@dataclass(frozen=True, kw_only=True)
class RolloutTime:
    """Lower bound of one generation, on the engine with the most completions."""

    completions: int
    """Completions of all engines."""
    tokens: int
    """Generated tokens of all engines."""
    passes: int
    """Forward passes of the engine; each generates one token of every running completion."""
    memory_seconds: float
    """Reads of weights, keys and values at the full rate of the GPU's memory."""
    compute_seconds: float
    """Operations at the GPU's peak."""
    network_seconds: float
    """Sums of hidden states over an engine's nodes, or ways to its experts and back, at the full
    rate of network cards; 0 on one node."""

    @property
    def seconds(self) -> float:
        """Lower bound of the generation."""
        # The network comes on top: a sum over nodes is the input of the next matrix.
        return max(self.memory_seconds, self.compute_seconds) + self.network_seconds


def rollout_time(job: Job, engine: EngineBytes) -> RolloutTime | None:
    """Lower bound on one generation; sequences are distributed as `lengths` of the job.

    For completions of c_i tokens behind prompts of p_i tokens an engine makes max c_i passes, or
    more if its cache (or `max_num_seqs`) holds fewer completions at once. Each pass reads the
    weights. Completion i reads keys and values of p_i c_i + c_i^2 / 2 tokens in all, and reads and
    writes linear attention's memory c_i times. Prompts have `data.max_prompt_length` tokens (None
    without that key) and are computed once per group, as with vLLM's prefix caching. Data-parallel
    groups share an engine's completions evenly, and experts are reached from all groups.

    Left out: latency of kernels and all-reduces, all-reduces within a node, scheduling, prompts
    that are computed while completions wait, and prompts that several groups of an engine compute,
    as engines deal out completions one by one.
    """
    cfg, shape, card = job.cfg, job.shape, job.card
    if cfg.data.max_prompt_length is None:
        return None
    total = cfg.grpo.generation_batch_size
    count = ceil(total / cfg.rollout.num_engines)
    pairs = _prompts_and_completions(job, count)
    completions = sorted(completion for _, completion in pairs)
    tokens = sum(completions)
    group = cfg.grpo.num_generations
    remembered = engine.sequence_bytes / engine.token_bytes  # in tokens
    # Tokens in the cache, summed over passes: a group shares its prompt, a completion is half done
    # in the mean.
    cached = sum(p * c / group + c * c / 2 + remembered * c for p, c in pairs)
    # Tokens read, summed over passes: each completion of a group reads the prompt itself.
    read = sum(p * c + c * c / 2 for p, c in pairs)
    at_once = _most_sequences(cfg) or count
    passes = max(completions[-1], ceil(tokens / at_once), ceil(cached / engine.cached_tokens))
    dense, experts = _read_bytes(cfg, shape)
    num_bytes = passes * dense + _expert_passes(shape, completions) * experts
    num_bytes += _cache_traffic(engine, tokens, read) / cfg.rollout.data_parallel_size
    prompt_tokens = sum(p for p, _ in pairs) / group
    return RolloutTime(
        completions=total,
        tokens=sum(completion for _, completion in _prompts_and_completions(job, total)),
        passes=passes,
        memory_seconds=num_bytes / card.memory_rate,
        compute_seconds=_flops(shape, tokens, prompt_tokens, read)
        / cfg.rollout.gpus_per_engine
        / card.flops,
        network_seconds=_sent_bytes(cfg, shape, card)
        * (tokens + prompt_tokens)
        / card.per_node
        / card.network_rate,
    )


def mode_of(cfg: Config) -> Mode:
    """Read from `cfg` how far it may generate ahead."""
    rollout = cfg.rollout
    return Mode(max_staleness=rollout.max_staleness, in_flight=rollout.in_flight_updates)


def training_loop(job: Job, engine: EngineBytes, step_seconds: float, push: LinkUse) -> Loop | None:
    """Describe a job, with the time of an optimizer step, for `simulate`; None without
    `data.max_prompt_length`.

    Passes take their lower bound, as in `rollout_time`, with the mean number of cached tokens per
    running completion.
    """
    cfg, shape, card, grpo = job.cfg, job.shape, job.card, job.cfg.grpo
    if cfg.data.max_prompt_length is None:
        return None
    pairs = _prompts_and_completions(job, grpo.generation_batch_size)
    completions = sorted(completion for _, completion in pairs)
    group, tokens = grpo.num_generations, sum(completions)
    # Per generated token: tokens that its attention reads, and tokens that the cache holds for it.
    read = sum(p * c + c * c / 2 for p, c in pairs) / tokens
    cached = sum(p * c / group + c * c / 2 for p, c in pairs) / tokens
    cached += engine.sequence_bytes / engine.token_bytes
    dense, experts = _read_bytes(cfg, shape)
    rate, groups = cfg.rollout.gpus_per_engine * card.flops, cfg.rollout.data_parallel_size
    decode, prefill = _flops(shape, 1, 0, read) / rate, _flops(shape, 0, 1, 0) / rate
    network = _sent_bytes(cfg, shape, card) / card.per_node / card.network_rate

    def pass_seconds(running: int) -> float:
        num_bytes = dense + _reached(shape, running) * experts
        num_bytes += _cache_traffic(engine, running, running * read) / groups
        return max(num_bytes / card.memory_rate, running * decode) + running * network

    return Loop(
        lengths=completions,
        batch=grpo.generation_batch_size,
        num_engines=cfg.rollout.num_engines,
        at_once=min(
            _most_sequences(cfg) or engine.cached_tokens,
            max(1, int(engine.cached_tokens / cached)),
        ),
        pass_seconds=pass_seconds,
        prompt_seconds=sum(p for p, _ in pairs) / len(pairs) / group * (prefill + network),
        token_seconds=prefill + network,
        recomputes=cfg.rollout.recompute_kv_cache,
        start_seconds=0.0,
        train_seconds=step_seconds * BatchSchedule.of(grpo).updates_per_generation,
        push_seconds=push.seconds,
    )


def _most_sequences(cfg: Config) -> int | None:
    """Most completions that an engine runs at once; None without a limit in the config."""
    # vLLM's limit holds for each data-parallel group, SGLang's for all groups together.
    limit = engine_number(cfg.rollout, PLANNED[cfg.rollout.engine].max_sequences)
    num_limits = cfg.rollout.data_parallel_size if cfg.rollout.engine == "vllm" else 1
    return limit and limit * num_limits


def _prompts_and_completions(job: Job, count: int) -> list[tuple[int, int]]:
    """Tokens of the prompt and the completion of `count` sequences."""
    prompt, longest = job.cfg.data.max_prompt_length, job.cfg.rollout.max_completion_length
    assert prompt is not None, "else how long prompts are is unknown"
    lengths = spread(job.lengths, count)
    completions = [min(max(length - prompt, 1), longest) for length in lengths]
    return [(length - own, own) for length, own in zip(lengths, completions, strict=True)]


def _read_bytes(cfg: Config, shape: ModelShape) -> tuple[int, int]:
    """(bytes of dense weights, of all experts) that a pass may read on one GPU.

    An untied embedding is looked up, not read.
    """
    dense = experts = 0
    for each in worker_tensors(cfg, replace(shape, trains_mtp=False)):  # as without drafts
        if ".experts." in each.source:
            experts += each.num_layers * each.num_bytes
        elif shape.tie_word_embeddings or ".embed_tokens." not in each.source:
            dense += each.num_layers * each.num_bytes
    return dense, experts


def _cache_traffic(engine: EngineBytes, tokens: int, read: float) -> float:
    """Bytes read and written to generate `tokens`, whose attention reads `read` cached tokens."""
    # 2: each generated token reads and writes linear attention's memory.
    return read * engine.token_bytes + 2.0 * tokens * engine.sequence_bytes


def _expert_passes(shape: ModelShape, completions: Sequence[int]) -> float:
    """Passes times the fraction of experts read, while completions (ascending) end one by one.

    `_reached` is concave: starting all completions at once reads least, which keeps a lower bound.
    """
    running = range(len(completions), 0, -1)
    steps = (end - start for start, end in pairwise([0, *completions]))
    return sum(n * _reached(shape, b) for n, b in zip(steps, running, strict=True))


def _reached(shape: ModelShape, running: int) -> float:
    """Fraction of the experts that b running completions reach.

    b tokens, each sent to k of E experts evenly, reach E (1 - (1 - k / E)^b) of them.
    """
    if shape.moe is None:
        return 0.0
    return float(1 - (1 - shape.moe.experts_per_token / shape.moe.num_experts) ** running)


def _sent_bytes(cfg: Config, shape: ModelShape, card: GpuSpec) -> float:
    """Least bytes per token that each node of an engine sends, and receives; 0 on one node.

    A group on several nodes adds up hidden states of its tokens after every module: whatever the
    algorithm, and even if switches add, a node's own sum leaves it once. Left out: the embedding's
    sum, and logits, which one worker gathers.

    Groups that share experts: a node sends each of its tokens once to every other node with one of
    the token's experts (if experts are split, to all nodes), and receives it back once. Nodes have
    equally many tokens. In a group on several nodes, the group's other nodes need the token, too.
    """
    rollout, size = cfg.rollout, shape.hidden_size * ITEMSIZE[cfg.model.dtype]
    nodes, groups = rollout.gpus_per_engine // card.per_node, rollout.data_parallel_size
    if rollout.gpus_per_engine <= card.per_node:
        return 0.0
    modules = (1.0 if shape.block_types else 2.0) * shape.num_layers
    mixtures = shape.num_layers_with("moe") if groups > 1 else 0
    sent = 0.0
    if rollout.tensor_parallel_size > card.per_node:
        sent += (modules - mixtures) / groups + mixtures / nodes
    if mixtures:
        assert shape.moe is not None
        is_whole = engine_dims(rollout).expert_parallel
        others = (nodes - 1) * (reached_share(shape.moe, nodes) if is_whole else 1.0)
        sent += 2.0 * mixtures * others / nodes
    return sent * size


def _flops(shape: ModelShape, tokens: int, prompt_tokens: float, read: float) -> float:
    """Two operations per weight and token, the head for generated tokens, and attention."""
    head = shape.hidden_size * shape.vocab_size
    flops = 2.0 * (active_weights(shape) * (tokens + prompt_tokens) + head * tokens)
    return flops + sum(
        len(kind.layers) * block.engine_flops(tokens, prompt_tokens, read)
        for kind in layer_kinds(shape)
        for block in kind.blocks
    )
