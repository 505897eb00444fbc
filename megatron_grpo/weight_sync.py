"""A push of weights: from the trainer's shards into the engines' workers.

It goes over channels of its own, or through a folder (`WeightFolder`).

A push is a transaction. After each phase, all ranks know whether it succeeded everywhere, and no
engine serves requests until every worker is verified to hold the same weights as the ranks, by
checksums of every parameter that are summed over the ranks.
"""

import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from checkpoint_convert.vllm import check_engine
from megatron_grpo.config.config import Config
from megatron_grpo.engines.client import RolloutClient, meanwhile
from megatron_grpo.engines.http import RolloutAborted
from megatron_grpo.engines.layouts import holdings, shard_bytes
from megatron_grpo.engines.push_protocol import WorkerSums
from megatron_grpo.engines.pushed import NOTHING, sums_of_all_ranks
from megatron_grpo.launch.process import Preempted
from megatron_grpo.policy.residency import EVERYTHING_STAYS, Residency
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_folder import WeightFolder
from parallel import Sender, cut_shares, plan_shares
from parallel.collectives import broadcast_text, first_failure, on_rank_0, wait_for_rank_0
from parallel.weight_transfer import (
    TIMEOUT,
    Rendezvous,
    RendezvousAddress,
    TransferInitInfo,
    WeightSender,
    bucket_bytes_for,
    join,
    open_rendezvous,
    rendezvous_address,
)


