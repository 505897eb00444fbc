"""The planner's activation memory of layers, compared with what autograd really saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from checkpoint_convert import read_shape
from helpers.models.published import write_config
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import pack_all, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import (
    final_norm_bytes,
    forward_bytes,
    head_bytes,
    layer_bytes,
    stage_activations,
)
from megatron_grpo.planning.layer_kinds import layer_kinds
from megatron_grpo.planning.linear_attention import CHUNK
from megatron_grpo.planning.workload import in_flight
from megatron_grpo.policy.model import build_model, forward
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.tiles import even_columns

TOKENS = 512
LENGTHS = [[(64, 192), (32, 96), (32, 96)]]
WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3}
MASK_BYTES = 4 * sum(length // 4 * length * 5 // 4 for length in map(sum, LENGTHS[0]))
"""On context rank 1 of 2: its chunks, a quarter each, attend to two and three quarters."""
FULL = ["recompute_granularity: full", "recompute_method: uniform", "recompute_num_layers: 1"]


def offloaded(modules: str) -> list[str]:
    return [
        "fine_grained_activation_offloading: true",
        f"offload_modules: [{modules}]",
        "min_offloaded_tensor_size: 0",
    ]


def recomputed(module: str) -> list[str]:
    return ["recompute_granularity: selective", f"recompute_modules: [{module}]"]


@dataclass(frozen=True)
class Run:
    family: str = "llama"
    dims: ParallelDims = field(default_factory=ParallelDims)
    megatron: Sequence[str] = ()
    overrides: Sequence[str] = ()
    model: Mapping[str, Any] = field(default_factory=dict)

    def config(self, folder: Path) -> Config:
        return tiny_config(
            folder,
            self.dims,
            "model.dtype=bfloat16",
            f"train.max_tokens_per_microbatch={TOKENS}",
            "model.megatron.transformer_impl=local",
            *(f"model.megatron.{field.replace(': ', '=', 1)}" for field in self.megatron),
            *self.overrides,
        )


def one_module(megatron: Sequence[str] = (), **dims: int) -> Run:
    """Layers of one module each, one of each kind."""
    return Run("nemotron_h", ParallelDims(**dims), megatron, model={"num_hidden_layers": 4})


EVERY_MODULE = "attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm"
RUNS = {
    "bfloat16": Run(),
    "float32": Run(overrides=["model.dtype=float32"]),
    "norms of queries and keys": Run("qwen3"),
    "experts": Run("qwen3_moe"),
    "tensor": Run(dims=ParallelDims(tensor=2)),
    "tensor, whole sequence": Run(
        dims=ParallelDims(tensor=2), overrides=["parallel.sequence_parallel=false"]
    ),
    "context": Run(dims=ParallelDims(context=2)),
    "experts over data": Run("qwen3_moe", ParallelDims(data=2, expert=2)),
    "recomputed": Run(megatron=FULL),
    "attention recomputed": Run(megatron=recomputed("core_attn")),
    "fused activation": Run(megatron=["bias_activation_fusion: true"]),
    "a shared expert over tensor": Run("glm4_moe", ParallelDims(tensor=2)),
    "a shared expert recomputed": Run("glm4_moe", megatron=recomputed("shared_experts")),
    "all experts recomputed": Run("glm4_moe", megatron=recomputed("moe")),
    "latents": Run("deepseek_v3"),
    "latents of keys and values alone": Run("deepseek_v3", model={"q_lora_rank": None}),
    "latents over tensor": Run("deepseek_v3", ParallelDims(tensor=2)),
    "latents over context": Run("deepseek_v3", ParallelDims(context=2)),
    "sparse": Run("deepseek_v32"),
    "sparse over tensor": Run("deepseek_v32", ParallelDims(tensor=2)),
    "sparse over context": Run("deepseek_v32", ParallelDims(context=2)),
    "latents recomputed": Run("deepseek_v3", megatron=FULL),
    "linear": Run("qwen3_5_text"),
    "linear over tensor": Run("qwen3_next", ParallelDims(tensor=2)),
    "linear over context": Run("qwen3_next", ParallelDims(context=2)),
    "linear recomputed": Run("qwen3_next", megatron=FULL),
    "a module in each layer": one_module(),
    "a module in each layer over tensor": one_module(tensor=2),
    "a module in each layer over context": one_module(context=2),
    "a module in each layer recomputed": one_module(FULL),
    "a module in each layer, MLPs recomputed": one_module(recomputed("mlp")),
    "attention between linear recomputed": Run("qwen3_5_text", megatron=recomputed("core_attn")),
    "offloaded": Run("qwen3_moe", ParallelDims(tensor=2), offloaded(EVERY_MODULE)),
    "linear, norms offloaded": Run("qwen3_next", megatron=offloaded("attn_norm, mlp_norm")),
}


class Saved:
    """Stands for a saved tensor: autograd drops it when the tensor is no longer needed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(rank: int, cfg: Config) -> int:
    """Bytes of tensors, weights aside, that a microbatch's forward saves for its backward."""
    setup_device(rank)
    groups = init_groups(cfg.dims)
    model = build_model(cfg, read_shape(cfg.model.path), groups)
    for parameter in model.parameters().values():
        parameter.data.uniform_(-0.1, 0.1)  # else all tokens might go to the same experts
    weights = {p.untyped_storage().data_ptr() for p in model.parameters().values()}
    [batch] = pack_all(LENGTHS, cfg.dims)
    batch = batch.on_rank(groups.dims, groups.coordinates)
    assert len(batch.tokens) == TOKENS
    saved: WeakSet[Saved] = WeakSet()

    def keep(tensor: Tensor) -> Saved:
        kept = Saved(tensor)
        saved.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        states = forward(model.chunks[0], batch, groups)
    storages = [kept.tensor.untyped_storage() for kept in saved]
    assert states.requires_grad  # keeps the graph alive
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in weights}.values())


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_layers_keep_what_autograd_saves(run, tmp_path):
    cfg = run.config(tiny_model(tmp_path, run.family, **(WIDE | {**run.model})))
    shape = read_shape(cfg.model.path)
    measured = max(run_ranks(run.dims.world_size, saved_bytes, cfg))
    of_kinds = [len(kind.layers) * layer_bytes(cfg, kind).kept for kind in layer_kinds(shape)]
    planned = TOKENS / run.dims.context * (sum(of_kinds) + final_norm_bytes(cfg, shape))
    # Not in the plan: token ids, a table of RoPE, masks of torch's attention.
    left_out = 8 * TOKENS / run.dims.context
    if run.megatron == FULL:
        left_out += 4 * shape.rotary_dim * max(map(sum, LENGTHS[0]))
    if shape.latent is not None and run.megatron != FULL:
        # Torch's norms copy latents; the plan has a view that includes the keys' rotated part.
        of_keys = 2 * shape.num_layers * shape.latent.rotary_dim
        left_out -= of_keys * TOKENS / run.dims.context / run.dims.tensor
    if run.dims.tensor == 2:
        left_out += TOKENS  # mask of this rank's rows of the vocabulary
    if run.dims.context == 2 and shape.indexer is None:  # masks are made again
        left_out += shape.num_attending_layers * MASK_BYTES
    if run.dims.context == 2 and shape.linear is not None:
        left_out += (
            2 * 8 * TOKENS
        )  # the order of all tokens that ranks exchange for heads, and back
    if shape.linear is not None and run.megatron != FULL:
        # The causal mask of a chunk, and the convolution's weights in float32.
        weights = shape.linear.num_key_heads * shape.linear.mixed_dim * shape.linear.kernel_size
        copied = 4 * weights / run.dims.tensor / run.dims.context
        left_out += len(shape.linear_layers) * (CHUNK**2 + copied)
    # Linear attention also keeps some int64 per token and context rank.
    assert measured == pytest.approx(planned + left_out, rel=0.002 if shape.linear else 0.001)


