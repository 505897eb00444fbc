"""`megatron-grpo eval`: evaluates the weights of a folder, which the engines load themselves."""

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoint_convert import ModelShape, check_weights, read_shape
from checkpoint_convert.tokenizer import load_tokenizer
from megatron_grpo.agents.partners import Partners
from megatron_grpo.bars import progress_bar, waiting
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import served_here
from megatron_grpo.data.prompts import end_tokens, with_date
from megatron_grpo.engine_weights.protocol import LOADED_VERSION
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import EngineDown, NoServingEngine
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.engines.reward_models import RewardModels
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.engines.server import EngineServers
from megatron_grpo.engines.support import check_kernels
from megatron_grpo.evaluation.evaluation import (
    Evaluated,
    Evaluations,
    as_evaluated,
    eval_metrics,
    eval_rows,
    metrics_of,
)
from megatron_grpo.launch.run_dir import write_whole
from megatron_grpo.preflight import check_engines
from megatron_grpo.prompt_checks import check_evaluation, check_reward_models
from megatron_grpo.reporting.progress import EvaluationBar
from megatron_grpo.reporting.tracking import EVAL_COMPLETIONS_FILE
from megatron_grpo.rewards.pool import RewardPools
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.workers.event_loop import EventLoop

RESULT_FILE = "eval.json"


class FolderEvaluation:
    """An evaluation of the weights in `model.path`; `close` ends its engines. Raises ValueError or
    OSError if `cfg` cannot be evaluated."""

    def __init__(self, cfg: Config, out: Path) -> None:
        # Replays are for training, and nothing is trained on these completions.
        rollout = cfg.rollout.model_copy(update={"router_replay": False, "indexer_replay": False})
        cfg = cfg.model_copy(update={"rollout": rollout})
        shape = _check(cfg)
        tokenizer = load_tokenizer(cfg.model.path)
        cfg = with_date(cfg, tokenizer)
        check_evaluation(cfg, shape)
        self.cfg, self.out = cfg, out
        with ExitStack() as stack:
            # The engines load while the reward functions do, and the data is encoded.
            self.servers = EngineServers(cfg.model, cfg.rollout, out / "logs", None)
            stack.enter_context(closing(self.servers))
            loop = stack.enter_context(closing(EventLoop()))
            pool = EnginePool(self.servers, cfg.rollout)
            self._client = stack.enter_context(closing(RolloutClient(pool, cfg.rollout, loop)))
            sets = [as_evaluated(cfg, name) for name in cfg.eval.named_sets]
            rewards = [view.reward for each in sets for view in each.by_source.values()]
            models = None
            if served := served_here(rewards):
                models = RewardModels(served, cfg.rollout, out / "logs", engines=self.servers)
            pools = stack.enter_context(closing(RewardPools(models)))
            ends = end_tokens(shape, tokenizer, cfg.rollout)
            partners = stack.enter_context(closing(Partners(cfg, tokenizer, ends, self._client)))
            decode = partial(tokenizer.decode, skip_special_tokens=True)
            router = RequestRouter(self._client, decode, streams=False)
            # The stack closes in reverse order: the router while its loop and client still work.
            stack.callback(lambda: loop.call(router.close()))
            self._evaluations = Evaluations(cfg, shape, tokenizer, router, pools, partners)
            with waiting(self.servers.awaited, "answer") as show:
                self.servers.wait_ready(cfg.rollout.startup_timeout, show)
            if pools.servers and pools.servers.awaited:
                with waiting(pools.servers.awaited, "answer") as show:
                    pools.servers.restart_dead(show)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def run(self) -> dict[str, float]:
        """Evaluate, write the results to the output folder, and return the metrics.

        Lost engines are restarted and get the remaining prompts. Raises RolloutAborted if no engine
        comes back, RewardError, and InstancesLost.
        """
        timer = PhaseTimer(lambda phase: None)
        with progress_bar(Console()) as bar:
            evaluated = self._evaluate(timer, EvaluationBar(bar))
        metrics: dict[str, float] = {}
        for name, held_out in self.cfg.eval.named_sets.items():
            metrics |= eval_metrics(evaluated[name], held_out, name)
        metrics["time/eval"] = timer.metrics()["time/eval"]
        self._write(evaluated, metrics)
        return metrics

    def _evaluate(self, timer: PhaseTimer, bar: EvaluationBar) -> dict[str, Evaluated]:
        while True:
            # Nothing is pushed to the engines: they serve the weights that they have loaded.
            self._client.update_health(lambda workers: None)
            self._client.await_engines(lambda workers: None)
            try:
                self._client.serve_loaded()
                return self._evaluations.run(LOADED_VERSION, timer, bar.show)
            except (NoServingEngine, EngineDown):
                continue  # `await_engines` waits until one of the lost engines is back

    def _write(self, evaluated: dict[str, Evaluated], metrics: dict[str, float]) -> None:
        rows = (
            json.dumps(row, ensure_ascii=False) + "\n"
            for name, held_out in self.cfg.eval.named_sets.items()
            for row in eval_rows(evaluated[name], held_out, name)
        )
        write_whole(self.out / EVAL_COMPLETIONS_FILE, "".join(rows))
        result: dict[str, Any] = {
            "model": str(self.cfg.model.path),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "metrics": metrics,
            "config": self.cfg.model_dump(mode="json"),
        }
        write_whole(self.out / RESULT_FILE, json.dumps(result, indent=1) + "\n")


def result_table(metrics: Mapping[str, float], names: Iterable[str]) -> Table:
    """Build a terminal table of the metrics, with a column per held-out set of `names`."""
    table = Table("metric", box=None, header_style="dim")
    columns = []
    for name in names:
        table.add_column(name or "value", justify="right")
        columns.append(metrics_of(name, metrics))
    for row in dict.fromkeys(chain(*columns)):
        form = ".0f" if row in ("failed", "num_prompts") else ".4f"
        table.add_row(row, *(format(own[row], form) if row in own else "" for own in columns))
    table.caption = f"{metrics['time/eval']:.1f} s"
    return table


def _check(cfg: Config) -> ModelShape:
    """Raise ValueError, with a legal value, if `cfg` cannot be evaluated on this machine."""
    if not cfg.eval.named_sets:
        raise ValueError(
            "eval names no held-out prompts: give eval.data.path=FILE, or, where data.path has "
            "such a split, eval.data.split=test, or several sets in eval.sets"
        )
    if cfg.rollout.base_urls:
        raise ValueError(
            "rollout.base_urls: eval starts its own engines, as it cannot tell which weights "
            "running ones have loaded: set rollout.base_urls=[]"
        )
    if cfg.rollout.vllm.get("load_format") == "dummy":
        raise ValueError(
            "rollout.vllm.load_format dummy makes engines start with random weights, which eval "
            "does not replace: leave it out, or set rollout.vllm.load_format=hf"
        )
    cfg.model.check_folder()
    shape = read_shape(cfg.model.path)
    check_weights(cfg.model.path, shape)
    check_engines(cfg, shape, None)
    check_kernels(cfg.rollout, shape, cfg.model.dtype)
    check_reward_models(cfg)
    return shape
