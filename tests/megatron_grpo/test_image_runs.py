"""Whole runs on prompts with images."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo.make_squares import write
from helpers.engines.live import kernels_for
from helpers.models.images import picture, tiny_vision_model
from helpers.oracle.adapters import ATTENTION
from helpers.runs.environments import write_environments
from helpers.runs.jobs import finish_job
from helpers.runs.train import TINY_CONFIG, read_metrics

pytestmark = pytest.mark.long

COLOURS = TINY_CONFIG.parent / "learn_colours.yaml"
RANKS = "tensor", "pipeline"
TRAINED, HALVES = "model.freeze_vision=false", "grpo.steps_per_generation=2"
IN_FLIGHT = [
    "rollout.max_staleness=2",
    "rollout.in_flight_updates=true",
    "grpo.rollout_importance_sampling_mode=token_truncate",
]


AGENT = '''
async def compare(client, row):
    """Shows an image, then the other; forgets the first; shows one twice, and both at once."""
    async def ask(*messages):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.model_dump(exclude_none=True)

    def user(*urls):
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return {"role": "user", "content": [*images, {"type": "text", "text": "Which?"}]}

    one, other = row["image"]
    turn = await ask(user(one))
    await ask(user(one), turn, user(other))
    await ask(user(other))
    await ask(user(one, one))
    return len((await ask(user(other, one)))["content"])
'''


@pytest.fixture(autouse=True)
def multimodal() -> None:
    pytest.importorskip("torchvision", reason="vLLM's multimodal models need it")


def learn(run_dir: Path, model: Path, *options: str, num_rows: int | None = None, **how) -> None:
    """A run on images of squares, of `num_rows` or all, which is resumed if there is one."""
    rows = write(run_dir.with_name("squares"))
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:num_rows]))
    arguments = f"model.path={model}", f"data.path={rows}", "train.num_steps=4"
    with kernels_for(model):
        finish_job(run_dir, *arguments, *options, config=COLOURS, **how)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


RUNS = {
    # Half of the ranks have no embeddings, and tensor ranks a part of the tokens each; requests
    # that pushes cut go on with their images.
    "ranks, in flight": ("qwen3_vl", RANKS, IN_FLIGHT),
    "experts": ("qwen3_vl_moe", ("pipeline", "data"), ["parallel.expert_parallel_size=2"]),
    "shared": ("qwen2_5_vl", (), ["grpo.shared_prompts=true", HALVES, "grpo.beta=0.1"]),
    # The reference keeps a tower of its own, as loaded.
    "trained": ("qwen2_5_vl", RANKS, [TRAINED, HALVES, "grpo.beta=0.1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "axes", "options"), RUNS.values(), ids=RUNS)
def test_image_runs_agree_and_change_what_is_trained(tmp_path, family, axes, options):
    model, run_dir = tiny_vision_model(tmp_path / "model", family), tmp_path / "run"
    evaluated = ["eval.data.shuffle=false", "eval.max_prompts=6", "eval.interval=2"]
    # Engines see the same images after each push.
    num_rows = 12 if TRAINED in options else None
    learn(run_dir, model, *evaluated, *options, axes=axes, num_rows=num_rows)
    steps = read_metrics(run_dir)
    assert steps[1]["probe/logprob_gap_max"] < 1e-4  # after the evaluation before the first step
    assert any("eval/mean@1" in step for step in steps)
    if TRAINED in options:
        assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in steps if step["step"])
    old, new = weights(model), weights(run_dir / "hf")
    assert old.keys() == new.keys()
    for name, values in old.items():
        is_frozen = "visual." in name and TRAINED not in options
        assert torch.equal(values, new[name]) == is_frozen, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "axes", "options"),
    [
        ("qwen3_vl", RANKS, ["lora.sync=adapter"]),
        ("qwen3_vl_moe", (), ["lora.sync=merged", ATTENTION]),
    ],
    ids=["adapter", "merged"],
)
def test_image_runs_push_adapters_of_the_text_tower(tmp_path, family, axes, options):
    model = tiny_vision_model(tmp_path / "model", family)
    adapters = ["lora.r=4", "optimizer.lr=1e-2", "grpo.beta=0.1"]
    learn(tmp_path / "run", model, *adapters, *options, axes=axes)
    steps = read_metrics(tmp_path / "run")
    assert steps[-1]["kl"] > 1e-3  # against the model without adapters
    assert all(step["rollout/logprob_gap_max"] < 1e-4 for step in steps)


@pytest.mark.slow
def test_environments_observe_an_image_at_every_turn(tmp_path):
    """Each sample has its own first observation, behind the image."""
    model = tiny_vision_model(tmp_path / "model", "qwen3_vl")
    game = [
        f"environment.name={write_environments(tmp_path)}:Dice",
        "environment.max_turns=2",
        # The first is what the template writes after a turn; the others shorten turns.
        f"rollout.stop_token_ids={[3, *range(20, 60)]}",
        "rollout.max_completion_length=100",
        "data.max_prompt_length=400",
        "reward.functions=[]",
    ]
    learn(tmp_path / "run", model, *game, axes=RANKS)
    for step in read_metrics(tmp_path / "run"):
        assert step["rollout/logprob_gap_max"] < 1e-4
        assert step["num_turns/max"] == 2


def test_agents_show_images_of_their_row_at_any_turn(tmp_path):
    model, rows = tiny_vision_model(tmp_path / "model", "qwen3_vl"), tmp_path / "rows.jsonl"
    for seed in range(16):
        picture(60, 90, seed).save(tmp_path / f"{seed}.png")  # only pixels tell them apart
    pairs = [[f"{seed}.png", f"{seed + 1}.png"] for seed in range(0, 16, 2)]
    table = [json.dumps({"prompt": "Which?", "image": each}) for each in pairs]
    rows.write_text("\n".join(table))
    (tmp_path / "agent.py").write_text(AGENT)
    agents = [
        *(f"data.path={rows}", "data.answer_column=null"),
        "rollout.vllm.limit_mm_per_prompt.image=2",
        f"agent.function={tmp_path / 'agent.py'}:compare",
        "rollout.tool_call_parser=hermes",
        "reward.functions=[]",
        f"rollout.stop_token_ids={[*range(20, 60)]}",
        "rollout.max_completion_length=200",
        "data.max_prompt_length=200",
        *("grpo.num_generations=4", "grpo.generation_batch_size=16"),
        *("grpo.shared_prompts=true", "grpo.beta=0.1"),
    ]
    learn(tmp_path / "run", model, *agents, axes=RANKS)
    for step in read_metrics(tmp_path / "run"):
        assert step["rollout/logprob_gap_max"] < 1e-4
        assert (step["num_turns/max"], step["agent/branches_mean"]) == (5, 4)
        assert step["agent/failed_ratio"] == 0 and step["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], [TRAINED, "optimizer.optimizer=muon"]], ids=str)
def test_image_run_in_bfloat16_resumes_bit_for_bit(tmp_path, options):
    model = tiny_vision_model(tmp_path / "model", "qwen3_vl")
    for name, num_steps in (("whole", 4), ("resumed", 2), ("resumed", 4)):
        given = [f"train.num_steps={num_steps}", "model.dtype=bfloat16", *options]
        learn(tmp_path / name, model, *given)
    whole, resumed = (weights(tmp_path / name / "hf") for name in ("whole", "resumed"))
    assert all(torch.equal(values, resumed[name]) for name, values in whole.items())
    for metrics in read_metrics(tmp_path / "whole"):
        assert metrics["rollout/logprob_gap_mean"] < 0.05
