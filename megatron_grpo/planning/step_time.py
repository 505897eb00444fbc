"""What a step computes and sends, and the least time that a card and its links need for it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from checkpoint_convert import ModelShape, hf_tensors
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import layer_kinds, recomputed_layers, recomputed_parts
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec
from megatron_grpo.planning.state import StateBytes, expert_shards, gradient_itemsize
from megatron_grpo.planning.workload import Computed, Workload
from parallel import ParallelDims, pipeline_layers

ATTAINABLE = 0.5
"""Fraction of the peak, for layers alone; Megatron-LM reaches 0.41 to 0.48 including all waits."""
ATTAINABLE_BY_EXPERTS = 0.3
"""The same for experts, whose matrices are small. verl reports 0.31: Qwen3-30B-A3B on 32 GPUs."""
ATTAINABLE_OF_LINK = 0.8
"""NCCL's protocol takes about 20%: 370 of an H100's 450 GB/s are left (NVIDIA/nccl-tests#212)."""


FLEX_SLOWDOWN = 1.5
"""Time of torch's flex attention, which `grpo.shared_prompts` needs, over that of cuDNN's, for as
many pairs of tokens. FlashAttention-3's authors measured 389 TFLOP/s for Triton's kernels and 609
for cuDNN's, on an H100 at 4,096 tokens and heads of 128 (arXiv 2407.08608)."""


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """Bytes that the busiest GPU sends for one purpose in an optimizer step."""

    purpose: str
    num_bytes: int
    in_node: bool
    """Whether over NVLink; else over the network card."""
    seconds: float
    """Time at the full rate of that link."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of one optimizer step: training, and its share of the log-probability passes."""

    flops: float
    """Operations of all ranks."""
    attainable: float
    """Fraction of the peak that the estimate assumes."""
    compute_seconds: float
    """Time of the busiest pipeline stage at the peak of its cards: no step is faster."""
    paced_seconds: float
    """The same with the slowdown of attention by shared prompts."""
    bubble: float
    """Idle time of the pipeline, as a fraction of its busy time."""
    links: Sequence[LinkUse]

    @property
    def waits(self) -> float:
        """Seconds for all traffic, at `ATTAINABLE_OF_LINK`."""
        return sum(link.seconds for link in self.links) / ATTAINABLE_OF_LINK

    @property
    def estimate(self) -> float:
        """Seconds, if no traffic is hidden behind computation."""
        return self.paced_seconds / self.attainable * (1 + self.bubble) + self.waits


def step_time(
    cfg: Config, shape: ModelShape, states: Sequence[StateBytes], work: Workload, card: GpuSpec
) -> StepTime:
    """The time of one optimizer step of `cfg`; `states` is what each stage holds."""
    dims, flops = cfg.dims, stage_flops(cfg, shape, work.computed)
    slowdown = FLEX_SLOWDOWN if work.is_shared else 1.0
    paced = replace(work.computed, pairs=slowdown * work.computed.pairs)
    return StepTime(
        flops=sum(flops),
        attainable=ATTAINABLE if shape.moe is None else ATTAINABLE_BY_EXPERTS,
        compute_seconds=max(flops) / dims.stage_size / card.flops,
        paced_seconds=max(stage_flops(cfg, shape, paced)) / dims.stage_size / card.flops,
        bubble=(dims.pipeline - 1) / (work.microbatches * dims.virtual_pipeline),
        links=_links(cfg, shape, states, work, card),
    )


def stage_flops(cfg: Config, shape: ModelShape, work: Computed) -> list[float]:
    """Multiplications and additions of each pipeline stage, in a step.

    A backward costs two forwards (Kaplan et al., arXiv 2001.08361). What is recomputed of layers
    runs once more, and so does the head, which counts as if every token were of a response.
    """
    forwards = _forwards_alone(cfg)
    flops = [0.0] * cfg.dims.pipeline
    for kind in layer_kinds(shape):
        parts = _part_flops(kind.shape, work)
        layer = sum(parts.values())
        again = sum(parts[part] for part in parts if part in recomputed_parts(cfg))
        for stage, chunks in enumerate(pipeline_layers(shape.num_layers, cfg.dims)):
            flops[stage] += layer * (3 + forwards) * kind.count_in(*chunks)
            flops[stage] += again * kind.count_in(*recomputed_layers(cfg, chunks))
    head = 2.0 * shape.hidden_size * shape.vocab_size * work.tokens
    flops[-1] += head * (4 + forwards)
    return flops


def _forwards_alone(cfg: Config) -> float:
    """Forwards per step that no backward follows: of the policy before training, of the reference.

    Each is made once per generation and serves all `grpo.num_iterations`.
    """
    old = cfg.grpo.num_old_passes / cfg.grpo.steps_per_generation
    return (old + (cfg.grpo.beta > 0)) / cfg.grpo.num_iterations


def forward_flops(shape: ModelShape, work: Computed) -> float:
    """Operations of all layers in a forward."""
    return sum(
        len(kind.layers) * sum(_part_flops(kind.shape, work).values())
        for kind in layer_kinds(shape)
    )


def _part_flops(shape: ModelShape, work: Computed) -> dict[str, float]:
    """Operations of each of a layer's `PARTS` in a forward; all layers of `shape` are of one kind.

    Twice the weights per token. Attention multiplies the query with the key, and its weight with
    the value, of each pair of tokens that attend.
    """
    flops = {part: 2.0 * size * work.tokens for part, size in _part_weights(shape).items()}
    of_pair = 2.0 * shape.num_attention_heads * (shape.head_dim + shape.value_dim)
    return flops | {"core_attn": of_pair * work.pairs}


def active_weights(shape: ModelShape) -> float:
    """Weights of all layers that a token is multiplied with; of experts, only those it goes to."""
    return sum(
        len(kind.layers) * sum(_part_weights(kind.shape).values()) for kind in layer_kinds(shape)
    )


def _part_weights(shape: ModelShape) -> dict[str, float]:
    """`active_weights` of each part of one layer; all layers of `shape` are of one kind."""
    share = shape.moe.experts_per_token / shape.moe.num_experts if shape.moe else 1.0
    weights: dict[str, float] = defaultdict(float)
    for name, size in hf_tensors(replace(shape, num_layers=1)).items():
        if ".layers." in name:
            weights[_part(name, shape)] += prod(size) * (share if ".experts." in name else 1.0)
    return weights


def _part(name: str, shape: ModelShape) -> str:
    """Which of a layer's `PARTS` a Hugging Face tensor belongs to."""
    if ".self_attn." in name:
        return "attention"
    if ".shared_experts." in name:
        return "shared_experts"
    if "norm." in name:
        return "layernorm"
    return "mlp" if shape.moe is None else "moe"


def _links(
    cfg: Config, shape: ModelShape, states: Sequence[StateBytes], work: Workload, card: GpuSpec
) -> list[LinkUse]:
    """What the ranks of each axis send each other, on the stage that sends most.

    Tensor and context ranks of every stage exchange the activations of all its microbatches.
    Traffic stays within a node if the axis, together with the axes inside it, fits in one.
    """
    dims, itemsize = cfg.dims, ITEMSIZE[cfg.model.dtype]
    tokens = work.filled / dims.data / dims.context
    width = itemsize * shape.hidden_size * tokens
    forwards_alone = _forwards_alone(cfg)
    gathered, attended, dispatched = _exchanges(cfg, shape)
    heads = shape.num_key_value_heads / dims.tensor
    keys_and_values = heads * (shape.head_dim + shape.value_dim) * itemsize * tokens
    shards = dims.data * dims.context
    copied = max(
        _ring_share(shards) * (state.weights - state.expert_weights)
        + _ring_share(expert_shards(dims)) * state.expert_weights
        for state in states
    )
    if shape.moe is not None:
        shards = max(shards, expert_shards(dims))
    share = 1 / dims.tensor if cfg.parallel.sequence_parallel else 1.0
    sends = _pipeline_sends(dims, 1 + forwards_alone)
    experts = dims.expert * dims.expert_tensor
    uses = [
        (
            "tensor",
            dims.tensor,
            dims.tensor,
            _ring_share(dims.tensor) * itemsize * tokens * gathered,
        ),
        (
            "context",
            dims.context,
            dims.tensor * dims.context,
            work.received / work.filled * keys_and_values * attended,
        ),
        ("pipeline", dims.pipeline, dims.world_size, sends * width * share),
        ("data", shards, dims.stage_size, copied / itemsize * (gradient_itemsize(cfg) + itemsize)),
    ]
    if shape.moe is not None:
        # Tokens go to the ranks of their experts, to all of them if an expert is split, and back.
        sent = (_ring_share(dims.expert) + dims.expert_tensor - 1) * shape.moe.experts_per_token
        uses.append(("expert", experts, experts, sent * width * share * 2 * dispatched))
    return [
        _link(purpose, num_bytes, span <= card.per_node, card)
        for purpose, size, span, num_bytes in uses
        if size > 1
    ]


def _exchanges(cfg: Config, shape: ModelShape) -> tuple[float, float, float]:
    """What ranks exchange in all forwards and the backward, each on the stage with the most of it.

    Elements that tensor ranks gather and reduce for a token; how often context ranks exchange keys
    and values, over all layers; and how often tokens go to their experts and back. Gradients of
    keys and values are as much as both and are summed, and those of tokens take the same ways.
    """
    forwards, parts = 1 + _forwards_alone(cfg), recomputed_parts(cfg)
    gathered, attended, dispatched = [], [], []
    for chunks in pipeline_layers(shape.num_layers, cfg.dims):
        again = recomputed_layers(cfg, chunks)
        counts = [
            (kind.shape, kind.count_in(*chunks), kind.count_in(*again))
            for kind in layer_kinds(shape)
        ]
        gathered.append(
            sum(
                (layers - repeated) * _gathered(kind, forwards, frozenset())
                + repeated * _gathered(kind, forwards, parts)
                for kind, layers, repeated in counts
            )
        )
        attended.append(
            sum(
                layers * (forwards + 2) + repeated * ("core_attn" in parts)
                for _, layers, repeated in counts
            )
        )
        dispatched.append(
            sum(
                layers * (forwards + 1) + repeated * ("moe" in parts)
                for kind, layers, repeated in counts
                if kind.moe
            )
        )
    return max(gathered), max(attended), max(dispatched)


def _gathered(shape: ModelShape, forwards: float, recomputed: frozenset[str]) -> float:
    """Elements of a token that tensor ranks exchange in a layer; all of `shape` are of one kind.

    They all-gather the inputs of split matrices, and reduce-scatter what these add to hidden
    states: around attention, and around an MLP or expert that all tokens go to; once more around a
    `recomputed` part. A backward does both for gradients, and gathers the inputs once more for
    those of weights. Of latent attention the inputs are latents; the rotated part of keys is
    gathered like them, but no matrix's input.
    """
    hidden = inputs = shape.hidden_size
    rotated = 0
    if shape.latent is not None:
        inputs = (shape.latent.query_rank or hidden) + shape.latent.rank
        rotated = shape.latent.rotary_dim
    passes = forwards + 1 + ("attention" in recomputed)
    elements = passes * (inputs + rotated + hidden) + inputs
    if shape.moe is None or shape.moe.shared_intermediate_size:
        part = "mlp" if shape.moe is None else "shared_experts"
        elements += (2 * (forwards + 1 + (part in recomputed)) + 1) * hidden
    return elements


def _pipeline_sends(dims: ParallelDims, forwards: float) -> float:
    """How often the busiest stage sends each token: outputs to the next stage, gradients back.

    A middle stage does both for all its chunks. The first chunk sends no gradient, and the last no
    output.
    """
    chunks = dims.virtual_pipeline
    return max(
        forwards * (chunks - (stage == dims.pipeline - 1)) + chunks - (stage == 0)
        for stage in range(dims.pipeline)
    )


def push_link(num_bytes: int, card: GpuSpec, *, in_node: bool) -> LinkUse:
    """The weights of one engine worker, which it receives once per generation."""
    return _link("push", num_bytes, in_node, card)


def _ring_share(size: int) -> float:
    """Fraction of the data that each of `size` ranks sends or receives in a ring."""
    return (size - 1) / size


def _link(purpose: str, num_bytes: float, in_node: bool, card: GpuSpec) -> LinkUse:
    rate = card.node_rate if in_node else card.network_rate
    return LinkUse(
        purpose=purpose, num_bytes=round(num_bytes), in_node=in_node, seconds=num_bytes / rate
    )
