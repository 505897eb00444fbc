"""Operations and traffic of a step, and the least time that a card and its links need for them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from checkpoint_convert import ModelShape
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import (
    is_recomputed,
    most_offloaded,
    recomputed_layers,
    row_bytes,
)
from megatron_grpo.planning.block import FROZEN_PASSES, PASSES, Block
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec
from megatron_grpo.planning.layer_kinds import kinds_of_layers, layer_kinds, mtp_kind
from megatron_grpo.planning.mlp import copies_to_experts
from megatron_grpo.planning.optimizers import planned_optimizer
from megatron_grpo.planning.state import (
    StateBytes,
    bucket_elements,
    expert_shards,
    gradient_itemsize,
)
from megatron_grpo.planning.workload import Computed, Job, Workload, forwards_alone, warm_up
from parallel import ParallelDims, pipeline_layers

FLEX_SLOWDOWN = 1.5
"""Time per pair of tokens in torch's flex attention (shared prompts, sinks), relative to cuDNN.
FlashAttention-3's authors measured 389 TFLOP/s for Triton's kernels and 609 for cuDNN's, on an H100
at 4,096 tokens and heads of 128 (arXiv 2407.08608)."""
ATTAINABLE_OF_LINK = 0.8
"""Fraction of a link's rate left by NCCL: 370 of an H100's 450 GB/s (NVIDIA/nccl-tests#212)."""

ALL = "all parts"
"""Key of the seconds of whole layers."""
Cover = tuple[float, float]
"""Share of a link's bytes, and the seconds of computation behind which they can hide."""


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """Bytes that the busiest GPU sends for one purpose in an optimizer step."""

    purpose: str
    num_bytes: int
    in_node: bool
    """Whether over NVLink, or PCIe if `to_host`; else over the network card."""
    seconds: float
    """Time at the full rate of that link."""
    hidden_seconds: float = 0.0
    """Part of the time at `ATTAINABLE_OF_LINK` in which the GPU computes something else."""
    to_host: bool = False
    """Whether to the memory of the node, and back."""

    @property
    def exposed(self) -> float:
        """Seconds that a step waits for it."""
        return self.seconds / ATTAINABLE_OF_LINK - self.hidden_seconds

    def behind(self, *covers: Cover) -> "LinkUse":
        """Hide each share of the bytes behind its computation, as far as that lasts."""
        attainable = self.seconds / ATTAINABLE_OF_LINK
        hidden = sum(min(share * attainable, seconds) for share, seconds in covers)
        return replace(self, hidden_seconds=hidden)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Time of one optimizer step: training, and its share of the log-probability passes."""

    flops: float
    """Operations of all ranks."""
    attainable: float
    """Fraction of the peak that the estimate assumes."""
    compute_seconds: float
    """Time of the busiest pipeline stage, and of the optimizer's update, at the peak of the cards:
    no step is faster."""
    paced_seconds: float
    """Time of the busiest stage at the peak, with `FLEX_SLOWDOWN` of attention; no update."""
    update_seconds: float
    """Time of the optimizer's update, on the rank with the most to do."""
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
    slowdown = FLEX_SLOWDOWN if work.is_shared or shape.has_sinks else 1.0
    paced = replace(work.computed, pairs=slowdown * work.computed.pairs)
    attainable = min(block.attainable for kind in layer_kinds(shape) for block in kind.blocks)
    rate = dims.stage_size * card.flops
    update_flops, most = planned_optimizer(cfg).flops(shape, dims)
    # The busiest stage, not the mean: a pipeline runs at the pace of its slowest stage.
    busy = max(stage_flops(cfg, shape, work.computed, card)) / rate
    return StepTime(
        flops=sum(flops) + update_flops,
        attainable=attainable,
        compute_seconds=busy + most / card.flops,
        paced_seconds=max(stage_flops(cfg, shape, paced, card)) / rate,
        update_seconds=most / card.flops,
        bubble=(dims.pipeline - 1) / (work.microbatches * dims.virtual_pipeline),
        links=_links(job, states, work, _layer_seconds(job, paced, attainable)),
    )


def _layer_seconds(job: Job, work: Computed, attainable: float) -> Mapping[str, float]:
    """Seconds of each part of layers in a step, on its busiest stage; and of all parts (`ALL`)."""
    cfg, rate = job.cfg, job.cfg.dims.stage_size * job.card.flops * attainable
    parts = _layer_flops(cfg, job.shape, work, job.card)
    stages = map(sum, zip(*parts.values(), strict=True))
    return {part: max(each) / rate for part, each in parts.items()} | {ALL: max(stages) / rate}


# Operations


def stage_flops(
    cfg: Config, shape: ModelShape, work: Computed, card: GpuSpec | None = None
) -> list[float]:
    """Operations (multiplications and additions) of each pipeline stage in a step.

    The head counts every token as of a response, and runs once more in a backward. With `card`, an
    operation in FP8 counts as the bfloat16 operations of the same time.
    """
    parts = _layer_flops(cfg, shape, work, card)
    flops = [sum(stages) for stages in zip(*parts.values(), strict=True)]
    head = 2.0 * shape.hidden_size * shape.vocab_size * work.tokens
    flops[-1] += head * (_passes(cfg) + 1 + forwards_alone(cfg))
    if shape.trains_mtp:  # 3 heads: forward, again in the backward, gradient of hidden states alone
        layer = [each for block in mtp_kind(shape).blocks for each in block.flops(work)]
        joins = 4.0 * shape.hidden_size**2 * work.tokens
        flops[-1] += 3 * (sum(each.forward for each in layer) + joins + head)
        flops[-1] += sum(each.forward for each in layer if is_recomputed(cfg, each.part))
    return flops


def _layer_flops(
    cfg: Config, shape: ModelShape, work: Computed, card: GpuSpec | None
) -> Mapping[str, Sequence[float]]:
    """Operations of the layers of each pipeline stage in a step, by part of a module.

    Recomputed parts run once more. Left out: products of adapters, some hundredths.
    """
    stages = pipeline_layers(shape.num_layers, cfg.dims)
    total: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(stages))
    for precision, kind in kinds_of_layers(cfg, shape):
        linear_time = precision.relative_time(card) if card else 1.0
        for each in (each for block in kind.blocks for each in block.flops(work, linear_time)):
            passes = (each.frozen_passes if cfg.lora.r else each.passes) + forwards_alone(cfg)
            is_again = is_recomputed(cfg, each.part)
            for stage, chunks in enumerate(stages):
                again = kind.count_in(*recomputed_layers(cfg, chunks)) if is_again else 0
                layers = passes * kind.count_in(*chunks) + again
                total[each.part][stage] += each.forward * layers
    return total


