"""The servers of reward models: vLLM's pooling runner against transformers, and its death."""

import os
import signal
from collections.abc import Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from helpers.models.reward_models import (
    STEP_TAG,
    process_model_folder,
    reference_score,
    reference_steps,
    rendered,
    reward_model_folder,
    tokenizer,
)
from helpers.models.tiny import character_tokenizer
from helpers.oracle.policies import tiny_config
from helpers.runs.rewards import sample_of
from megatron_grpo.config.data import DataConfig
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.http import EngineError
from megatron_grpo.engines.processes import ServerProcesses
from megatron_grpo.engines.reward_models import RewardModels, check_served, reward_devices, tag_id
from megatron_grpo.launch.run_dir import bearer
from megatron_grpo.prompt_checks import check_reward_models
from megatron_grpo.rewards.pool import RewardPool, RewardPools
from parallel import ParallelDims

ROLLOUT = RolloutConfig(max_completion_length=8, request_timeout=10)
SYSTEM = "Be good."
TEXTS = ["It is 4.", "First\n\nthen 8.\n\n\n\nSo 12.", ""]


def function(folder: Path, **arguments) -> RewardFunction:
    vllm = {"dtype": "float32", "max_model_len": 256}
    return RewardFunction(
        name="reward_model", arguments={"path": str(folder), "vllm": vllm, **arguments}
    )


@contextmanager
def served(scored_by: RewardFunction, logs: Path, timeout: float = 60):
    models = RewardModels([scored_by], ROLLOUT, logs)
    cfg = RewardConfig(functions=(scored_by,), timeout=timeout, num_workers=1)
    with closing(RewardPools(models)) as pools:
        yield models, pools.pool_for(cfg)


def samples(num_prompts: int, texts: Sequence[str] = TEXTS) -> list[Sample]:
    data = DataConfig(path="unread", answer_column=None, system_prompt=SYSTEM)
    prompts = [
        Prompt(index=i, token_ids=(1,), text="not this", row={"prompt": f"What is {i}?"}, data=data)
        for i in range(num_prompts)
    ]
    return [
        sample_of(text, {}, number=number, prompt=prompt)
        for prompt in prompts
        for number, text in enumerate(texts)
    ]


def read_by_the_model(sample: Sample, completion: str) -> str:
    return rendered(sample.prompt.row["prompt"], completion, SYSTEM)


def scores(pool: RewardPool, batch: Sequence[Sample]) -> list[float]:
    return [each["reward_model"] for each in pool.score(batch, num_completions=len(batch))]


@pytest.mark.long
def test_score_is_the_logit_of_transformers(tmp_path) -> None:
    folder, batch = reward_model_folder(tmp_path / "model"), samples(2)
    with served(function(folder), tmp_path / "logs") as (_, pool):
        found = scores(pool, batch)
    expected = [reference_score(folder, read_by_the_model(each, each.text)) for each in batch]
    assert found == pytest.approx(expected, abs=1e-4)
    assert max(found) - min(found) > 0.1


@pytest.mark.slow
def test_score_of_steps_is_the_probability_of_transformers(tmp_path) -> None:
    folder, batch = process_model_folder(tmp_path / "model"), samples(2)
    with served(function(folder, step_tag=STEP_TAG), tmp_path / "logs") as (_, pool):
        found = pool.score(batch, num_completions=len(batch))
    for sample, score in zip(batch, found, strict=True):
        steps = [step for step in sample.text.split("\n\n") if step] or [""]
        tagged = "".join(f"{step}{STEP_TAG}" for step in steps)
        expected = reference_steps(folder, read_by_the_model(sample, tagged))
        assert [each for _, each in score.steps] == pytest.approx(expected, abs=1e-4)
        assert score["reward_model"] == pytest.approx(min(expected), abs=1e-4)


