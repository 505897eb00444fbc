"""The servers of reward models that a run starts: vLLM's pooling runner, on GPUs of its own.

The reward function `reward_model` asks them.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from megatron_grpo.bars import Show
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import RewardFunction, served_here
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engines.arguments import command_flags
from megatron_grpo.engines.http import EngineError
from megatron_grpo.engines.processes import LOOPBACK, Command, ServerProcesses
from megatron_grpo.engines.server import engine_environment, num_gpus, share_gpus
from megatron_grpo.engines.vllm.args import (
    TOKEN_GUARD,
    engine_argument_names,
    platform_arguments,
    server_environment,
)
from megatron_grpo.launch.run_dir import TOKEN_VARIABLE, new_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED = {
    "model": "set path",
    "tensor_parallel_size": "it is an argument of its own",
    "runner": "a reward model has vLLM's pooling runner",
    "pooler_config": "it follows from step_tag",
}
"""Names that cannot be in the table `vllm` of the arguments."""


class RewardModels(ServerProcesses):
    """One server for each `reward_model` with a `path`, in training and evaluations."""

    kind = "reward model"

    def __init__(
        self,
        functions: Sequence[RewardFunction],  # by `served_here`
        rollout: RolloutConfig,
        log_dir: Path,
        num_ranks: int = 0,
    ) -> None:
        super().__init__((), log_dir)
        self._token = new_token()
        self._timeout = rollout.startup_timeout
        self._models = [function.arguments for function in functions]
        self._is_ready = False
        self._restarted: set[str] = set()
        """Those that have been started again since completions were last scored."""
        if not functions:
            return
        sizes = [function.num_gpus for function in functions]
        devices = reward_devices(rollout, sizes, num_gpus(), num_ranks, os.environ)

        def command_of(model: Mapping[str, Any], gpus: str | None) -> Command:
            return lambda port: reward_command(model, port, gpus, self._token)

        placed = enumerate(zip(self._models, devices, strict=True))
        self.start({f"reward_model_{i}": command_of(model, gpus) for i, (model, gpus) in placed})

    @classmethod
    def of_run(cls, cfg: Config, log_dir: Path, num_ranks: int = 0) -> "RewardModels":
        """Those of a run, on the GPUs after `num_ranks` trainer ranks and its engines."""
        return cls(served_here(cfg.rewards.values()), cfg.rollout, log_dir, num_ranks)

    @property
    def awaited(self) -> str:
        """What `revive` waits for the first time; empty if there is no server."""
        return super().awaited if self.are_ours else ""

    def addressed(self, functions: Sequence[RewardFunction]) -> tuple[RewardFunction, ...]:
        """The functions, with the address of its server in place of the path of each model."""
        return tuple(self._addressed(each) if each.is_served_here else each for each in functions)

    def _addressed(self, function: RewardFunction) -> RewardFunction:
        url = self.base_urls[self._models.index(function.arguments)]
        own = {name: value for name, value in function.arguments.items() if name.startswith("step")}
        address = {"base_url": url, "api_key": SecretStr(self._token)}
        return function.model_copy(update={"arguments": own | address})

    def revive(self, show: Show) -> bool:
        """Start those again that have died, and return when all answer; whether any had died.

        Raises EngineError, which names it, for one that dies again before completions are scored,
        or as it starts. Call it only from a thread that lasts as long as the run.
        """
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
            self.wait_ready(self._timeout, show)
            self._is_ready = True
        return bool(dead)

    def finish_scoring(self) -> None:
        """Record that completions were scored: each server may be started again."""
        self._restarted.clear()


def reward_devices(
    rollout: RolloutConfig,
    sizes: Sequence[int],
    num_devices: int,
    num_ranks: int,
    environ: Mapping[str, str],
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of servers of these sizes: the GPUs after those of ranks and engines.

    On a machine without GPUs, None for each. Raises ValueError if too few are left.
    """
    if num_devices == 0:
        return [None] * len(sizes)
    num_used = num_ranks
    if not rollout.base_urls and not share_gpus(rollout, num_devices, num_ranks):
        num_used += rollout.num_engines * rollout.gpus_per_engine
    if num_used + sum(sizes) > num_devices:
        raise ValueError(
            f"reward_model: {sum(sizes)} GPUs for reward models, and of the {num_devices} of this "
            f"host ranks and engines leave {max(0, num_devices - num_used)}: use fewer for them, "
            "or serve the model elsewhere and give its base_url in place of path"
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    free = iter(visible.split(",")[num_used:num_devices])
    return [",".join(next(free) for _ in range(size)) for size in sizes]


def reward_command(
    arguments: Mapping[str, Any], port: int, devices: str | None, token: str
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the server of a reward model with these arguments."""
    size, on_gpu = arguments.get("tensor_parallel_size", 1), devices is not None
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
        **({} if on_gpu else platform_arguments(size, on_gpu)),
        **arguments.get("vllm", {}),
    }
    environment = engine_environment(os.environ, devices) | server_environment(size, on_gpu)
    environment |= {TOKEN_VARIABLE: token, "VLLM_HOST_IP": LOOPBACK}
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [*command, *command_flags(flags)], environment


def pooler_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How vLLM pools: the score of the last token, or of the tag of each step."""
    if (tag := arguments.get("step_tag")) is None:
        return {"task": "classify"}
    step_tag_id = tag_id(_tokenizer(arguments["path"]), tag)
    return {"task": "token_classify", "tok_pooling_type": "STEP", "step_tag_id": step_tag_id}


def tag_id(tokenizer: "PreTrainedTokenizerBase", tag: str) -> int:
    """The token of `step_tag`; ValueError if it is not one."""
    token_ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
    if len(token_ids) != 1:
        raise ValueError(
            f"step_tag {tag!r} is {len(token_ids)} tokens of the reward model: give the one token "
            "that ends its steps, such as <extra_0>"
        )
    return int(token_ids[0])


def check_served(cfg: Config) -> None:
    """Raise ValueError if vLLM could not serve a reward model, or not score what is asked."""
    for function in served_here(cfg.rewards.values()):
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


def _tokenizer(path: str) -> "PreTrainedTokenizerBase":
    from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415 - takes seconds

    return load_tokenizer(Path(path))
