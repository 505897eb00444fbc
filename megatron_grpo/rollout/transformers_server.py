"""A rollout engine of a few lines: the routes that our client uses, on top of `transformers`.

For machines without vLLM, and what vLLM is compared with in the tests. The samples of one prompt
are one batch and prompts come one after the other: slow, but nothing is ever padded.

    python -m megatron_grpo.rollout.transformers_server --model FOLDER --host 127.0.0.1 --port 8000
"""

import argparse
import json
import os
import socket
import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from checkpoint_convert.tokenizer import load_tokenizer
from megatron_grpo.launch.job_token import check_token, take_token
from megatron_grpo.rollout.access import REFUSAL, is_allowed
from megatron_grpo.rollout.push_state import Json, PushState, parameter_table
from parallel.checksum import checksums
from parallel.transport import Inbox, Invitation

Completion = tuple[list[int], list[float]]  # token ids and their log-probabilities


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompt_ids: list[int],
    *,
    n: int,
    seed: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = -1,
    max_tokens: int,
    stop_token_ids: list[int],
    note: Callable[[int], None] = lambda num_tokens: None,
) -> list[Completion]:
    """`n` completions of one prompt; log-probabilities are those after temperature and cuts.

    Completion i draws from its own generator, seeded with `seed` + i; temperature 0 is greedy. A
    completion ends with the first of `stop_token_ids`, which it includes, or after `max_tokens`.
    `note` is told of every few tokens how many they are, and may end the work by what it raises.
    """
    generators = [torch.Generator().manual_seed(seed + i) for i in range(n)]
    completions: list[Completion] = [([], []) for _ in range(n)]
    running = list(range(n))
    inputs = torch.tensor([prompt_ids], device=model.device)
    cache = None
    while running:
        output = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[:, -1].float().cpu()
        if len(inputs) < len(running):  # the prompt was computed once for all
            logits = logits.expand(n, -1)
            cache.batch_repeat_interleave(n)
        logprobs = cut(torch.log_softmax(logits / (temperature or 1.0), dim=-1), top_p, top_k)
        chosen = [
            _draw(row, generators[i]) if temperature else int(row.argmax())
            for i, row in zip(running, logprobs, strict=True)
        ]
        for row, i in enumerate(running):
            completions[i][0].append(chosen[row])
            completions[i][1].append(float(logprobs[row, chosen[row]]))
        note(len(running))
        keep = [
            row
            for row, i in enumerate(running)
            if chosen[row] not in stop_token_ids and len(completions[i][0]) < max_tokens
        ]
        running = [running[row] for row in keep]
        cache.batch_select_indices(torch.tensor(keep, dtype=torch.long, device=model.device))
        inputs = torch.tensor([[chosen[row]] for row in keep], device=model.device)
    return completions


def cut(logprobs: Tensor, top_p: float, top_k: int) -> Tensor:
    """`logprobs` [N, vocabulary] of the `top_k` likeliest tokens alone (-1: of all), and of these
    of the likeliest that make up `top_p`; the others are -inf, as vLLM has it."""
    if top_k != -1:
        least = logprobs.topk(min(top_k, logprobs.shape[-1])).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf).log_softmax(-1)
    if top_p < 1:
        ascending, order = logprobs.sort(dim=-1)
        is_rest = ascending.exp().cumsum(-1) <= 1 - top_p
        is_rest[:, -1] = False
        logprobs = logprobs.masked_fill(is_rest.scatter(-1, order, is_rest), -torch.inf)
        logprobs = logprobs.log_softmax(-1)
    return logprobs


def _draw(logprobs: Tensor, generator: torch.Generator) -> int:
    """A token from its log-probabilities, by the race of exponential clocks."""
    clocks = torch.empty_like(logprobs).exponential_(generator=generator)
    return int((logprobs - clocks.log()).argmax())


class Abandoned(Exception):
    """Nobody waits for an answer any more."""


