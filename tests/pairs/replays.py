"""Two optimizer steps by the trainer of a run, on made-up generations and with no engines.

A push goes as far as the engines' side: the state moves, and what would be sent is made.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from checkpoint_convert.tokenizer import load_tokenizer
from helpers.models.images import picture, tiny_vision_model
from helpers.models.tiny import add_mtp_layer, tiny_model
from helpers.oracle.optimizers import allow_offload
from helpers.oracle.policies import Boxes, boxes_of, whole
from helpers.oracle.routes import EXPERTS, INDEX_TOPK, LAYERS, ROUTED, TOPK
from helpers.oracle.rows import SMALL, in_buckets
from helpers.ranks.processes import run_ranks
from helpers.runs.rewards import sample_of
from megatron_grpo.batch.experience import Experience
from megatron_grpo.config.config import Config
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.data.samples import Sample
from megatron_grpo.data.stream import PromptStream
from megatron_grpo.engine_weights.checksums import pushed_weights
from megatron_grpo.launch.launch import RankPlace
from megatron_grpo.policy.chunks import gather_weights
from megatron_grpo.rank import Rank
from megatron_grpo.rollout.generation import RolloutBatch
from megatron_grpo.rollout.replay import write_generation
from megatron_grpo.rollout.services import load_stream
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.trainer import Trainer
from megatron_grpo.watchdog import Limits, Watchdog
from parallel import ParallelDims
from parallel.cpu_device import setup_device
from parallel.groups import Groups, init_groups

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES = 2, 2, 4
"""Steps, each on a generation of its own, and prompts and samples of each of a generation."""
STEPS = [
    f"train.num_steps={NUM_STEPS}",
    f"grpo.generation_batch_size={NUM_PROMPTS * NUM_SAMPLES}",
    f"grpo.num_generations={NUM_SAMPLES}",
    "grpo.rollout_importance_sampling_mode=token_truncate",
    "rollout.temperature=0.8",
    "optimizer.lr=1e-3",
    "optimizer.weight_decay=0.1",
    # As large as elements of a clipped gradient: else Adam turns rounding errors into full steps.
    "optimizer.adam_eps=1e-3",
    # Which `parallel.overlap_param_gather` needs: buckets change the order of sums.
    "parallel.overlap_grad_reduce=true",
]


def make_model(folder: Path, family: str) -> Path:
    """A model of the sizes that the oracles of routers and indexers know."""
    sizes = ROUTED.get(family.replace("_vl", ""), {})
    if family == "qwen3_vl_moe":
        return tiny_vision_model(folder, family, **sizes)
    model = tiny_model(folder, family, **sizes)
    return add_mtp_layer(model) if family == "glm4_moe" else model


def write_rows(folder: Path) -> Path:
    """Write the prompts of all generations, each with a picture."""
    folder.mkdir()
    rows = []
    for number in range(NUM_STEPS * NUM_PROMPTS):
        picture(60 + 20 * number, 70, number).save(folder / f"{number}.png")
        words = "What is it? " * (number + 1)
        rows.append({"prompt": words, "answer": "a", "image": f"{number}.png"})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def completions(cfg: Config, stream: PromptStream, generation: int) -> list[Sample]:
    """Random completions of prompts of their own, with choices of routers and indexers if they are
    replayed."""
    generator = torch.Generator().manual_seed(generation)
    samples = []
    for prompt in stream.prompts[NUM_PROMPTS * generation :][:NUM_PROMPTS]:
        for number in range(NUM_SAMPLES):
            length = int(torch.randint(1, 13, (), generator=generator))
            tokens = torch.randint(4, 240, (length,), generator=generator)
            logprobs = -5.5 + 0.3 * torch.randn(length, generator=generator)
            values = {"completion_ids": tokens.tolist(), "logprobs": logprobs.tolist()}
            routes = choices(cfg, len(prompt.token_ids) + length - 1, generator)
            samples.append(sample_of("", {}, 0, number, prompt, routes=routes, **values))
    return samples


def choices(cfg: Config, seen: int, generator: torch.Generator) -> np.ndarray | None:
    """Random experts, and random earlier tokens, of `seen` tokens at each layer."""
    parts = []
    if cfg.rollout.router_replay:
        scores = torch.rand(seen, LAYERS, EXPERTS, generator=generator)
        parts.append(scores.topk(TOPK).indices)
    if cfg.rollout.indexer_replay:
        scores = torch.rand(seen, LAYERS, seen, generator=generator)
        future = torch.ones(seen, seen).triu(1).bool()[:, None]
        parts.append(scores.masked_fill(future, -1).topk(INDEX_TOPK).indices)
    dtype = torch.int16 if cfg.rollout.indexer_replay else torch.uint8
    return torch.cat(parts, dim=2).to(dtype).numpy() if parts else None


def generation_of(cfg: Config, stream: PromptStream, generation: int) -> Experience:
    """Completions with random advantages."""
    samples = completions(cfg, stream, generation)
    generator = torch.Generator().manual_seed(100 + generation)
    advantages = torch.randn(len(samples), generator=generator, dtype=torch.float64)
    ids = torch.tensor([sample.prompt.index for sample in samples])
    rewards = [{"share_of_digits": each} for each in advantages.tolist()]
    return Experience(samples, rewards, advantages + 1, ids, advantages)


def record(cfg: Config, first: int = 0) -> list[Experience]:
    """Write the generations from number `first` on to the folder that the config replays."""
    stream = load_stream(cfg, trained_shape(cfg), load_tokenizer(cfg.model.path))
    made = [generation_of(cfg, stream, number) for number in range(first, NUM_STEPS)]
    train = cfg.train.model_copy(update={"run_dir": cfg.train.replay})
    written = cfg.model_copy(update={"train": train})
    for number, experience in enumerate(made):
        write_generation(written, number, RolloutBatch(experience, {}), stream.fingerprint)
    return made


class PushesToNobody(Trainer):
    """A trainer that makes what it would push, and moves its state as for engines that sleep."""

    def push(self, policy_version: int, timer: PhaseTimer | None = None) -> None:
        gather_weights(self.policy.chunks)
        self.residency.enter("push")
        weights = pushed_weights(self.policy, self.cfg, self.rank.groups)
        self.pushed = {name: values.detach().clone() for name, values in weights.items()}
        self.residency.copy_ahead("generate")
        self.residency.enter("generate")
        # Engines write to the memory that the state has left.
        [torch.full(room.values.shape, 255, dtype=torch.uint8) for room in self.residency.rooms]
        self._engines_are_awake = self.cfg.rollout.enable_sleep_mode

    def sleep_engines(self) -> None:
        self.residency.enter("log-probabilities")
        self._engines_are_awake = False


Metrics = list[dict[str, float]]
"""Of each step."""
Tensors = dict[str, Tensor]
Trained = tuple[Metrics, list[Tensors]]
"""Metrics, and trained weights before the first step and after each."""


def train(cfg: Config, groups: Groups, number: int) -> tuple[Metrics, list[Boxes]]:
    """Train a run to its end on a rank; `number` tells it from others of the process."""
    place = RankPlace(groups.rank, groups.rank, dist.get_world_size(), num_hosts=1)
    store = PrefixStore(str(number), dist.distributed_c10d._get_default_store())
    limits, cpu = Limits.from_config(cfg, on_gpu=False), torch.device("cpu")
    reports = []
    with Watchdog(place, store, limits, cfg.train.run_dir) as watchdog, ExitStack() as stack:
        # A replay moves nothing, as it has no engines; here pushes move it as beside engines.
        moved = patch.object(Config, "offload", cfg.train.offload)
        with in_buckets(SMALL), moved:
            trainer = PushesToNobody(Rank(cfg, groups, cpu, 1, None, watchdog), stack)
        stack.push(watchdog.report)
        weights = trainer.policy.saved_parameters()
        trained: Any = trainer.policy.adapters or trainer.policy
        boxes = [boxes_of(trained, weights)]
        trainer.push(0)
        trainer.start()
        while trainer.step < trainer.num_steps:
            report = trainer.update(trainer.next_minibatch())
            reports.append(report.metrics)
            gather_weights(trainer.policy.chunks)
            boxes.append(boxes_of(trained, weights))
            trainer.log(report)
            trainer.boundary()
            trainer.save()
    return reports, boxes


@dataclass(frozen=True)
class World:
    """Ranks that train one run after the other."""

    dims: ParallelDims
    dynamic_context: bool = False
    host_optimizer: bool = False

    def train(self, configs: Sequence[Config]) -> list[Trained]:
        """Results of each run."""
        size, timeout = self.dims.world_size, 60 + 20 * len(configs)
        ranks = run_ranks(size, self.on_rank, configs, timeout=timeout)
        return [
            (
                of_run[0][0],
                [whole(each) for each in zip(*(boxes for _, boxes in of_run), strict=True)],
            )
            for of_run in zip(*ranks, strict=True)
        ]

    def on_rank(self, rank: int, configs: Sequence[Config]) -> list[tuple[Metrics, list[Boxes]]]:
        setup_device(rank)
        if self.host_optimizer:
            allow_offload()
        groups = init_groups(self.dims, dynamic_context=self.dynamic_context)
        return [train(cfg, groups, number) for number, cfg in enumerate(configs)]
