"""The types that describe a model family, once for all directions of conversion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from checkpoint_convert.families.engines import Engines
from checkpoint_convert.shape import Stacks
from parallel import Axes, Box, Shape, ShardMapping


@dataclass(frozen=True)
class Experts:
    """How a family names its mixture of experts, in config.json and in the weight files."""

    num_experts: str
    """Config key of the number of experts. Experts per token: always `num_experts_per_tok`."""
    intermediate_size: str
    """Config key of the intermediate size of one expert."""
    normalize_topk: str | None
    """Config key: whether the weights of a token's experts are scaled to sum to 1; None: always."""
    block: str = "mlp"
    """Name of the module that holds router and experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """Names of the three matrices of an expert."""
    router: str = "gate"
    """Name of the router."""
    stacks: Stacks | None = None
    """See `MoeShape`."""
    tower_stacks: Stacks | None = None
    """`stacks` of the family's text tower in a multimodal model; None: the same as `stacks`."""
    may_be_apart: bool = False
    """Whether some weight files of the family store experts one by one in spite of `stacks`."""
    score_function: str = "softmax"
    """See `MoeShape`."""
    weight_scale: str | None = None
    """Config key of the factor of the experts' weights; None: 1."""
    num_shared: str | None = None
    """Config key: size of the shared expert in experts; None: there is none."""
    shared: str = "shared_experts"
    """Name of the shared expert."""
    shared_size: str | None = None
    """Config key of the intermediate size of the shared expert; None: see `num_shared`."""
    has_shared_gate: bool = False
    """See `MoeShape`."""
    num_dense_layers: str | None = None
    """Config key of the number of layers with a dense MLP, which come first; None: 0."""
    dense_layers: str | None = None
    """Config key of a list of layers with a dense MLP; None: there is none."""
    every: str | None = None
    """Config key of n, where only every n-th layer has experts; None: 1."""
    bias: str = "gate.e_score_correction_bias"
    """Name of the biases with which a sigmoid router chooses experts."""
    has_groups: bool = False
    """Whether config.json has groups of experts: `n_group` and `topk_group`."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Layers that have a window of attention, if `sliding_window` in config.json is not null."""

    switch: str | None = None
    """Config key that must be true, too."""
    first: str | None = None
    """Config key of the first layer with a window; None: 0."""
    every: int | str | None = None
    """Every n-th layer has no window: n, or its config key. None: all layers from `first` on have
    one."""
    are_by_layer_types: bool = False
    """Whether `layer_types` in config.json overrides this rule; otherwise it must agree."""
    rope_theta: tuple[float, float] | None = None
    """RoPE bases of layers without and with a window, where config.json has none. None: all layers
    have one RoPE."""
    rope_theta_key: str | None = None
    """Older config key of the RoPE base of layers with a window; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Where layers have RMS norms, and over what: see `ModelShape`."""

    has_pre: bool = True
    has_post: bool = False
    of_heads: bool | str = False
    """Whether query and key heads have a norm, or the config key that says so."""
    over_all_heads: bool = False
    is_zero_centered: bool = False


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How RoPE rotates, and how it may be scaled."""

    partial_factor: float | None = 1.0
    """See `ModelShape.partial_rotary_factor`; None: config.json says."""
    size: str | None = None
    """Config key of the size of the rotated part, which vLLM needs; None: there is none."""
    types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    required: Mapping[str, Any] = field(default_factory=dict)
    """RoPE parameters, each with the only supported value."""


@dataclass(frozen=True)
class Mtp:
    """Layers for multi-token prediction."""

    num_layers: str | None = None
    """Config key of `ModelShape.num_mtp_layers`; None: 0."""
    is_apart: bool = False
    """Whether weight files have these layers under ``mtp.``, not behind the last layer. Such layers
    have full attention, even in models with linear attention."""


@dataclass(frozen=True)
class Family:
    """A `model_type` of config.json, and how it differs from the other decoders."""

    model_type: str
    defaults: Mapping[str, Any]
    """Values that transformers assumes for keys missing in config.json."""
    required: Mapping[str, Any]
    """Keys that change what the model computes, each with the only supported value."""
    explicit: Mapping[str, Any] = field(default_factory=dict)
    """Required keys that must be present: vLLM has another value for an absent one."""
    attention_bias: bool | str = False
    """Whether queries, keys and values have a bias, or the config key that says so."""
    has_output_bias: bool = False
    """Whether attention's output projection has a bias where these have."""
    norms: Norms = Norms()
    rope: Rope = Rope()
    scales_embeddings: bool = False
    has_linear_biases: bool = False
    has_sinks: bool = False
    has_output_gate: bool = False
    activation: str = "silu"
    """See `ModelShape` for this and the four fields above."""
    query_scale: str | None = None
    """Config key of `ModelShape.query_pre_attn_scalar`; None: `head_dim`."""
    experts: Experts | None = None
    """None: every layer has a dense MLP."""
    has_mla: bool = False
    """Whether attention is multi-head latent attention: see `LatentShape`."""
    indexer_pairs: Literal["halves", "neighbours"] | None = None
    """How RoPE pairs elements in sparse attention's indexers: see `IndexerShape`; None: no
    indexers."""
    windows: Windows | None = None
    """None: no layer has a window."""
    linear: Literal["by head", "one by one", "mamba"] | None = None
    """Linear attention: Mamba-2, or the delta rule, whose projections weight files group by key
    head or store one by one; None: no layer has it."""
    has_block_types: bool = False
    """Whether layers have one module each, listed in config.json."""
    has_fused_weights: bool = False
    """Whether weight files have queries, keys and values in one matrix, and gate and up in one."""
    mtp: Mtp = Mtp()
    file_names: Mapping[str, str] = field(default_factory=dict)
    """Names in weight files, by the usual names of embedding, layers and last norm."""
    engines: Engines = field(default_factory=Engines)


