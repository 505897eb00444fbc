"""The evaluations of a run: of every held-out set, one after the other."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from checkpoint_convert import ModelShape
from megatron_grpo.config.config import Config
from megatron_grpo.config.eval_config import section_of
from megatron_grpo.data.prompts import end_tokens
from megatron_grpo.environments import EnvironmentPool
from megatron_grpo.evaluation.evaluation import (
    Ask,
    Evaluated,
    Evaluation,
    as_evaluated,
    load_eval_prompts,
)
from megatron_grpo.rewards import RewardError, RewardPools
from megatron_grpo.rollout.client import RolloutClient
from megatron_grpo.rollout.dialogues import DialogueGeneration
from megatron_grpo.rollout.generation import Generation
from megatron_grpo.rollout.turns import Turns
from megatron_grpo.timing import PhaseTimer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Evaluations:
    """Evaluates all held-out sets of a config, any number of times.

    A set gets the same completions whatever other sets there are.
    """

    def __init__(
        self,
        cfg: Config,
        shape: ModelShape,
        tokenizer: "PreTrainedTokenizerBase",
        engines: RolloutClient,
        pools: RewardPools,
        environments: EnvironmentPool | None,
    ) -> None:
        ends = end_tokens(shape, tokenizer, cfg.rollout)
        context = shape.max_position_embeddings
        self._evaluations: dict[str, Evaluation] = {}
        for name in cfg.eval.named_sets:
            view = as_evaluated(cfg, name)
            # Whoever checked the config has warned already.
            prompts = load_eval_prompts(view, name, tokenizer, context, warns=False)
            ask: Ask = Generation
            if environments:
                ask = partial(
                    DialogueGeneration,
                    environments=environments,
                    turns=Turns.of(view, tokenizer, ends),
                    max_turns=cfg.environment.max_turns,
                )
            pool = pools.of(view.reward)
            self._evaluations[name] = Evaluation(view, prompts, ends, engines, pool, ask)
        self._environments = environments
        self._done: dict[str, Evaluated] = {}

    def run(
        self, policy_version: int, timer: PhaseTimer, show: Callable[[str, int, int], None]
    ) -> dict[str, Evaluated]:
        """The results by the name of the set; `show` is called with that name first.

        Otherwise like `Evaluation.run`: after EnginesOut, a call for the same version continues
        where it stopped.
        """
        for name, evaluation in self._evaluations.items():
            if name not in self._done:
                if self._environments:
                    self._environments.wait_ready([prompt.row for prompt in evaluation.prompts])
                try:
                    self._done[name] = evaluation.run(policy_version, timer, partial(show, name))
                except RewardError as error:
                    raise RewardError(f"{section_of(name)}: {error}") from None
        done, self._done = self._done, {}
        return done
