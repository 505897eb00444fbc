"""Operations and traffic of a step, and the least time that a card and its links need for them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from checkpoint_convert import ModelShape, hf_tensors
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import PARTS, recomputed_layers, recomputed_parts
from megatron_grpo.planning.attention import rule_flops
from megatron_grpo.planning.card import GpuSpec
from megatron_grpo.planning.fp8 import kinds_of_layers, saved_flops
from megatron_grpo.planning.layer_kinds import layer_kinds, mtp_kind
from megatron_grpo.planning.state import StateBytes
from megatron_grpo.planning.traffic import Cover, LinkUse, activation_links, step_links
from megatron_grpo.planning.workload import Computed, Job, Workload, forwards_alone
from megatron_grpo.policy.matrices import is_matrix, newton_schulz_flops
from parallel import pipeline_layers

ATTAINABLE = 0.5
"""Fraction of the peak, for layers alone; Megatron-LM reaches 0.41 to 0.48 including all waits.

In FP8 the same of each operation's own peak. For Llama-3-70B on 64 H100 (TP4 PP8 VP5, 8,192 tokens,
scales of tensors) that is 12.2 s for 128 sequences; Megatron-Bridge reports 9.8 to 10.2. Scales of
blocks take more time, and for them, or for experts, no such figure has been found.
"""
ATTAINABLE_BY_EXPERTS = 0.3
"""Likewise for experts, whose matrices are small. verl reports 0.31: Qwen3-30B-A3B on 32 GPUs."""

FLEX_SLOWDOWN = 1.5
"""Time of torch's flex attention, which shared prompts and sinks need, over that of cuDNN's, for as
many pairs of tokens. FlashAttention-3's authors measured 389 TFLOP/s for Triton's kernels and 609
for cuDNN's, on an H100 at 4,096 tokens and heads of 128 (arXiv 2407.08608)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of one optimizer step: training, and its share of the log-probability passes."""

    flops: float
    """Operations of all ranks."""
    attainable: float
    """Fraction of the peak that the estimate assumes."""
    compute_seconds: float
    """Time of the busiest pipeline stage, and of an update by Muon, at the peak of the cards: no
    step is faster."""
    paced_seconds: float
    """Time of the stage with the slowdown of attention by shared prompts."""
    update_seconds: float
    """Time of Muon's update, on the rank with the most to do."""
    bubble: float
    """Idle time of the pipeline, as a fraction of its busy time."""
    links: Sequence[LinkUse]

    @property
    def waits(self) -> float:
        """Seconds for the traffic that computation does not hide."""
        return sum(link.exposed for link in self.links)

    @property
    def estimate(self) -> float:
        """Seconds that the step takes."""
        busy = self.paced_seconds * (1 + self.bubble) + self.update_seconds
        return busy / self.attainable + self.waits


def step_time(job: Job, states: Sequence[StateBytes], work: Workload) -> StepTime:
    """The time of one optimizer step; `states` is what each stage holds."""
    cfg, shape, card = job.cfg, job.shape, job.card
    dims, flops = cfg.dims, stage_flops(cfg, shape, work.computed)
    attainable = ATTAINABLE if shape.moe is None else ATTAINABLE_BY_EXPERTS
    slowdown = FLEX_SLOWDOWN if work.is_shared or shape.has_sinks else 1.0
    paced = replace(work.computed, pairs=slowdown * work.computed.pairs)
    rate = dims.stage_size * card.flops

    def seconds(*parts: str) -> float:
        return max(_layer_flops(cfg, shape, paced, frozenset(parts), card)) / rate / attainable

    # As if all were recomputed of which a part is.
    passes = _passes(cfg, "mlp") + forwards_alone(cfg) + bool(recomputed_parts(cfg))
    cover = Cover(
        microbatch=seconds(*PARTS) / passes / work.microbatches,
        attention=seconds("core_attn"),
        shared_experts=seconds("shared_experts"),
    )
    of_update, most = muon_flops(cfg, shape)
    return StepTime(
        flops=sum(flops) + of_update,
        attainable=attainable,
        compute_seconds=max(stage_flops(cfg, shape, work.computed, card)) / rate
        + most / card.flops,
        paced_seconds=max(stage_flops(cfg, shape, paced, card)) / rate,
        update_seconds=most / card.flops,
        bubble=(dims.pipeline - 1) / (work.microbatches * dims.virtual_pipeline),
        links=[
            *step_links(job, states, work, cover),
            *activation_links(job, work, cover),
        ],
    )


def stage_flops(
    cfg: Config, shape: ModelShape, work: Computed, card: GpuSpec | None = None
) -> list[float]:
    """Multiplications and additions of each pipeline stage, in a step.

    The head runs once more in a backward, as if every token were of a response. With a card, those
    in FP8 count as the bfloat16 ones that it does in their time.
    """
    flops = _layer_flops(cfg, shape, work, PARTS, card)
    head = 2.0 * shape.hidden_size * shape.vocab_size * work.tokens
    flops[-1] += head * (_passes(cfg, "head") + 1 + forwards_alone(cfg))
    if shape.trains_mtp:  # with the head, which runs twice and has no gradient of its own
        layer, recomputed = _part_flops(mtp_kind(shape), work), recomputed_parts(cfg)
        joins = 4.0 * shape.hidden_size**2 * work.tokens
        flops[-1] += 3 * (sum(layer.values()) + joins + head)
        flops[-1] += sum(each for part, each in layer.items() if part in recomputed)
    return flops