@dataclass(frozen=True)
class StackPlace:
    """Where an expert's tensor lies in a stack of the weight files."""

    name: str
    stored_shape: Shape
    shape: Shape
    """Dimensions of the same elements in which the tensor is a box: [experts, inputs, outputs, 2]
    where gate and up alternate."""
    start: Shape
    axes: Axes
    """Dimension of the stack for each dimension of the tensor."""

    def box(self, shape: Shape) -> Box:
        """Box of the stack that a tensor of this `shape` fills."""
        size = [1] * len(self.shape)
        for axis, extent in zip(self.axes, shape, strict=True):
            size[axis] = extent
        return Box(self.start, tuple(size))


@dataclass(frozen=True)
class Tensor:
    """A tensor of the weight files."""

    name: str
    shape: Shape
    num_heads: int | None = None
    """Key-value heads in its rows, which an engine with more ranks than heads replicates; None for
    all other tensors."""
    is_float32: bool = False
    """Whether it is float32 in a model of any dtype."""
    rows: tuple[int, int] | None = None
    """(first row, rows of the whole) of a part of a stored tensor; None: it is the whole."""
    stack: StackPlace | None = None
    """Its place in a stack of the files, if any; then its name is not in the files."""

    @property
    def whole_shape(self) -> Shape:
        """Shape of the stored tensor, which may have more rows than this part."""
        return self.shape if self.rows is None else (self.rows[1], *self.shape[1:])

    @property
    def first_row(self) -> int:
        """First row of this part in the stored tensor."""
        return self.rows[0] if self.rows else 0


