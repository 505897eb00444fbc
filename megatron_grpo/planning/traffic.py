"""Traffic between ranks in a step: bytes, time of links, and the part that computation hides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

from checkpoint_convert import ModelShape
from checkpoint_convert.shape import MoeShape
from megatron_grpo.batch.schedule import BatchSchedule
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import (
    layer_bytes,
    recomputed_layers,
    recomputed_parts,
    token_share,
)
from megatron_grpo.planning.attention import exchanged_elements
from megatron_grpo.planning.card import ITEMSIZE, GpuSpec
from megatron_grpo.planning.fp8 import kinds_of_layers
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.planning.state import (
    StateBytes,
    bucket_elements,
    expert_shards,
    gradient_itemsize,
)
from megatron_grpo.planning.workload import Job, Workload, forwards_alone, warm_up
from parallel import ParallelDims, pipeline_layers

ATTAINABLE_OF_LINK = 0.8
"""NCCL's protocol takes about 20%: 370 of an H100's 450 GB/s are left (NVIDIA/nccl-tests#212)."""


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


@dataclass(frozen=True, kw_only=True)
class Cover:
    """Seconds that the busiest stage computes, behind which traffic can hide."""

    microbatch: float
    """A forward of one microbatch; a backward takes twice as long."""
    attention: float
    """All products of queries with keys, and with values, in an optimizer step."""
    shared_experts: float
    """The experts that all tokens go to, in an optimizer step."""


def step_links(
    job: Job, states: Sequence[StateBytes], work: Workload, cover: Cover
) -> list[LinkUse]:
    """Traffic of each axis, on the stage that sends most.

    Tensor and context ranks of every stage exchange the activations of all its microbatches.
    Traffic stays within a node if the axis, together with the axes inside it, fits in one.
    """
    cfg, shape, card = job.cfg, job.shape, job.card
    dims, itemsize = cfg.dims, ITEMSIZE[cfg.model.dtype]
    tokens = work.filled / dims.data / dims.context
    width = itemsize * shape.hidden_size * tokens
    gathered, attended, mixed, dispatched = _exchanges(cfg, shape)
    shards = dims.data * dims.context
    copied = max(
        _ring_share(shards) * (state.trained - state.expert_weights)
        + _ring_share(expert_shards(dims)) * state.expert_weights
        for state in states
    )
    if shape.moe is not None:
        shards = max(shards, expert_shards(dims))
    of_tensor = _ring_share(dims.tensor) * itemsize * tokens * gathered
    share, sends = token_share(cfg), _pipeline_sends(dims, 1 + forwards_alone(cfg))
    experts = dims.expert * dims.expert_tensor
    uses = [
        ("tensor", dims.tensor, dims.tensor, of_tensor),
        *(
            (purpose, dims.context, dims.tensor * dims.context, itemsize * tokens * elements)
            for purpose, elements in _of_context(cfg, shape, work, attended, mixed).items()
        ),
        ("pipeline", dims.pipeline, dims.world_size, sends * width * share),
        ("data", shards, dims.stage_size, copied / itemsize * (gradient_itemsize(cfg) + itemsize)),
    ]
    if cfg.optimizer.optimizer == "muon":  # parts of matrices go to who computes them, and back
        exchanged = 2 * max(state.exchanged for state in states)
        splits = max(dims.tensor, dims.expert_tensor)
        uses.append(("muon", splits, splits, exchanged))
    if shape.moe is not None:  # tokens go to their experts and back
        span, copies = copies_to_experts(cfg, shape.moe, card)
        uses.append(("expert", experts, span, copies * width * share * 2 * dispatched))
    return [
        _with_hidden(
            _link(purpose, num_bytes, span <= card.per_node, card), cfg, states, work, cover
        )
        for purpose, size, span, num_bytes in uses
        if size > 1
    ]


def _of_context(
    cfg: Config, shape: ModelShape, work: Workload, attended: float, mixed: float
) -> dict[str, float]:
    """Elements that context ranks exchange for each of their own tokens, by purpose."""
    sizes, others = shape.head_dim + shape.value_dim, work.received / work.filled
    elements = shape.num_key_value_heads * sizes * others
    if not _is_ring(cfg):  # of its tokens a rank keeps some heads, of queries and outputs, too
        heads = shape.num_key_value_heads + shape.num_attention_heads
        elements = heads * sizes * others / (others + 1)
    uses = {"context": elements / cfg.dims.tensor * attended}
    if shape.linear is not None:  # of its tokens a rank keeps the heads that it computes
        whole = exchanged_elements(shape.linear) / cfg.dims.tensor
        uses["linear attention"] = others / (others + 1) * whole * mixed
    return uses


def copies_to_experts(cfg: Config, moe: MoeShape, card: GpuSpec) -> tuple[int, float]:
    """Copies of a token that a rank sends to experts over its busier link, and the ranks there.

    `alltoall` sends one to the rank of each expert, and from there to all others that have a part
    of it. `flex` (DeepEP, HybridEP) sends one to each other node, where a GPU passes one on to each
    rank with any of the experts. NVLink and the network are used at the same time. Nodes are taken
    to have equal parts of the experts.
    """
    dims = cfg.dims
    ranks = dims.expert * dims.expert_tensor
    nodes = -(-ranks // card.per_node)
    if _is_flex(cfg):
        network = (nodes - 1) * reached_share(moe, nodes)
        in_node = (ranks - nodes) * reached_share(moe, dims.expert)
    else:
        others = 1 / nodes - 1 / dims.expert + dims.expert_tensor - 1
        network, in_node = (moe.experts_per_token * part for part in (_ring_share(nodes), others))
    if network / card.network_rate > in_node / card.node_rate:
        return ranks, network
    return min(ranks, card.per_node), in_node


def _is_flex(cfg: Config) -> bool:
    """Whether tokens reach each node once, and not once for each of their experts there."""
    return bool(cfg.model.megatron.get("moe_token_dispatcher_type") == "flex")


def reached_share(moe: MoeShape, places: int) -> float:
    """Fraction of tokens with an expert in one of `places` equal parts of them, if chosen evenly.

    Of groups, a part has some, or is of one. Of each of its groups a token has equally many
    experts; with random scores it then reaches 1 % fewer nodes than this for DeepSeek-V3 on eight.
    """
    size, of_group = moe.num_experts // places, moe.num_experts // moe.num_groups
    groups, chosen = moe.num_groups, moe.groups_per_token
    if size >= of_group:
        return 1 - comb(groups - size // of_group, chosen) / comb(groups, chosen)
    each = moe.experts_per_token // chosen
    return chosen / groups * (1 - comb(of_group - size, each) / comb(of_group, each))


def _with_hidden(
    use: LinkUse, cfg: Config, states: Sequence[StateBytes], work: Workload, cover: Cover
) -> LinkUse:
    """Subtract from a link's time the part that computation hides."""
    seconds = use.seconds / ATTAINABLE_OF_LINK
    match use.purpose:
        case "data":
            hidden = _hidden_of_data(seconds, cfg, states, cover)
        # In a ring, a rank attends to one part of the keys while it receives the next. With shared
        # prompts it gathers all of them first.
        case "context" if _is_ring(cfg) and not work.is_shared:
            hidden = min(seconds, _ring_share(cfg.dims.context) * cover.attention)
        case "pipeline":
            hidden = seconds * _steady_share(cfg.dims, work.microbatches)
        case "expert" if cfg.model.megatron.get("moe_shared_expert_overlap"):
            hidden = min(seconds, cover.shared_experts)
        case _:
            hidden = 0.0
    return replace(use, hidden_seconds=hidden)


def _is_ring(cfg: Config) -> bool:
    return bool(cfg.model.megatron.get("cp_comm_type", "p2p") == "p2p")


def _hidden_of_data(
    seconds: float, cfg: Config, states: Sequence[StateBytes], cover: Cover
) -> float:
    """Seconds in which sums of gradients and gathered weights travel while layers compute.

    Of the first stage, as later ones wait for it anyway. Its last bucket of gradients is there only
    at the end of the last backward, and its first weights are needed at once. A step before a push
    gathers all its weights at once, and with a trained vision tower every pass does.
    """
    itemsize, of_gradient = ITEMSIZE[cfg.model.dtype], gradient_itemsize(cfg)
    bucket, experts = bucket_elements(cfg.dims) * itemsize, states[0].expert_weights
    others = states[0].trained - experts  # with buckets of their own
    in_buckets = 1 - (min(bucket, others) + min(bucket, experts)) / states[0].trained
    gradients = seconds * of_gradient / (of_gradient + itemsize)
    hidden = 0.0
    if cfg.parallel.overlap_grad_reduce:
        hidden += min(in_buckets * gradients, 2 * cover.microbatch)
    if cfg.parallel.overlap_param_gather and cfg.model.freeze_vision:
        updates = BatchSchedule.of(cfg.grpo).updates_per_generation
        not_pushed = 1 - 1 / updates if cfg.num_engines else 1.0
        hidden += not_pushed * min(in_buckets * (seconds - gradients), cover.microbatch)
    return hidden


def _steady_share(dims: ParallelDims, microbatches: int) -> float:
    """Part of a pipeline's sends that virtual stages hide behind other chunks' computation.

    Megatron-Core's interleaved schedule overlaps them between its warm-up and its cool-down. Of the
    first stage, which warms up longest; without virtual stages none.
    """
    if (chunks := dims.virtual_pipeline) == 1:
        return 0.0
    return max(0.0, 1 - warm_up(0, dims.pipeline, chunks) / (microbatches * chunks))


def _exchanges(cfg: Config, shape: ModelShape) -> list[float]:
    """Exchanges of ranks in all forwards and the backward, each on the stage with the most of it.

    Elements that tensor ranks gather and reduce for a token; how often context ranks exchange keys
    and values, over all layers; how often they exchange tokens for heads of linear attention; and
    how often tokens go to their experts and back. In a ring a backward passes keys and values
    round once more, and their gradients. Gradients of tokens take the ways of these.
    """
    forwards, parts = 1 + forwards_alone(cfg), recomputed_parts(cfg)
    backwards = 2 if _is_ring(cfg) else 1
    stages = []
    for chunks in pipeline_layers(shape.num_layers, cfg.dims):
        again, sums = recomputed_layers(cfg, chunks), [0.0] * 4
        for kind in layer_kinds(shape):
            layers, repeated, each = kind.count_in(*chunks), kind.count_in(*again), kind.shape
            once = (layers - repeated) * _gathered(each, forwards, frozenset())
            sums[0] += once + repeated * _gathered(each, forwards, parts)
            if "attention" in each.modules(0):
                sums[1] += layers * (forwards + backwards) + repeated * ("core_attn" in parts)
            if each.linear:
                sums[2] += layers * (forwards + 1) + repeated * ("delta_rule" in parts)
            if each.moe:
                sums[3] += layers * (forwards + 1) + repeated * ("moe" in parts)
        stages.append(sums)
    return [max(of_stages) for of_stages in zip(*stages, strict=True)]


def _gathered(shape: ModelShape, forwards: float, recomputed: frozenset[str]) -> float:
    """Elements of a token that tensor ranks exchange in a layer; all of `shape` are of one kind.

    They all-gather the inputs of split matrices, and reduce-scatter what these add to hidden
    states: around attention, and around an MLP or expert that all tokens go to; once more around a
    `recomputed` part. A backward does both for gradients, and gathers the inputs once more for
    those of weights. Of latent attention the inputs are latents; the rotated part of keys is
    gathered like them, but no matrix's input.
    """
    hidden = inputs = shape.hidden_size
    modules, elements, rotated = {*shape.modules(0)}, 0.0, 0
    if shape.latent is not None:
        inputs = (shape.latent.query_rank or hidden) + shape.latent.rank
        rotated = shape.latent.rotary_dim
    if modules & {"attention", "linear"}:
        passes = forwards + 1 + ("attention" in recomputed)
        elements += passes * (inputs + rotated + hidden) + inputs
    if "mlp" in modules or (shape.moe is not None and shape.moe.shared_intermediate_size):
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


def activation_links(job: Job, work: Workload, cover: Cover) -> list[LinkUse]:
    """The activations that leave in forwards and come back in backwards, on the stage with most.

    Either way they hide behind what computes them.
    """
    cfg, shape, card = job.cfg, job.shape, job.card
    kinds = kinds_of_layers(cfg, shape)
    layers = [(kind, layer_bytes(config, kind.shape).offloaded) for config, kind in kinds]
    per_token = max(
        sum(kind.count_in(*chunks) * offloaded for kind, offloaded in layers)
        for chunks in pipeline_layers(shape.num_layers, cfg.dims)
    )
    if not per_token:
        return []
    one_way = per_token * work.filled / cfg.dims.data / cfg.dims.context
    seconds, forward = one_way / card.host_rate, work.microbatches * cover.microbatch
    attainable = seconds / ATTAINABLE_OF_LINK
    return [
        LinkUse(
            purpose="activations",
            num_bytes=round(2 * one_way),
            in_node=True,
            seconds=2 * seconds,
            hidden_seconds=min(attainable, forward) + min(attainable, 2 * forward),
            to_host=True,
        )
    ]


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
