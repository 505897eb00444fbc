"""The trained model: Megatron-Core GPTModels with weights from a Hugging Face folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_te_version
from torch import Tensor

from checkpoint_convert import ModelShape, megatron_layout, padded_vocab_size
from checkpoint_convert.families.ffn import SELECTION_BIAS
from checkpoint_convert.megatron import layout_sender
from checkpoint_convert.rank_weights import read_weights
from megatron_grpo.config.config import Config
from megatron_grpo.policy.mla import yarn_frequencies, yarn_scaling
from megatron_grpo.policy.optimizer import make_optimizer, make_scheduler
from megatron_grpo.policy.packed_params import PackedRotary, packed_params
from megatron_grpo.policy.router import RouterLosses, add_router_replay, own_routes
from megatron_grpo.policy.transformer import (
    accumulate_in_products,
    block_spec,
    transformer_config,
    uses_transformer_engine,
)
from parallel import Layout, Sender, pipeline_layers
from parallel.context import context_indices
from parallel.groups import Groups
from parallel.packing import PackedBatch


@dataclass(kw_only=True)
class Model:
    """This rank's part of a model: one chunk per virtual pipeline stage."""

    shape: ModelShape
    layout: Layout
    """Which boxes of the Hugging Face tensors this rank's parameters hold."""
    chunks: list[Any]
    """GPTModels, wrapped in Megatron's DistributedDataParallel if they have gradients."""

    @property
    def is_last_stage(self) -> bool:
        """Whether the last chunk outputs the model's final hidden states."""
        return unwrapped(self.chunks[-1]).post_process

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary / tp, H], on the last stage; the embedding's weight if tied."""
        chunk = unwrapped(self.chunks[-1])
        if chunk.share_embeddings_and_output_weights:
            shared: Tensor = chunk.shared_embedding_or_output_weight()
            return shared
        own: Tensor = chunk.output_layer.weight
        return own

    def parameters(self) -> dict[str, Tensor]:
        """Parameters by their local names in `layout`: ``{chunk}.{Megatron's name}``.

        They include the biases by which experts are chosen, which have no gradient.
        """
        return {
            f"{number}.{name}": value
            for number, chunk in enumerate(self.chunks)
            for name, value in chain(
                unwrapped(chunk).named_parameters(), _selection_biases(unwrapped(chunk))
            )
        }


@dataclass(kw_only=True)
class Policy(Model):
    """The model that is trained."""

    optimizer: Any
    """Megatron's distributed optimizer."""
    scheduler: Any
    """Sets the optimizer's learning rate; stepped once per optimizer step."""
    router_losses: RouterLosses
    """What the routers of a mixture lost in the microbatches since `zero_grad`."""

    def zero_grad(self) -> None:
        """Zero all gradients, before the first microbatch of an optimizer step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.router_losses.clear()

    def zero_summed_gradient(self) -> None:
        """Zero this rank's shard of the gradient summed over data and context ranks.

        The rest of its buffers keeps this rank's own contributions to the other ranks' shards.
        """
        for chunk in self.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    bucket.grad_data.chunk(group.size())[group.rank()].zero_()


def build_policy(cfg: Config, shape: ModelShape, groups: Groups) -> Policy:
    """The model of `cfg.model.path` with its optimizer; collective over all ranks."""
    model = build_model(cfg, shape, groups)
    if cfg.rollout.router_replay:
        add_router_replay(model.chunks)
    add_gradients(model)
    read_weights(cfg.model.path, shape, model.layout, model.parameters())
    # The optimizer copies the loaded weights into its float32 master weights, so it comes last.
    return add_optimizer(model, cfg)


def build_model(cfg: Config, shape: ModelShape, groups: Groups) -> Model:
    """This rank's part of the model, with uninitialized weights."""
    chunks = _build_chunks(cfg, shape, groups)
    layout = megatron_layout(
        shape,
        groups.dims,
        groups.coordinates,
        transformer_engine=uses_transformer_engine(chunks[0].config),
    )
    return Model(shape=shape, layout=layout, chunks=chunks)


def describe(policy: Policy) -> str:
    """What computes layers, attention and optimizer steps: they differ in speed and in rounding."""
    chunk = unwrapped(policy.chunks[0])
    fused = uses_transformer_engine(chunk.config)
    attention = chunk.decoder.layers[0].self_attention.core_attention
    steps = {
        type(part.optimizer).__name__
        for part in policy.optimizer.chained_optimizers
        if part.optimizer is not None
    }
    return (
        f"layers: {f'Transformer Engine {get_te_version()}' if fused else 'torch'}, "
        f"attention: {type(attention).__name__}, optimizer: {', '.join(sorted(steps))}"
    )


def add_gradients(model: Model) -> None:
    """Give a model's chunks gradient buffers, which are summed over data and context ranks."""
    model.chunks = [_with_gradients(chunk) for chunk in model.chunks]


def add_optimizer(model: Model, cfg: Config) -> Policy:
    """Add optimizer and scheduler to a model with gradients; collective over all ranks."""
    optimizer = make_optimizer(model.chunks, cfg.optimizer)
    scheduler = make_scheduler(optimizer, cfg.optimizer, cfg.train.num_steps)
    losses = RouterLosses([unwrapped(chunk) for chunk in model.chunks])
    return Policy(**vars(model), optimizer=optimizer, scheduler=scheduler, router_losses=losses)


