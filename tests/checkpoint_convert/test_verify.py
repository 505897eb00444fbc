"""Comparing two models byte by byte or within a tolerance, in any formats."""

import math
import re
import shutil

import pytest
import torch

from checkpoint_convert.hf_to_megatron import import_checkpoint
from checkpoint_convert.verify import compare, verify_weights
from helpers.models.conversions import config_of, run_cli, variant, weights_of
from helpers.models.tiny import tiny_model
from parallel import ParallelDims

TABLE = "model.embed_tokens.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def imported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "ckpt"
    import_checkpoint(model, folder, ParallelDims(tensor=4, pipeline=2))
    return folder


@pytest.fixture
def nameless(imported, tmp_path):
    """A checkpoint without a config."""
    folder = shutil.copytree(imported, tmp_path / "nameless")
    shutil.rmtree(folder / "hf_config")
    return folder


def edited(model, tmp_path, **values):
    """Copy the model, with other values at NORM[0] (`norm`) or TABLE[7, 3] (`table`)."""

    def edit(weights):
        for place, value in values.items():
            name, index = {"table": (TABLE, (7, 3)), "norm": (NORM, (0,))}[place]
            weights[name][index] = value

    return variant(model, tmp_path / "edited", edit)


def differences(*arguments, **options):
    return [str(difference) for difference in verify_weights(*arguments, **options)]


# Two sets of weights.


def test_verify_weights_takes_all_formats(model, imported, tmp_path):
    bins = variant(model, tmp_path / "bin")
    (bins / "model.safetensors").unlink()
    torch.save(weights_of(model), bins / "pytorch_model.bin")
    for a, b in ((model, imported), (imported, bins), (bins, model)):
        assert differences(a, b) == [], (a, b)


def test_verify_weights_names_one_different_element(model, imported, tmp_path):
    value = weights_of(model)[TABLE][7, 3].item() + 0.5
    other = edited(model, tmp_path, table=value)
    expected = [f"{TABLE}: 1 of 16,000 elements differ, by 0.5 at most"]
    assert differences(model, other) == differences(other, imported) == expected
    assert differences(model, other, num_workers=2) == expected


def test_verify_weights_names_another_dtype(model, tmp_path):
    weights = weights_of(model)
    edit = {NORM: weights[NORM].bfloat16(), TABLE: weights[TABLE].double()}
    (difference, other) = differences(model, variant(model, tmp_path / "edited", edit))
    assert difference == f"{TABLE}: float32 and float64, equal in value"
    assert other.startswith(f"{NORM}: 6") and other.endswith(" (float32 and bfloat16)")


def test_verify_weights_tolerates_any_dtype(model, tmp_path):
    rounded = {name: value.bfloat16() for name, value in weights_of(model).items()}
    other = variant(model, tmp_path / "edited", rounded)
    assert differences(model, other, tolerance=0.01) == []
    assert len(differences(model, other, tolerance=1e-6)) == len(weights_of(model))


# Which model it is.


def test_verify_weights_of_a_checkpoint_without_config(model, imported, nameless):
    assert (
        differences(model, nameless)
        == differences(nameless, model)
        == differences(nameless, imported)
        == []
    )


def test_verify_weights_refuses_two_checkpoints_without_config(model, nameless):
    with pytest.raises(ValueError, match=r"neither .* says which model it is: give --hf-config"):
        verify_weights(nameless, nameless)
    assert differences(nameless, nameless, hf_config=model) == []


def test_verify_weights_takes_hf_config_for_a_missing_config(model, nameless, tmp_path):
    rope = config_of(model)["rope_parameters"] | {"rope_theta": 500_000.0}
    longer = variant(model, tmp_path / "longer", rope_parameters=rope)
    differing = ["config: rope_theta: 10000.0, 500000.0"]
    assert differences(model, longer) == differences(model, longer, hf_config=model) == differing
    assert differences(nameless, longer, hf_config=model) == differing
    (longer / "config.json").unlink()
    assert differences(nameless, longer, hf_config=model) == differences(model, longer) == []


def test_verify_weights_names_sizes_of_other_models(model, tmp_path):
    other = tiny_model(tmp_path / "other", "deepseek_v3", intermediate_size=128)
    with pytest.raises(ValueError, match="are different models") as error:
        verify_weights(model, other)
    faults = {
        "  family: qwen3, deepseek_v3",
        "  intermediate_size: 96, 128",
        "  moe.num_groups: None, 4",
    }
    assert faults <= set(str(error.value).splitlines())


# Two tensors.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_compare_compares_bits_in_every_dtype(dtype):
    a = torch.tensor([1.0, -0.0, math.nan, math.inf, 2.0], dtype=dtype)
    b = torch.tensor([1.0, 0.0, math.nan, math.inf, 4.0], dtype=dtype)
    assert compare("x", a, a.clone(), None).num_different == 0
    difference = compare("x", a, b, None)
    assert (difference.num_different, difference.largest) == (2, 2.0)
    assert compare("x", a, b, 0.0).num_different == 1  # zeros are equal


def test_compare_tolerates_equal_infinities():
    a = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    b = torch.tensor([math.inf, -math.inf, math.nan, 1.25])
    assert compare("x", a, b, 0.5).num_different == 0
    assert compare("x", a, b, 0.125).num_different == 1
    assert compare("x", a, b, 0.125).largest == 0.25
    opposite = torch.tensor([-math.inf, math.inf, 1.0, 1.0])
    difference = compare("x", a, opposite, 1e300)
    assert difference.num_different == 3
    assert math.isnan(difference.largest)


def test_verify_weights_has_the_largest_difference_of_all_parts(model, tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoint_convert.verify._MAX_ELEMENTS", 100)

    def edit(weights):
        weights[TABLE][7, 3] += 2.0
        weights[TABLE][100, 3] = math.nan
        weights[TABLE][200, 3] += 3.0

    (difference,) = verify_weights(model, variant(model, tmp_path / "edited", edit))
    assert difference.num_different == 3
    assert difference.num_elements == 16_000
    assert math.isnan(difference.largest)


def test_verify_weights_names_nan_in_both_models(model, tmp_path):
    for value in (math.nan, -math.inf):
        folder = edited(model, tmp_path / str(value), norm=value)
        (difference,) = differences(folder, folder)
        assert difference == f"{NORM}: float32 and float32, equal, with values that are not finite"


def test_verify_weights_refuses_another_tied_head(tmp_path):
    tied = tiny_model(tmp_path / "tied", "llama", tied=True)
    other = variant(tied, tmp_path / "other", {"lm_head.weight": weights_of(tied)[TABLE] + 1})
    message = "lm_head.weight differs from the embedding .* set tie_word_embeddings to false"
    for a, b in ((tied, other), (other, tied)):
        with pytest.raises(ValueError, match=message):
            verify_weights(a, b)
    with pytest.raises(ValueError, match=message):
        import_checkpoint(other, tmp_path / "out", ParallelDims())


# The command.


def test_verify_exit_code_says_whether_models_are_equal(model, imported, tmp_path):
    logs = tmp_path / "logs"
    same = run_cli("verify", model, imported, "--workers", "2", logs=logs)
    assert (same.exit_code, same.output) == (0, "the same\n")
    other = edited(model, tmp_path, norm=100.0)
    different = run_cli("verify", imported, other, logs=logs)
    assert different.exit_code == 1
    assert re.fullmatch(rf"{NORM}: 1 of 64 .*\ndifferences: 1\n", different.output)
    within = run_cli("verify", imported, other, "--tolerance", "1000", logs=logs)
    assert (within.exit_code, within.output) == (0, "the same within 1000\n")
