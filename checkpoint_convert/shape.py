"""The numbers that define a decoder-only model of any family."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from parallel import ParallelDims, Shape, divisors, pipeline_layers

# Fields that do not change what is computed: Mistral and Llama compute the same.
_NEUTRAL_FIELDS = (
    "family",
    "max_position_embeddings",
    "eos_token_ids",
    "num_mtp_layers",
    "moe.stacks",
    "moe.mtp_stacks",
    "trains_mtp",
    "vision",
)
Stacks = Literal["alternating", "joined", "transposed"]
"""How files stack a layer's experts. `joined`: [experts, outputs, inputs], gate's outputs before
up's; `transposed`: that order as [experts, inputs, outputs]; `alternating`: [experts, inputs,
outputs], outputs of gate and up in turn."""
Module = Literal["attention", "linear", "mlp", "moe"]
"""Kinds of modules: attention, linear attention, a dense MLP, a mixture of experts."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of
    all heads are projections of one short vector per token, its latent."""

    query_rank: int | None
    """Size of the latent of queries; None: queries are projections of hidden states."""
    rank: int
    """Size of the latent of keys and values."""
    rotary_dim: int
    """Size of the last part of a head, which RoPE rotates. For keys, all heads share this part, a
    projection of hidden states."""
    value_dim: int
    """Size of a head of values."""


@dataclass(frozen=True, kw_only=True)
class IndexerShape:
    """Sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): each layer's indexer chooses
    the tokens that all heads attend to. It is not trained."""

    topk: int
    """Number of tokens, itself included, that a token attends to: those with the largest scores."""
    num_heads: int
    """Heads of the indexer's queries; they share one key per token."""
    head_dim: int
    """Size of a head. RoPE rotates its first `LatentShape.rotary_dim` elements."""
    has_neighbouring_pairs: bool
    """Whether RoPE rotates pairs of neighbours, as in attention; otherwise element i of the first
    half of the rotated part pairs with element i of the second."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """Linear attention: the gated delta rule (Gated DeltaNet, arXiv 2412.06464) or Mamba-2 (arXiv
    2405.21060). A head keeps one matrix as its memory of all tokens, in place of keys and values.
    """

    is_mamba: bool = False
    """Whether it is Mamba-2; then key heads are its groups, value heads its heads, and `key_dim`
    its state size."""
    num_key_heads: int
    """Heads of queries and of keys."""
    num_value_heads: int
    """A multiple of `num_key_heads`: that many neighbours share queries and keys."""
    key_dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    """Size of a head of values."""
    kernel_size: int
    """Tokens that the convolution of queries, keys and values spans, the current one included."""

    @property
    def group_size(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def mixed_dim(self) -> int:
        """Channels of the convolution per key head: its query, its key, and its heads of values."""
        return 2 * self.key_dim + self.group_size * self.value_dim

    @property
    def projected_dim(self) -> int:
        """Rows of the projection of hidden states: the convolution's channels, output gates, and
        per value head a decay and, under the delta rule, the strength of an update."""
        rates = self.num_value_heads * (1 if self.is_mamba else 2)
        return self.num_key_heads * self.mixed_dim + self.num_value_heads * self.value_dim + rates


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """The mixture of experts that replaces the MLP of every layer but `dense_layers`."""

    num_experts: int
    experts_per_token: int
    """Number of experts that process a token: those with the largest scores."""
    intermediate_size: int
    """Intermediate size of one expert."""
    normalize_topk: bool
    """Whether the weights of a token's experts, their scores, are scaled to sum to 1."""
    score_function: str = "softmax"
    """`softmax` or `sigmoid` of the router's outputs. With `sigmoid`, an untrained bias is added to
    scores to choose experts, but not to the experts' weights (arXiv 2408.15664)."""
    num_groups: int = 1
    """Groups of experts. A token's experts come from the `groups_per_token` groups with the largest
    sums of two best scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    groups_per_token: int = 1
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    shared_intermediate_size: int = 0
    """Intermediate size of the shared expert, which processes every token; 0: there is none."""
    has_shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a sigmoid gate of one element."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP instead."""
    stacks: Stacks | None = None
    """How weight files stack a layer's experts, with gate and up fused; None: they do not."""
    mtp_stacks: Stacks | None = None
    """`stacks` of the layers for multi-token prediction."""

    @property
    def has_choice_biases(self) -> bool:
        """Whether a bias is added to the scores that choose experts."""
        return self.score_function == "sigmoid"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Definition of a model apart from its weights; sizes are those of the unsplit model."""

    family: str
    """Key in `families.FAMILIES`, which is the `model_type` of config.json."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Size of one head of queries and keys; heads * head_dim need not be `hidden_size`."""
    intermediate_size: int
    """Intermediate size of a dense MLP; for experts see `MoeShape`."""
    vocab_size: int
    """Rows of the embedding in the weight files, without padding."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the query, key and value projections have a bias."""
    qk_norm: bool
    """Whether every query and key head has an RMS norm over `head_dim`."""
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(hash=False)
    """`rope_type` and parameters of a scaled RoPE, named as in config.json; None: not scaled."""
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    has_pre_norms: bool = True
    """Whether attention and MLP read normalised hidden states."""
    has_post_norms: bool = False
    """Whether outputs of attention and MLP are normalised before they are added."""
    norms_all_heads: bool = False
    """Whether `qk_norm` is over all heads together."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""
    query_pre_attn_scalar: float | None = None
    """Products of queries and keys are divided by its square root; None: `head_dim`."""
    has_output_bias: bool = False
    """Whether attention's output projection has a bias."""
    has_linear_biases: bool = False
    """Whether routers and experts have biases, too."""
    has_sinks: bool = False
    """Whether heads have sinks: trained scores in the softmax whose value is zero."""
    activation: str = "silu"
    """Activation of an MLP with gate g and other factor u: `silu`; `gelu_pytorch_tanh`, GELU's
    approximation; or `swigluoai`: (u + 1) g sigmoid(1.702 g), with g <= 7 and -7 <= u <= 7. Without
    gates, `relu2`: max(u, 0)^2."""
    has_output_gate: bool = False
    """Whether attention's output is multiplied by sigmoid gates, further outputs of the query
    projection."""
    partial_rotary_factor: float = 1.0
    """Part of each head that RoPE rotates; it comes first. 0: there is no RoPE."""
    window: int | None = None
    """Number of tokens, itself included, that a token attends to in `windowed_layers`."""
    windowed_layers: tuple[int, ...] = ()
    """Layers with a window; in all others a token attends to all before it."""
    window_rope_theta: float | None = None
    """Base of the unscaled RoPE of `windowed_layers`; None: all layers share one RoPE."""
    moe: MoeShape | None = None
    """None for a dense model."""
    latent: LatentShape | None = None
    """None: keys and values are projections of hidden states."""
    indexer: IndexerShape | None = None
    """None: attention is not sparse."""
    linear: LinearShape | None = None
    """Attention of `linear_layers`; None: there are none."""
    linear_layers: tuple[int, ...] = ()
    block_types: tuple[Module, ...] = ()
    """Module of each layer, if layers have one module each; empty: layers have two."""
    num_mtp_layers: int = 0
    """Number of layers for multi-token prediction that weight files may have behind the last one.
    They are not part of the model, and stay in an export."""
    trains_mtp: bool = False
    """Whether the only MTP layer is trained, and thus part of the model."""
    vision: tuple[tuple[str, Shape], ...] = ()
    """Name and shape of each tensor of a trained vision tower. Empty: the tower is not part of the
    model, and stays in an export."""

    @property
    def can_train_mtp(self) -> bool:
        """Whether `trains_mtp` may be set: a layer with an indexer was not tried."""
        return self.num_mtp_layers == 1 and self.indexer is None

    @cached_property
    def has_mamba(self) -> bool:
        return self.linear is not None and self.linear.is_mamba

    @property
    def rope_type(self) -> str:
        """Kind of RoPE's scaling, `default` without."""
        return "default" if self.rope_scaling is None else self.rope_scaling["rope_type"]

    @property
    def has_gates(self) -> bool:
        """Whether MLPs and experts have gates."""
        return self.activation != "relu2"

    def modules(self, layer: int) -> tuple[Module, ...]:
        """The modules of a layer, each with a residual connection."""
        if self.block_types:
            return (self.block_types[layer],)
        is_dense = self.moe is None or layer in self.moe.dense_layers
        attention: Module = "linear" if layer in self.linear_layers else "attention"
        return attention, "mlp" if is_dense else "moe"

    def num_layers_with(self, module: Module) -> int:
        return sum(module in self.modules(layer) for layer in range(self.num_layers))

    @property
    def num_dense_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self.num_layers_with("mlp")

    @property
    def num_attending_layers(self) -> int:
        """Number of layers with keys and values of all tokens."""
        return self.num_layers_with("attention")

    @property
    def attending_share(self) -> float:
        return self.num_attending_layers / self.num_layers

    @property
    def value_dim(self) -> int:
        """Size of one head of values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Size of the part of each head that RoPE rotates."""
        if self.latent is not None:
            return self.latent.rotary_dim
        return round(self.partial_rotary_factor * self.head_dim)

    @property
    def has_equal_layers(self) -> bool:
        """Whether all layers have the same modules; Megatron then stacks them in checkpoints."""
        # As `non_homogeneous_layers` in Megatron-Core's TransformerBlock.sharded_state_dict.
        if self.linear_layers or self.block_types:
            return False
        return self.moe is None or not self.moe.dense_layers