def in_one_tensor(name: str, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Make the parts consecutive rows of one tensor of the weight files."""
    sizes = [part.shape[0] for part in parts]
    return tuple(
        replace(part, name=name, rows=(sum(sizes[:number]), sum(sizes)))
        for number, part in enumerate(parts)
    )


@dataclass(frozen=True, kw_only=True)
class InVllm:
    """The place of a parameter in a vLLM engine, which fuses the same tensors."""

    name: str = ""
    """Empty: the name of the only source."""
    parts: tuple[tuple[str, int], ...] = ()
    """(name, number of sources) of each engine parameter, if vLLM has several for this one."""
    rows: tuple[int, int] | None = None
    """(first row, rows of the whole), if this is a part of an engine parameter."""
    split: int | None = None
    """Dimension that workers split, if another than tensor ranks split."""
    is_float32: bool = False
    """Whether an engine of any dtype keeps it in float32."""
    alternates: bool = False
    """Whether the rows of an expert's two sources alternate."""
    is_added_once: bool = False
    """Expert bias: the first worker that splits the expert holds it, the others hold zeros."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of Megatron-Core before it is split over tensor ranks, and its other names.

    Rows of the sources are interleaved: each source is cut into `interleave_groups` equal shares,
    and group i is the i-th share of every source. Fused QKV has a group for each key-value head:
    with two, its rows are q0 k0 v0 q1 k1 v1. One group is plain concatenation. `zero_rows` follow.
    """

    name: str
    sources: tuple[Tensor, ...]
    split: int | None = None
    """Dimension split into equal parts over tensor ranks; None: every rank holds the whole."""
    interleave_groups: int = 1
    is_split_by_source: bool = False
    """Whether each rank holds its share of every source, one after the other (gate and up): with n
    ranks there are n groups."""
    zero_rows: int = 0
    """Rows of zeros at the end; in an engine, after each source along the split dimension."""
    is_copy: bool = False
    """Whether another parameter holds the same elements and owns them."""
    is_expert: bool = False
    """Whether it is split and replicated over the expert-parallel ranks."""
    key: str = ""
    """Name in a torch_dist checkpoint; empty: `name`."""
    vllm: InVllm = InVllm()
    stack_axes: tuple[tuple[int, int], ...] = ()
    """(index, size) along each leading dimension on which a checkpoint stacks layers or experts."""

    @property
    def shape(self) -> Shape:
        """Shape before the split, with the zero rows."""
        rows = sum(source.shape[0] for source in self.sources) + self.zero_rows
        return (rows, *self.sources[0].shape[1:])

    @property
    def name_in_engine(self) -> str:
        """Name of the vLLM engine's parameter for this parameter, if there is only one."""
        return self.vllm.name or self.sources[0].name

    def renamed_in_engine(self, name: str) -> "Parameter":
        """The parameter under another name in a vLLM engine."""
        return replace(self, vllm=replace(self.vllm, name=name))

    def in_engine(self) -> list["Parameter"]:
        """Parameters of a vLLM engine that stand for this parameter."""
        found, first = [], 0
        for name, num_sources in self.vllm.parts:
            sources = self.sources[first : first + num_sources]
            found.append(replace(self, sources=sources).renamed_in_engine(name))
            first += num_sources
        return found or [self]

    def under(self, prefix: str) -> "Parameter":
        """The parameter with a prefix to its name, and to its key in a checkpoint."""
        return replace(self, name=prefix + self.name, key=prefix + (self.key or self.name))

    def in_layer(self, local_index: int, index: int, num_stacked: int) -> "Parameter":
        """The parameter of a layer renamed as that of the whole model.

        The layer is number `index` of the model and number `local_index` of its chunk. A checkpoint
        stacks `num_stacked` layers under one key; 0: it has one key for each layer.
        """
        name, own = f"decoder.layers.{local_index}.{self.name}", self.key or self.name
        if num_stacked:
            stack_axes = ((index, num_stacked), *self.stack_axes)
            return replace(self, name=name, key=f"decoder.layers.{own}", stack_axes=stack_axes)
        return replace(self, name=name, key=f"decoder.layers.{index}.{own}")


@dataclass(frozen=True)
class Shard:
    """One tensor rank's part of a parameter; pieces are named as in the `Parameter`."""

    shape: Shape
    pieces: tuple[ShardMapping, ...]
    zeros: tuple[Box, ...]


def shard(parameter: Parameter, rank: int, size: int) -> Shard:
    """The part of a parameter that tensor rank `rank` of `size` holds."""
    local = Box.whole(parameter.shape)
    if parameter.split is not None:
        extent, rest = divmod(parameter.shape[parameter.split], size)
        assert rest == 0, f"{parameter.name}: {parameter.shape} over {size} tensor ranks"
        local = local.narrowed(parameter.split, rank * extent, extent)
    is_replica = parameter.is_copy or (parameter.split is None and rank > 0)
    pieces, zeros = [], []
    num_groups = size if parameter.is_split_by_source else parameter.interleave_groups
    for block, tensor, first_row in _blocks(parameter, num_groups, local):
        box = block.overlap(local)
        if box is None:
            continue
        local_box = box.moved(local.start, (0,) * len(local.start))
        if tensor is None:
            zeros.append(local_box)
        else:
            source_box = box.moved(block.start, (first_row, *block.start[1:]))
            pieces.append(ShardMapping(parameter.name, local_box, tensor, source_box, is_replica))
    return Shard(local.size, tuple(pieces), tuple(zeros))


def _blocks(parameter: Parameter, num_groups: int, local: Box) -> list[tuple[Box, str | None, int]]:
    """Row blocks of the groups that `local` meets: box, source (None: zeros), first source row."""
    whole = Box.whole(parameter.shape)
    shares = [source.shape[0] // num_groups for source in parameter.sources]
    group_rows = sum(shares)
    first = local.start[0] // group_rows
    # Rows of zeros lie behind the last group.
    last = min(-(-local.end[0] // group_rows), num_groups)
    blocks: list[tuple[Box, str | None, int]] = []
    for i in range(first, last):
        row = i * group_rows
        for source, share in zip(parameter.sources, shares, strict=True):
            first_row = source.first_row + i * share
            blocks.append((whole.narrowed(0, row, share), source.name, first_row))
            row += share
    if parameter.zero_rows:
        end = group_rows * num_groups
        blocks.append((whole.narrowed(0, end, parameter.zero_rows), None, 0))
    return blocks


def stored_boxes(parameter: Parameter, rank: int, size: int) -> list[Box]:
    """The boxes of a parameter that tensor rank `rank` of `size` saves, in checkpoint coordinates.

    A checkpoint holds parameters unsplit and stacked under one key. Sources that are split one by
    one (gate and up) are concatenated there.
    """
    blocks = [Box.whole(parameter.shape)]
    if parameter.is_split_by_source:
        blocks = [block for block, _, _ in _blocks(parameter, 1, blocks[0])]
    if parameter.split is not None:
        extents = [block.size[parameter.split] // size for block in blocks]
        blocks = [
            block.narrowed(parameter.split, rank * extent, extent)
            for block, extent in zip(blocks, extents, strict=True)
        ]
    return [stacked(parameter, block) for block in blocks]


def stacked(parameter: Parameter, box: Box) -> Box:
    """A box of a parameter as a box of the stacked tensor in a checkpoint."""
    indices = tuple(index for index, _ in parameter.stack_axes)
    return Box(indices + box.start, (1,) * len(indices) + box.size)
