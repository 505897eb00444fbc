"""Prompts with images: transformers' numbers, at every layout, with the vision tower frozen."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRMSNorm

from checkpoint_convert import read_shape
from checkpoint_convert.text_tower import is_of_text, text_name
from checkpoint_convert.weights import read_weights
from helpers.images import (
    logits,
    sequence_with_images,
    tiny_vision_model,
    with_completion,
    with_other_pixels,
)
from helpers.policies import (
    LOSS_WEIGHT,
    Numbers,
    OracleCase,
    layout_name,
    numbers_of,
    tiny_config,
    unstacked,
)
from helpers.ranks import run_ranks
from helpers.towers import as_published
from megatron_grpo.policy.forward import response_logprobs
from megatron_grpo.policy.model import build_model, build_policy, forward
from megatron_grpo.policy.vision import vision_tower, with_features
from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.cpu_device import setup_device
from parallel.groups import init_groups
from parallel.packing import TokenSequence, pack

# Several images of different sizes in a prompt, its group, text beside them and alone, nothing.
MICROBATCHES = [[0, 1, 2, 3, 4], [5], [6], []]


def sequences(family: str) -> list[TokenSequence]:
    grids = [[(4, 6), (4, 4)], [(8, 4)], [], [(6, 6)], []]
    first, *others = (
        sequence_with_images(each, 5 + 3 * seed, seed, LOSS_WEIGHT, family)
        for seed, each in enumerate(grids)
    )
    return [first, with_completion(first, 9, seed=7), with_other_pixels(first), *others]


def oracle_logprobs(model: Any, sequence: TokenSequence) -> Tensor:
    tokens, first = sequence.tokens[None], sequence.num_prompt_tokens
    found = logits(model, tokens, sequence.images)[0, first - 1 : -1]
    return found.log_softmax(-1).gather(1, tokens[0, first:, None])[:, 0]


MIXTURE = "qwen3_vl_moe"
NORMS = Qwen2_5_VLRMSNorm | Qwen3VLTextRMSNorm | Qwen3VLMoeTextRMSNorm


@pytest.fixture(
    scope="module",
    params=["qwen2_5_vl", "qwen3_vl", pytest.param(MIXTURE, marks=pytest.mark.long)],
)
def case(request, tmp_path_factory) -> OracleCase:
    folder = tiny_vision_model(
        tmp_path_factory.mktemp(request.param) / request.param, request.param
    )
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    model.model.visual.requires_grad_(False)
    for module in model.model.language_model.modules():
        if isinstance(module, NORMS):  # which compute in float32
            module.forward = partial(
                rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    logprobs = [oracle_logprobs(model, each) for each in sequences(folder.name)]
    (-LOSS_WEIGHT * torch.cat(logprobs).sum()).backward()
    found = {
        text_name(name): parameter.grad
        for name, parameter in model.named_parameters()
        if is_of_text(text_name(name))
    }
    found = as_published(found) if folder.name == MIXTURE else found
    gradients = unstacked(found, read_shape(folder))
    return OracleCase(folder, [each.detach() for each in logprobs], gradients)


def numbers_on_rank(rank: int, folder: Path, dims: ParallelDims, *overrides: str) -> Numbers:
    setup_device(rank)
    cfg = tiny_config(folder, dims, "data.image_column=images", *overrides)
    groups = init_groups(dims, dynamic_context=cfg.parallel.dynamic_context_parallel)
    policy = build_policy(cfg, read_shape(folder), groups)
    alignment, shares = Alignment.for_mesh(dims, dims.tensor > 1), cfg.grpo.shared_prompts
    own = MICROBATCHES[groups.coordinates.data :: dims.data]
    every = sequences(folder.name)
    batches = [pack(every, each, alignment, share_prompts=shares) for each in own]
    return numbers_of(policy, groups, [*with_features(batches, policy.vision)])


slow = pytest.mark.slow
SHARED = "grpo.shared_prompts=true"
DYNAMIC = "parallel.dynamic_context_parallel=true"


@pytest.mark.parametrize(
    ("dims", "overrides"),
    [
        (ParallelDims(), ()),
        (ParallelDims(tensor=2), (SHARED,)),
        (ParallelDims(context=2, pipeline=2), ()),
        pytest.param(ParallelDims(tensor=2), (), marks=slow),
        pytest.param(ParallelDims(), (SHARED,), marks=slow),
        pytest.param(ParallelDims(context=2), (DYNAMIC,), marks=slow),
        pytest.param(ParallelDims(tensor=2, context=2), (SHARED,), marks=slow),
        pytest.param(ParallelDims(data=2), (SHARED,), marks=slow),
    ],
    ids=str,
)
def test_logprobs_and_gradients_equal_transformers(case, dims, overrides):
    case.check(run_ranks(dims.world_size, numbers_on_rank, case.folder, dims, *overrides))


@pytest.mark.long
@pytest.mark.parametrize("case", [MIXTURE], indirect=True)
@pytest.mark.parametrize(
    ("dims", "overrides"),
    [
        (ParallelDims(pipeline=2, data=2, expert=2), ()),
        pytest.param(ParallelDims(tensor=2, expert_tensor=1, expert=2), (SHARED,), marks=slow),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, ParallelDims) else str(value),
)
def test_so_they_do_where_ranks_share_the_experts(case, dims, overrides):
    case.check(run_ranks(dims.world_size, numbers_on_rank, case.folder, dims, *overrides))


@slow
@pytest.mark.parametrize("case", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_every_chunk_of_a_pipeline_adds_features_also_if_it_recomputes(case, granularity):
    dims = ParallelDims(pipeline=2, virtual_pipeline=2)
    recompute = [f"model.megatron.recompute_granularity={granularity}"]
    if granularity == "full":
        recompute += [f"model.megatron.recompute_{x}" for x in ("method=uniform", "num_layers=1")]
    case.check(run_ranks(2, numbers_on_rank, case.folder, dims, *recompute))


def float64_on_rank(rank: int, folder: Path) -> Numbers:
    """As `numbers_on_rank`, in a dtype that no run has; without an optimizer."""
    setup_device(rank)
    dims, every = ParallelDims(), sequences(folder.name)
    options = ["model.megatron.moe_router_dtype=fp64"] if folder.name == MIXTURE else []
    cfg = tiny_config(folder, dims, "data.image_column=images", *options)
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"dtype": "float64"})})
    groups, shape = init_groups(dims), read_shape(folder)
    model = build_model(cfg, shape, groups)
    parameters = model.parameters()
    read_weights(folder, shape, model.layout, parameters)
    batch = pack(every, range(len(every)), Alignment(), dtype=torch.float64)
    vision = vision_tower(cfg, shape, groups, batch.tokens.device)
    [batch] = with_features([batch.on_rank(dims, groups.coordinates)], vision)
    chosen = response_logprobs(model, forward(model.chunks[0], batch, groups), batch, 1.0, groups)
    (-LOSS_WEIGHT * chosen.logprobs.sum()).backward()
    logprobs = chosen.logprobs.detach().split([len(each.rollout_logprobs) for each in every])
    gradients = [
        (piece.tensor, piece.box, parameters[piece.local].grad[piece.local_box.slices])
        for piece in model.layout.pieces
    ]
    return dict(enumerate(logprobs)), gradients, 0.0


def test_in_float64_they_are_exact(case):
    ((logprobs, gradients, _),) = run_ranks(1, float64_on_rank, case.folder)
    # Routers of Megatron-Core and of transformers have softmax in float32.
    bound = 1e-7 if case.folder.name == MIXTURE else 1e-9
    for index, expected in enumerate(case.logprobs):
        torch.testing.assert_close(logprobs[index], expected, atol=bound, rtol=0)
    for name, box, values in gradients:
        torch.testing.assert_close(values, case.gradients[name][box.slices], atol=bound, rtol=0)