def named_fields(shape: ModelShape) -> dict[str, Any]:
    """All fields by name; nested ones have names such as ``moe.num_experts``."""
    fields = asdict(shape)
    for part in ("latent", "indexer", "linear", "moe"):
        values = fields.pop(part) or {}
        fields |= {f"{part}.{name}": value for name, value in values.items()}
    return fields


def differing_fields(
    a: ModelShape, b: ModelShape, but_for: Collection[str] = _NEUTRAL_FIELDS
) -> list[str]:
    """Fields outside `but_for` that make models compute different things: ``name: a, b``."""
    fields, others = named_fields(a), named_fields(b)
    return [
        f"{name}: {fields.get(name)}, {others.get(name)}"
        for name in fields | others
        if fields.get(name) != others.get(name) and name not in but_for
    ]


def padded_vocab_size(shape: ModelShape, dims: ParallelDims) -> int:
    """Rows of the embedding over all tensor ranks: the next multiple of the number of ranks."""
    return -(-shape.vocab_size // dims.tensor) * dims.tensor


def tensor_sizes(shape: ModelShape) -> list[int]:
    """The tensor parallel sizes over which Megatron-Core can split the model, ascending."""
    return [n for n in divisors(shape.num_attention_heads) if not _obstacles(shape, n)]


def check_divisible(shape: ModelShape, dims: ParallelDims) -> None:
    """Raise ValueError, naming the legal sizes, when `dims` cannot split the model."""
    pipeline_layers(shape.num_layers, dims)
    obstacles = _obstacles(shape, dims.tensor)
    if obstacles:
        raise ValueError(
            f"tensor({dims.tensor}) cannot split the model: it "
            + " and ".join(obstacles)
            + f"; legal values are {tensor_sizes(shape)}"
        )
    linear = shape.linear
    if linear is not None and linear.num_key_heads % (dims.tensor * dims.context):
        raise ValueError(
            f"tensor({dims.tensor}) * context({dims.context}) cannot split linear attention: it "
            f"does not divide {_key_heads(linear)}({linear.num_key_heads}): each rank computes "
            "whole heads, for all tokens"
        )
    if shape.moe is None:
        if dims.expert > 1:
            raise ValueError(
                f"expert({dims.expert}) splits experts, but {shape.family} has none: set 1"
            )
        return
    if shape.has_linear_biases and dims.expert_tensor > 1:
        raise ValueError(
            f"expert_tensor({dims.expert_tensor}) cannot split the experts: Megatron-Core adds "
            "their biases only where they are whole; legal values are [1]"
        )
    for axis, size, split in (
        ("expert", dims.expert, "num_experts"),
        ("expert_tensor", dims.expert_tensor, "intermediate_size"),
    ):
        whole = getattr(shape.moe, split)
        if whole % size:
            raise ValueError(
                f"{axis}({size}) cannot split the experts: it does not divide their "
                f"{split}({whole}); legal values are {divisors(whole)}"
            )


def _key_heads(linear: LinearShape) -> str:
    """config.json's key of the number of key heads."""
    return "n_groups" if linear.is_mamba else "linear_num_key_heads"


def _obstacles(shape: ModelShape, tensor: int) -> list[str]:
    """Why Megatron-Core cannot split non-expert parameters over `tensor` ranks; empty: it can."""
    num_heads = shape.num_attention_heads * (1 + shape.has_output_gate)
    # With fewer key-value heads than ranks, Megatron-Core still splits the rows of the fused QKV
    # projection into equal shares, regardless of head boundaries, and gathers its output.
    rows = (num_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    fused = {} if shape.latent else {"rows of the fused QKV projection": rows}
    return split_obstacles(shape, tensor, fused)


def split_obstacles(shape: ModelShape, tensor: int, further: Mapping[str, int]) -> list[str]:
    """Why neither Megatron-Core nor vLLM can split the model over `tensor` ranks; empty: they can.

    `further` has sizes, by description, that `tensor` must divide as well.
    """
    kv_heads = shape.num_key_value_heads
    split = {"num_attention_heads": shape.num_attention_heads}
    if shape.num_dense_layers:
        split["intermediate_size"] = shape.intermediate_size
    if shape.moe is not None:
        split["intermediate_size of the shared expert"] = shape.moe.shared_intermediate_size
    if shape.linear is not None:
        split[_key_heads(shape.linear)] = shape.linear.num_key_heads
    split |= further
    obstacles = [f"does not divide {name}({size})" for name, size in split.items() if size % tensor]
    if kv_heads % tensor and tensor % kv_heads:
        obstacles.append(f"is neither a divisor nor a multiple of num_key_value_heads({kv_heads})")
    return obstacles