class WeightSync:
    """Pushes weights to the engines; every rank makes one, and all call `push` together.

    `sender` describes what this rank can send, by the local names of its parameters; `loaded` has
    the `loaded_sums` of what engines hold besides. Only rank 0 has `engines`. Ranks coordinate over
    the CPU: a GPU that waits in a collective is busy, and an engine may share it.
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
        self._sender, self._device, self._engines = sender, device, engines
        self._residency = residency
        self._network_only = cfg.rollout.weight_transport == "network"
        # As resolved by the last rank: on rank 0's own host, its name may resolve to loopback.
        address = rendezvous_address(cfg.rollout.base_urls, num_hosts, os.environ)
        self._address = broadcast_text(address, source=dist.get_world_size() - 1)
        held = holdings(cfg, shape)
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in held.dtypes.items()}
        self._workers, self._held, self._loaded = held.pushed, held.all, loaded
        shares = plan_shares(sender, self._workers)
        self._senders = self._all_senders({worker for worker, *_ in shares})
        limit = cfg.rollout.update_weights_bucket_megabytes * 1_000_000
        itemsizes = {name: dtype.itemsize for name, dtype in self._dtypes.items()}
        self._bucket_bytes = bucket_bytes_for(
            limit,
            self._senders,
            cfg.rollout.num_engines,
            shard_bytes(self._workers, itemsizes),
        )
        self._sends = cut_shares(shares, self._bucket_bytes // max(itemsizes.values()))
        self._check_engine = partial(check_engine, held.all, dtypes=held.dtypes)
        self._num_engines, self._chain_number = 0, 0
        folder = WeightFolder(cfg, shape, sender, self._workers, self._sends, self._dtypes)
        folder.close()  # that of a run which was killed in a push
        self._folder = folder if cfg.rollout.weight_transport == "disk" else None
        self._weight_sender: WeightSender | WeightFolder | None = None
        self._rendezvous: Rendezvous | None = None

    def push(
        self,
        parameters: Mapping[str, Tensor],
        policy_version: int,
        timer: PhaseTimer,
    ) -> None:
        """Make every healthy engine serve `parameters`, this rank's shard, as `policy_version`.

        On return, every worker of every serving engine is verified to hold the same weights as the
        ranks, and the engines have dropped their caches. A push that fails is repeated once from
        the start, over new channels. If an engine has failed, the push goes to the others, and may
        again be repeated once.

        Raises on all ranks: RolloutAborted, when the push fails twice with the same engines or no
        engine is back within `rollout.startup_timeout` (its text on rank 0 names the engine, worker
        and parameters; no engine ever serves weights that failed verification); Preempted, when
        rank 0 was told to stop while waiting for an engine.
        """
        with timer.phase("await_engines"):
            self._assemble()
        is_repeated = False
        while failure := self._try_push(parameters, policy_version, timer):
            self.close()
            with timer.phase("await_engines"):
                has_changed = self._assemble()
            if is_repeated and not has_changed:
                raise RolloutAborted(str(failure))
            is_repeated = not has_changed
            if self._engines is not None:
                print(f"a push of weights failed and is repeated: {failure}", file=sys.stderr)

    def close(self) -> None:
        """Close this rank's channels."""
        if self._weight_sender is not None:
            self._weight_sender.close()
        self._weight_sender = None

    def _assemble(self) -> bool:
        """Tell all ranks how many engines the push is for; returns whether the engines changed.

        If they did, the channels to the earlier ones are closed.
        """

        def assemble(engines: RolloutClient) -> tuple[int, int]:
            try:
                return engines.assemble(self._check_engine)
            except ConnectionError as error:
                raise RolloutAborted(str(error)) from None

        self._make_room()
        assembled = on_rank_0(self._engines, assemble, (Preempted, RolloutAborted))
        found = torch.tensor(assembled or (0, 0))
        dist.broadcast(found, src=0)
        self._num_engines, chain_number = found.tolist()
        has_changed = chain_number != self._chain_number
        self._chain_number = chain_number
        if has_changed:
            self.close()
        return has_changed

    def _make_room(self) -> None:
        """Find lost engines, and free GPU memory if one is starting again. Collective.

        That engine may share GPUs with the ranks, and vLLM ends unless all of its share is free. So
        the ranks release unused memory and move their state away, as before a generation.
        """
        needs_room = torch.tensor(False)
        if self._engines is not None:
            self._engines.take_stock(self._check_engine)
            pool = self._engines.pool
            needs_room.fill_(bool(pool.starting) or not pool.up)
        dist.broadcast(needs_room, src=0)
        if needs_room:
            self._residency.enter("generate")
            torch.cuda.empty_cache()

    def _try_push(
        self,
        parameters: Mapping[str, Tensor],
        policy_version: int,
        timer: PhaseTimer,
    ) -> ConnectionError | None:
        """Returns on all ranks the error of the first rank that failed; None if none did."""
        push = f"{policy_version}-{uuid.uuid4().hex[:12]}"
        self._take_caches(timer)
        with timer.phase("push"):
            self._residency.enter("push")
            self._residency.copy_ahead("generate")  # a push only reads what leaves after it
            failure = first_failure(lambda: self._begin(push), ConnectionError)
            self._rendezvous = None  # all have their channels, or have failed
            if failure is not None:
                return failure
            if self._folder is not None:
                self._folder.write(parameters)  # the workers find all of it
            sent: dict[int, WorkerSums] = {}
            broken = first_failure(
                lambda: sent.update(self._transfer(parameters, push)), ConnectionError
            )
        # Ask the engines in any case: only the other end of a broken channel may know why it broke.
        with timer.phase("verify_weights"):
            expected = None if broken else sums_of_all_ranks(sent, self._held, self._loaded)
            failure = self._ask_engines(lambda engines: engines.check_push(push, expected))
        if failure is None and broken is None:
            with timer.phase("push"):
                self._residency.enter("generate")  # engines in sleep mode now wake their caches
                failure = self._ask_engines(
                    lambda engines: engines.finish_push(push, policy_version)
                )
        if failure is None and broken is None and self._folder is not None:
            self._folder.close()
        return failure or broken

    def _take_caches(self, timer: PhaseTimer) -> None:
        """Let engines sleep if their caches may be where this rank's weights go. Collective."""
        if "weights" not in self._residency.away:
            return
        with timer.phase("sleep"):
            if self._engines is not None:
                self._engines.sleep()
            wait_for_rank_0()

    def _ask_engines(self, ask: Callable[[RolloutClient], None]) -> ConnectionError | None:
        """`ask` the engines on rank 0; returns on all ranks the error, if any."""
        engines = self._engines
        return first_failure(lambda: ask(engines) if engines else None, ConnectionError)

    def _begin(self, push: str) -> None:
        if self._weight_sender is None:
            self._weight_sender = self._open_channels()
        if self._engines is not None:
            self._engines.begin_push(push)

    def _open_channels(self) -> WeightSender | WeightFolder:
        """Open channels to the workers of the engines; collective over all ranks."""
        if self._folder is not None:
            if self._engines is not None:
                self._engines.open_channels(self._folder.init_info, lambda: True)
            return self._folder
        address = None
        if self._engines is not None:
            address, self._rendezvous = open_rendezvous(self._address)
        text = broadcast_text(json.dumps(asdict(address)) if address else "")
        init_info = TransferInitInfo(
            rendezvous=RendezvousAddress(**json.loads(text)),
            bucket_bytes=self._bucket_bytes,
            num_engines=self._num_engines,
            network_only=self._network_only,
            senders=self._senders,
            zeros=[
                [(name, [*box.start], [*box.size]) for name, box in worker.zeros]
                for worker in self._workers
            ],
        )

        def open_channels(engines: RolloutClient, is_sending: Callable[[], bool]) -> None:
            try:
                engines.open_channels(init_info.to_json(), is_sending)
            except OSError as error:
                join(init_info.rendezvous, TIMEOUT).publish_failure(str(error))
                raise

        with meanwhile(self._engines, open_channels):
            return WeightSender(
                init_info,
                self._rendezvous or join(init_info.rendezvous, TIMEOUT),
                rank=self._sender.rank,
                sends=self._sends,
                shapes=[worker.shapes for worker in self._workers],
                dtypes=self._dtypes,
                device=self._device,
            )

    def _transfer(self, parameters: Mapping[str, Tensor], push: str) -> Mapping[int, WorkerSums]:
        """Send this rank's share; returns the checksums of what it has sent, by worker."""
        assert self._weight_sender is not None

        def receive(engines: RolloutClient, is_sending: Callable[[], bool]) -> None:
            is_reading = self._folder is not None
            engines.receive_push(push, lambda: is_reading or is_sending())

        with meanwhile(self._engines, receive):
            return self._weight_sender.send_weights(parameters)

    def _all_senders(self, own: set[int]) -> list[list[int]]:
        """The ranks that send to each worker; `own` are the workers of this rank. Collective."""
        mine = torch.zeros(len(self._workers), dtype=torch.uint8)
        mine[list(own)] = 1
        by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, mine)
        return [column.nonzero().flatten().tolist() for column in torch.stack(by_rank, dim=1)]