@pytest.mark.slow
def test_score_starts_a_server_that_dies_again_once(tmp_path, capfd) -> None:
    folder, batch = reward_model_folder(tmp_path / "model"), samples(40)
    with served(function(folder), tmp_path / "logs", timeout=20) as (models, pool):
        undisturbed = scores(pool, batch)
        deaths = []

        def die(*_) -> None:
            deaths.append(models.processes[models.base_urls[0]].process.pid)
            os.kill(deaths[-1], signal.SIGKILL)

        before = signal.signal(signal.SIGALRM, die)
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # while it scores
        try:
            assert scores(pool, batch) == pytest.approx(undisturbed, abs=1e-5)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert len(deaths) == 1 and models.processes[models.base_urls[0]].process.pid != deaths[0]
        assert "ended with signal SIGKILL" in capfd.readouterr().err
        assert scores(pool, batch[:3]) == pytest.approx(undisturbed[:3], abs=1e-5)
        # It cannot be started again, either.
        (folder / "config.json").unlink()
        os.kill(models.processes[models.base_urls[0]].process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"reward model {models.base_urls[0]} ended with"):
            pool.score(batch, num_completions=len(batch))


@pytest.mark.slow
def test_servers_on_shared_gpus_sleep_unless_they_score(tmp_path, capfd) -> None:
    """A CPU server answers the same requests but keeps its memory, which tests/gpu measures."""
    folder, batch = reward_model_folder(tmp_path / "model"), samples(1)
    expected = [reference_score(folder, read_by_the_model(each, each.text)) for each in batch]
    with served(function(folder, share_gpus=True), tmp_path / "logs") as (models, pool):

        def is_asleep() -> bool:
            url, headers = f"{models.base_urls[0]}/is_sleeping", bearer(models._token)
            assert httpx.get(url).status_code == 401
            answer: bool = httpx.get(url, headers=headers).json()["is_sleeping"]
            return answer

        def pid() -> int:
            return models.processes[models.base_urls[0]].process.pid

        assert is_asleep() and models.awaited == ""
        first = pid()
        for _ in range(2):
            assert scores(pool, batch) == pytest.approx(expected, abs=1e-4)
            models.end_round()
            assert is_asleep() and pid() == first
        os.kill(first, signal.SIGKILL)
        assert scores(pool, batch) == pytest.approx(expected, abs=1e-4)
        models.end_round()
        assert is_asleep() and pid() != first
        assert "ended with signal SIGKILL" in capfd.readouterr().err
        second = pid()
        os.kill(second, signal.SIGSTOP)
        assert scores(pool, batch) == pytest.approx(expected, abs=1e-4)
        models.end_round()
        assert is_asleep() and pid() != second
        assert ": no wake_up: ReadTimeout" in capfd.readouterr().err


def test_servers_on_shared_gpus_wait_for_engines(tmp_path) -> None:
    """Two servers that load at once would each count the other's memory as its own."""
    engines = ServerProcesses(("http://127.0.0.1:9",), tmp_path)  # where nothing listens
    rollout = ROLLOUT.model_copy(update={"startup_timeout": 0.1})
    shared, logs = function(tmp_path, share_gpus=True), tmp_path / "logs"
    with pytest.raises(TimeoutError, match=r"rollout engine http://127\.0\.0\.1:9 did not answer"):
        RewardModels([shared], rollout, logs, engines=engines)
    assert not logs.exists()  # no server was started


SHARED = {"share_gpus": True}


@pytest.mark.parametrize(
    ("num_devices", "num_ranks", "rollout", "arguments", "expected"),
    [
        (0, 2, {}, {}, [None, None]),
        (8, 4, {"num_engines": 1}, {}, ["5,6", "7"]),
        (8, 4, {"base_urls": ["http://10.0.0.1:8000"]}, {}, ["4,5", "6"]),
        (4, 1, {"num_engines": 4}, {}, ["1,2", "3"]),  # engines share the GPUs of the rank
        (
            8,
            4,
            {"num_engines": 2},
            {},
            "need 3 GPUs, and ranks and engines leave 2 of this host.s 8",
        ),
        (3, 3, {"num_engines": 3}, SHARED, ["0,1", "2"]),
        (2, 2, {"num_engines": 2}, SHARED, "3 GPUs for reward models that share .* host has 2"),
    ],
)
def test_reward_devices_follow_those_of_engines(
    num_devices, num_ranks, rollout, arguments, expected
) -> None:
    config = RolloutConfig(max_completion_length=8, **rollout)
    models = [function(Path("m"), tensor_parallel_size=size, **arguments) for size in (2, 1)]
    arguments = (config, models, num_devices, num_ranks, {})
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            reward_devices(*arguments)
    else:
        assert reward_devices(*arguments) == expected


