"""Builds this rank's GPTModels for packed sequences, and changes them where no config field can.

Hooks of Megatron-Core's DistributedDataParallel sum gradients and gather weights while layers
compute: they reduce a bucket of gradients once its last gradient is there, and wait for a module's
whole weights before its forward.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_te_version
from torch import Tensor

from checkpoint_convert import ModelShape, padded_vocab_size
from checkpoint_convert.families.ffn import EXPERT_BIAS
from megatron_grpo.config.config import Config
from megatron_grpo.config.vision import mrope_axes, num_deepstack_layers
from megatron_grpo.policy.activation_offload import offload_activations
from megatron_grpo.policy.attention import attention_windows
from megatron_grpo.policy.linear_attention import LinearAttention
from megatron_grpo.policy.rope import packed_rotary, rotate_own_tokens
from megatron_grpo.policy.transformer import (
    accumulate_in_products,
    block_spec,
    transformer_config,
    uses_transformer_engine,
)
from megatron_grpo.policy.vision import add_deepstack, add_tower
from parallel import pipeline_layers
from parallel.groups import Groups


def build_chunks(cfg: Config, shape: ModelShape, groups: Groups) -> list[GPTModel]:
    """Build this rank's GPTModels, one per virtual stage, without gradients or loaded weights."""
    dims = groups.dims
    config = transformer_config(
        shape,
        dims,
        dtype=getattr(torch, cfg.model.dtype),
        sequence_parallel=cfg.parallel.sequence_parallel,
        overrides=cfg.model.megatron,
    )
    axes = mrope_axes(cfg)
    has_own_rows = cfg.grpo.shared_prompts or bool(axes)
    # Nothing random is drawn (no dropout, no initialization), but Megatron requires RNG states.
    model_parallel_cuda_manual_seed(0)
    chunks = [
        GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, layers, shape, has_own_rows),
            vocab_size=padded_vocab_size(shape, dims),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=layers.start == 0,
            post_process=layers.stop == shape.num_layers,
            share_embeddings_and_output_weights=shape.tie_word_embeddings,
            vp_stage=virtual_stage if dims.virtual_pipeline > 1 else None,
            position_embedding_type="rope" if shape.rotary_dim else "none",
        )
        for virtual_stage, layers in enumerate(
            pipeline_layers(shape.num_layers, dims)[groups.coordinates.pipeline]
        )
    ]
    if config.fine_grained_activation_offloading:
        offload_activations(next(chunks[0].parameters()).device)
    rotary = packed_rotary(shape, axes)
    for chunk in chunks:
        prepare_layers(chunk, cfg, shape, groups)
        chunk.attention_windows = attention_windows(chunk)
        add_deepstack(chunk, num_deepstack_layers(cfg), groups)
        if chunk.post_process:
            chunk.output_layer.forward = _pass_hidden_states
        if rotary:
            chunk.rotary_pos_emb = rotary
        if shape.scales_embeddings and chunk.pre_process:
            _scale_embeddings(chunk)
    if shape.vision and chunks[0].pre_process:
        add_tower(chunks[0], cfg)
    return chunks


def prepare_layers(chunk: Any, cfg: Config, shape: ModelShape, groups: Groups) -> None:
    """Set attributes of Megatron's modules that no field of the config sets.

    `chunk`: a GPTModel or an `MtpLayer`. `test_upstream.py` names Megatron's readers of each.
    """
    keep_choice_biases(chunk)
    if cfg.model.freeze_moe_router:
        freeze_routers(chunk)
    if shape.has_linear_biases:
        leave_out_sums_of_experts(chunk)
    recompute_no_missing_mlps(chunk)
    mark_experts(chunk)
    accumulate_in_products(chunk, cfg.model.megatron)
    if groups.is_dynamic:
        rotate_own_tokens(chunk, groups)


def keep_choice_biases(chunk: Any) -> None:
    """Choose experts by the biases as they were read: pretraining moves them after each step."""
    # The flags switch off only the count of tokens per expert (in a compiled function) and the
    # update in `finalize_model_grads`: `TopKRouter.routing` passes `expert_bias` all the same.
    chunk.config.moe_router_enable_expert_bias = False
    for router in _modules(chunk, TopKRouter):
        router.enable_expert_bias = False


def freeze_routers(chunk: Any) -> None:
    """Freeze the weights of routers: no gradient buffers, no moments.

    Scores still weight the outputs of experts and pass gradients to earlier layers.
    """
    for router in _modules(chunk, TopKRouter):
        router.requires_grad_(False)


def leave_out_sums_of_experts(chunk: Any) -> None:
    """Leave out Megatron's sum of an expert's outputs over tensor ranks, for experts with biases.

    Legal as only one rank holds an expert with biases (`expert_tensor` is 1).
    """
    # SequentialMLP adds the output's bias in place, which autograd refuses on the view that a sum
    # over a single rank returns.
    for experts in _modules(chunk, SequentialMLP):
        for expert in experts.local_experts:
            expert.linear_fc2.explicit_expert_comm = True