def muon_flops(cfg: Config, shape: ModelShape) -> tuple[float, float]:
    """Operations by which Muon orthogonalizes matrices: of all ranks, and of that with the most.

    Each is computed whole by one rank of its stage (`WholeMatrices`), as if these shared evenly.
    """
    if cfg.optimizer.optimizer != "muon":
        return 0.0, 0.0
    matrices = [(kind, _flops_of_matrices(_one_layer(kind.shape))) for kind in layer_kinds(shape)]
    stages = [
        float(sum(kind.count_in(*chunks) * sum(flops) for kind, flops in matrices))
        for chunks in pipeline_layers(shape.num_layers, cfg.dims)
    ]
    largest = max(max(flops) for _, flops in matrices)
    if shape.trains_mtp:
        joins = newton_schulz_flops((shape.hidden_size, 2 * shape.hidden_size))
        of_mtp = [joins, *_flops_of_matrices(_one_layer(mtp_kind(shape)))]
        stages[-1] += sum(of_mtp)
        largest = max(largest, *of_mtp)
    return sum(stages), max(max(stages) / cfg.dims.stage_size, largest)


@cache
def _flops_of_matrices(layer: ModelShape) -> Sequence[int]:
    return [
        newton_schulz_flops(size)
        for name, size in hf_tensors(layer).items()
        if ".layers." in name and ".indexer." not in name and is_matrix(name, size)
    ]


def _layer_flops(
    cfg: Config,
    shape: ModelShape,
    work: Computed,
    of_parts: frozenset[str],
    card: GpuSpec | None,
) -> list[float]:
    """Multiplications and additions of these parts of each pipeline stage's layers, in a step.

    What is recomputed runs once more. Adapters themselves, some hundredths, are left out. For
    `card` see `stage_flops`.
    """
    forwards, recomputed = forwards_alone(cfg), recomputed_parts(cfg)
    flops = [0.0] * cfg.dims.pipeline
    for config, kind in kinds_of_layers(cfg, shape):
        saved = saved_flops(config, kind.shape, work.tokens, card) if card else {}
        parts = {
            part: each - saved.get(part, 0)
            for part, each in _part_flops(kind.shape, work).items()
            if part in of_parts
        }
        layer = sum(each * (_passes(cfg, part) + forwards) for part, each in parts.items())
        again = sum(each for part, each in parts.items() if part in recomputed)
        for stage, chunks in enumerate(pipeline_layers(shape.num_layers, cfg.dims)):
            flops[stage] += layer * kind.count_in(*chunks)
            flops[stage] += again * kind.count_in(*recomputed_layers(cfg, chunks))
    return flops


def _passes(cfg: Config, part: str) -> int:
    """Forwards that a forward and a backward cost.

    A backward costs two (Kaplan et al., arXiv 2001.08361): for the gradients of inputs, and those
    of weights, which frozen ones have not. An indexer has no backward.
    """
    if part == "indexer":
        return 1
    return 2 if cfg.lora.r and part not in ("core_attn", "delta_rule") else 3


def forward_flops(shape: ModelShape, work: Computed) -> float:
    """Operations of all layers in a forward."""
    return sum(
        len(kind.layers) * sum(_part_flops(kind.shape, work).values())
        for kind in layer_kinds(shape)
    )


def _part_flops(shape: ModelShape, work: Computed) -> dict[str, float]:
    """Operations of each of a layer's `PARTS` in a forward; all layers of `shape` are of one kind.

    Twice the weights per token. Attention multiplies the query with the key, and its weight with
    the value, of each pair of tokens that attend; linear attention has no pairs. Sparse attention
    computes all pairs and masks most: it saves nothing here, and its indexer scores all pairs, too.
    """
    flops = {part: 2.0 * size * work.tokens for part, size in _part_weights(shape).items()}
    if shape.linear is not None:
        return flops | {"delta_rule": rule_flops(shape.linear) * work.tokens}
    if "attention" not in shape.modules(0):
        return flops
    of_pair = 2.0 * shape.num_attention_heads * (shape.head_dim + shape.value_dim)
    if shape.indexer is not None:
        flops["indexer"] = 2.0 * shape.indexer.num_heads * shape.indexer.head_dim * work.pairs
    return flops | {"core_attn": of_pair * _pairs(shape, work)}


def _pairs(shape: ModelShape, work: Computed) -> float:
    """Pairs of tokens that attend, in the mean over the model's layers: a token to a window, or to
    all before it where that is less for the mean of them."""
    if shape.window is None:
        return work.pairs
    share = len(shape.windowed_layers) / shape.num_layers
    return (1 - share) * work.pairs + share * min(work.pairs, shape.window * work.tokens)


def active_weights(shape: ModelShape) -> float:
    """Weights of all layers that a token is multiplied with; of experts, only those it goes to."""
    return sum(
        len(kind.layers) * sum(_part_weights(kind.shape).values()) for kind in layer_kinds(shape)
    )


def _part_weights(shape: ModelShape) -> Mapping[str, float]:
    """`active_weights` of each part of one layer; all layers of `shape` are of one kind."""
    return _weights_of_layer(_one_layer(shape))


def _one_layer(shape: ModelShape) -> ModelShape:
    return replace(shape, num_layers=1)


@cache
def _weights_of_layer(shape: ModelShape) -> Mapping[str, float]:
    share = shape.moe.experts_per_token / shape.moe.num_experts if shape.moe else 1.0
    weights: dict[str, float] = defaultdict(float)
    for name, size in hf_tensors(shape).items():
        if ".layers." in name:
            weights[_part(name, shape)] += prod(size) * (share if ".experts." in name else 1.0)
    return weights


def _part(name: str, shape: ModelShape) -> str:
    """Classify a Hugging Face tensor as one of a layer's `PARTS`."""
    modules = shape.modules(0)
    if "_attn." in name or {*modules} <= {"attention", "linear"}:
        return "attention"
    if ".shared_expert" in name:
        return "shared_experts"
    if "norm." in name:
        return "layernorm"
    return "mlp" if shape.moe is None else "moe"