def test_check_served_refuses_what_vllm_could_not_serve(tmp_path) -> None:
    folder = tmp_path / "model"
    tokenizer().save_pretrained(folder)

    def refusal(*overrides: str, **arguments) -> str:
        reward = RewardConfig(functions=(function(folder, **arguments),))
        cfg = tiny_config(tmp_path, ParallelDims(), *overrides)
        cfg = cfg.model_copy(update={"reward": reward})
        with pytest.raises(ValueError, match=r"reward_model|step_tag") as refused:
            check_served(cfg)
        return str(refused.value)

    assert "vllm.runner cannot be set: a reward model has" in refusal(vllm={"runner": "generate"})
    assert "vllm.max_len cannot be set" in refusal(vllm={"max_len": 5})
    assert "vllm.enable_sleep_mode cannot be set: set share_gpus" in refusal(
        vllm={"enable_sleep_mode": True}
    )
    assert "set rollout.enable_sleep_mode=true, or leave it out" in refusal(share_gpus=True)
    sleeps = ("rollout.enable_sleep_mode=true", "rollout.vllm.gpu_memory_utilization=0.8")
    for vllm in ({}, {"gpu_memory_utilization": 0.3}, {"gpu_memory_utilization": 0.0}):
        message = refusal(*sleeps, share_gpus=True, vllm=vllm)
        assert "is 0.8: together at most 0.95, such as 0.25 beside 0.7" in message
    sglang = ("rollout.engine=sglang", "rollout.vllm={}", "rollout.enable_sleep_mode=true")
    table = "rollout.sglang.mem_fraction_static=0.7"  # activations come on top
    message = refusal(*sglang, table, share_gpus=True, vllm={"gpu_memory_utilization": 0.2})
    assert "rollout.sglang.mem_fraction_static is 0.7: together at most 0.85" in message
    for bytes_of in (["rollout.vllm.kv_cache_memory_bytes=1000"], []):
        own = {"gpu_memory_utilization": 0.1} | ({} if bytes_of else {"kv_cache_memory_bytes": 9})
        message = refusal(*sleeps, *bytes_of, share_gpus=True, vllm=own)
        assert "vLLM then does not keep to gpu_memory_utilization" in message
    assert "step_tag '<x>' is 3 tokens" in refusal(step_tag="<x>")
    without = character_tokenizer(200)
    without.chat_template = None
    without.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert "has no chat template" in refusal()
    assert tag_id(tokenizer(), STEP_TAG) == tokenizer().convert_tokens_to_ids(STEP_TAG)


def test_check_reward_models_refuses_a_bad_folder(tmp_path) -> None:
    def refusal(*overrides: str) -> str:
        model = f"{{name: reward_model, arguments: {{path: {tmp_path}}}}}"
        cfg = tiny_config(tmp_path, ParallelDims(), f"reward.functions=[{model}]", *overrides)
        with pytest.raises(ValueError, match="reward_model") as refused:
            check_reward_models(cfg)
        return str(refused.value)

    assert f"path {tmp_path} is no folder of a model" in refusal()
    of_a_set = ("eval.data.path=x", "reward.functions=[exact]", "eval.pass_threshold=1")
    model = f"{{name: reward_model, arguments: {{path: {tmp_path}}}}}"
    assert "is no folder" in refusal(*of_a_set, f"eval.reward.functions=[{model}]")
