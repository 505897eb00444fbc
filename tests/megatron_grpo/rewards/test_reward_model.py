"""The reward model's requests and answers, folders and steps; `engines/` has a vLLM of it."""

import asyncio
import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from helpers.rewards import sample_of
from megatron_grpo.config.reward import RewardConfig, RewardFunction
from megatron_grpo.data.samples import Sample
from megatron_grpo.rewards.functions import Answer, load_function
from megatron_grpo.rewards.pool import RewardPool
from megatron_grpo.rewards.reward_model import request_of, steps_of
from megatron_grpo.rewards.scoring import Call, Scores, Scoring, token_ends, with_steps

CHAT = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "2 + 2?"}]
Serve = Callable[[Any], ThreadingHTTPServer]


class Dying:
    """The server of a run: it has died when it was asked for the first time."""

    def __init__(self, port: int, asked: threading.Event, answering: threading.Event) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.asked, self.answering, self.num_deaths = asked, answering, 0

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
    asked, answering, num_asked = threading.Event(), threading.Event(), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            num_asked.append(1)
            asked.set()
            answering.wait()  # until the death was noticed
            content = b'{"data": [{"data": [2.5]}]}'
            self.send_response(200 if recovers and len(num_asked) > 1 else 400)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    served = RewardFunction(name="reward_model", arguments={"path": "of the server"})
    cfg = RewardConfig(functions=(served,), num_workers=1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        dying = Dying(server.server_port, asked, answering)
        with closing(RewardPool(cfg, dying)) as pool:
            [score] = pool.score([sample_of("a", {})], num_completions=100)
        server.shutdown()
    assert (len(num_asked), dying.num_deaths) == (2, 1)
    assert score["reward_model"] == 2.5 if recovers else math.isnan(score["reward_model"])


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers /pooling with this `data`, or with this status code."""
    servers = []

    def start(data: Any) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                is_key = self.headers["Authorization"] == "Bearer secret"
                status = data if isinstance(data, int) else 200 if is_key else 401
                content = json.dumps({"data": [{"index": 0, "data": data}]}).encode()
                self.send_response(status if self.path == "/pooling" else 404)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answered(server: ThreadingHTTPServer, *texts: str, **arguments: Any) -> Answer:
    address = {"base_url": f"http://127.0.0.1:{server.server_port}", "api_key": SecretStr("secret")}
    function = RewardFunction(name="reward_model", arguments=address | arguments)
    samples = [sample_of(text, {}, 0, number) for number, text in enumerate(texts)]
    loaded = load_function(function)
    columns = Call(0, range(len(texts)), samples).columns(loaded.accepted_columns)
    return asyncio.run(loaded.call_async(columns, 5.0))


@pytest.mark.parametrize("data", [[-3.5], [[-3.5]]])
def test_the_score_of_a_completion_is_the_logit(serve: Serve, data: Any) -> None:
    assert answered(serve(data), "a", "b") == Answer([-3.5, -3.5])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([1.0, 2.0], "not the one score of a text: [1.0, 2.0]"),
        ([None], "not the one score of a text"),
        ("AAAA", "not the one score of a text"),
        (400, "answered status 400"),
        (404, "answered status 404"),
    ],
)
def test_what_is_no_score_has_failed_and_says_why(serve: Serve, data: Any, told: str) -> None:
    answer = answered(serve(data), "a")
    assert math.isnan(answer.scores[0])
    assert told in answer.error


def test_a_process_reward_model_scores_each_step(serve: Serve) -> None:
    server = serve([[0.0, 0.0], [1.0, 3.0]])
    answer = answered(server, "A\n\nB", "A", step_tag="§")
    second = 1 / (1 + math.exp(-2))
    assert answer.scores[0] == 0.5  # the lowest of its steps
    assert answer.steps == [[(3, 0.5), (4, pytest.approx(second))], []]
    assert math.isnan(answer.scores[1])
    assert "not one score for each of 1 steps" in answer.error
    assert answered(serve([[-900.0], [7.0]]), "A\n\nB", step_tag="§").scores == [-900.0]
    assert answered(serve([[900.0, -900.0]]), "A", step_tag="§").scores == [0.0]


def test_steps_end_with_what_separates_them() -> None:
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
    ("config", "arguments", "told"),
    [
        (SCALAR, {}, ""),
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
def test_folders_that_cannot_score_are_refused(tmp_path, config, arguments, told) -> None:
    path = str(folder_of(tmp_path / "model", config))
    function = RewardFunction(name="reward_model", arguments={"path": path, **arguments})
    if not told:
        load_function(function)
        return
    with pytest.raises(ValueError, match="reward_model") as refused:
        load_function(function)
    assert told in str(refused.value)


def test_a_path_without_a_model_or_weights_is_refused(tmp_path) -> None:
    for path, told in (
        (tmp_path / "none", "is no folder of a model"),
        (folder_of(tmp_path / "empty", SCALAR, "weights.txt"), "holds no weights"),
    ):
        function = RewardFunction(name="reward_model", arguments={"path": str(path)})
        with pytest.raises(ValueError, match=told):
            load_function(function)


def test_the_key_of_a_server_is_not_shown() -> None:
    arguments = {"base_url": "http://h", "api_key": SecretStr("secret")}
    assert "secret'" not in repr(RewardFunction(name="reward_model", arguments=arguments))


def test_steps_end_with_the_tokens_that_reach_their_ends() -> None:
    chance = random.Random(0)
    token_ids = [chance.randrange(4) for _ in range(1000)]

    def decode(ids):
        return "".join("x" * token for token in ids)  # some tokens have no text

    lengths = [len(decode(token_ids[: number + 1])) for number in range(len(token_ids))]
    ends = sorted(chance.sample(range(1, lengths[-1] + 1), 40))
    expected = [next(i for i, n in enumerate(lengths) if n >= end) for end in ends]
    assert token_ends(token_ids, ends, decode) == expected


def test_the_last_step_has_the_end_token() -> None:
    def sample(text: str, length: int) -> Sample:
        return Sample(
            prompt=sample_of("", {}).prompt,
            sample_index=0,
            completion_ids=range(length),
            logprobs=[0.0] * length,
            finish_reason="stop",
            text=text,
            policy_version=0,
        )

    of_two, of_none, unscored = Scores(), Scores(), Scores()
    of_two.steps, of_none.steps = [(3, 0.5), (4, 0.25)], [(0, 1.0)]
    samples = [sample("A\n\nB", 5), sample("", 0), sample("C", 2)]
    found = with_steps(samples, [of_two, of_none, unscored], lambda ids: "A\n\nB"[: len(ids)])
    assert [each.step_rewards for each in found] == [((2, 0.5), (4, 0.25)), (), ()]
    dialogue = replace(samples[2], step_rewards=((1, 1.0),))  # of another source
    [_, kept] = with_steps([samples[0], dialogue], [of_two, unscored], lambda ids: "A\n\nB")
    assert kept is dialogue
    assert with_steps(samples, [Scores(), Scores(), Scores()], str) is samples


def test_steps_are_kept_beside_the_score_and_functions_in_the_order_of_the_config() -> None:
    functions = (
        RewardFunction(name="reward_model", arguments={"base_url": "http://h", "step_tag": "§"}),
        RewardFunction(name="exact"),
    )
    samples = [sample_of("A", {}, 0, number) for number in range(2)]
    scoring = Scoring(samples, RewardConfig(functions=functions), set(), 2)
    steps_call, exact_call = scoring.calls
    scoring.record(exact_call, Answer([1.0, 0.0]))
    scoring.record(steps_call, Answer([0.5, 0.75], steps=[[(1, 0.5)], [(1, 0.75)]]))
    assert [[*score] for score in scoring.scores] == [["reward_model", "exact"]] * 2
    assert scoring.scores == [
        {"reward_model": 0.5, "exact": 1.0},
        {"reward_model": 0.75, "exact": 0.0},
    ]
    assert [score.steps for score in scoring.scores] == [[(1, 0.5)], [(1, 0.75)]]
