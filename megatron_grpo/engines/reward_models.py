"""Servers of the reward models that a run starts: vLLM's pooling runner.

The reward function `reward_model` requests scores. On GPUs shared with ranks and engines, servers
sleep between rounds of scoring, with their weights in host memory.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from megatron_grpo.bars import Show, waiting
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import RewardFunction, count_gpus, served_here
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.arguments import PLANNED, command_flags, engine_table
from megatron_grpo.engines.http import EngineError, status_of
from megatron_grpo.engines.processes import LOOPBACK, ServerProcesses
from megatron_grpo.engines.server import engine_environment, share_gpus
from megatron_grpo.engines.support import num_gpus
from megatron_grpo.engines.vllm.args import (
    TOKEN_GUARD,
    cpu_arguments,
    engine_argument_names,
    server_environment,
)
from megatron_grpo.launch.network import GLOO_VARIABLE
from megatron_grpo.launch.placement import check_shared_gpus
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, new_token
from megatron_grpo.workers.http import is_success
from parallel.words import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED = {
    "model": "set path",
    "tensor_parallel_size": "it is an argument of its own",
    "runner": "a reward model has vLLM's pooling runner",
    "pooler_config": "it follows from step_tag",
    "enable_sleep_mode": "set share_gpus",
}
"""Names that the table `vllm` of the arguments cannot have, and why."""

MAX_SHARES = 0.95
"""Maximum fraction of a GPU for an engine and a reward model together: vLLM starts only if its
share is free, and each CUDA context takes 0.6 to 1.1 GB outside of the shares."""
MAX_SHARES_WITH_SGLANG = 0.85
"""`MAX_SHARES` for engines of SGLang, whose share excludes activations, CUDA graphs and
buffers."""


class RewardModels(ServerProcesses):
    """One server for each `reward_model` with a `path`, in training and evaluations, on a host with
    `num_ranks` trainer ranks.

    vLLM measures a GPU's free memory when it starts: servers on shared GPUs start after all
    `engines` answer, and sleep when the constructor returns.
    """

    kind = "reward model"

    def __init__(
        self,
        functions: Sequence[RewardFunction],  # by `served_here`
        rollout: RolloutConfig,
        log_dir: Path,
        num_ranks: int = 0,
        engines: ServerProcesses | None = None,
    ) -> None:
        super().__init__((), log_dir)
        self._token = new_token()
        self._rollout = rollout
        self._models = [function.arguments for function in functions]
        self._is_ready = False
        self._restarted: set[str] = set()
        """Servers that were restarted since the last round of scoring."""
        self._sharing: list[str] = []
        """Addresses of the servers that share GPUs."""
        self._asleep: set[str] = set()
        devices = reward_devices(rollout, functions, num_gpus(), num_ranks, os.environ)
        if engines and any(function.shares_gpus for function in functions):
            with waiting(engines.awaited, "answer") as show:
                engines.wait_ready(rollout.startup_timeout, show)
        commands = [
            partial(reward_command, model, devices=gpus, token=self._token)
            for model, gpus in zip(self._models, devices, strict=True)
        ]
        self.start({f"reward_model_{number}": each for number, each in enumerate(commands)})
        addresses = zip(self.base_urls, functions, strict=True)
        self._sharing = [url for url, function in addresses if function.shares_gpus]
        if self._sharing:
            with waiting(self.awaited, "answer") as show:
                self.restart_dead(show)
            self.end_round()

    @property
    def awaited(self) -> str:
        """Servers that the first `restart_dead` waits for, in words; empty afterwards."""
        return "" if self._is_ready else super().awaited

    def addressed(self, functions: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
        """The functions, with their servers' addresses in place of the models' paths."""
        found = []
        for function in functions:
            if function.is_served_here:
                given = function.arguments
                own = {name: value for name, value in given.items() if name.startswith("step")}
                own["base_url"] = self.base_urls[self._models.index(given)]
                own["api_key"] = SecretStr(self._token)
                function = function.model_copy(update={"arguments": own})
            found.append(function)
        return tuple(found)

    def restart_dead(self, show: Show) -> bool:
        """Wake the servers, restart dead ones, wait until all answer; returns whether any was dead.

        Raises EngineError, which names the server, if a server dies at its start, or twice in a
        round of scoring.
        """
        # A server that does not wake is killed, and so restarted below.
        self._post_to_all(self._asleep, "wake_up")
        self._asleep.clear()
        dead = [url for url in self.base_urls if self.end(url)] if self._is_ready else []
        for url in dead:
            reason = f"{self.kind} {url} {self.end(url)}{self.log_tail(url)}"
            if url in self._restarted:
                raise EngineError(f"{reason}\nIt was started again, and no completion was scored")
            print(f"{reason}; it is being restarted", file=sys.stderr, flush=True)
            self.kill(url)
            self.restart(url)
            self._restarted.add(url)
        if dead or not self._is_ready:
            self.wait_ready(self._rollout.startup_timeout, show)
            self._is_ready = True
        return bool(dead)

    def end_round(self) -> None:
        """End a round of scoring: every server may be restarted again, and those on shared GPUs go
        to sleep."""
        self._restarted.clear()
        self._post_to_all(self._sharing, "sleep?level=1")
        self._asleep = {*self._sharing}

    def _post_to_all(self, urls: Iterable[str], route: str) -> None:
        """Post `route`, such as wake_up, to servers at the same time; kills those that fail."""

        limit = self._rollout.request_timeout
        with ThreadPoolExecutor() as threads:
            answers = [
                (url, threads.submit(status_of, "POST", url, route, limit, self._token))
                for url in urls
            ]
        for url, answer in answers:
            status, text = answer.result()
            if is_success(status):
                continue
            if not self.end(url):
                print(f"{self.kind} {url} failed at /{route}: {text}", file=sys.stderr, flush=True)
            self.kill(url)


def reward_devices(
    rollout: RolloutConfig,
    models: Sequence[RewardFunction],
    num_devices: int,
    num_ranks: int,
    environ: Mapping[str, str],
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each model: GPUs after those of ranks and engines, or from the first
    GPU on for models that share; None without GPUs. ValueError for too few GPUs."""
    if num_devices == 0:
        return [None] * len(models)
    num_used = num_ranks
    if not rollout.base_urls and not share_gpus(rollout, num_devices, num_ranks):
        num_used += rollout.num_engines * rollout.gpus_per_engine
    own = count_gpus(models, shared=False)
    if num_used + own > num_devices:
        raise ValueError(
            f"reward_model: reward models need {counted(own, 'GPU')}, and ranks and engines leave "
            f"{max(0, num_devices - num_used)} of this host's {num_devices}: use fewer for them, "
            "let the model share their GPUs (share_gpus: true), or serve it elsewhere and give its "
            "base_url in place of path"
        )
    check_shared_gpus(models, num_devices)
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    gpus = visible.split(",")[:num_devices]
    free, taken = iter(gpus[num_used:]), iter(gpus)
    return [",".join(islice(taken if each.shares_gpus else free, each.num_gpus)) for each in models]