def test_a_stage_holds_the_activations_of_its_layers(tmp_path):
    folder = write_config(tmp_path, "GLM-4.5", first_k_dense_replace=30)
    cfg = Run(dims=ParallelDims(pipeline=4)).config(folder)
    shape = read_shape(folder)
    dense, mixture = (layer_bytes(cfg, kind).kept for kind in layer_kinds(shape))
    between = 2 * shape.hidden_size  # received or sent
    held = [stage_activations(cfg, shape, stage, 8) / TOKENS for stage in range(4)]
    # Four stages of 23 layers; the first has four microbatches under way, the last one.
    assert held == [
        4 * (23 * dense + between),
        3 * (7 * dense + 16 * mixture + between),
        2 * (23 * mixture + between),
        23 * mixture + between,
    ]
    alone = [forward_bytes(cfg, shape, stage) / TOKENS for stage in range(4)]
    assert alone == [dense, mixture, mixture, mixture]


@pytest.mark.parametrize(
    ("model", "implementation", "outputs"),
    [
        ("Llama-3.1-8B", "local", 2),
        ("Llama-3.1-8B", "transformer_engine", 0),
        ("Qwen3-30B-A3B", "transformer_engine", 1),
        ("DeepSeek-V3", "transformer_engine", 2),
    ],
)
def test_norms_that_are_fused_into_a_linear_are_not_recomputed(
    model, implementation, outputs, tmp_path
):
    folder = write_config(tmp_path, model)
    plain, again = (
        Run(megatron=[f"transformer_impl: {implementation}", *megatron]).config(folder)
        for megatron in ([], recomputed("layernorm"))
    )
    shape = read_shape(folder)
    *_, kind = layer_kinds(shape)
    saved = layer_bytes(plain, kind).kept - layer_bytes(again, kind).kept
    assert saved == outputs * 2 * shape.hidden_size
    assert layer_bytes(again, kind).recomputed == saved


