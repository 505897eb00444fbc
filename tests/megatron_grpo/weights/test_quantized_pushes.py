"""A push of quantised weights leaves every bit that vLLM loads from the quantised export."""

import pytest

from checkpoint_convert.vllm import EngineDims
from helpers.engines.vllm_workers import NUM_ENGINES
from helpers.models.tiny import add_mtp_layer, mixture_of_blocks, tiny_model
from helpers.oracle.policies import layout_name
from helpers.pushes.quantized import Case, failing_push, push_quantized
from helpers.ranks.processes import run_ranks
from parallel import ParallelDims

SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    return tiny_model(folder, "qwen3", intermediate_size=1024, **SIZES)


@pytest.mark.parametrize(
    ("quantization", "dims"),
    [
        ("fp8", ParallelDims(tensor=2)),
        ("int8", ParallelDims(tensor=2, pipeline=2)),
        pytest.param("int8", ParallelDims(), marks=slow),
        pytest.param("fp8", ParallelDims(tensor=8), marks=slow),  # half a block each; few have keys
        pytest.param("fp8_channel", ParallelDims(tensor=2, data=2), marks=slow),
    ],
    ids=lambda each: each if isinstance(each, str) else layout_name(each),
)
def test_a_push_after_a_step_leaves_what_vllm_loads_from_the_export(
    tmp_path, engines, model, quantization, dims
):
    size, workers = engines
    ignored = r"re:model\.layers\.0\." if dims.pipeline > 1 else ""
    case = Case(model, EngineDims(tensor=size), quantization, ignored)
    ranks = run_ranks(dims.world_size, push_quantized, dims, case, workers, tmp_path, timeout=600)
    check(ranks[0], share=0.505)


@pytest.mark.long
def test_workers_read_quantised_weights_from_a_folder(tmp_path, engines):
    size, workers = engines
    folder, dims = mixture_of_blocks(tmp_path / "model", "qwen3_moe"), ParallelDims(tensor=2)
    case = Case(folder, EngineDims(tensor=size), "fp8", transport="disk")
    ranks = run_ranks(dims.world_size, push_quantized, dims, case, workers, tmp_path, timeout=600)
    check(ranks[0], share=0.51)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "quantization", "dims"),
    [
        ("deepseek_v3", "fp8", ParallelDims(tensor=2)),
        ("glm4_moe", "int8", ParallelDims(data=2, expert=2)),
        pytest.param("glm4_moe", "fp8", ParallelDims(pipeline=2), marks=slow),
        pytest.param("glm4_moe_lite", "fp8_channel", ParallelDims(tensor=2), marks=slow),
    ],
    ids=lambda each: each if isinstance(each, str) else layout_name(each),
)
def test_a_push_of_the_drafting_layer_leaves_what_vllm_quantises(
    tmp_path, engines, family, quantization, dims
):
    size, workers = engines
    model = add_mtp_layer(mixture_of_blocks(tmp_path / "model", family), norm=1.0)
    ignored = r"re:model\.layers\.(0|3)\.self_attn\."  # the layer is the last, 3
    case = Case(model, EngineDims(tensor=size), quantization, ignored, also="mtp")
    ranks = run_ranks(dims.world_size, push_quantized, dims, case, workers, tmp_path, timeout=600)
    check(ranks[0], share=0.51)


def check(engines, share):
    assert len(engines) == NUM_ENGINES
    for worker in (worker for workers in engines for worker in workers):
        # Routers in float32 are the folder's: no rank has rounded them yet.
        assert not [name for name in worker.loaded if not name.endswith(".gate.weight")]
        assert not worker.differing
        assert 0.5 < worker.share < share
        assert worker.bytes_received in (None, worker.bytes_held)
        assert worker.error < 0.05  # tokens of 8 bits


EP2 = ParallelDims(data=2, expert=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "quantization", "dims", "expert_parallel"),
    [
        ("qwen3_moe", "fp8", EP2, False),
        ("deepseek_v3", "int8", EP2, True),
        pytest.param("deepseek_v3", "fp8", EP2, False, marks=slow),
        pytest.param("qwen3_moe", "int8", EP2, True, marks=slow),
        pytest.param(
            *("deepseek_v3", "fp8_channel"),
            *(ParallelDims(tensor=2, data=2, expert=2, expert_tensor=2), True),
            marks=slow,
        ),
        pytest.param("glm4_moe", "fp8_channel", ParallelDims(tensor=2), False, marks=slow),
        pytest.param("glm4_moe_lite", "fp8", ParallelDims(tensor=2), True, marks=slow),
    ],
    ids=lambda each: layout_name(each) if isinstance(each, ParallelDims) else str(each),
)
def test_a_push_of_experts_and_latents_leaves_what_vllm_loads(
    tmp_path, engines, family, quantization, dims, expert_parallel
):
    size, workers = engines
    model = mixture_of_blocks(tmp_path / "model", family)
    of_engine = EngineDims(tensor=size, expert_parallel=expert_parallel)
    named = r"re:model\.layers\.0\.(self_attn|mlp\.experts)\."
    ignored = named if quantization == "fp8" or family == "qwen3_moe" else ""
    case = Case(model, of_engine, quantization, ignored)
    ranks = run_ranks(dims.world_size, push_quantized, dims, case, workers, tmp_path, timeout=600)
    check(ranks[0], share=0.51)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "name"), [("bit", "model."), ("scale", "down_proj.weight_scale")]
)
def test_a_flipped_bit_or_a_wrong_scale_ends_a_push_with_the_name(engines, model, fault, name):
    size, workers = engines
    case = Case(model, EngineDims(tensor=size), "int8")
    [message] = run_ranks(1, failing_push, ParallelDims(), case, workers, fault, timeout=300)
    assert "differ from what was pushed: model." in message
    assert name in message
