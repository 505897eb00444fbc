"""Real rollout engines for tests, and log-probabilities of their samples by `transformers`."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

from checkpoint_convert import read_shape
from checkpoint_convert.hf_config import has_other_towers
from checkpoint_convert.megatron import file_layout
from helpers.engines.sampling import Completions, Router, generate
from helpers.models.images import logits
from helpers.models.tiny import EOS_ID, tiny_model
from helpers.pushes.policies import client_of, push_folder
from megatron_grpo.config.lora import LoraConfig
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engine_weights.layouts import worker_layouts
from megatron_grpo.engine_weights.protocol import WorkerSums
from megatron_grpo.engines.arguments import command_flags
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.engine import COUNTS
from megatron_grpo.engines.processes import LOOPBACK, ServerProcesses
from megatron_grpo.engines.request import SamplingParams
from megatron_grpo.engines.server import EngineServers, engine_environment
from megatron_grpo.engines.vllm.args import NO_ADAPTERS
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, new_token
from parallel import intersect
from parallel.checksum import whole_checksum
from parallel.views import as_whole

SGLANG_PYTHON = Path(os.environ.get("SGLANG_PYTHON", ".venv-sglang/bin/python")).absolute()
"""The interpreter of SGLang's own environment (`make setup-sglang`)."""
TESTS = Path(__file__).parents[2]
PACKAGES = f"{TESTS.parent}{os.pathsep}{TESTS}"
"""PYTHONPATH of engines with a main module in `helpers`. The repository comes first: otherwise
`megatron_grpo` would be the folder tests/megatron_grpo."""


KERNELS = f"{TESTS / 'engines_on_cpu' / 'plugin'}{os.pathsep}{PACKAGES}"
"""PYTHONPATH of engines on CPUs with the plugin for models that are not dense."""


def needs_kernels(folder: Path, quantization: str = "none") -> bool:
    """Whether an engine needs the plugin to serve this model on CPUs."""
    shape, config = read_shape(folder), (folder / "config.json").read_text(encoding="utf-8")
    is_quantized = quantization != "none" or '"quantization_config"' in config
    return is_quantized or any((shape.moe, shape.latent, shape.linear))


@contextmanager
def kernels_for(folder: Path, quantization: str = "none") -> Iterator[None]:
    """Give the plugin to engines and runs started in the block, if the model needs it."""
    with pytest.MonkeyPatch.context() as patch:
        if needs_kernels(folder, quantization):
            patch.setenv("PYTHONPATH", KERNELS, prepend=os.pathsep)
        yield


def served_model(
    folder: Path, family: str, *, tied: bool, seed: int = 0, intermediate_size: int = 128
) -> Path:
    """A tiny model with heads that vLLM's CPU attention takes (32, 64, 96, ...) and layer sizes
    that SGLang does not pad for one or two workers (multiples of 64)."""
    sizes = {"head_dim": 32, "intermediate_size": intermediate_size}
    return tiny_model(folder, family, tied=tied, seed=seed, **sizes)


def sampling_params(**overrides: Any) -> SamplingParams:
    """Two samples of each prompt, of up to 16 tokens, with `overrides`."""
    settings: dict[str, Any] = {
        "num_generations": 2,
        "policy_version": 0,
        "temperature": 1.0,
        "max_completion_length": 16,
        "stop_token_ids": (EOS_ID,),
        "seed": 0,
        "series": 0,
    }
    return SamplingParams(**settings | overrides)


class ReferenceServers(ServerProcesses):
    """Engines of tests/reference_engine, started as a user starts external engines."""

    share_gpus = False

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, log_dir: Path) -> None:
        super().__init__((), log_dir)
        self.token = new_token()
        environment = engine_environment(os.environ, None) | {TOKEN_VARIABLE: self.token}
        flags = {
            "model": model.path,
            "dtype": model.dtype,
            "host": LOOPBACK,
            "engine": rollout.engine,
            "enable_return_routed_experts": rollout.router_replay or None,
            "enable_return_indexer_topk": rollout.indexer_replay or None,
        }
        command = [sys.executable, "-P", "-m", "reference_engine.server", *command_flags(flags)]

        def on_port(port: int) -> tuple[list[str], dict[str, str]]:
            return [*command, f"--port={port}"], environment | {"PYTHONPATH": PACKAGES}

        self.start({f"engine_{number}": on_port for number in range(rollout.num_engines)})


