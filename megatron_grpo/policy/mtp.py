"""The layer for multi-token prediction, trained along with the policy: engines draft with it.

From the hidden state of token t and the embedding of token t + 1 it predicts token t + 2
(DeepSeek-V3, arXiv 2412.19437, section 2.2). The policy does not learn from its loss: hidden
states, embedding and head are detached, and the layer has gradient buffers, a clipped norm and an
optimizer of its own. The policy's weights stay bit for bit those of a run without the layer.

Megatron-Core's MultiTokenPredictionLayer is not used (test_upstream: mtp). It can detach the policy
(`mtp_detach_heads`), but is a part of the GPTModel and shares the policy's buffers and optimizer;
it brings an embedding to the last pipeline stage, and computes whole logits.
"""

import math
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.families.decoder import MTP_LAYER
from megatron_grpo.config.config import Config
from megatron_grpo.policy.chunks import (
    expert_biases,
    gather_weights,
    prepare_layers,
    with_own_gradients,
)
from megatron_grpo.policy.mla import WholeLinear
from megatron_grpo.policy.optimizer import (
    apply_gradient,
    gradient_norm,
    make_optimizer,
    make_scheduler,
)
from megatron_grpo.policy.packed_params import PackedParams, params_on_rank
from megatron_grpo.policy.transformer import block_spec
from parallel.groups import Groups
from parallel.logprobs import chosen_logprobs
from parallel.packing import PackedBatch
from parallel.rank_part import SecondTokens


class MtpLayer(MegatronModule):
    """DeepSeek-V3's equations 21 to 23 without the head, with Megatron-Core's names."""

    def __init__(
        self, config: TransformerConfig, spec: TransformerBlockSubmodules, vp_stage: int | None
    ) -> None:
        super().__init__(config)
        size = config.hidden_size
        norm = partial(
            spec.layer_norm, config=config, hidden_size=size, eps=config.layernorm_epsilon
        )
        self.enorm, self.hnorm, self.final_layernorm = norm(), norm(), norm()
        self.eh_proj = WholeLinear(2 * size, size, config=config)
        (layer,) = spec.layer_specs
        self.transformer_layer = build_module(layer, config=config, vp_stage=vp_stage)

    def forward(
        self, hidden: Tensor, embedded: Tensor, rotary: Tensor, params: PackedParams
    ) -> Tensor:
        """Compute the head's input from final hidden states and embeddings of the next tokens, all
        [t, 1, H]; with sequence parallelism, t is the tensor rank's share of the tokens."""
        joined, _ = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))

        def through(joined: Tensor) -> Tensor:
            return self.transformer_layer(
                hidden_states=joined,
                attention_mask=None,
                rotary_pos_emb=rotary,
                packed_seq_params=params,
            )[0]

        is_recomputed = self.config.recompute_granularity == "full"
        output = checkpoint(through, False, joined) if is_recomputed else through(joined)
        return self.final_layernorm(output)