def _passes(cfg: Config) -> int:
    return FROZEN_PASSES if cfg.lora.r else PASSES


def forward_flops(shape: ModelShape, work: Computed) -> float:
    """Operations of all layers in a forward."""
    return sum(
        len(kind.layers) * each.forward
        for kind in layer_kinds(shape)
        for block in kind.blocks
        for each in block.flops(work)
    )


def active_weights(shape: ModelShape) -> float:
    """Weights of all layers that multiply a token, with its own experts alone."""
    return sum(
        len(kind.layers) * each.size
        for kind in layer_kinds(shape)
        for block in kind.blocks
        for each in block.weights()
    )


# Traffic


def _links(
    job: Job, states: Sequence[StateBytes], work: Workload, seconds: Mapping[str, float]
) -> list[LinkUse]:
    """Traffic of each axis, on the stage that sends most; `seconds`: `_layer_seconds`.

    Traffic stays within a node if the axis, together with the axes inside it, fits in one.
    """
    cfg, card, dims = job.cfg, job.card, job.cfg.dims
    forward = _forward_seconds(cfg, work, seconds)
    rows = _row_bytes(job, work) * _pipeline_sends(dims, 1 + forwards_alone(cfg))
    splits = max(dims.tensor, dims.expert_tensor)
    # Muon: parts of matrices go to the rank that updates them, and back.
    parts = 2 * max(state.exchanged for state in states)
    uses = [
        *_exchanges(job, work, seconds),
        _link("pipeline", rows, dims.world_size, card).behind(
            (_steady_share(dims, work.microbatches), inf)
        ),
        _link("data", _data_bytes(cfg, states), dims.stage_size, card).behind(
            *_data_covers(cfg, states, forward)
        ),
        _link(cfg.optimizer.optimizer, parts, splits, card),
        _activation_link(job, work, forward),
    ]
    return [use for use in uses if use.num_bytes]