class TestEngine:
    """One running engine; every push of weights makes a new version."""

    __test__ = False

    def __init__(
        self, folder: Path, servers: EngineServers | ReferenceServers, rollout: RolloutConfig
    ) -> None:
        self.folder = folder
        self.rollout = rollout
        self.servers = servers
        self.version = 0
        self._http = httpx.Client(
            base_url=servers.base_urls[0],
            headers={"Authorization": f"Bearer {servers.token}"},
            limits=httpx.Limits(keepalive_expiry=2.0),
            timeout=60,
            verify=False,
            trust_env=False,
        )
        """For requests to the first engine."""

    def client(self, **rollout: Any) -> RolloutClient:
        """A client that treats the engines as ready; `rollout` are fields of `RolloutConfig`."""
        client = client_of(self.servers.base_urls, self.servers.token, **rollout)
        client.pool.finish_push(self.servers.base_urls)
        return client

    def num_generated(self) -> int:
        """Number of tokens that the first engine has generated since its start."""
        return int(float(COUNTS["generated"].search(self._http.get("/metrics").text)[1]))

    def pause(self) -> None:
        """Pause as a push does first, without the seconds that starting its rank takes."""
        self._http.post("/pause?mode=keep&clear_cache=false").raise_for_status()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._http.post("/resume").raise_for_status()

    def pause_after(self, count: int, is_done: Callable[[], bool] = lambda: False) -> None:
        """`pause` as soon as the engine has generated `count` more tokens, or `is_done()`.

        Call it before `RequestRouter.pause`: while that runs, the engine would go on generating.
        """
        enough = self.num_generated() + count
        assert wait_until(lambda: is_done() or self.num_generated() >= enough, 120, 0.005)
        self.pause()

    def push_in_flight(
        self,
        router: Router,
        folder: Path,
        after: int,
        answered: Sequence[Future[None]],
        num_flips: int = 0,
    ) -> int:
        """`push` while requests are in flight, once the engine has generated `after` more tokens
        or every future of `answered` is done."""
        self.pause_after(after, lambda: all(each.done() for each in answered))
        router.pause(self.version + 1)
        router.resume(self.push(folder, num_flips))
        return self.version

    def push(self, folder: Path, num_flips: int = 0) -> int:
        """Push the weights in `folder`; returns the version now served. A flipped bit makes the
        push fail and start again."""
        self.version += 1
        engines = self.rollout, self.servers.base_urls, self.servers.token
        push_folder(folder, *engines, self.version, num_flips)
        return self.version

    def ask(self, prompts: Sequence[Prompt], number: int = 0, **overrides: Any) -> Completions:
        """Request four samples of each prompt from the newest weights, in generation `number`."""
        settings = {"num_generations": 4, "policy_version": self.version, "series": number}
        return Completions(prompts, sampling_params(**settings | overrides), number)

    def generate(self, prompts: Sequence[Prompt], **overrides: Any) -> list[Sample]:
        with closing(self.client()) as client:
            return generate(client, self.ask(prompts, **overrides))


def worker_sums(folder: Path, rollout: RolloutConfig) -> list[WorkerSums]:
    """Checksums of each engine worker's shard of the weights in `folder`.

    The shards are cut from the full tensors; padding is zero and adds nothing.
    """
    whole = file_layout(read_shape(folder))
    stored = load_file(folder / "model.safetensors")
    weights = {name: stored[name].view(size) for name, size in whole.shapes.items()}
    sums = []
    for layout in worker_layouts(read_shape(folder), rollout):
        worker = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
        for copy in intersect(whole, layout):
            target = worker[copy.destination][copy.destination_box.slices]
            values = weights[copy.source][copy.source_box.slices]
            as_whole(target, copy.destination_axes).copy_(as_whole(values, copy.source_axes))
        sums.append({name: int(whole_checksum(tensor)) for name, tensor in worker.items()})
    return sums


@contextmanager
def running_engine(
    engine: str,
    folder: Path,
    log_dir: Path,
    token: str | None = None,
    dtype: str = "float32",
    freeze_vision: bool = True,
    lora: LoraConfig = NO_ADAPTERS,
    **rollout,
) -> Iterator[TestEngine]:
    """An engine that serves the model in `folder` in `dtype`; `token` belongs to `base_urls`.

    The engine `reference` poses as vLLM, or as SGLang if it reports the choices of indexers.
    """
    model = ModelConfig(path=folder, dtype=dtype, freeze_vision=freeze_vision)
    servers: EngineServers | ReferenceServers
    if engine == "reference":
        taken_for = "sglang" if rollout.get("indexer_replay") else "vllm"
        config = RolloutConfig(engine=taken_for, max_completion_length=16, **rollout)
        servers = ReferenceServers(model, config, log_dir)
    else:
        config = RolloutConfig(engine=engine, max_completion_length=16, **rollout)
        with kernels_for(folder, config.quantization):
            servers = EngineServers(model, config, log_dir, token, lora=lora)
    try:
        servers.wait_ready(240)
        yield TestEngine(folder, servers, config)
    finally:
        servers.close()


