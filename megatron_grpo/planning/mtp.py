"""What training of a layer for multi-token prediction takes, on the last pipeline stage.

Its weights, gradients and optimizer are in `state.py`.
"""

from checkpoint_convert import ModelShape, padded_vocab_size
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import final_norm_bytes, layer_bytes
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.layer_kinds import mtp_kind


def mtp_embedding(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Bytes of the copy of the embedding on the last stage, where it is not the first."""
    if not shape.trains_mtp or stage == 0 or stage < cfg.dims.pipeline - 1:
        return 0
    rows = padded_vocab_size(shape, cfg.dims) // cfg.dims.tensor
    return rows * shape.hidden_size * ITEMSIZE[cfg.model.dtype]


def mtp_activations(cfg: Config, shape: ModelShape, stage: int) -> int:
    """Bytes for the backward of one microbatch, which follows its forward at once: of the layer,
    the norms of hidden states and embeddings, what joins them, and the last norm.

    The head has as many as the policy's, after it. Full recomputation takes the layer by itself,
    whatever its method and number of layers are.
    """
    if not shape.trains_mtp or stage < cfg.dims.pipeline - 1:
        return 0
    by_itself = {"recompute_method": "uniform", "recompute_num_layers": 1}
    model = cfg.model.model_copy(update={"megatron": {**cfg.model.megatron, **by_itself}})
    inner = layer_bytes(cfg.model_copy(update={"model": model}), mtp_kind(shape))
    share = 1 / cfg.dims.tensor if cfg.parallel.sequence_parallel else 1.0
    joined = 4 * shape.hidden_size * ITEMSIZE[cfg.model.dtype] * share  # both, apart and together
    norms = 3 * final_norm_bytes(cfg, shape)
    tokens = cfg.train.max_tokens_per_microbatch / cfg.dims.context
    return round(tokens * (inner.kept + inner.recomputed + joined + norms))
