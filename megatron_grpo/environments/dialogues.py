"""What makes samples that are dialogues: environments, or agents (`agents.Agents`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron_grpo.config.config import Config
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.generation import SampleRequests
from megatron_grpo.engines.sampling_params import SamplingParams
from megatron_grpo.environments.multi_turn import DialogueGeneration
from megatron_grpo.environments.pool import EnvironmentPool
from megatron_grpo.environments.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dialogues(Protocol):
    """Makes dialogues, until `close`."""

    def wait_ready(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Wait until dialogues can begin with these rows of data; raises ValueError if they cannot.

        It is to be closed all the same.
        """

    def generation(
        self, prompts: Sequence[Prompt], params: SamplingParams, cfg: Config
    ) -> SampleRequests:
        """Dialogues for each prompt, which begin at once; `cfg` may be of an evaluation."""

    def generate(self, requests: SampleRequests) -> list[Sample]:
        """All samples, as by `RolloutClient.generate`, while engines do nothing else."""

    def close(self) -> None:
        """Kill what answers the model."""


class EnvironmentDialogues:
    """Dialogues with environments."""

    def __init__(
        self,
        cfg: Config,
        tokenizer: "PreTrainedTokenizerBase",
        end_tokens: Sequence[int],
        client: RolloutClient,
    ) -> None:
        self._tokenizer, self._end_tokens, self._client = tokenizer, end_tokens, client
        self._pool = EnvironmentPool(cfg.environment)
        self.wait_ready, self.close = self._pool.wait_ready, self._pool.close

    def generation(
        self, prompts: Sequence[Prompt], params: SamplingParams, cfg: Config
    ) -> DialogueGeneration:
        """Dialogues for each prompt; their environments start at once."""
        return DialogueGeneration(
            prompts,
            params,
            environments=self._pool,
            turns=Turns.from_config(cfg, self._tokenizer, self._end_tokens),
            max_turns=cfg.environment.max_turns,
        )

    def generate(self, requests: SampleRequests) -> list[Sample]:
        """All samples of `requests`."""
        return self._client.generate(requests)