def recompute_no_missing_mlps(chunk: Any) -> None:
    """Recompute no MLP in layers without one: Megatron would keep hidden states for it."""
    for layer in _modules(chunk, TransformerLayer):
        if isinstance(layer.mlp, IdentityOp):
            layer.recompute_mlp = False


def mark_experts(chunk: Any) -> None:
    """Sum the gradients of experts over the experts' own data ranks in every layout.

    Megatron marks expert parameters only if expert > 1. Unmarked, their gradients would be summed
    over the data ranks of the other weights, too few when expert_tensor < tensor; and whether
    experts have an optimizer of their own, also in checkpoints, would depend on the layout.
    """
    parameter: Any
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            # Megatron takes an expert's output bias for a copy of the other tensor ranks' biases,
            # which belong to other experts: no sum over tensor ranks, but each in the norm.
            parameter.allreduce, parameter.sequence_parallel = False, False
            parameter.tensor_model_parallel = True


def _modules(chunk: Any, kind: type) -> Iterator[Any]:
    return (module for module in chunk.modules() if isinstance(module, kind))


def with_gradients(chunks: Sequence[GPTModel], cfg: Config) -> list[Any]:
    """Give a rank's chunks gradient buffers, to be summed over data and context ranks."""
    wrapped = [with_own_gradients(chunk, cfg, overlaps=True) for chunk in chunks]
    if cfg.parallel.overlap_grad_reduce:
        # Without `no_sync_func`, Megatron's schedules would reduce after each microbatch, and so
        # add sums that were already reduced; with it, only in a chunk's last backward of a step.
        functions = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
    # Each rank reads whole weights: the first forward would gather for nothing.
    for group in _bucket_groups(wrapped):
        group.param_gather_dispatched = True
    return wrapped


def with_own_gradients(module: Any, cfg: Config, *, overlaps: bool = False) -> Any:
    """Wrap one module in Megatron's DistributedDataParallel. With `overlaps`, the `overlap_*` keys
    of `parallel` apply."""
    return DistributedDataParallel(
        module.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=cfg.optimizer.grad_reduce_in_fp32,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlaps and cfg.parallel.overlap_grad_reduce,
            overlap_param_gather=overlaps and cfg.parallel.overlap_param_gather,
            # This check is an assert on one rank, which ends the run; `train_step` instead makes
            # all ranks skip the step.
            check_for_nan_in_grad=False,
        ),
        module,
    )


def gather_weights(chunks: Sequence[Any]) -> None:
    """Gather the weights of the last update, as the next forward would; until then a rank has new
    values of its shard only.

    Does nothing after that forward, or without `overlap_param_gather`. Collective over data and
    context ranks. Never call it between the reduction of a gradient and its update.
    """
    # `finish_grad_sync` resets `param_gather_dispatched`, and a gather sets it: one between
    # reduction and update would make the next forward take its stale weights for whole.
    for group in _bucket_groups(chunks):
        if not group.param_gather_dispatched or group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)


def _bucket_groups(chunks: Sequence[Any]) -> Iterator[Any]:
    """Bucket groups of chunks that gather weights in the forward."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            yield from chunk.bucket_groups
            yield from chunk.expert_parallel_bucket_groups


def describe(chunk: GPTModel, optimizer: Any) -> str:
    """Name the kernels of layers, attention and optimizer: they differ in speed and rounding."""
    fused = uses_transformer_engine(chunk.config)
    attentions = [layer.self_attention for layer in chunk.decoder.layers]
    kinds = {
        each.kind
        if isinstance(each, LinearAttention)
        else type(getattr(each, "core_attention", each)).__name__
        for each in attentions
    }
    kinds.discard("IdentityOp")  # layers without attention
    # Megatron takes Transformer Engine's optimizer, else Apex's of the same name, else torch's.
    steps = {
        f"{type(part.optimizer).__name__} of {type(part.optimizer).__module__.partition('.')[0]}"
        for part in optimizer.chained_optimizers
        if part.optimizer is not None
    }
    return (
        f"layers: {f'Transformer Engine {get_te_version()}' if fused else 'torch'}, "
        f"attention: {', '.join(sorted(kinds))}, optimizer: {', '.join(sorted(steps))}"
    )


def expert_biases(chunk: Any) -> list[tuple[str, Tensor]]:
    """Name and value of the biases by which experts are chosen: buffers, not parameters."""
    return [each for each in chunk.named_buffers() if each[0].endswith(EXPERT_BIAS)]


def _pass_hidden_states(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Replace the output layer: `parallel/logprobs.py` computes logits from the head's weight."""
    return hidden, None


def _scale_embeddings(chunk: GPTModel) -> None:
    """Multiply embeddings by sqrt(hidden_size), rounded to their dtype as in transformers."""
    dtype = chunk.config.params_dtype
    wide = torch.promote_types(dtype, torch.float32)
    scale = torch.tensor(chunk.config.hidden_size**0.5, dtype=wide).to(dtype).item()
    chunk.embedding.register_forward_hook(lambda module, given, embedded: embedded * scale)