def forward(chunk: Any, batch: PackedBatch, groups: Groups) -> Tensor:
    """Run one model chunk on this context rank's part of a packed microbatch.

    Returns hidden states. For the last chunk: the head's input, [T / cp, H] in the order of
    `context_indices`, or the tensor rank's slice of it under sequence parallelism. For the others:
    what Megatron-Core sends to the next stage.
    """
    rank, size = groups.coordinates.context, groups.dims.context
    local = context_indices(batch.cu_seqlens, rank, size)
    params = packed_params(batch, local, rank, size)
    params.routed_experts = own_routes(batch, local, groups)
    output: Tensor = chunk(
        input_ids=batch.tokens[local].unsqueeze(0),
        position_ids=batch.position_ids[local].unsqueeze(0),
        attention_mask=None,
        packed_seq_params=params,
    )
    return output.squeeze(0) if unwrapped(chunk).post_process else output


def _build_chunks(cfg: Config, shape: ModelShape, groups: Groups) -> list[GPTModel]:
    dims = groups.dims
    config = transformer_config(
        shape,
        dims,
        dtype=getattr(torch, cfg.model.dtype),
        sequence_parallel=cfg.parallel.sequence_parallel,
        overrides=cfg.model.megatron,
    )
    # Nothing random is drawn (no dropout, no initialization), but Megatron requires RNG states.
    model_parallel_cuda_manual_seed(0)
    chunks = [
        GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, layers, shape, cfg.grpo.shared_prompts),
            vocab_size=padded_vocab_size(shape, dims),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=layers.start == 0,
            post_process=layers.stop == shape.num_layers,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            vp_stage=virtual_stage if dims.virtual_pipeline > 1 else None,
            position_embedding_type="rope",
        )
        for virtual_stage, layers in enumerate(
            pipeline_layers(shape.num_layers, dims)[groups.coordinates.pipeline]
        )
    ]
    packed_rotary = PackedRotary(_rotary(shape))
    _keep_selection_biases(chunks)
    for chunk in chunks:
        _mark_experts(chunk)
        if chunk.post_process:
            chunk.output_layer.forward = _pass_hidden_states
        chunk.rotary_pos_emb = packed_rotary
        accumulate_in_products(chunk, cfg.model.megatron)
    return chunks


def _selection_biases(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    return (each for each in chunk.named_buffers() if each[0].endswith(SELECTION_BIAS))


def _keep_selection_biases(chunks: Sequence[GPTModel]) -> None:
    """Choose experts by the biases as they were read.

    In pretraining Megatron counts the tokens of each expert, in a function that it compiles first,
    and moves the biases after each step. With these flags off it still adds them to the scores.
    """
    chunks[0].config.moe_router_enable_expert_bias = False
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.enable_expert_bias = False


def _pass_hidden_states(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Replaces the output layer: parallel/logprobs.py computes logits from the head's weight."""
    return hidden, None


def _mark_experts(chunk: GPTModel) -> None:
    """Make the gradients of experts be summed over the experts' own data ranks in every layout.

    Megatron marks expert parameters only if expert > 1. Unmarked, their gradients would be summed
    over the data ranks of the other weights, which are too few when expert_tensor < tensor; and
    whether experts have an optimizer of their own, also in checkpoints, would depend on the layout.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def _rotary(shape: ModelShape) -> RotaryEmbedding:
    """RoPE's angles, for the part of each head that it rotates."""
    rotary = RotaryEmbedding(
        shape.rotary_dim,
        rotary_percent=1.0,
        rotary_base=shape.rope_theta,
        **_rope_scaling(shape),
    )
    if yarn := yarn_scaling(shape):
        rotary.inv_freq = yarn_frequencies(rotary.inv_freq, shape.rope_theta, yarn)
    return rotary


def _rope_scaling(shape: ModelShape) -> dict[str, Any]:
    """RotaryEmbedding's arguments for the kinds of RoPE scaling that it computes itself."""
    if shape.rope_scaling is None or yarn_scaling(shape):
        return {}
    factor = shape.rope_scaling["factor"]
    if shape.rope_scaling["rope_type"] == "linear":
        return {"seq_len_interpolation_factor": factor}
    assert shape.rope_scaling["rope_type"] == "llama3", "read_shape refuses other kinds"
    return {"rope_scaling": True, "rope_scaling_factor": factor}


def _with_gradients(chunk: GPTModel) -> DistributedDataParallel:
    """Give a chunk a float32 gradient buffer, which is summed over data and context ranks."""
    return DistributedDataParallel(
        chunk.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            # This check is an assert on one rank, which ends the run; `train_step` instead makes
            # all ranks skip the step.
            check_for_nan_in_grad=False,
        ),
        chunk,
    )


def weight_sender(model: Model, groups: Groups) -> Sender:
    """Describes which of the model's weights this rank can send to the engines."""
    return layout_sender(
        model.layout,
        model.shape,
        groups.dims,
        groups.coordinates,
        transformer_engine=uses_transformer_engine(unwrapped(model.chunks[0]).config),
    )


def unwrapped(chunk: Any) -> GPTModel:
    """The GPTModel inside a chunk."""
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
