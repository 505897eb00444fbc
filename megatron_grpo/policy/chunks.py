"""Builds this rank's GPTModels for packed sequences, and sets what their config cannot say.

Megatron-Core's DistributedDataParallel sums gradients and gathers weights by hooks while layers
compute: it reduces a bucket of gradients once the last of them is there, and before a module's
forward waits until its weights are whole.
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
    """This rank's GPTModels, one per virtual pipeline stage, without gradients or weights."""
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
    """Set what the config of the layers in a chunk, or of another module, cannot say."""
    chunk.config.moe_router_enable_expert_bias = False  # see below
    module: Any
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            # Experts are chosen by the biases as they were read. In pretraining Megatron counts the
            # tokens of each expert, in a function that it compiles first, and moves the biases
            # after each step. With these flags off it still adds them to the scores.
            module.enable_expert_bias = False
            if cfg.model.freeze_moe_router:
                # Without gradients, the weights have no buffers and no moments either. Scores still
                # weight the outputs of experts, through which layers before have gradients.
                module.requires_grad_(False)
        if isinstance(module, SequentialMLP) and shape.has_linear_biases:
            # Experts add the bias of their output in place. Autograd refuses that for the view
            # which Megatron's sum over a single tensor rank returns. With biases, no more ranks
            # share an expert, and there is nothing to sum.
            for expert in module.local_experts:
                expert.linear_fc2.explicit_expert_comm = True
        if isinstance(getattr(module, "mlp", None), IdentityOp):
            module.recompute_mlp = False  # for which Megatron would keep hidden states
        if hasattr(module, "kept_packed_seq_params"):
            # Megatron then passes it to Transformer Engine's attention.
            module.kept_packed_seq_params.add("pad_between_seqs")
    _mark_experts(chunk)
    accumulate_in_products(chunk, cfg.model.megatron)
    if groups.is_dynamic:
        rotate_own_tokens(chunk, groups)


def with_gradients(chunks: Sequence[GPTModel], cfg: Config) -> list[Any]:
    """Give the chunks of a rank gradient buffers, which are summed over data and context ranks."""
    wrapped = [with_own_gradients(chunk, cfg, overlaps=True) for chunk in chunks]
    if cfg.parallel.overlap_grad_reduce:
        # Megatron's schedules then reduce gradients only in a chunk's last backward of a step. They
        # would reduce after each microbatch, sums included that were reduced before.
        functions = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
    for group in _bucket_groups(wrapped):  # a rank has all weights: the first forward gathers none
        group.param_gather_dispatched = True
    return wrapped


def with_own_gradients(module: Any, cfg: Config, *, overlaps: bool = False) -> Any:
    """Give one module such buffers; `overlaps`: if `parallel` says so, hooks sum and gather."""
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
    """Gather the weights that the last update has changed, as the next forward would have done.

    Until then a rank has only its shard of the new ones. Does nothing where that forward has been,
    or an update gathers them itself. Collective over data and context ranks. Not for between the
    reduction of a gradient and the update by it, whose weights would then be taken for whole.
    """
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
    kinds.discard("IdentityOp")  # of layers without
    steps = {
        type(part.optimizer).__name__
        for part in optimizer.chained_optimizers
        if part.optimizer is not None
    }
    return (
        f"layers: {f'Transformer Engine {get_te_version()}' if fused else 'torch'}, "
        f"attention: {', '.join(sorted(kinds))}, optimizer: {', '.join(sorted(steps))}"
    )


def expert_biases(chunk: Any) -> list[tuple[str, Tensor]]:
    """The biases by which experts are chosen, by name: they are buffers."""
    return [each for each in chunk.named_buffers() if each[0].endswith(EXPERT_BIAS)]


def _pass_hidden_states(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Replaces the output layer: parallel/logprobs.py computes logits from the head's weight."""
    return hidden, None


def _scale_embeddings(chunk: GPTModel) -> None:
    """Multiply embeddings by sqrt(hidden_size), rounded to their dtype as in transformers."""
    dtype = chunk.config.params_dtype
    wide = torch.promote_types(dtype, torch.float32)
    scale = torch.tensor(chunk.config.hidden_size**0.5, dtype=wide).to(dtype).item()
    chunk.embedding.register_forward_hook(lambda module, given, embedded: embedded * scale)


def _mark_experts(chunk: Any) -> None:
    """Make the gradients of experts be summed over the experts' own data ranks in every layout.

    Megatron marks expert parameters only if expert > 1. Unmarked, their gradients would be summed
    over the data ranks of the other weights, which are too few when expert_tensor < tensor; and
    whether experts have an optimizer of their own, also in checkpoints, would depend on the layout.
    It takes the bias of their output for a copy of that on other tensor ranks, which are of other
    experts.
    """
    parameter: Any
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce, parameter.sequence_parallel = False, False
            parameter.tensor_model_parallel = True