class Mtp:
    """A policy's layer and its training. All ranks have an `Mtp` and make the same calls; before
    the last pipeline stage its module is empty.
    """

    def __init__(
        self, cfg: Config, shape: ModelShape, chunks: Sequence[GPTModel], groups: Groups
    ) -> None:
        self._cfg, self._shape, self._groups = cfg, shape, groups
        self._first, self._last = chunks[0], chunks[-1]
        self._prefix = f"{len(chunks) - 1}.{MTP_LAYER}"
        self.module: Any = _build_module(cfg, shape, chunks[-1], groups)
        """The layer, wrapped in Megatron's DistributedDataParallel if it has gradients."""
        self.num_steps = 0
        """Updates so far. Adam's own count exists only on ranks with the layer."""
        self._num_tokens = 1
        self._loss = torch.zeros((), device=next(chunks[0].parameters()).device)
        self._embedding = _embedding_for(chunks[-1], shape)

    def parameters(self) -> dict[str, Tensor]:
        """The layer's parameters, named like those of the last chunk in `Model.parameters`."""
        layer = self._unwrapped
        named = chain(layer.named_parameters(), expert_biases(layer))
        return {self._prefix + name: value for name, value in named}

    def sharded_state_dict(self) -> dict[str, Any]:
        """Describe the layer for Megatron's checkpoints."""
        return self._unwrapped.sharded_state_dict(MTP_LAYER, metadata={})

    def add_gradients(self) -> None:
        """Give the layer gradient buffers."""
        self.module = with_own_gradients(self.module, self._cfg)

    def add_optimizer(self) -> None:
        """Add the optimizer, once weights are loaded."""
        self.optimizer = make_optimizer([self.module], self._cfg.optimizer)
        self._scheduler = make_scheduler(self.optimizer, self._cfg.optimizer, self._cfg.num_steps)

    def begin(self, chunks: Sequence[Any], batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Begin an optimizer step: returns the microbatches with their second tokens.

        The loss is a mean over all second tokens of the optimizer batch, whatever ranks and
        microbatches hold them. Collective.
        """
        at, dims = self._groups.coordinates, self._groups.dims
        batches = [with_second_tokens(b.on_rank(dims, at), self._groups) for b in batches]
        rows = [b.part.second.predictions.rows for b in batches if b.part and b.part.second]
        count = torch.tensor(sum(map(len, rows)), device=batches[0].tokens.device)
        dist.all_reduce(count, group=self._groups.data_context)
        self._num_tokens = max(int(count), 1)
        self._loss.zero_()
        self.module.zero_grad_buffer()
        self._send_embedding(chunks[0])
        return batches

    def add_loss(self, hidden: Tensor, batch: PackedBatch, head_weight: Tensor) -> None:
        """Add the gradient of a microbatch, from the model's final hidden states [t, H]."""
        assert batch.part is not None and batch.part.second is not None, "set by `begin`"
        second, params = batch.part.second, params_on_rank(batch, self._groups)
        assert self._embedding is not None, "only the last stage has hidden states"
        with torch.no_grad():
            embedded = self._embedding(
                input_ids=batch.tokens[second.next].unsqueeze(0), position_ids=None
            )
        rotary = self._last.rotary_pos_emb(params)
        output = self.module(hidden.detach().unsqueeze(1), embedded, rotary, params)
        chosen = chosen_logprobs(
            output.squeeze(1),
            head_weight.detach(),
            batch.tokens,
            second.predictions,
            temperature=batch.temperature_at(
                second.predictions.positions, self._cfg.rollout.temperature
            ),
            vocab_size=self._shape.vocab_size,
            tensor_group=self._groups.tensor,
        )
        loss = -chosen.logprobs.sum() / self._num_tokens
        # At once, within the schedule's forward: the layer's graph ends at detached hidden states.
        loss.backward()
        self._loss += loss.detach()

    def update(self, num_steps: int) -> dict[str, float]:
        """Update the layer at the learning rate after `num_steps` steps; returns the metrics of all
        ranks. Collective.

        If loss or gradient is not finite, the layer stays as it is, and rank 0 says so.
        """
        self._sum_gradient()
        norm = gradient_norm(self.optimizer)
        self._groups.reduce_over_tokens(self._loss)
        loss = float(self._loss)
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if is_finite and norm > 0:
            self._scheduler.step(increment=num_steps - self._scheduler.num_steps)
            apply_gradient(self.optimizer, norm)
            self.num_steps += 1
        elif not is_finite and self._groups.rank == 0:
            cause = f"its loss is {loss}, the norm of its gradient {norm}"
            print(f"mtp: optimizer step skipped: {cause}", file=sys.stderr, flush=True)
        self.optimizer.zero_grad()
        found = {"mtp/loss": loss, "mtp/grad_norm": norm} if is_finite else {}
        return found | {"mtp/skipped_steps": float(not is_finite)}

    def _sum_gradient(self) -> None:
        """Sum the gradient over data and context ranks, and over tensor ranks with other tokens."""
        # The schedule's `finalize_model_grads` knows the policy's chunks only.
        self.module.finish_grad_sync()
        if not self._cfg.parallel.sequence_parallel:
            return
        for parameter in self.module.parameters():
            if parameter.requires_grad and getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.main_grad, group=self._groups.tensor)

    def _send_embedding(self, chunk: Any) -> None:
        """Copy the embedding to the last stage, if only the first stage has it.

        `chunk`: this rank's first chunk, in DistributedDataParallel.
        """
        group, size = self._groups.pipeline, self._groups.dims.pipeline
        if size > 1 and self._first.pre_process:
            gather_weights([chunk])
            weight = self._first.embedding.word_embeddings.weight.detach()
            dist.send(weight, group=group, group_dst=size - 1)
        elif size > 1 and self._embedding is not None:
            weight = self._embedding.word_embeddings.weight
            dist.recv(weight, group=group, group_src=0)

    @property
    def _unwrapped(self) -> MegatronModule:
        is_wrapped = isinstance(self.module, DistributedDataParallel)
        return self.module.module if is_wrapped else self.module


def with_second_tokens(batch: PackedBatch, groups: Groups) -> PackedBatch:
    """Add `second` tokens to the `part` of a batch. Call it before `to`, like `on_rank`."""
    part = batch.part
    if part is None or part.second is not None:
        return batch
    second = SecondTokens.of(
        batch.cu_seqlens, batch.loss_mask, part.local, groups.dims.tensor, batch.prefixes
    )
    return replace(batch, part=replace(part, second=second))


def _build_module(
    cfg: Config, shape: ModelShape, chunk: GPTModel, groups: Groups
) -> MegatronModule:
    """Build a layer of the last layer's kind on the last chunk's rank, else an empty module."""
    config = copy(chunk.config)  # later changes of the chunks' config stay out
    if not chunk.post_process:
        return MegatronModule(config)
    config.moe_router_enable_expert_bias = shape.moe is not None and shape.moe.has_choice_biases
    number, has_own_rows = shape.num_layers, cfg.grpo.shared_prompts
    spec = block_spec(config, range(number, number + 1), shape, has_own_rows)
    layer = MtpLayer(config, spec, chunk.vp_stage)
    prepare_layers(layer, cfg, shape, groups)
    return layer


def _embedding_for(chunk: GPTModel, shape: ModelShape) -> LanguageModelEmbedding | None:
    """The last chunk's embedding, or a copy that `_send_embedding` fills; None on other stages."""
    if not chunk.post_process:
        return None
    if chunk.pre_process:
        return chunk.embedding
    length = shape.max_position_embeddings
    own = LanguageModelEmbedding(chunk.config, chunk.vocab_size, length, "rope")
    return own.requires_grad_(False)
