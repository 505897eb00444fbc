"""The model's partner in a session, by source of a row: an environment, an agent, or nobody."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from megatron_grpo.agents.agents import Agents
from megatron_grpo.agents.dialogue import DialogueGroup
from megatron_grpo.agents.fork_pool import ForkPool
from megatron_grpo.agents.turns import ObservationTemplate
from megatron_grpo.config.agent import AGENT
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import ENVIRONMENT
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.engine import Json
from megatron_grpo.engines.group import CompletionGroup, Group
from megatron_grpo.engines.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NewGroup = Callable[[Prompt, SamplingParams, int, Json | None], Group]
"""(prompt, parameters, first priority of its requests, `image_features` or None) -> group."""


class Environments:
    """Environments of a source; their class is loaded in the background."""

    def __init__(
        self, cfg: Config, tokenizer: "PreTrainedTokenizerBase", end_tokens: Sequence[int]
    ) -> None:
        self._tokenizer, self._end_tokens = tokenizer, end_tokens
        self._pool = ForkPool(cfg.environment)
        self.wait_ready, self.close = self._pool.wait_ready, self._pool.close

    def groups(self, cfg: Config) -> NewGroup:
        return partial(
            DialogueGroup,
            environments=self._pool,
            template=ObservationTemplate.from_config(cfg, self._tokenizer, self._end_tokens),
            max_turns=cfg.environment.max_turns,
        )


class Partners:
    """Partners of all sources, training's and evaluations', until `close`."""

    def __init__(
        self,
        cfg: Config,
        tokenizer: "PreTrainedTokenizerBase",
        end_tokens: Sequence[int],
        client: RolloutClient,
    ) -> None:
        self._by_source: dict[str, Agents | Environments | None] = {}
        # If a partner cannot be made, the partners of earlier sources are closed.
        with ExitStack() as stack:
            stack.callback(self.close)
            for name, view in cfg.by_source.items():
                partner: Agents | Environments | None = None
                if view.partner == AGENT:
                    partner = Agents(view, tokenizer, end_tokens, client)
                elif view.partner == ENVIRONMENT:
                    partner = Environments(view, tokenizer, end_tokens)
                self._by_source[name] = partner
            stack.pop_all()

    def wait_ready(self, prompts: Sequence[Prompt]) -> None:
        """Wait until sessions with these rows can begin; raises ValueError if they cannot."""
        for name, partner in self._by_source.items():
            if partner:
                partner.wait_ready([each.row for each in prompts if each.source == name])

    def groups(self, cfg: Config) -> dict[str, NewGroup]:
        """Factory of groups for each source; `cfg` is the run's, or an evaluation's view of it."""
        return {
            name: partner.groups(view) if (partner := self._by_source[name]) else CompletionGroup
            for name, view in cfg.by_source.items()
        }

    def close(self) -> None:
        with ExitStack() as stack:  # closes every partner, even if one raises
            for partner in self._by_source.values():
                if partner:
                    stack.enter_context(closing(partner))