def test_transformer_engine_keeps_every_heads_keys_and_values_and_whole_latents(tmp_path):
    folder = write_config(tmp_path, "DeepSeek-V3")
    fused = ["transformer_impl: transformer_engine"]
    cfg = Run(dims=ParallelDims(tensor=2), megatron=fused).config(folder)
    dense, _ = layer_kinds(read_shape(folder))
    # 128 heads: queries and keys of 192 elements, values and output of 128, and a float32.
    attention = 128 * (2 * (192 + 192 + 128 + 128) + 4)
    # Inputs and outputs of norms, in two bytes, with a float32: hidden states, both latents, and
    # the rotated part of keys, which is computed with one of them.
    norms = 2 * (4 * 7168 + 4) + (4 * 1536 + 4) + (4 * 512 + 4) + 2 * 64
    mlp = 2 * 3 * 18432
    assert layer_bytes(cfg, dense).kept == (attention + norms + mlp) / 2


def test_a_gpus_tile_of_logits_is_planned_with_layers_of_torch_too(tmp_path):
    cfg = Run().config(write_config(tmp_path, "Llama-3.1-8B"))
    shape = read_shape(cfg.model.path)
    on_gpu, on_cpu = (
        head_bytes(cfg, shape, backward=False, device=device) for device in ("cuda", "cpu")
    )
    # Tiles of about 8,192 columns on a GPU and 512 on a CPU; three float32 copies.
    wider = even_columns(128_256, 8192) - even_columns(128_256, 512)
    assert on_gpu - on_cpu == 3 * 4 * TOKENS * wider


def test_a_pipeline_keeps_as_many_microbatches_as_megatron_runs_ahead():
    # 1F1B: the last stage turns each around at once.
    assert [in_flight(stage, 4, 1, 16) for stage in range(4)] == [[4], [3], [2], [1]]
    assert in_flight(0, 4, 1, 2) == [2]  # at most all
    # Interleaved: on stage 0 of 2, 2 * 1 + 2 forwards and one more, in turns of 2 per chunk.
    assert in_flight(0, 2, 2, 8) == [3, 2]
    assert in_flight(1, 2, 2, 8) == [2, 1]
