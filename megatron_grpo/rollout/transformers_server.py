"""A rollout engine of a few lines: the routes that our client uses, on top of `transformers`.

For machines without vLLM, and what vLLM is compared with in the tests. The samples of one prompt
are one batch and prompts come one after the other: slow, but nothing is ever padded.

    python -m megatron_grpo.rollout.transformers_server --model FOLDER --port 8000
"""

import argparse
import json
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from checkpoint_convert.tokenizer import load_tokenizer
from megatron_grpo.rollout.weight_folder import check_all_loaded
from parallel.checksum import whole_checksum

Json = dict[str, Any]
Completion = tuple[list[int], list[float]]  # token ids and their log-probabilities


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompt_ids: list[int],
    *,
    n: int,
    seed: int,
    temperature: float,
    max_tokens: int,
    stop_token_ids: list[int],
) -> list[Completion]:
    """`n` completions of one prompt; log-probabilities are those after temperature.

    Completion i draws from its own generator, seeded with `seed` + i; temperature 0 is greedy. A
    completion ends with the first of `stop_token_ids`, which it includes, or after `max_tokens`.
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
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        chosen = [
            _draw(row, generators[i]) if temperature else int(row.argmax())
            for i, row in zip(running, logprobs, strict=True)
        ]
        for row, i in enumerate(running):
            completions[i][0].append(chosen[row])
            completions[i][1].append(float(logprobs[row, chosen[row]]))
        keep = [
            row
            for row, i in enumerate(running)
            if chosen[row] not in stop_token_ids and len(completions[i][0]) < max_tokens
        ]
        running = [running[row] for row in keep]
        cache.batch_select_indices(torch.tensor(keep, dtype=torch.long, device=model.device))
        inputs = torch.tensor([[chosen[row]] for row in keep], device=model.device)
    return completions


def _draw(logprobs: Tensor, generator: torch.Generator) -> int:
    """A token from its log-probabilities, by the race of exponential clocks."""
    clocks = torch.empty_like(logprobs).exponential_(generator=generator)
    return int((logprobs - clocks.log()).argmax())


class TransformersEngine:
    """A model and the version of its weights; one request computes at a time, none while paused.

    The methods named in `ROUTES` take the body of a request and return that of the answer.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.weight_version = "default"
        # The push that began last, and the one whose weights these are, as in worker.PushWorker.
        self._push, self._held_push = "", ""
        self._is_loaded = False
        self._num_accepted = 0
        self._paused = False
        self._turn = threading.Condition()

    def answer_nothing(self, body: Json) -> Json:
        """For routes behind which vLLM does what is not needed here."""
        return {}

    def load(self, body: Json) -> Json:
        """How many requests were accepted and are not answered."""
        return {"server_load": self._num_accepted}

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

    def answer_as_worker(self, body: Json) -> Json:
        """Answer a method of `worker.PushWorker`, which says what they are, as the one worker."""
        arguments = body["kwargs"]
        answer: Json = {"question": arguments["question"]}
        match body["method"]:
            case "describe_parameters":
                answer["parameters"] = {
                    name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                    for name, tensor in self._stored_tensors().items()
                }
            case "begin_push":
                self._push, self._is_loaded, self._held_push = arguments["push"], False, ""
            case "push_report":
                sums = {n: int(whole_checksum(t)) for n, t in self._stored_tensors().items()}
                answer |= {"push": self._push, "is_loaded": self._is_loaded, "sums": sums}
                answer["error"] = ""
            case "held_push":
                answer["push"] = self._held_push
            case method:
                raise ValueError(f"there is no method {method}")
        return {"results": [answer]}

    def _stored_tensors(self) -> dict[str, Tensor]:
        """The parameters as a folder has them: transformers stacks experts and renames them."""
        parameters = dict(self.model.named_parameters())
        return revert_weight_conversion(self.model, parameters)

    def update_weight_version(self, body: Json) -> Json:
        """Name the weights."""
        self.weight_version = body["new_version"]
        return {}

    def update_weights(self, body: Json) -> Json:
        """Take every parameter from a folder; raises ValueError when one is not there."""
        update = body["update_info"]
        folder = Path(update["folder"])
        # Names and shapes in a folder may be others than in the model, which stacks experts.
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.model.dtype, output_loading_info=True
        )
        wanted = {name for name, _ in model.named_parameters()}
        check_all_loaded(wanted, wanted - set(loading["missing_keys"]), folder)
        with self._turn:
            if update["push"] == self._push:
                self.model.load_state_dict(model.state_dict())
                self._is_loaded = True
        return {}

    def finish_weight_update(self, body: Json) -> Json:
        """Name the weights, which are in place."""
        if self._is_loaded:
            self._held_push = self._push
        self.weight_version = body["weight_version"]
        return {}

    def reset_prefix_cache(self, body: Json) -> Json:
        """Nothing is kept from one prompt to the next."""
        return {"success": True}

    def generate(self, body: Json) -> Json:
        """All samples of one prompt."""
        params = body["sampling_params"]
        with self._turn:
            self._num_accepted += 1
            self._turn.wait_for(lambda: not self._paused)
            completions = sample(
                self.model,
                body["token_ids"],
                n=params["n"],
                seed=params["seed"],
                temperature=params["temperature"],
                max_tokens=params["max_tokens"],
                stop_token_ids=params["stop_token_ids"],
            )
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


ROUTES = {
    "/health": TransformersEngine.answer_nothing,
    "/load": TransformersEngine.load,
    "/inference/v1/generate": TransformersEngine.generate,
    "/pause": TransformersEngine.pause,
    "/resume": TransformersEngine.resume,
    "/start_weight_update": TransformersEngine.answer_nothing,
    "/collective_rpc": TransformersEngine.answer_as_worker,
    "/update_weight_version": TransformersEngine.update_weight_version,
    "/update_weights": TransformersEngine.update_weights,
    "/finish_weight_update": TransformersEngine.finish_weight_update,
    "/reset_prefix_cache": TransformersEngine.reset_prefix_cache,
}


class RequestHandler(BaseHTTPRequestHandler):
    """One connection; `engine` is set by `serve`."""

    protocol_version = "HTTP/1.1"  # connections stay open
    engine: TransformersEngine

    def do_GET(self) -> None:
        """Answer from `ROUTES`."""
        self._answer()

    def do_POST(self) -> None:
        """Answer from `ROUTES`."""
        self._answer()

    def _answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        route = urlsplit(self.path).path
        try:
            status, answer = 200, ROUTES[route](self.engine, body)
        except Exception as error:
            traceback.print_exc()
            status, answer = 500, {"error": {"message": repr(error)}}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""


class Server(ThreadingHTTPServer):
    """A thread per connection."""

    request_queue_size = 1024  # all prompts of a generation connect at once


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--port", type=int, required=True, help="port of the loopback interface")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.dtype)
    RequestHandler.engine = TransformersEngine(arguments.model, dtype, device)
    Server(("127.0.0.1", arguments.port), RequestHandler).serve_forever()


if __name__ == "__main__":
    main()
