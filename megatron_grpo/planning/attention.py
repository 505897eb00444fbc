"""Linear attention: operations, kept tensors, state; and memory of sparse attention."""

from checkpoint_convert import ModelShape
from checkpoint_convert.shape import LinearShape
from megatron_grpo.config.config import Config
from megatron_grpo.planning.card import ITEMSIZE
from megatron_grpo.planning.workload import longest_sequence

CHUNK = 64
"""Tokens of a chunk, as in `parallel.delta_rule`; that imports torch, which takes seconds."""
BLOCK, INDEX_BLOCK = 128, 32
"""Queries of attention and of the indexer at a time, as in `parallel.sparse_attention`."""


def rule_flops(linear: LinearShape, chunk: int = CHUNK) -> float:
    """Operations of a token in a layer, without projections and convolution, which have weights.

    In chunks of C tokens (Gated DeltaNet, arXiv 2412.06464, section 3.3), a head with keys of size
    k and values of size v multiplies, per token: its key and its query with the keys of the chunk,
    4 C k; what its key recalls of the memory, what its query reads there, and what it adds to it,
    6 k v; and the weights of its query with changes of values, 2 C v. The triangular system has
    k + v right-hand sides, C (k + v). An engine generates in chunks of one token.

    Mamba-2 (arXiv 2405.21060, section 6) has neither what a key recalls nor the system, and
    multiplies queries with keys once for all heads of a group: 2 C k.
    """
    key, value = linear.key_dim, linear.value_dim
    if linear.is_mamba:
        of_heads = linear.num_value_heads * (2 * chunk * value + 4.0 * key * value)
        return of_heads + 2.0 * linear.num_key_heads * chunk * key
    return linear.num_value_heads * (chunk * (5 * key + 3 * value) + 6.0 * key * value)


def kept_bytes(linear: LinearShape, context: int) -> tuple[float, float]:
    """Bytes per token that a layer keeps for its backward between its two projections.

    The first are split over tensor ranks, the second are not. Counts the tensors that autograd
    saves of `policy.linear_attention` and `parallel.delta_rule`, all in float32, for sequences of
    whole chunks. Kernels (`parallel.linear_kernels`) compute most of it again; whether a run has
    them is not known here.
    """
    groups, heads, mixed = linear.num_key_heads, linear.num_value_heads, linear.mixed_dim
    key, value = linear.key_dim, linear.value_dim
    if linear.is_mamba:
        return _kept_by_mamba(linear), (linear.kernel_size - 1 + 8) * context
    # What the convolution multiplies, and the input and output of the activation after it; the
    # inverse lengths of queries and keys.
    convolution = groups * ((linear.kernel_size + 2) * mixed + 2)
    # Decays and strengths, and what they are computed of; the inverse length of the output.
    rates = 8
    # Products of keys and of queries with keys, decays between two tokens, and the system.
    pairs = 6 * CHUNK
    keys = 7 * key  # queries and keys, plain and with decays, and in the order of steps
    values = 8 * value  # values, their changes, the output, its norm and its gate
    memory = key * value / CHUNK  # before each chunk
    split = convolution + heads * (rates + pairs + keys + values + memory)
    # Whether tokens are of the same sequence, and their places in chunks. Context ranks each have
    # some heads of all tokens.
    whole = linear.kernel_size - 1 + 8
    return 4 * split, whole * context


def _kept_by_mamba(linear: LinearShape) -> float:
    """As `kept_bytes`, for `parallel.state_space`."""
    groups, heads, value = linear.num_key_heads, linear.num_value_heads, linear.value_dim
    # What the projection gives, what the convolution multiplies, and the input of its activation.
    mixed = linear.projected_dim + groups * (linear.kernel_size + 1) * linear.mixed_dim
    # Products of queries with keys, these with decays, and decays between two tokens.
    pairs = CHUNK * (groups + 2 * heads)
    # Queries and keys; and the inverse length of the output.
    of_groups = groups * (2 * linear.key_dim + 1)
    # Steps and decays; x, values, the output, its norm and its gate; memories before each chunk.
    of_heads = heads * (4 + 8 * value + (2 * linear.key_dim + 1) * value / CHUNK)
    return 4 * (mixed + pairs + of_groups + of_heads)


def exchanged_elements(linear: LinearShape) -> int:
    """Elements of a token that a layer's context ranks exchange: what the projection gives, and
    what goes into that of the output. A rank has whole tokens before and after, and whole heads in
    between."""
    return linear.projected_dim + linear.num_value_heads * linear.value_dim


def sequence_elements(linear: LinearShape, num_drafted: int) -> tuple[int, int]:
    """Elements that a layer of an engine remembers of a sequence: last tokens, and the memory.

    The first are inputs of the convolution, in the dtype of the model. With drafts vLLM keeps both
    once more for each of their `num_drafted` tokens, and these tokens with the last ones.
    """
    tokens = (linear.kernel_size - 1 + num_drafted) * linear.num_key_heads * linear.mixed_dim
    memory = linear.num_value_heads * linear.key_dim * linear.value_dim
    return (1 + num_drafted) * tokens, (1 + num_drafted) * memory


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
    """Bytes of the indexer, which chooses the tokens in float32.

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
    """Bytes of attention to the chosen tokens, by kernels that hold no scores of pairs.

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
