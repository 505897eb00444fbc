"""The text tower of a multimodal model has the numbers of the whole on text, as transformers'."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from checkpoint_convert import read_shape
from checkpoint_convert.text_tower import text_name
from helpers.models.towers import CONFIGS, as_published, tiny_multimodal
from helpers.oracle.policies import (
    EXACT,
    LENGTHS,
    LOSS_WEIGHT,
    OracleCase,
    exact_numbers_on_rank,
    gradients_of,
    layout_name,
    load_oracle,
    numbers_on_rank,
    sequence_logprobs,
    unstacked,
)
from helpers.ranks.processes import run_ranks
from parallel import ParallelDims


def oracle_case(folder) -> OracleCase:
    model = load_oracle(folder, AutoModelForImageTextToText)
    logprobs = sequence_logprobs(model, LENGTHS)
    found = gradients_of(model, -LOSS_WEIGHT * torch.cat(logprobs).sum())
    found = as_published(found, model.config.model_type)
    of_text = {text_name(name): each for name, each in found.items()}
    gradients = unstacked(of_text, read_shape(folder))
    return OracleCase(folder, [each.detach() for each in logprobs], gradients)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return {
        kind: oracle_case(
            tiny_multimodal(tmp_path_factory.mktemp(kind), kind, tied=kind == "qwen3_vl")
        )
        for kind in CONFIGS
    }


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(ParallelDims(), marks=pytest.mark.slow),
        ParallelDims(tensor=2),
        pytest.param(ParallelDims(context=2, pipeline=2), marks=pytest.mark.slow),
    ],
    ids=layout_name,
)
def test_logprobs_and_gradients_equal_transformers(cases, dims):
    folders = {kind: case.folder for kind, case in cases.items()}
    ranks = run_ranks(dims.world_size, numbers_on_rank, folders, dims, LENGTHS)
    for kind, case in cases.items():
        case.check([rank[kind] for rank in ranks])


def test_in_float64_they_are_exact(cases):
    folders = {kind: case.folder for kind, case in cases.items()}
    (found,) = run_ranks(1, exact_numbers_on_rank, folders, LENGTHS)
    for kind, case in cases.items():
        case.check([found[kind]], EXACT)
