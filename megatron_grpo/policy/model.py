"""The trained model: Megatron-Core GPTModels with weights from a Hugging Face folder."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from checkpoint_convert import ModelShape, hf_tensors, megatron_layout
from checkpoint_convert.megatron import megatron_sender
from checkpoint_convert.weights import read_weights
from megatron_grpo.bars import waiting
from megatron_grpo.config.config import Config
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.optimizer import OptimizerConfig
from megatron_grpo.policy.chunks import (
    build_chunks,
    expert_biases,
    gather_weights,
    with_gradients,
)
from megatron_grpo.policy.lora import Adapters, add_adapters
from megatron_grpo.policy.lora_targets import LOCAL_NAME
from megatron_grpo.policy.matrices import matrices_of
from megatron_grpo.policy.mtp import Mtp
from megatron_grpo.policy.muon import Muon
from megatron_grpo.policy.optimizer import make_optimizer, make_scheduler
from megatron_grpo.policy.packed_params import params_on_rank
from megatron_grpo.policy.router import (
    RouterLosses,
    add_router_replay,
    loss_names,
    own_routes,
)
from megatron_grpo.policy.sparse_attention import add_indexer_replay
from megatron_grpo.policy.transformer import uses_transformer_engine
from megatron_grpo.policy.vision import VisionTower, embedded, vision_tower
from parallel import Layout, Sender
from parallel.groups import Groups
from parallel.packing import PackedBatch


@dataclass(kw_only=True)
class Model:
    """This rank's part of a model: one chunk per virtual pipeline stage."""

    shape: ModelShape
    layout: Layout
    """Boxes of the Hugging Face tensors that this rank's parameters hold."""
    chunks: list[Any]
    """GPTModels, wrapped in Megatron's DistributedDataParallel if they have gradients."""
    adapters: Adapters | None = None
    """Adapters, trained in place of the weights, if `lora.r` is not 0."""
    mtp: Mtp | None = None
    """Layer for multi-token prediction, if it is trained."""
    vision: VisionTower | None = None
    """Vision tower, on stages that use features of images; a reference's if it is trained."""

    @property
    def is_last_stage(self) -> bool:
        """Whether the last chunk outputs the model's final hidden states."""
        return unwrapped(self.chunks[-1]).post_process

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary / tp, H], on the last stage; the embedding's weight if tied."""
        chunk = unwrapped(self.chunks[-1])
        if chunk.share_embeddings_and_output_weights:
            return chunk.shared_embedding_or_output_weight()
        return chunk.output_layer.weight

    def parameters(self) -> dict[str, Tensor]:
        """Parameters by their local names in `layout`: ``{chunk}.{Megatron's name}``.

        Includes the biases by which experts are chosen, which have no gradient; no adapters.
        """
        return {
            f"{number}.{name}": value
            for number, module in enumerate(map(unwrapped, self.chunks))
            for name, value in chain(module.named_parameters(), expert_biases(module))
            if f"{LOCAL_NAME}." not in name
        } | (self.mtp.parameters() if self.mtp else {})

    def saved_parameters(self) -> dict[str, Tensor]:
        """Parameters in checkpoints: only the adapters where there are some."""
        return self.adapters.parameters() if self.adapters else self.parameters()

    def computing(self) -> AbstractContextManager[None]:
        """Context for forwards: subclasses swap adapters or quantise weights in it."""
        return nullcontext()


@dataclass(kw_only=True)
class Policy(Model):
    """The model that is trained."""

    optimizer: Any
    """Megatron's distributed optimizer."""
    scheduler: Any
    """Sets the optimizer's learning rate; stepped once per optimizer step."""
    router_losses: RouterLosses | None
    """Auxiliary losses of routers since `zero_grad`; None if the model has none."""

    def parameters(self) -> dict[str, Tensor]:
        """`Model.parameters` after the last update; collective, see `gather_weights`."""
        gather_weights(self.chunks)
        return super().parameters()

    def served(self, lora: LoraConfig) -> Mapping[str, Tensor]:
        """Tensors of a push: adapters alone, or `parameters` with adapters merged; collective."""
        if self.adapters and lora.is_served:
            return self.adapters.scaled()
        weights = self.parameters()
        return self.adapters.merged(weights) if self.adapters else weights

    def zero_grad(self) -> None:
        """Zero all gradients, before the first microbatch of an optimizer step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.router_losses:
            self.router_losses.clear()

    def zero_summed_gradient(self) -> None:
        """Zero this rank's shard of the gradient summed over data and context ranks.

        The rest of the buffers keeps this rank's own contributions to other ranks' shards.
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
    if cfg.rollout.indexer_replay:
        add_indexer_replay(model.chunks)
    if not cfg.lora.r:  # adapters get the only gradients, and come after the weights
        add_gradients(model, cfg)
    with waiting(f"reading {cfg.model.path}", shows=groups.rank == 0) as show:
        read_weights(cfg.model.path, shape, model.layout, model.parameters(), show)
    if cfg.lora.r:
        model.adapters = add_adapters(
            model.chunks, shape, model.layout, cfg.lora, groups, cfg.train.seed
        )
        add_gradients(model, cfg)
    # The optimizer copies the loaded weights into its float32 master weights, so it comes last.
    policy = add_optimizer(model, cfg, groups)
    policy.vision = vision_tower(cfg, shape, groups, unwrapped(policy.chunks[0]))
    return policy