def reward_command(
    arguments: Mapping[str, Any], port: int, devices: str | None, token: str
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the server of a reward model with these arguments."""
    size, on_gpu = arguments.get("tensor_parallel_size", 1), devices is not None
    sleeps = arguments.get("share_gpus", False)
    flags = {
        "model": arguments["path"],
        "host": LOOPBACK,
        "port": port,
        "middleware": TOKEN_GUARD,
        "disable_uvicorn_access_log": True,
        "runner": "pooling",
        "pooler_config": pooler_config(arguments),
        "config_format": "hf",
        "tokenizer_mode": "hf",
        "tensor_parallel_size": size,
        # vLLM on CPUs accepts requests to sleep, but does not start with this flag.
        "enable_sleep_mode": (sleeps and on_gpu) or None,
        **({} if on_gpu else cpu_arguments(size)),
        **arguments.get("vllm", {}),
    }
    environment = engine_environment(os.environ, devices) | server_environment(size, on_gpu)
    environment |= {TOKEN_VARIABLE: token, "VLLM_HOST_IP": LOOPBACK, GLOO_VARIABLE: "lo"}
    if sleeps:
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # the routes for it, which the token guards
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*command, *command_flags(flags)], environment


def pooler_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Pooling in vLLM: the score of the last token, or at each step's tag."""
    if (tag := arguments.get("step_tag")) is None:
        return {"task": "classify"}
    step_tag_id = tag_id(_tokenizer(arguments["path"]), tag)
    return {"task": "token_classify", "tok_pooling_type": "STEP", "step_tag_id": step_tag_id}


def tag_id(tokenizer: "PreTrainedTokenizerBase", tag: str) -> int:
    """The id of `step_tag`; ValueError unless it is a single token."""
    token_ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
    if len(token_ids) != 1:
        raise ValueError(
            f"step_tag {tag!r} is {len(token_ids)} tokens of the reward model: give the one token "
            "that ends its steps, such as <extra_0>"
        )
    return int(token_ids[0])


def check_served(cfg: Config) -> None:
    """Raise ValueError if vLLM cannot serve a reward model, or score as configured."""
    for function in served_here(cfg.rewards.values()):
        gpu_share(function, cfg.rollout)
        known = engine_argument_names()
        for name in function.arguments.get("vllm", {}):
            if name in RESERVED or name not in known:
                why = RESERVED.get(name, "`vllm serve --help` has the arguments of vLLM")
                raise ValueError(f"reward_model: vllm.{name} cannot be set: {why}")
        tokenizer = _tokenizer(function.arguments["path"])
        if function.scores_steps:
            tag_id(tokenizer, function.arguments["step_tag"])
        if cfg.data.apply_chat_template and tokenizer.chat_template is None:
            raise ValueError(
                f"reward_model: the tokenizer of {function.arguments['path']} has no chat "
                "template, and prompts are chats: give it the one that it was trained with "
                "(chat_template.jinja), or set data.apply_chat_template=false"
            )


def gpu_share(model: RewardFunction, rollout: RolloutConfig) -> float:
    """Fraction of each of the ranks' GPUs that a reward model takes while it scores; ValueError if
    it cannot share GPUs, or its arguments set no such fraction."""
    if not model.shares_gpus:
        return 0.0
    if not rollout.enable_sleep_mode:
        raise ValueError(
            "reward_model: share_gpus true is for GPUs that ranks and engines have by turns: set "
            "rollout.enable_sleep_mode=true, or leave it out, for GPUs of its own"
        )
    names, own = PLANNED["vllm"], model.arguments.get("vllm", {})
    most = MAX_SHARES_WITH_SGLANG if rollout.engine == "sglang" else MAX_SHARES
    engine = engine_table(rollout)
    if "kv_cache_memory_bytes" in own or "kv_cache_memory_bytes" in engine:
        raise ValueError(
            "reward_model: share_gpus true with vllm.kv_cache_memory_bytes: vLLM then does not "
            f"keep to {names.memory_fraction}: leave it out"
        )
    theirs = PLANNED[rollout.engine]
    of_engine = engine.get(theirs.memory_fraction, theirs.default_fraction)
    share = own.get(names.memory_fraction)
    if not isinstance(share, float) or share <= 0 or share + of_engine > most:
        raise ValueError(
            f"reward_model: share_gpus true with vllm.{names.memory_fraction} {share}: give the "
            "fraction of a GPU that the model takes beside an engine, whose "
            f"rollout.{rollout.engine}.{theirs.memory_fraction} is {of_engine:g}: together at most "
            f"{most}, such as 0.25 beside {most - 0.25:.2g}"
        )
    return share


def _tokenizer(path: str) -> "PreTrainedTokenizerBase":
    from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415 - takes seconds

    return load_tokenizer(Path(path))