class TransformersEngine:
    """A model and the version of its weights; one request computes at a time, none while paused.

    The methods named in `ROUTES` take the body of a request and return that of the answer.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.weight_version = "default"
        self.state = PushState()
        self._inbox: Inbox | None = None
        self._received: dict[str, Tensor] = {}
        self._num_accepted = 0
        self._num_tokens = 0
        self._paused = False
        self._turn = threading.Condition()

    def answer_nothing(self, body: Json) -> Json:
        """For routes behind which vLLM does what is not needed here."""
        return {}

    def load(self, body: Json) -> Json:
        """How many requests were accepted and are not answered."""
        return {"server_load": self._num_accepted}

    def metrics(self, body: Json) -> bytes:
        """How many tokens were generated so far, as Prometheus reads it."""
        return f"vllm:generation_tokens_total {self._num_tokens}\n".encode()

    def pause(self, body: Json) -> Json:
        """Hold requests back, from the end of the one that is computed."""
        with self._turn:
            self._paused = True
        return {}

    def resume(self, body: Json) -> Json:
        """Let waiting requests compute."""
        with self._turn:
            self._paused = False
            self._turn.notify_all()
        return {}

    def init_weight_transfer_engine(self, body: Json) -> Json:
        """Make links to all that send to this engine, in the place of earlier ones."""
        self.state.connect(body["init_info"]["links"])
        with self._turn, self.state.keep_error():
            if self._inbox is not None:
                self._inbox.close()
                self._inbox = None
            self._received = self._stored_tensors()
            self._inbox = Inbox.open(
                Invitation.from_json(body["init_info"]["invitation"]),
                engine=body["init_info"]["engine"],
                worker=0,
                parameters=self._received,
                device=self.model.device,
            )
        return {}

    def answer_as_worker(self, body: Json) -> Json:
        """Answer a method of `worker.PushWorker`, which says what they are, as the one worker."""
        arguments = body["kwargs"]
        answer: Json = {"question": arguments["question"]}
        match body["method"]:
            case "describe_parameters":
                answer["parameters"] = parameter_table(self._stored_tensors())
            case "begin_push":
                self.state.begin(arguments["push"], arguments["links"])
            case "receive_push":
                self._receive(arguments["push"])
            case "push_report":
                answer |= self.state.report()
            case "finish_push":
                if arguments["push"] == self.state.push:
                    self.state.finish()
            case "hold_loaded":
                self.state.hold_loaded()
            case "held_push":
                answer["push"] = self.state.held
            case method:
                raise ValueError(f"there is no method {method}")
        return {"results": [answer]}

    def _receive(self, push: str) -> None:
        with self._turn:
            if push != self.state.push or self._inbox is None:
                return  # another has begun, or the state says why there are no links
            with self.state.keep_error():
                self._inbox.receive(self._received)
                self._take_received()
                self.state.load(checksums(self._stored_tensors()))

    def _stored_tensors(self) -> dict[str, Tensor]:
        """The parameters as a folder has them: transformers stacks experts and renames them.

        Most are views of the model's own.
        """
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        return revert_weight_conversion(self.model, parameters)

    def _take_received(self) -> None:
        """Write what was received to the parameters of which no view was there to write to."""
        model = type(self.model).from_pretrained(
            None, config=self.model.config, state_dict=self._received
        )
        self.model.load_state_dict(model.state_dict())

    def update_weight_version(self, body: Json) -> Json:
        """Name the weights."""
        self.weight_version = body["new_version"]
        return {}

    def reset_prefix_cache(self, body: Json) -> Json:
        """Nothing is kept from one prompt to the next."""
        return {"success": True}

    def generate(self, body: Json, is_wanted: Callable[[], bool]) -> Json:
        """All samples of one prompt; Abandoned once nobody wants them."""
        params = body["sampling_params"]

        def note(num_tokens: int) -> None:
            self._num_tokens += num_tokens
            if not is_wanted():
                raise Abandoned

        with self._turn:
            self._num_accepted += 1
            try:
                self._turn.wait_for(lambda: not self._paused)
                completions = sample(
                    self.model,
                    body["token_ids"],
                    n=params["n"],
                    seed=params["seed"],
                    temperature=params["temperature"],
                    top_p=params["top_p"],
                    top_k=params["top_k"],
                    max_tokens=params["max_tokens"],
                    stop_token_ids=params["stop_token_ids"],
                    note=note,
                )
            finally:
                self._num_accepted -= 1
        stop_ids = params["stop_token_ids"]
        return {"choices": [self._choice(i, c, stop_ids) for i, c in enumerate(completions)]}

    def _choice(self, index: int, completion: Completion, stop_ids: list[int]) -> Json:
        token_ids, logprobs = completion
        stopped = token_ids[-1] in stop_ids
        shown = token_ids[:-1] if stopped else token_ids
        return {
            "index": index,
            "token_ids": token_ids,
            "logprobs": {"content": [{"logprob": value} for value in logprobs]},
            "finish_reason": "stop" if stopped else "length",
            "text": self.tokenizer.decode(shown, skip_special_tokens=True),
            "weight_versions": [
                {"version": self.weight_version, "start": 0, "end": len(token_ids)}
            ],
        }


MAX_REFUSED_BYTES = 1 << 16
"""So much is read of a request without the token, so that its sender gets to read the answer."""

GENERATE = "/inference/v1/generate"
ROUTES: dict[str, Callable[..., Json | bytes]] = {
    "/health": TransformersEngine.answer_nothing,
    "/load": TransformersEngine.load,
    "/metrics": TransformersEngine.metrics,
    GENERATE: TransformersEngine.generate,
    "/pause": TransformersEngine.pause,
    "/resume": TransformersEngine.resume,
    "/init_weight_transfer_engine": TransformersEngine.init_weight_transfer_engine,
    "/collective_rpc": TransformersEngine.answer_as_worker,
    "/update_weight_version": TransformersEngine.update_weight_version,
    "/reset_prefix_cache": TransformersEngine.reset_prefix_cache,
}


class RequestHandler(BaseHTTPRequestHandler):
    """One connection; `engine` and `token` are set by `main`."""

    protocol_version = "HTTP/1.1"  # connections stay open
    engine: TransformersEngine
    token: str

    def do_GET(self) -> None:
        """Answer from `ROUTES`."""
        self._answer()

    def do_POST(self) -> None:
        """Answer from `ROUTES`."""
        self._answer()

    def _answer(self) -> None:
        route = urlsplit(self.path).path
        authorization = self.headers.get("Authorization", "").encode("latin-1")
        length = int(self.headers.get("Content-Length", 0))
        if is_allowed(self.command, route, authorization, self.token):
            try:
                self._send(*self._result(route, self.rfile.read(length)))
            except (Abandoned, ConnectionError):
                self.close_connection = True
        else:
            self.rfile.read(min(length, MAX_REFUSED_BYTES))
            self.close_connection = True
            self._send(401, REFUSAL)

    def _result(self, route: str, body: bytes) -> tuple[int, bytes]:
        """Status and content of the answer."""
        more = {"is_wanted": self._is_wanted} if route == GENERATE else {}
        try:
            answer = ROUTES[route](self.engine, json.loads(body or b"{}"), **more)
            return 200, answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        except Abandoned:
            raise
        except Exception as error:
            traceback.print_exc()
            return 500, json.dumps({"error": {"message": repr(error)}}).encode()

    def _is_wanted(self) -> bool:
        """Whether who asked is still there, who says nothing more before the answer."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""


class Server(ThreadingHTTPServer):
    """A thread per connection."""

    request_queue_size = 1024  # all prompts of a generation connect at once

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), RequestHandler)


def main() -> None:
    """Serve until killed. The token comes by the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--host", required=True, help="one address of this host")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.dtype)
    RequestHandler.engine = TransformersEngine(arguments.model, dtype, device)
    RequestHandler.token = check_token(take_token(os.environ))
    Server(arguments.host, arguments.port).serve_forever()


if __name__ == "__main__":
    main()
