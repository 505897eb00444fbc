"""Services for rollouts on rank 0: engines, prompts, partners and rewards."""

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import check_engine
from megatron_grpo.agents.partners import Partners
from megatron_grpo.bars import Show, waiting
from megatron_grpo.config.config import Config
from megatron_grpo.config.reward import served_here
from megatron_grpo.data.prompts import end_tokens, load_prompts
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engine_weights.layouts import worker_shards
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.pool import EnginePool, JoinFolder
from megatron_grpo.engines.request import SamplingParams
from megatron_grpo.engines.reward_models import RewardModels
from megatron_grpo.engines.router import RequestRouter
from megatron_grpo.engines.server import EngineServers
from megatron_grpo.evaluation.evaluation import Evaluations
from megatron_grpo.rewards.by_source import RewardsBySource, reference_faults
from megatron_grpo.rewards.pool import RewardPools
from megatron_grpo.rollout.scorer import GroupScorer
from megatron_grpo.workers.event_loop import EventLoop

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_stream(
    cfg: Config, shape: ModelShape, tokenizer: "PreTrainedTokenizerBase"
) -> PromptStream:
    """Load the prompts of a run, without warnings: the preflight has printed them."""
    context, fault_of = shape.max_position_embeddings, reference_faults(cfg)
    prompts = load_prompts(cfg, tokenizer, context, fault_of=fault_of, warns=False)
    return PromptStream.of(cfg, prompts)


class RolloutServices:
    """Engines, prompts, partners and rewards of a run. Engines started here leave the first
    `num_ranks` GPUs of this host to its trainer ranks."""

    def __init__(self, cfg: Config, shape: ModelShape, token: str | None, num_ranks: int) -> None:
        # Imported here because transformers takes a second, which no other rank needs.
        from checkpoint_convert.tokenizer import load_tokenizer  # noqa: PLC0415

        self.cfg, self.shape = cfg, shape
        self.loop = EventLoop()
        # First: the engines load while the trainer builds its model.
        logs = cfg.train.run_dir / "logs"
        self.servers = EngineServers(
            cfg.model, cfg.rollout, logs, token, num_ranks, cfg.lora, cfg.completions_per_engine
        )
        served = served_here(cfg.rewards.values())
        self.pools = RewardPools(
            RewardModels(served, cfg.rollout, logs, num_ranks, self.servers) if served else None
        )
        self.rewards = RewardsBySource(cfg.by_source, self.pools)
        tokenizer = load_tokenizer(cfg.model.path)
        pool = EnginePool(self.servers, cfg.rollout, JoinFolder.of_run(cfg))
        # A push that fills the vision tower outdates cached image features; SGLang's workers drop
        # them by themselves.
        keeps_features = cfg.model.freeze_vision or cfg.rollout.engine != "vllm"
        self.engines = RolloutClient(
            pool, cfg.rollout, self.loop, cfg.lora, keeps_features=keeps_features
        )
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        # No streams with router_replay: chunks do not contain the experts of tokens.
        streams = cfg.rollout.in_flight_updates and not cfg.rollout.router_replay
        self.router = RequestRouter(self.engines, decode, streams=streams)
        self.scorer = GroupScorer(cfg, self.rewards, decode)
        ends, rollout = end_tokens(shape, tokenizer, cfg.rollout), cfg.rollout
        self.tokenizer = tokenizer
        self.partners = Partners(cfg, tokenizer, ends, self.engines)
        self.groups = self.partners.groups(cfg)
        replayed = shape.indexer if rollout.indexer_replay else None
        self.params = SamplingParams(
            num_generations=cfg.grpo.num_generations,
            policy_version=0,
            temperature=rollout.temperature,
            max_completion_length=rollout.max_completion_length,
            stop_token_ids=ends,
            stop=rollout.stop,
            router_replay=rollout.router_replay,
            index_topk=replayed.topk if replayed else 0,
            seed=cfg.train.seed,
            series=0,
        )
        """Parameters of the first group; others replace version, seed, series and position."""
        self.stream = load_stream(cfg, shape, tokenizer)
        self.eval_router = RequestRouter(self.engines, decode, streams=False)
        """For the probe and evaluations, which sample while `router` is aborted."""
        self.evaluations = Evaluations(
            cfg, shape, tokenizer, self.eval_router, self.pools, self.partners
        )

    def wait_for_memory(self) -> None:
        """Return when engines that share GPUs with trainer ranks have reserved their memory, or, in
        sleep mode, given it back. Raises what `wait_ready` raises."""
        # At their start engines measure the free memory: trainer ranks must not allocate meanwhile.
        with waiting(self.servers.awaited, "answer") as show:
            if self.cfg.rollout.enable_sleep_mode:
                self.wait_ready(show)
                self.engines.sleep()
            elif self.servers.share_gpus:
                self.servers.wait_ready(self.cfg.rollout.startup_timeout, show)

    def wait_ready(self, show: Show) -> None:
        """Return when every engine answers. Raises when one is dead or late, and ValueError with
        the names of an engine's parameters that a push would not fill."""
        self.servers.wait_ready(self.cfg.rollout.startup_timeout, show)
        held = worker_shards(self.cfg, self.shape)
        for url, workers in self.engines.describe_parameters().items():
            try:
                check_engine(held.all, workers, held.dtypes)
            except ValueError as error:
                raise ValueError(f"rollout engine {url}: {error}") from None

    def cancel(self) -> None:
        """End a running rollout, evaluation or wait for engines soon; safe from any thread."""
        self.engines.cancel()
        self.pools.cancel()

    def close(self) -> None:
        self.cancel()
        with ExitStack() as stack:
            stack.callback(self.loop.close)
            stack.callback(self.servers.close)
            stack.callback(self.engines.close)
            stack.callback(self.pools.close)
            stack.callback(self.partners.close)
            # Last in, first out: routers close first, since they would restart ended engines.
            stack.callback(lambda: self.loop.call(self.eval_router.close()))
            stack.callback(lambda: self.loop.call(self.router.close()))