def random_prompts(count: int, seed: int = 0, lengths: tuple[int, int] = (5, 80)) -> list[Prompt]:
    """Prompts of random non-special tokens; the longer ones fill several blocks of vLLM's cache."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index in range(count):
        length = int(torch.randint(*lengths, (1,), generator=generator))
        token_ids = torch.randint(4, 250, (length,), generator=generator).tolist()
        prompts.append(Prompt(index=index, token_ids=tuple(token_ids), text="", row={}))
    return prompts


_LOADING = threading.Lock()
"""transformers patches its classes while it loads a model. With two concurrent loads, one may
restore the other's patch, and no later model of this process has tied weights."""


@lru_cache(maxsize=8)
def _reference(folder: Path) -> Any:
    """The float32 model of `transformers`, cached because tests use it sample by sample."""
    kind = AutoModelForImageTextToText if has_other_towers(folder) else AutoModelForCausalLM
    with _LOADING:
        return kind.from_pretrained(folder, dtype=torch.float32)


def reference_logprobs(folder: Path, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the sample's tokens from one float32 forward pass of `transformers`."""
    completion = torch.tensor([*sample.completion_ids])
    tokens = torch.tensor([[*sample.prompt.token_ids, *sample.completion_ids]])
    images = sample.prompt.images
    with torch.inference_mode():
        found = logits(_reference(folder), tokens, images.read() if images else None)
    found = found[0, -len(completion) - 1 : -1]
    return torch.log_softmax(found / temperature, -1).gather(1, completion[:, None])[:, 0]


def chosen_tokens(folder: Path, sample: Sample) -> np.ndarray:
    """Tokens that the indexers of `transformers` choose in one float32 pass, for every token of the
    sample except the last: int32 [tokens, layers, index_topk]."""
    model, found = _reference(folder), []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda *given: found.append(given[2][0]))
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        model(torch.tensor([[*sample.prompt.token_ids, *sample.completion_ids[:-1]]]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).numpy()


def largest_logprob_error(
    folder: Path, samples: Sequence[Sample], temperature: float = 1.0
) -> float:
    """Largest difference between the samples' log-probabilities and `reference_logprobs`."""
    return max(
        float((reference_logprobs(folder, s, temperature) - torch.tensor(s.logprobs)).abs().max())
        for s in samples
    )


def largest_error_by_version(weights: Mapping[int, Path], sample: Sample) -> float:
    """Largest difference between the sample's log-probabilities and `reference_logprobs` of the
    weights that sampled each token."""
    bounds = pairwise([0, *accumulate(count for _, count in sample.spans)])
    found = torch.tensor(sample.logprobs)
    return max(
        float((reference_logprobs(weights[version], sample) - found)[start:end].abs().max())
        for (version, _), (start, end) in zip(sample.spans, bounds, strict=True)
    )


def kept_cache_error(weights: Mapping[int, Path], sample: Sample) -> float:
    """Largest difference between the sample's log-probabilities and a recomputation with a kept
    cache: keys and values of a position come from the weights that sampled the next token."""
    tokens = torch.tensor([[*sample.prompt.token_ids, *sample.completion_ids]])
    first = len(sample.prompt.token_ids) - 1
    ends = [first + end for end in accumulate(count for _, count in sample.spans)]
    cache, logits = DynamicCache(), []
    with torch.inference_mode():
        for (version, _), (start, end) in zip(sample.spans, pairwise([0, *ends]), strict=True):
            model = _reference(weights[version])
            logits.append(model(tokens[:, start:end], past_key_values=cache).logits[0])
    logprobs = torch.cat(logits).log_softmax(-1)[first:].gather(1, tokens[0, first + 1 :, None])
    return float((logprobs[:, 0] - torch.tensor(sample.logprobs)).abs().max())


def wait_until(condition, seconds: float, poll: float = 0.05) -> bool:
    """Whether `condition()` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(poll)
    return bool(result)


def samples_until(
    has_happened: Callable[[Sample], bool], make: Callable[[], list[Sample]]
) -> list[Sample]:
    """Call `make` up to 5 times until `has_happened` is true of a sample; returns all samples.

    For events in the middle of a completion. With a tiny model on a CPU, vLLM's core computes
    tokens faster than its API server reports them: on a busy machine it may finish them all before
    the server forwards a pause.
    """
    samples: list[Sample] = []
    for _ in range(5):
        samples += make()
        if any(map(has_happened, samples)):
            return samples
    raise AssertionError(f"it has happened to none of {len(samples)} samples")


# A proxy whose connections can be cut, to imitate a failing network.


class Proxy:
    """Forwards connections from its own port to the server at `url` until it is cut."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = target.hostname, target.port
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.mend()

    def mend(self) -> None:
        """Let connections through again."""
        if self._listener.fileno() == -1:
            self._listener = socket.create_server(("127.0.0.1", self._port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """End all connections and refuse new ones."""
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):  # the connection has ended already
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # cut
            while True:
                ours, _ = listener.accept()
                theirs = socket.create_connection(self._target)
                self._sockets |= {ours, theirs}
                for source, target in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # cut, or ended by the other side
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
