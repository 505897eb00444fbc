"""The reward model's requests and answers, folders and steps; `engines/` has a vLLM of it."""

import asyncio
import json
import math
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from helpers.engines.json_server import Request, json_server
from helpers.runs.rewards import sample_of
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.rewards.functions import Answer, load_function
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.reward_model import request_of, steps_of
from megatron_grpo.rewards.scoring import Call

CHAT = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "2 + 2?"}]


class Dying:
    """The server of a run: it is dead when first asked."""

    def __init__(self, url: str, asked: threading.Event, answering: threading.Event) -> None:
        self.url, self.asked, self.answering, self.num_deaths = url, asked, answering, 0

    awaited = ""

    def addressed(self, functions: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
        address = {"base_url": self.url, "api_key": SecretStr("secret")}
        return tuple(each.model_copy(update={"arguments": address}) for each in functions)

    def restart_dead(self, show: object) -> bool:
        if not self.asked.is_set() or self.num_deaths:
            return False
        self.num_deaths += 1
        self.answering.set()
        return True

    def end_round(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("recovers", [True, False])
def test_a_call_that_a_death_of_the_server_interrupts_is_repeated_once(recovers: bool) -> None:
    asked, answering = threading.Event(), threading.Event()

    def reply(request: Request) -> tuple[int, object]:
        asked.set()
        answering.wait()  # until the death was noticed
        return 200 if recovers and request.times > 1 else 400, {"data": [{"data": [2.5]}]}

    served = RewardFunction(name="reward_model", arguments={"path": "of the server"})
    cfg = RewardConfig(functions=(served,), num_workers=1)
    with json_server(reply) as server:
        dying = Dying(server.url, asked, answering)
        with closing(RewardPool(cfg, dying)) as pool:
            [score] = pool.score([sample_of("a", {})], num_completions=100)
    assert (len(server.requests), dying.num_deaths) == (2, 1)
    assert score["reward_model"] == 2.5 if recovers else math.isnan(score["reward_model"])


def answered(data: Any, *texts: str, **arguments: Any) -> Answer:
    """Score texts by a server that answers /pooling with this `data` or status code."""

    def reply(request: Request) -> tuple[int, object]:
        if request.path != "/pooling":
            return 404, {}
        if request.headers["Authorization"] != "Bearer secret":
            return 401, {}
        return data if isinstance(data, int) else 200, {"data": [{"index": 0, "data": data}]}

    with json_server(reply) as server:
        address = {"base_url": server.url, "api_key": SecretStr("secret")}
        loaded = load_function(RewardFunction(name="reward_model", arguments=address | arguments))
        samples = [sample_of(text, {}, 0, number) for number, text in enumerate(texts)]
        columns = Call(0, range(len(texts)), samples).columns(loaded.accepted_columns)
        return asyncio.run(loaded.call_async(columns, 5.0))


@pytest.mark.parametrize("data", [[-3.5], [[-3.5]]])
def test_the_score_of_a_completion_is_the_logit(data: Any) -> None:
    assert answered(data, "a", "b") == Answer([-3.5, -3.5])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ([1.0, 2.0], "not the one score of a text: [1.0, 2.0]"),
        ([None], "not the one score of a text"),
        ("AAAA", "not the one score of a text"),
        (400, "answered status 400"),
        (404, "answered status 404"),
    ],
)
def test_an_invalid_score_has_failed_and_says_why(data: Any, error: str) -> None:
    answer = answered(data, "a")
    assert math.isnan(answer.scores[0])
    assert error in answer.error


def test_a_process_reward_model_scores_each_step() -> None:
    answer = answered([[0.0, 0.0], [1.0, 3.0]], "A\n\nB", "A", step_tag="§")
    second = 1 / (1 + math.exp(-2))
    assert answer.scores[0] == 0.5  # the lowest of its steps
    assert answer.steps == [[(3, 0.5), (4, pytest.approx(second))], []]
    assert math.isnan(answer.scores[1])
    assert "not 1 score, one for each step" in answer.error
    assert answered([[-900.0], [7.0]], "A\n\nB", step_tag="§").scores == [-900.0]
    assert answered([[900.0, -900.0]], "A", step_tag="§").scores == [0.0]


def test_steps_end_with_their_separator() -> None:
    assert steps_of("One\n\nTwo", "\n\n") == [(5, "One"), (8, "Two")]
    assert steps_of("\n\nOne\n\n\n\nTwo\n\n", "\n\n") == [(9, "One"), (14, "Two")]
    assert steps_of("One", "\n\n") == [(3, "One")]
    for blank in ("", "\n\n", " "):
        assert steps_of(blank, "\n\n") == [(len(blank), blank)]


def test_the_model_reads_the_chat_or_without_a_template_the_text() -> None:
    no_activation = {"use_activation": False}
    assert request_of("2 + 2 =", " 4") == no_activation | {"input": "2 + 2 = 4"}
    answer = {"role": "assistant", "content": "4"}
    assert request_of(CHAT, "4") == no_activation | {"messages": [*CHAT, answer]}


def folder_of(folder: Path, config: Any, weights: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / weights).touch()
    return folder


SCALAR = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "good"}}
PROCESS = {"architectures": ["Qwen2ForProcessRewardModel"]}


@pytest.mark.parametrize(
    ("config", "arguments", "error"),
    [
        (SCALAR, {}, ""),
        (SCALAR, {"path": "none"}, "is no folder of a model"),
        (PROCESS, {"step_tag": "§"}, ""),
        (SCALAR | {"id2label": {"0": "a", "1": "b", "2": "c"}}, {}, "classifies into 3 labels"),
        ({"architectures": SCALAR["architectures"]}, {}, "classifies into 2 labels"),
        ({"architectures": ["Qwen2ForCausalLM"]}, {}, "holds a Qwen2ForCausalLM, not"),
        (PROCESS, {}, "ForSequenceClassification): set step_tag"),
        (SCALAR, {"step_tag": "§"}, "not a model that scores steps"),
        (SCALAR, {"base_url": "http://h"}, "either path"),
        (SCALAR, {"api_key": "sk-1"}, "api_key_env"),
        (SCALAR, {"step_separator": ""}, "step_separator is empty"),
        (SCALAR, {"devices": "0"}, "has no argument 'devices'"),
        (SCALAR, {"tensor_parallel_size": 0}, "give a number of GPUs"),
        (SCALAR, {"share_gpus": "yes"}, "share_gpus 'yes': give true or false"),
        (SCALAR, {"vllm": "dtype"}, "give a table of arguments"),
        (SCALAR, {"path": None, "base_url": "http://h", "vllm": {"dtype": "x"}}, "run serves"),
    ],
)
def test_folders_that_cannot_score_are_refused(tmp_path, config, arguments, error) -> None:
    path = str(folder_of(tmp_path / "model", config))
    function = RewardFunction(name="reward_model", arguments={"path": path, **arguments})
    if not error:
        load_function(function)
        return
    with pytest.raises(ValueError, match="reward_model") as refused:
        load_function(function)
    assert error in str(refused.value)


def test_a_folder_without_weights_is_refused(tmp_path) -> None:
    path = str(folder_of(tmp_path, SCALAR, "weights.txt"))
    with pytest.raises(ValueError, match="holds no weights"):
        load_function(RewardFunction(name="reward_model", arguments={"path": path}))


def test_the_key_of_a_server_is_not_shown() -> None:
    arguments = {"base_url": "http://h", "api_key": SecretStr("secret")}
    assert "secret'" not in repr(RewardFunction(name="reward_model", arguments=arguments))
