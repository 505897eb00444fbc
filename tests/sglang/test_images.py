"""Prompts with images, and vision towers that pushes fill, with a real SGLang."""

import json
import re

import pytest
from safetensors.torch import load_file, save_file

from demo.make_squares import write
from helpers.engines.live import SGLANG_PYTHON, kernels_for, largest_logprob_error, running_engine
from helpers.engines.sglang_sums import check_pushes, push
from helpers.models import towers
from helpers.models.images import picture, prompts_with_images, tiny_vision_model
from helpers.runs.train import TINY_CONFIG, finish_run, read_metrics
from parallel import ParallelDims

FILE = "model.safetensors"
COLOURS = TINY_CONFIG.parent / "learn_colours.yaml"
LIMITS = {"limit_mm_data_per_request": {"image": 2}}
# Later prompts find earlier ones in the cache.
TWO_AT_A_TIME = LIMITS | {"max_running_requests": 2}
CACHED = re.compile(r"#cached-token: (\d+)")
TRAINED = ("model.freeze_vision=false", "data.image_column=image")
TP2_PP2, EP2 = ParallelDims(tensor=2, pipeline=2), ParallelDims(data=2, expert=2)
TEXT = {"intermediate_size": 128}  # which SGLang does not pad for two workers
OF_EXPERTS = TEXT | {"moe_intermediate_size": 128}
# Windows, and an MLP that SGLang pads to 64, as it pads 3,420 to 3,424; position embeddings over
# two workers, the second with padding.
TOWERS = {
    "qwen2_5_vl": {"depth": 2, "window_size": 56, "intermediate_size": 60},
    "qwen3_vl": {"num_position_embeddings": 100},
    "qwen3_vl_moe": {"num_position_embeddings": 100},
}


@pytest.mark.parametrize(
    ("family", "size", "dims"),
    [
        ("qwen3_vl", 2, ParallelDims()),
        pytest.param("qwen2_5_vl", 2, TP2_PP2, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", 1, ParallelDims(tensor=2), marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", 2, EP2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_both_towers_are_pushed_and_engines_agree_with_transformers(
    monkeypatch, tmp_path, family, size, dims
):
    monkeypatch.setitem(towers.VISION, family, towers.VISION[family] | TOWERS[family])
    sizes = OF_EXPERTS if family == "qwen3_vl_moe" else TEXT
    folder, others = (
        tiny_vision_model(tmp_path / str(seed), family, seed=seed, **sizes) for seed in range(2)
    )
    if family == "qwen2_5_vl":  # as other releases of transformers save it
        weights = load_file(folder / FILE)
        names = {name: name.replace("model.", "model.language_model.", 1) for name in weights}
        names |= {name: f"model.{name}" for name in weights if name.startswith("visual.")}
        renamed = {names[name]: values for name, values in weights.items()}
        save_file(renamed, folder / FILE, {"format": "pt"})
    for number, sides in enumerate([(60, 90), (56, 56), (56, 56), (300, 120)]):
        picture(*sides, seed=number).save(tmp_path / f"{number}.png")
    values = ["0.png", "1.png", "2.png", ["3.png", "1.png"], None]
    prompts = prompts_with_images(folder, tmp_path, values)
    assert prompts[1].token_ids == prompts[2].token_ids  # of other images
    options = {"python": SGLANG_PYTHON, "tensor_parallel_size": size, "sglang": TWO_AT_A_TIME}
    with running_engine(
        "sglang", folder, tmp_path / "logs", freeze_vision=False, **options
    ) as engine:
        check_pushes(engine, folder, others, dims, *TRAINED)
        after = engine.generate(prompts)
        assert push(engine, others, dims, options=TRAINED) == ""
        before = engine.generate(prompts)
    log = (tmp_path / "logs" / "engine_0.log").read_text()
    assert max(map(int, CACHED.findall(log))) >= len(prompts[1].token_ids) - 1
    assert largest_logprob_error(others, before) < 1e-4
    assert largest_logprob_error(folder, after) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2_5_vl", ()),
        ("qwen3_vl_moe", ("rollout.router_replay=true", "model.freeze_vision=false")),
        # Requests are held through pushes; with 4 tokens each, few are cut.
        (
            "qwen3_vl",
            (
                "rollout.max_staleness=2",
                "rollout.in_flight_updates=true",
                "grpo.rollout_importance_sampling_mode=token_truncate",
            ),
        ),
    ],
    ids=["frozen", "trained", "in flight"],
)
def test_engines_and_ranks_agree_while_a_run_learns_from_images(tmp_path, family, overrides):
    sizes = OF_EXPERTS if family == "qwen3_vl_moe" else {}
    model = tiny_vision_model(tmp_path / "model", family, **sizes)
    with kernels_for(model):
        ended = finish_run(
            *(f"model.path={model}", f"data.path={write(tmp_path / 'squares')}"),
            *(f"train.run_dir={tmp_path / 'run'}", "train.num_steps=4", "rollout.vllm={}"),
            *("rollout.engine=sglang", f"rollout.python={SGLANG_PYTHON}"),
            f"rollout.sglang={json.dumps(LIMITS)}",
            *("eval.data.shuffle=false", "eval.max_prompts=6", "eval.interval=2"),
            *overrides,
            config=COLOURS,
            timeout=550,
        )
    assert ended.exit_code == 0, ended.output
    steps = read_metrics(tmp_path / "run")
    assert steps[1]["probe/logprob_gap_max"] < 1e-4
    assert any("eval/mean@1" in step for step in steps)
    if not overrides:
        assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in steps if step["step"])
