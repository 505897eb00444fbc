"""Gradients of a model, their sums over data ranks, and gathering of weights, while layers compute.

Megatron-Core's DistributedDataParallel does both by hooks: it reduces a bucket of gradients once
the last of them is there, and before a module's forward waits until its weights are whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel

from megatron_grpo.config.config import Config


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