def build_model(cfg: Config, shape: ModelShape, groups: Groups) -> Model:
    """Build this rank's part of the model, with uninitialised weights."""
    chunks = build_chunks(cfg, shape, groups)
    layout = megatron_layout(
        shape,
        groups.dims,
        groups.coordinates,
        transformer_engine=uses_transformer_engine(chunks[0].config),
    )
    mtp = Mtp(cfg, shape, chunks, groups) if shape.trains_mtp else None
    return Model(shape=shape, layout=layout, chunks=chunks, mtp=mtp)


def add_gradients(model: Model, cfg: Config) -> None:
    """Give a model's chunks gradient buffers, to be summed over data and context ranks."""
    model.chunks = with_gradients(model.chunks, cfg)
    if model.mtp:
        model.mtp.add_gradients()


def add_optimizer(model: Model, cfg: Config, groups: Groups) -> Policy:
    """Add optimizer and scheduler to a model with gradients; collective over all ranks."""
    optimizer = _optimizer(model, cfg.optimizer, groups)
    scheduler = make_scheduler(optimizer, cfg.optimizer, cfg.num_steps)
    if model.mtp:
        model.mtp.add_optimizer()
    chunks = [unwrapped(chunk) for chunk in model.chunks]
    names = loss_names(chunks[0].config)
    losses = RouterLosses(chunks, names) if names else None
    return Policy(**vars(model), optimizer=optimizer, scheduler=scheduler, router_losses=losses)


def _optimizer(model: Model, cfg: OptimizerConfig, groups: Groups) -> Any:
    """Megatron's optimizer, with Muon as a hook before its step where the config says so."""
    if cfg.optimizer == "adam":
        return make_optimizer(model.chunks, cfg)
    parameters = model.parameters()
    matrices = {parameters[name] for name in matrices_of(model.layout)}
    optimizer = make_optimizer(model.chunks, cfg, matrices)
    shapes = cache(partial(hf_tensors, model.shape))
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:
            muon = Muon(part, parameters, model.layout, shapes, groups.stage, cfg)
            part.optimizer.register_step_pre_hook(muon.step)
    return optimizer


def forward(chunk: Any, batch: PackedBatch, groups: Groups) -> Tensor:
    """Run one model chunk on this context rank's part of a packed microbatch.

    Returns hidden states: from the last chunk the head's input [T / cp, H], in the order of
    `context_indices`, or its tensor rank's slice with sequence parallelism; from other chunks
    [T / cp, 1, H] or its slice, which Megatron-Core sends to the next stage.
    """
    assert batch.part is not None, "set by `run_schedule`"
    local, module = batch.part.local, unwrapped(chunk)
    params = params_on_rank(batch, groups, module.attention_windows)
    if batch.routed_experts is not None:
        params.routed_experts = own_routes(batch.routed_experts, local, groups)
    params.chosen_tokens = batch.chosen_tokens
    embeddings = None  # the chunk embeds text itself
    if batch.images is not None and module.pre_process:
        embeddings = embedded(module, batch, local, groups)
    output: Tensor = chunk(
        input_ids=batch.tokens[local].unsqueeze(0),
        position_ids=batch.position_ids[local].unsqueeze(0),
        attention_mask=None,
        decoder_input=embeddings,
        packed_seq_params=params,
    )
    return output.squeeze(0) if module.post_process else output


def weight_sender(model: Model, groups: Groups) -> Sender:
    """Describe the weights that this rank can send to engines."""
    return megatron_sender(
        model.shape,
        groups.dims,
        groups.coordinates,
        transformer_engine=uses_transformer_engine(unwrapped(model.chunks[0]).config),
        layout=model.layout,
    )


def unwrapped(chunk: Any) -> GPTModel:
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