def _exchanges(job: Job, work: Workload, seconds: Mapping[str, float]) -> Iterator[LinkUse]:
    """Activations of all microbatches that tensor, context and expert ranks exchange."""
    cfg, shape, card, dims = job.cfg, job.shape, job.card, job.cfg.dims
    itemsize, tokens = ITEMSIZE[cfg.model.dtype], _rank_tokens(job, work)
    is_ring = cfg.model.megatron.get("cp_comm_type", "p2p") == "p2p"
    exchanged = _exchanged(cfg, shape, work.received / work.filled, is_ring=is_ring)
    for purpose, elements in exchanged.items():
        num_bytes = itemsize * tokens * elements
        match purpose:
            case "tensor":
                yield _link(purpose, _ring_share(dims.tensor) * num_bytes, dims.tensor, card)
            case "expert":  # tokens go there and back
                assert shape.moe is not None
                span, copies = copies_to_experts(cfg, shape.moe, card)
                use = _link(purpose, copies * _row_bytes(job, work) * 2 * elements, span, card)
                overlaps = cfg.model.megatron.get("moe_shared_expert_overlap")
                yield use.behind((1.0, seconds["shared_experts"] if overlaps else 0.0))
            case _:
                use = _link(purpose, num_bytes / dims.tensor, dims.tensor * dims.context, card)
                if purpose == "context" and is_ring and not work.is_shared:
                    # A rank attends to one part of the keys while it receives the next. With shared
                    # prompts it gathers all of them first.
                    use = use.behind((1.0, _ring_share(dims.context) * seconds["core_attn"]))
                yield use


def _activation_link(job: Job, work: Workload, forward: float) -> LinkUse:
    """Activations that leave in forwards and return in backwards, on the stage with most."""
    num_bytes = 2 * most_offloaded(job.cfg, job.shape) * _rank_tokens(job, work)
    use = LinkUse(
        purpose="activations",
        num_bytes=round(num_bytes),
        in_node=True,
        seconds=num_bytes / job.card.host_rate,
        to_host=True,
    )
    # The way out hides behind forwards, the way back behind backwards, which take twice as long.
    forwards = work.microbatches * forward
    return use.behind((0.5, forwards), (0.5, 2 * forwards))


def _rank_tokens(job: Job, work: Workload) -> float:
    """Tokens of a context rank in a step."""
    return work.filled / job.cfg.dims.data / job.cfg.dims.context


def _row_bytes(job: Job, work: Workload) -> float:
    """Bytes of hidden states of a rank in a step."""
    return row_bytes(job.cfg, job.shape) * _rank_tokens(job, work)


def _forward_seconds(cfg: Config, work: Workload, seconds: Mapping[str, float]) -> float:
    """Seconds of a microbatch's forward; its backward takes twice as long.

    Partial recomputation counts as full.
    """
    recomputes = cfg.model.megatron.get("recompute_granularity") is not None
    passes = _passes(cfg) + forwards_alone(cfg) + recomputes
    return seconds[ALL] / passes / work.microbatches


