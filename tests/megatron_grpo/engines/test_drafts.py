"""Drafts of engines, and their metrics."""

from pathlib import Path

import pytest

from helpers.models.quantized import FORMATS, quantized_copy
from helpers.models.tiny import add_mtp_layer, servable_model
from megatron_grpo.config.file import load_config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engines.spec_decode_metrics import SpecDecodeMetrics
from megatron_grpo.engines.support import check_drafts

CONFIG = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
MTP = "{speculative_config: {method: mtp, num_speculative_tokens: 1}}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model without a layer for multi-token prediction, with one, and with one in 8 bits."""
    folder = tmp_path_factory.mktemp("models")
    without = servable_model(folder / "without", "glm4_moe")
    layer = add_mtp_layer(servable_model(folder / "with", "glm4_moe"))
    quantized = quantized_copy(layer, folder / "fp8", FORMATS["FP8 per channel"])
    return {"without": without, "with": layer, "8 bits": quantized}


@pytest.mark.parametrize("number", ["0", "-1", "two", "null", "true", "1.5"])
def test_drafts_need_a_number_of_tokens(number):
    # Without a number vLLM would draft one token.
    for table in (
        MTP.replace(": 1", f": {number}"),
        MTP.replace(", num_speculative_tokens: 1", ""),
    ):
        with pytest.raises(ValueError, match=r"num_speculative_tokens is .*: give .*, such as 2"):
            load_config(CONFIG, [f"rollout.vllm={table}"])
    assert load_config(CONFIG, [f"rollout.vllm={MTP}"]).rollout.num_speculative_tokens == 1


@pytest.mark.parametrize(
    ("model", "table", "message"),
    [
        ("with", MTP, None),
        ("without", MTP, "drafts with mtp, and model.path has no layer for multi-token prediction"),
        ("without", MTP.replace("mtp", "glm4_moe_mtp"), "drafts with glm4_moe_mtp, and model.path"),
        ("without", MTP.replace("mtp,", "mtp, model: /published,"), None),
        ("8 bits", MTP, None),
        ("fp8", MTP, "is quantised in another format than rollout.quantization=fp8"),
        ("8 bits", MTP.replace("mtp,", "mtp, model: /other,"), "and the layer of /other, and"),
        ("with", "{speculative_config: '{}'}", "speculative_config is '{}': give a table"),
        ("trained", MTP[:-1] + ", load_format: dummy}", None),
        ("with", MTP.replace("method: mtp", "model: /other"), "has no method: give its method"),
    ],
)
def test_drafts_by_weights_that_engines_do_not_have_are_refused(models, model, table, message):
    folder = models[{"trained": "with", "fp8": "8 bits"}.get(model, model)]
    options = [f"model.path={folder}", f"rollout.vllm={table}"]
    options += ["model.mtp_num_layers=1"] * (model == "trained")
    if model == "fp8":
        options += ["model.dtype=bfloat16", "rollout.quantization=fp8"]
        options += ["grpo.rollout_importance_sampling_mode=token_truncate"]
    cfg = load_config(CONFIG, options)
    shape = trained_shape(cfg)
    if message is None:
        check_drafts(cfg, shape)
    else:
        with pytest.raises(ValueError, match=message):
            check_drafts(cfg, shape)


def page(drafts, *accepted, engine="0"):
    labels = f'engine="{engine}",model_name="/my models/{{a}}"'
    lines = [f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts)}"]
    for position, count in enumerate(accepted):
        at = f'{labels},position="{position}"'
        lines += [
            f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{at}}} {float(count)}",
            f"vllm:spec_decode_num_accepted_tokens_per_pos_created{{{at}}} 1.7e9",
        ]
    return "\n".join(lines)


def test_drafts_are_counted_since_the_last_report():
    meter = SpecDecodeMetrics(None, are_new=True)
    two_ranks = page(6, 4, 0) + "\n" + page(4, 1, 0, engine="1")
    first = {"rollout/acceptance_rate/1": 0.5, "rollout/acceptance_rate/2": 0.0}
    assert meter.compare({"a": two_ranks, "b": ""}) == {"rollout/acceptance_length": 1.5, **first}
    assert meter.compare({"a": two_ranks}) == {}
    assert meter.compare({"a": page(20, 7, 4)})["rollout/acceptance_length"] == 1.6
    assert meter.compare({"a": page(2, 1, 1)})["rollout/acceptance_length"] == 2  # a new process


def test_drafts_for_other_runs_are_not_counted():
    meter = SpecDecodeMetrics(None, are_new=False)
    assert meter.compare({"a": page(1000, 1000)}) == {}
    assert meter.compare({"a": page(1010, 1001)})["rollout/acceptance_length"] == 1.1
