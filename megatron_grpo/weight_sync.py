"""Pushes weights from the trainer's shards into the engines' workers.

Weights travel over channels (`WeightChannels`) or through a folder (`WeightFolder`).

A push is a transaction. After each phase all ranks know whether it succeeded everywhere, and no
engine serves requests until every worker is verified to hold the ranks' weights, by checksums of
every parameter, summed over the ranks.
"""

import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import check_engine
from megatron_grpo.config.config import Config
from megatron_grpo.engine_weights.checksums import NOTHING, sums_of_all_ranks
from megatron_grpo.engine_weights.layouts import shard_bytes, worker_shards
from megatron_grpo.engine_weights.protocol import WorkerSums
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import RolloutAborted
from megatron_grpo.launch.process import Preempted
from megatron_grpo.policy.residency import EVERYTHING_STAYS, Residency
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_transports import WeightChannels, WeightFolder
from parallel import Sender, cut_shares, plan_shares
from parallel.collectives import first_failure, on_rank_0, wait_for_rank_0
from parallel.weight_transfer import bucket_bytes_for


class WeightSync:
    """Pushes weights to the engines; every rank has a `WeightSync`, and all call `push` together.

    `sender`: tensors that this rank can send. `loaded`: `loaded_sums` of weights that engines load
    themselves. Only rank 0 has `engines`. Ranks coordinate over the CPU: a GPU that waits in a
    collective is busy, and an engine may share it.
    """

    def __init__(
        self,
        cfg: Config,
        shape: ModelShape,
        sender: Sender,
        device: torch.device,
        num_hosts: int,
        engines: RolloutClient | None,
        residency: Residency = EVERYTHING_STAYS,
        loaded: Mapping[int, WorkerSums] = NOTHING,
    ) -> None:
        self._engines, self._residency = engines, residency
        shards = worker_shards(cfg, shape)
        workers, self._held, self._loaded = shards.pushed, shards.all, loaded
        self._check_engine = partial(check_engine, shards.all, dtypes=shards.dtypes)
        dtypes = {name: getattr(torch, dtype) for name, dtype in shards.dtypes.items()}
        itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
        shares = plan_shares(sender, workers)
        senders = _all_senders({worker for worker, *_ in shares}, len(workers))
        limit = cfg.rollout.update_weights_bucket_megabytes * 1_000_000
        worker_bytes = shard_bytes(workers, itemsizes)
        bucket_bytes = bucket_bytes_for(limit, senders, cfg.rollout.num_engines, worker_bytes)
        # In elements of the largest dtype: no piece exceeds a bucket in any other.
        sends = cut_shares(shares, bucket_bytes // max(itemsizes.values()))
        self._transport: WeightChannels | WeightFolder
        folder = WeightFolder(cfg, shape, sender, workers, sends, dtypes)
        folder.close()  # removes the folder of a run that was killed in a push
        if cfg.rollout.weight_transport == "disk":
            self._transport = folder
        else:
            self._transport = WeightChannels(
                cfg.rollout,
                workers,
                sends,
                dtypes,
                senders=senders,
                bucket_bytes=bucket_bytes,
                device=device,
                num_hosts=num_hosts,
            )
        self._num_engines, self._chain_number = 0, 0

    def push(
        self, weights: Callable[[], Mapping[str, Tensor]], policy_version: int, timer: PhaseTimer
    ) -> None:
        """Make every healthy engine serve `weights()`, this rank's shard, as `policy_version`.

        Each attempt calls `weights` anew, once the policy's weights are on the GPU. On return,
        every worker of every serving engine is verified to hold the ranks' weights, and engines
        have dropped their caches. A failed push is repeated from the start, over new channels: once
        with the same engines, and again whenever these have changed.

        Raises on all ranks RolloutAborted, when the push fails twice with the same engines (on rank
        0 the text names engine, worker and parameters) or no engine is back within
        `rollout.startup_timeout`; and Preempted, when rank 0 gets the signal to stop while it waits
        for an engine. No engine ever serves weights that failed verification.
        """
        with timer.phase("await_engines"):
            self._agree_on_engines()
        is_repeated = False
        while failure := self._try_push(weights, policy_version, timer):
            self.close()
            with timer.phase("await_engines"):
                has_changed = self._agree_on_engines()
            if is_repeated and not has_changed:
                raise RolloutAborted(str(failure))
            is_repeated = not has_changed
            if self._engines is not None:
                print(f"a push of weights failed and is repeated: {failure}", file=sys.stderr)

    def close(self) -> None:
        self._transport.close()

    def _agree_on_engines(self) -> bool:
        """Broadcast the number of engines; returns whether the engines have changed. Collective.

        If they have, closes the channels to the earlier engines.
        """
        needs_room = torch.tensor(False)
        if self._engines is not None:
            self._engines.update_health(self._check_engine)
            pool = self._engines.pool
            needs_room.fill_(bool(pool.starting) or not pool.up)
        dist.broadcast(needs_room, src=0)
        # A starting engine may share the ranks' GPUs, and vLLM exits at its start unless all of its
        # share of the memory is free: the ranks' state leaves first.
        if needs_room:
            self._residency.enter("generate")
            torch.cuda.empty_cache()
        assembled = on_rank_0(
            self._engines,
            lambda engines: engines.await_engines(self._check_engine),
            (Preempted, RolloutAborted),
        )
        found = torch.tensor(assembled or (0, 0))
        dist.broadcast(found, src=0)
        self._num_engines, chain_number = found.tolist()
        has_changed = chain_number != self._chain_number
        self._chain_number = chain_number
        if has_changed:
            self.close()
        return has_changed

    def _try_push(
        self, weights: Callable[[], Mapping[str, Tensor]], policy_version: int, timer: PhaseTimer
    ) -> ConnectionError | None:
        """Push once; returns on all ranks the error of the first rank that failed, or None."""
        engines, transport = self._engines, self._transport
        # Unique per attempt: the report of an earlier push, or of another trainer's with the same
        # version, must not pass for this one's.
        push = f"{policy_version}-{uuid.uuid4().hex[:12]}"
        # The ranks' weights return to GPU memory that caches of engines may use.
        if "weights" in self._residency.away:
            with timer.phase("sleep"):
                if engines is not None:
                    engines.sleep()
                wait_for_rank_0()
        with timer.phase("push"):
            self._residency.enter("push")
            parameters = weights()
            # A push only reads the parts that leave after it, so copies may start now.
            self._residency.copy_ahead("generate")
            if failure := _failure_of(lambda: transport.open(engines, self._num_engines)):
                return failure
            if failure := _failure_of(lambda: engines.begin_push(push) if engines else None):
                return failure
            transport.prepare(parameters)
            sent: dict[int, WorkerSums] = {}
            broken = _failure_of(lambda: sent.update(transport.send(engines, push, parameters)))
        # Ask the engines in any case: only the other end of a broken channel may know why it broke.
        with timer.phase("verify_weights"):
            expected = None if broken else sums_of_all_ranks(sent, self._held, self._loaded)
            failure = _failure_of(lambda: engines.check_push(push, expected) if engines else None)
        if failure is None and broken is None:
            with timer.phase("push"):
                self._residency.enter("generate")  # engines in sleep mode now wake their caches
                failure = _failure_of(
                    lambda: engines.finish_push(push, policy_version) if engines else None
                )
            transport.finish()
        return failure or broken


_failure_of = partial(first_failure, kind=ConnectionError)
"""Run the action of a phase; returns on all ranks the error of the first rank that failed."""


def _all_senders(own: set[int], num_workers: int) -> list[list[int]]:
    """Ranks that send to each worker; `own`: workers that this rank sends to. Collective."""
    mine = torch.zeros(num_workers, dtype=torch.uint8)
    mine[list(own)] = 1
    by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, mine)
    return [column.nonzero().flatten().tolist() for column in torch.stack(by_rank, dim=1)]
