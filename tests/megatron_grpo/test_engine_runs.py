"""Whole runs with engines of their own: with adapters, quantised, that draft, or that score."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from checkpoint_convert.hf_config import read_scheme
from demo.learning_curves import CONFIG, rewards
from demo.make_kinds import write
from helpers.engines.live import kernels_for, served_model
from helpers.models.reward_models import STEP_TAG, process_model_folder, reward_model_folder
from helpers.models.tiny import add_mtp_layer
from helpers.runs.jobs import Job, finish_job, start_job, write_sums
from helpers.runs.train import marked_processes, read_json_lines, read_metrics, steps_of

CHANCE, LEARNT = 0.3, 0.6


def learn(run_dir: Path, model: Path, *arguments: str, **how) -> list[float]:
    """The rewards of a run of configs/learn_tiny.yaml, which is resumed if there is one."""
    write(data := run_dir.with_name("kinds.jsonl"))
    paths = f"model.path={model}", f"data.path={data}"
    ended = finish_job(run_dir, *paths, *arguments, config=CONFIG, seconds=600, **how)
    assert "is lost" not in ended.output
    return rewards(run_dir)


def gaps(run_dir: Path, kind: str) -> list[float]:
    """The differences between trainer's and engine's log-probabilities, by step."""
    return [record[f"rollout/logprob_gap_{kind}"] for record in read_metrics(run_dir)]


@pytest.mark.slow
def test_adapters_learn_with_either_kind_of_push(tied_model, live_engine, tmp_path):
    """Engines sleep between generations, and the training state leaves while they do not."""
    run_dir = tmp_path / "run"
    adapters = ["lora.r=16", "lora.lora_alpha=32", "optimizer.lr=1e-2"]
    adapters += ["rollout.enable_sleep_mode=true", "train.offload=all"]
    curve = learn(run_dir, tied_model, *adapters, "train.num_steps=40")
    assert curve[0] < CHANCE
    assert sum(curve[-5:]) / 5 > LEARNT
    # This run's engine starts anew with the model alone, and gets adapters that are not zero.
    learn(run_dir, tied_model, *adapters, "train.num_steps=42", "lora.sync=adapter")
    merged = [*adapters, "train.num_steps=44", "lora.sync=merged"]
    curve = learn(run_dir, tied_model, *merged, engine=live_engine)
    assert sum(curve[40:]) / 4 > LEARNT
    assert max(gaps(run_dir, "max")) < 1e-4


INT8 = [
    "model.dtype=bfloat16",
    "rollout.quantization=int8",
    "grpo.rollout_importance_sampling_mode=token_truncate",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_int8_engines_learn_and_their_weights_are_exported(tied_model, tmp_path):
    """Engines sleep between generations, and the training state leaves while they do not."""
    options = ["train.num_steps=40", "train.export_quantization=int8"]
    options += ["rollout.enable_sleep_mode=true", "train.offload=all"]
    with kernels_for(tied_model, "int8"):
        curve = learn(tmp_path / "run", tied_model, *INT8, *options)
    assert curve[0] < CHANCE
    assert sum(curve[-5:]) / 5 > LEARNT
    assert 0 < max(gaps(tmp_path / "run", "mean")) < 0.1
    assert read_scheme(tmp_path / "run" / "hf").dtype == "I8"


@pytest.mark.long
def test_engines_have_the_values_of_the_export_for_which_a_run_trains(
    tied_model, live_engine, tmp_path
):
    nvfp4 = ["train.export_quantization=nvfp4", "rollout.quantization_aware=true"]
    learn(tmp_path / "run", tied_model, *nvfp4, "train.num_steps=3", engine=live_engine)
    assert max(gaps(tmp_path / "run", "max")) < 1e-4
    assert read_scheme(tmp_path / "run" / "hf").dtype == "U8"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_int8_weights_are_pushed_in_flight(tied_model, tmp_path):
    options = [
        "rollout.max_staleness=2",
        "rollout.in_flight_updates=true",
        "rollout.max_completion_length=160",
        "optimizer.lr=1e-7",  # the difference is then quantisation's
        "train.num_steps=12",
    ]
    with kernels_for(tied_model, "int8"):
        learn(tmp_path / "run", tied_model, *INT8, *options)
    rows = read_json_lines(tmp_path / "run" / "completions.jsonl")
    assert any(len(row.get("versions", ())) > 1 for row in rows)
    assert 0 < max(gaps(tmp_path / "run", "mean")) < 0.05


def decided_model(folder: Path) -> Path:
    """A model whose samples depend more on the last tokens than random weights make them."""
    served_model(folder, "glm4_moe", tied=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 50
    weights["lm_head.weight"][4:12] *= 5
    weights["lm_head.weight"][12:] *= 0.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


SLEEPS_IN_8_BITS = [
    *("model.dtype=bfloat16", "rollout.quantization=fp8_channel"),
    "grpo.rollout_importance_sampling_mode=token_truncate",
    *("rollout.enable_sleep_mode=true", "train.offload=all"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kind", "most"),
    [([], "max", 1e-3), (SLEEPS_IN_8_BITS, "mean", 0.1)],
    ids=["plain", "8 bits, sleep"],
)
def test_trained_layer_drafts_more_that_engines_take(tmp_path, options, kind, most):
    model, run_dir = add_mtp_layer(decided_model(tmp_path / "model"), norm=1.0), tmp_path / "run"
    with kernels_for(model):
        finish_job(
            run_dir,
            f"model.path={model}",
            "model.mtp_num_layers=1",
            f"data.path={write_sums(tmp_path)}",
            "train.num_steps=4",
            "optimizer.lr=3e-3",
            "optimizer.lr_warmup_steps=0",
            "grpo.generation_batch_size=32",
            "rollout.max_completion_length=48",
            "rollout.vllm={speculative_config: {method: mtp, num_speculative_tokens: 1}}",
            *options,
        )
    records = read_metrics(run_dir)
    rates = [record["rollout/acceptance_rate/1"] for record in records]
    losses = [record["mtp/loss"] for record in records]
    assert rates[-1] > 2 * rates[0] > 0, rates
    assert losses == sorted(losses, reverse=True)
    # Samples are the policy's, whatever was drafted.
    assert max(gaps(run_dir, kind)) < most
    source, trained = (load_file(at / "model.safetensors") for at in (model, run_dir / "hf"))
    name = "model.layers.3.eh_proj.weight"
    assert not source[name].equal(trained[name])


def rewarded(policy: Path, folder: Path, model: str) -> list[str]:
    """Arguments of a run with a reward model."""
    data = folder / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(8)))
    function = f"{{name: reward_model, weight: 2.0, arguments: {model}}}"
    return [f"model.path={policy}", f"data.path={data}", f"reward.functions=[{function}]"]


def reward_servers(job: Job) -> list[psutil.Process]:
    found = []
    for process in marked_processes(job.mark):
        with suppress(psutil.Error):
            if "--runner=pooling" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.slow
def test_run_with_a_process_reward_model_outlives_its_server(live_engine, tied_model, tmp_path):
    folder, run_dir = process_model_folder(tmp_path / "process"), tmp_path / "run"
    vllm = "{dtype: float32, max_model_len: 256}"
    model = f"{{path: {folder}, step_tag: {STEP_TAG}, step_separator: e, vllm: {vllm}}}"
    options = ["train.num_steps=3", "grpo.supervision=process", "rollout.max_completion_length=100"]
    arguments = [*rewarded(tied_model, tmp_path, model), *options]
    with start_job(run_dir, *arguments, engine=live_engine) as job:
        job.wait_for(lambda: steps_of(run_dir), 200)
        for server in reward_servers(job):
            with suppress(psutil.NoSuchProcess):
                server.kill()
        ended = job.end(200)
    assert ended.exit_codes == [0], ended.output
    assert ended.survivors == []
    assert "it is being restarted" in ended.output
    rows = read_json_lines(run_dir / "completions.jsonl")
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        assert record["grad_norm"] > 0
        assert record["reward/failed"] == 0
        scores = [r["rewards"]["reward_model"] for r in rows if r["step"] == record["step"]]
        assert record["reward/reward_model/mean"] == pytest.approx(sum(scores) / len(scores))
    for row in rows:
        assert row["reward"] == pytest.approx(2 * row["rewards"]["reward_model"])
        of_steps = [turn["reward"] for turn in row["turns"] if turn["reward"] is not None]
        assert row["rewards"]["reward_model"] == min(of_steps)
    assert any(len(row["turns"]) > 1 for row in rows)


@pytest.mark.slow
def test_reward_model_that_shares_gpus_wakes_to_score(live_engine, tied_model, tmp_path):
    folder, run_dir = reward_model_folder(tmp_path / "scalar"), tmp_path / "run"
    vllm = "{dtype: float32, max_model_len: 256, gpu_memory_utilization: 0.1}"
    model = f"{{path: {folder}, share_gpus: true, vllm: {vllm}}}"
    options = ["rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.5"]
    options += ["train.num_steps=2", f"eval.data.path={tmp_path / 'data.jsonl'}"]
    options += ["eval.interval=1", "eval.pass_threshold=0"]
    finish_job(run_dir, *rewarded(tied_model, tmp_path, model), *options, engine=live_engine)
    evaluated, *trained = read_metrics(run_dir)
    assert [record["step"] for record in trained] == [1, 2]
    assert all(record["reward/failed"] == 0 < record["grad_norm"] for record in trained)
    assert all(record["eval/failed"] == 0 for record in [evaluated, *trained])
    # Asleep before the first, it wakes for two generations and the evaluations around them.
    log = (run_dir / "logs" / "reward_model_0.log").read_text()
    assert (log.count("to fall asleep"), log.count("wake up the engine")) == (1 + 5, 5)
