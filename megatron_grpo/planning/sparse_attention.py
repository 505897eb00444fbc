"""What sparse attention holds while it computes, beside what layers keep for their backward."""

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.workload import longest_sequence

BLOCK, INDEX_BLOCK = 128, 32
"""Queries of attention and of the indexer at a time, as in `parallel.sparse_attention`; that
imports torch, which takes seconds."""


def working_bytes(cfg: Config, shape: ModelShape, device: str, *, backward: bool) -> int:
    """Peak bytes of a layer on a rank, in a forward, or with the backward after it.

    0 if no sequence is longer than `topk`, as attention is then whole.
    """
    indexer = shape.indexer
    if indexer is None or longest_sequence(cfg, shape) <= indexer.topk:
        return 0
    attending = attending_bytes(cfg, shape, device, backward=backward)
    return max(choosing_bytes(cfg, shape), attending)


def choosing_bytes(cfg: Config, shape: ModelShape) -> int:
    """Those of the indexer, which chooses the tokens in float32.

    First its queries: as they were projected and rotated, with what of them is rotated and twice
    more. Then the rotated ones, the keys of all context ranks, and for a block of queries the
    scores of every head with each key; of the sums over heads three copies, two of them of the
    block before, and twelve bytes for their order.
    """
    indexer = shape.indexer
    assert indexer is not None
    size, heads, width = cfg.dims.tensor, indexer.num_heads, indexer.head_dim
    tokens = cfg.train.max_tokens_per_microbatch / cfg.dims.context
    own = tokens / size if cfg.parallel.sequence_parallel else tokens
    turned = (3 if indexer.has_neighbouring_pairs else 2) * shape.rotary_dim
    projecting = own * 4 * heads * (2 * width + turned)
    block = min(INDEX_BLOCK, own) * _num_keys(cfg, shape, INDEX_BLOCK) * (4 * heads + 20)
    keys = 4 * width * cfg.train.max_tokens_per_microbatch
    chosen = 4 * indexer.topk * own
    return round(max(projecting, own * 4 * heads * (width + 1) + keys + chosen + block))


def attending_bytes(cfg: Config, shape: ModelShape, device: str, *, backward: bool) -> int:
    """Those of attention to the chosen tokens, by kernels that hold no scores of pairs.

    In a forward outputs of blocks, which are then joined. A backward has float32 sums of the
    gradients of keys and values; and those of a block's keys and values, or in the end copies of
    the sums in their dtype. Gradients of queries are joined, too.
    """
    indexer, heads = shape.indexer, shape.num_attention_heads / cfg.dims.tensor
    assert indexer is not None
    itemsize = ITEMSIZE[cfg.model.dtype] if device == "cuda" else 4
    tokens = cfg.train.max_tokens_per_microbatch / cfg.dims.context
    num_keys = _num_keys(cfg, shape, BLOCK)
    # A mask, and that in the dtype of scores.
    block = BLOCK * (num_keys * (1 + itemsize) + 8 * indexer.topk)
    if not backward:
        return round(tokens * heads * shape.value_dim * itemsize + block)
    queries = tokens * heads * shape.head_dim * itemsize
    width = heads * (shape.head_dim + shape.value_dim)
    sums = cfg.train.max_tokens_per_microbatch * width
    copies = 0 if itemsize == 4 else itemsize * sums
    of_block = itemsize * num_keys * width + block
    return round(4 * sums + queries + max(of_block, copies + queries))


def _num_keys(cfg: Config, shape: ModelShape, block: int) -> int:
    """The most that a block of queries sees: all of one sequence, and what of the next ones is
    before its last query. That may be in a context rank's first slice, before which are up to
    (C - 1) / 2C of its sequence."""
    context, longest = cfg.dims.context, longest_sequence(cfg, shape)
    before = longest * (context - 1) // (2 * context)
    return min(longest + before + block * context, cfg.train.max_tokens_per_microbatch)