def _exchanged(cfg: Config, shape: ModelShape, others: float, *, is_ring: bool) -> dict[str, float]:
    """Elements of a token that ranks exchange in forwards and a backward, on the busiest stage.

    `expert` counts round trips instead. `others`, `is_ring`: see `Block.context_elements`.
    """

    def sent(block: Block, purpose: str, forwards: float) -> float:
        match purpose:
            case "tensor":
                return block.tensor_elements(forwards)
            case "expert":
                return forwards + 1
        return block.context_elements(forwards, others, is_ring=is_ring)

    forwards = 1 + forwards_alone(cfg)
    most: dict[str, float] = defaultdict(float)
    for chunks in pipeline_layers(shape.num_layers, cfg.dims):
        sums: dict[str, float] = defaultdict(float)
        recomputed = recomputed_layers(cfg, chunks)
        for kind in layer_kinds(shape):
            for block in kind.blocks:
                for purpose, part in block.repeats.items():
                    again = kind.count_in(*recomputed) if is_recomputed(cfg, part) else 0
                    once = sent(block, purpose, forwards)
                    more = sent(block, purpose, forwards + 1) - once
                    sums[purpose] += kind.count_in(*chunks) * once + again * more
        for purpose, elements in sums.items():
            most[purpose] = max(most[purpose], elements)
    return most


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


def _steady_share(dims: ParallelDims, microbatches: int) -> float:
    """Part of a pipeline's sends that virtual stages hide behind computation of other chunks.

    Megatron-Core's interleaved schedule overlaps them between warm-up and cool-down. Counted for
    the first stage, which warms up longest; 0 without virtual stages.
    """
    if (chunks := dims.virtual_pipeline) == 1:
        return 0.0
    return max(0.0, 1 - warm_up(0, dims.pipeline, chunks) / (microbatches * chunks))


def _data_bytes(cfg: Config, states: Sequence[StateBytes]) -> float:
    """Bytes of gradients that a rank sums with its copies, and of weights that it gathers."""
    itemsize, shards = ITEMSIZE[cfg.model.dtype], cfg.dims.data * cfg.dims.context
    copied = max(
        _ring_share(shards) * (state.trained - state.expert_weights)
        + _ring_share(expert_shards(cfg.dims)) * state.expert_weights
        for state in states
    )
    return copied / itemsize * (gradient_itemsize(cfg) + itemsize)


def _data_covers(cfg: Config, states: Sequence[StateBytes], forward: float) -> list[Cover]:
    """Computation that hides sums of gradients and gathers of weights.

    Counted for the first stage: later stages wait for it anyway. Its last bucket of gradients is
    complete only at the end of the last backward, and its first weights are needed at once. The
    step before a push gathers all weights at once, and so does every pass with a trained vision
    tower.
    """
    itemsize, of_gradient = ITEMSIZE[cfg.model.dtype], gradient_itemsize(cfg)
    bucket, experts = bucket_elements(cfg.dims) * itemsize, states[0].expert_weights
    others = states[0].trained - experts  # experts have buckets of their own
    in_buckets = 1 - (min(bucket, others) + min(bucket, experts)) / states[0].trained
    gradients = of_gradient / (of_gradient + itemsize)
    covers: list[Cover] = []
    if cfg.parallel.overlap_grad_reduce:
        covers.append((in_buckets * gradients, 2 * forward))
    if cfg.parallel.overlap_param_gather and cfg.model.freeze_vision:
        updates = BatchSchedule.of(cfg.grpo).updates_per_generation
        # One step of a generation comes before a push.
        not_pushed = 1 - 1 / updates if cfg.num_engines else 1.0
        covers.append((not_pushed * in_buckets * (1 - gradients), not_pushed * forward))
    return covers


def push_link(num_bytes: float, card: GpuSpec, *, in_node: bool, purpose: str = "push") -> LinkUse:
    """Traffic over NVLink or the network; as `push`, the weights that one engine worker receives
    per generation."""
    rate = card.node_rate if in_node else card.network_rate
    return LinkUse(
        purpose=purpose, num_bytes=round(num_bytes), in_node=in_node, seconds=num_bytes / rate
    )


def _ring_share(size: int) -> float:
    """Fraction of the data that each of `size` ranks sends or receives in a ring."""
    return (size - 1) / size


def _link(purpose: str, num_bytes: float, span: int, card: GpuSpec) -> LinkUse:
    """Traffic between ranks of an axis, over `span` neighbouring GPUs."""
    return push_link(num_bytes, card, in_node=span <= card.per_node, purpose=purpose)
