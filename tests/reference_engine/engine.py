"""The engine behind `server`: generation and weight updates of one model."""

import base64
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from checkpoint_convert import read_shape
from checkpoint_convert.hf_config import read_scheme
from checkpoint_convert.megatron import file_layout, file_tensors
from checkpoint_convert.quantized.scheme import CONFIG_KEYS
from checkpoint_convert.tokenizer import load_tokenizer
from checkpoint_convert.weights import whole_tensors
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import worker_dtypes, worker_layouts
from megatron_grpo.engine_weights.protocol import Json
from megatron_grpo.engine_weights.worker import PushWorker, Receiver
from megatron_grpo.engines.choice import npy_of, smallest
from parallel import Layout, intersect
from parallel.views import as_whole
from reference_engine.sampling import Completion, RouteRecorder, sample


class Abandoned(Exception):
    """The client no longer waits for the answer."""


@dataclass(eq=False)
class _Request:
    """An accepted request for a sample."""

    body: Json
    is_wanted: Callable[[], bool]
    """Whether the client still waits for the answer."""
    answer: Json | None = None

    def fits(self, other: "_Request") -> bool:
        """Whether both fit into one batch: they differ only in their seeds."""
        return self._without_seed() == other._without_seed()

    def _without_seed(self) -> tuple[list[int], Json]:
        params = self.body["sampling_params"]
        return self.body["token_ids"], params | {"seed": None}


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `folder`, with quantised weights dequantised."""
    if read_scheme(folder) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = AutoConfig.from_pretrained(folder)
    for key in CONFIG_KEYS:
        if hasattr(config, key):
            delattr(config, key)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    weights = dict(whole_tensors(folder))
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype)


class ModelWorker(PushWorker):
    """The weights of a transformers model in the layout of an engine's single worker."""

    def __init__(self, model: PreTrainedModel, folder: Path, dtype: str, engine: str) -> None:
        """Hold the weights in `folder` as a worker of `engine` would; `model` generates."""
        super().__init__(0, model.device)
        shape, rollout = read_shape(folder), RolloutConfig(engine=engine, max_completion_length=1)
        self.model = model
        self._sizes, self._files = file_tensors(shape), file_layout(shape)
        [self._layout] = worker_layouts(shape, rollout)
        dtypes = worker_dtypes(shape, rollout, dtype)
        self._held = {
            name: torch.zeros(size, dtype=getattr(torch, dtypes[name]), device=model.device)
            for name, size in self._layout.shapes.items()
        }
        stored = {name: t.view(self._files.shapes[name]) for name, t in whole_tensors(folder)}
        copy_weights(stored, self._files, self._held, self._layout)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters in the form of vLLM or SGLang."""
        return self._held

    def can_sleep(self) -> bool:
        """It keeps its memory while it sleeps, as vLLM does on CPUs."""
        return True

    def receive(self, receiver: Receiver, received: dict[str, Tensor]) -> Mapping[str, int]:
        """Receive a push, and copy it into the model by the names of weight files."""
        sums = super().receive(receiver, received)
        copies = intersect(self._layout, self._files)
        dtypes = {copy.destination: received[copy.source].dtype for copy in copies}
        weights = {
            name: torch.empty(self._files.shapes[name], dtype=dtypes[name]) for name in dtypes
        }
        copy_weights(received, self._layout, weights, self._files)
        stored = {name: weights[name].view(size) for name, size in self._sizes.items()}
        model = type(self.model).from_pretrained(None, config=self.model.config, state_dict=stored)
        self.model.load_state_dict(model.state_dict())
        return sums


def copy_weights(
    source: Mapping[str, Tensor],
    source_layout: Layout,
    destination: Mapping[str, Tensor],
    destination_layout: Layout,
) -> None:
    """Fill the boxes of `destination` from those of `source`."""
    for copy in intersect(source_layout, destination_layout):
        values = source[copy.source][copy.source_box.slices]
        target = destination[copy.destination][copy.destination_box.slices]
        as_whole(target, copy.destination_axes).copy_(as_whole(values, copy.source_axes))


class TransformersEngine:
    """A model and the version of its weights; computes one prompt at a time, none while paused.

    The methods in `server.ROUTES` take the body of a request and return that of the response.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        return_routed_experts: bool = False,
        return_indexer_topk: bool = False,
        engine: str = "vllm",
    ) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.model = load_model(folder, dtype).to(device).eval()
        returned = {"topkrouter": return_routed_experts, "indexer": return_indexer_topk}
        recorded = [kind for kind, is_on in returned.items() if is_on]
        self.recorder = RouteRecorder(self.model, recorded) if recorded else None
        self.weight_version = "default"
        self.worker = ModelWorker(self.model, folder, str(dtype).removeprefix("torch."), engine)
        self._requests: list[_Request] = []
        self._num_tokens = 0
        self._paused = False
        self._turn = threading.Condition()

    def answer_nothing(self, body: Json) -> Json:
        """Answer routes that need no action here, such as /health."""
        return {}

    def load(self, body: Json) -> Json:
        """Number of requests accepted but not answered."""
        return {"server_load": len(self._requests)}

    def metrics(self, body: Json) -> bytes:
        """Number of tokens generated so far, in the format of Prometheus."""
        return f"vllm:generation_tokens_total {self._num_tokens}\n".encode()

    def pause(self, body: Json) -> Json:
        """Hold back requests that are not being computed yet."""
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
        """Answer a call as this engine's only worker."""
        call = body["kwargs"]
        with self._turn if call["call"] in ("open_channels", "receive_push") else nullcontext():
            return {"results": [self.worker.answer(**call)]}

    def update_weight_version(self, body: Json) -> Json:
        """Set the version that labels samples."""
        self.weight_version = body["new_version"]
        return {}

    def reset_prefix_cache(self, body: Json) -> Json:
        """Do nothing: no cache outlives a prompt."""
        return {"success": True}

    def generate(self, body: Json, is_wanted: Callable[[], bool]) -> Json:
        """A sample of a prompt; raises Abandoned once `is_wanted` returns False.

        The first request of a prompt that gets its turn computes all waiting ones in one batch.
        """
        request = _Request(body, is_wanted)
        with self._turn:
            self._requests.append(request)
            try:
                self._turn.wait_for(lambda: request.answer or not self._paused)
                if request.answer is None:
                    waiting = [other for other in self._requests if other.answer is None]
                    self._compute([other for other in waiting if other.fits(request)])
            finally:
                self._requests.remove(request)
        assert request.answer is not None
        return request.answer

    def _compute(self, requests: list[_Request]) -> None:
        """Answer requests that differ only in their seeds."""

        def note(num_tokens: int) -> None:
            self._num_tokens += num_tokens
            if not any(request.is_wanted() for request in requests):
                raise Abandoned

        params = requests[0].body["sampling_params"]
        completions = sample(
            self.model,
            requests[0].body["token_ids"],
            seeds=[request.body["sampling_params"]["seed"] for request in requests],
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=params["top_k"],
            max_tokens=params["max_tokens"],
            stop_token_ids=params["stop_token_ids"],
            note=note,
            recorder=self.recorder,
        )
        for request, completion in zip(requests, completions, strict=True):
            request.answer = {"choices": [self._choice(completion, params)]}

    def _choice(self, completion: Completion, params: Json) -> Json:
        token_ids, logprobs, routes = completion
        stop_ids, known = params["stop_token_ids"], params.get("routed_experts_prompt_start", 0)
        stopped = token_ids[-1] in stop_ids
        shown = token_ids[:-1] if stopped else token_ids
        return {
            "token_ids": token_ids,
            "logprobs": {"content": [{"logprob": value} for value in logprobs]},
            "finish_reason": "stop" if stopped else "length",
            "text": self.tokenizer.decode(shown, skip_special_tokens=True),
            "weight_versions": [
                {"version": self.weight_version, "start": 0, "end": len(token_ids)}
            ],
            "routed_experts": _encoded(routes[known:]) if routes is not None else None,
        }


def _encoded(routes: Tensor) -> str:
    """Routes in the format of vLLM: base64 of a `.npy` file."""
    return base64.b64encode(npy_of(smallest(routes.numpy()))).decode()
