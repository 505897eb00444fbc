"""A push of weights: from the trainer's shards over links of their own into the engines' workers.

A transaction. After each part of it all ranks know whether it went well everywhere; until every
worker has been found to hold what the ranks hold, no engine serves anything.
"""

import json
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_convert import ModelShape
from megatron_grpo.config import Config
from megatron_grpo.experience_source import ExperienceSource
from megatron_grpo.failure import broadcast_text, first_failure
from megatron_grpo.rollout import RolloutClient, WorkerSums
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sums import WeightSums, worker_layouts
from parallel import Sender, plan_sends
from parallel.meeting import Board, Meeting, join, local_address, open_meeting
from parallel.transport import TIMEOUT, Invitation, Outbox, bucket_bytes_for, refuse_all

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class WeightSync:
    """Pushes weights to the engines; every rank makes one, and calls `push` together.

    `sender` says what this rank can send, by the local names of its parameters.
    """

    def __init__(
        self, cfg: Config, shape: ModelShape, sender: Sender, device: torch.device, num_hosts: int
    ) -> None:
        self._sender, self._device = sender, device
        self._num_engines = cfg.rollout.num_engines
        self._network_only = cfg.rollout.weight_transport == "network"
        # As the last rank sees it: on rank 0's own host its name may stand for loopback.
        address = meeting_address(cfg.rollout.base_urls, num_hosts, os.environ)
        self._address = broadcast_text(address, device, source=dist.get_world_size() - 1)
        self._dtype = getattr(torch, cfg.model.dtype)
        self._workers = worker_layouts(shape, cfg.rollout)
        self._sums = WeightSums(sender.layout, self._workers, self._dtype)
        self._senders = self._all_senders()
        limit = cfg.rollout.update_weights_bucket_megabytes * 1_000_000
        shard_bytes = max(worker.num_elements for worker in self._workers) * self._dtype.itemsize
        self._bucket_bytes = bucket_bytes_for(limit, self._senders, self._num_engines, shard_bytes)
        max_elements = self._bucket_bytes // self._dtype.itemsize
        self._sends = plan_sends(sender, self._workers, max_elements)
        self._outbox: Outbox | None = None
        self._board: Board | None = None

    def push(
        self,
        parameters: Mapping[str, Tensor],
        source: ExperienceSource | None,
        policy_version: int,
        timer: PhaseTimer,
    ) -> None:
        """Have every engine serve `parameters`, this rank's share, as `policy_version`.

        Rank 0 holds `source`. When it returns, every worker of every engine has been found to hold
        what the ranks hold, and the engines have dropped what they had cached. A push that fails is
        done once more from the start, over new links. After that ConnectionError names engine,
        worker and parameters on rank 0, for which the other ranks wait, and no engine serves
        weights of which not all were right. A time-out of an engine is not tried again: it may
        still be at it.
        """
        with timer.phase("verify_weights"):
            expected = self._sums.of(parameters)
        failure = self._try_push(parameters, source, policy_version, expected, timer)
        if failure is not None:
            self.close()
            if source is not None:
                print(f"a push of weights is tried once more: {failure}", file=sys.stderr)
            failure = self._try_push(parameters, source, policy_version, expected, timer)
        if failure is not None:
            if source is not None:
                raise failure
            dist.barrier()  # which rank 0 leaves out, as it ends the job

    def close(self) -> None:
        """Close this rank's links."""
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = None

    def _try_push(
        self,
        parameters: Mapping[str, Tensor],
        source: ExperienceSource | None,
        policy_version: int,
        expected: Sequence[WorkerSums],
        timer: PhaseTimer,
    ) -> ConnectionError | None:
        """What the first rank that failed has raised, on all ranks; None when none has."""
        push = f"{policy_version}-{uuid.uuid4().hex[:12]}"
        with timer.phase("push"):
            failure = first_failure(lambda: self._begin(source, push), self._device)
            self._board = None  # all that met there have their links, or have failed
            if failure is not None:
                return failure
            broken = first_failure(lambda: self._transfer(parameters, source, push), self._device)
        # The engines are asked in any case: why a link broke may be known at its other end alone.
        with timer.phase("verify_weights"):
            failure = first_failure(lambda: _check(source, push, expected), self._device)
        if failure is None and broken is None:
            with timer.phase("push"):
                failure = first_failure(lambda: _finish(source, push, policy_version), self._device)
        return failure or broken

    def _begin(self, source: ExperienceSource | None, push: str) -> None:
        if self._outbox is None:
            self._outbox = self._connect(source)
        if source is not None:
            with source.engines() as engines:
                engines.begin_push(push)

    def _connect(self, source: ExperienceSource | None) -> Outbox:
        """Meet the workers of the engines; collective over all ranks."""
        meeting = None
        if source is not None:
            meeting, self._board = open_meeting(self._address)
        words = broadcast_text(json.dumps(asdict(meeting)) if meeting else "", self._device)
        invitation = Invitation(
            meeting=Meeting(**json.loads(words)),
            bucket_bytes=self._bucket_bytes,
            num_engines=self._num_engines,
            network_only=self._network_only,
            senders=self._senders,
            zeros=[
                [(name, [*box.start], [*box.size]) for name, box in worker.zeros]
                for worker in self._workers
            ],
        )

        def connect(engines: RolloutClient) -> None:
            try:
                engines.connect(invitation.to_json())
            except OSError as error:
                refuse_all(invitation, str(error))
                raise

        with meanwhile(source, connect):
            return Outbox.open(
                invitation,
                self._board or join(invitation.meeting, TIMEOUT),
                rank=self._sender.rank,
                sends=self._sends,
                dtype=self._dtype,
                device=self._device,
            )

    def _transfer(
        self, parameters: Mapping[str, Tensor], source: ExperienceSource | None, push: str
    ) -> None:
        assert self._outbox is not None
        with meanwhile(source, lambda engines: engines.receive_push(push)):
            self._outbox.send(parameters)

    def _all_senders(self) -> list[list[int]]:
        """Of each worker: the ranks that send to it; collective over all ranks."""
        sends = plan_sends(self._sender, self._workers, max_elements=sys.maxsize)
        mine = torch.zeros(len(self._workers), dtype=torch.uint8, device=self._device)
        mine[list(sends)] = 1
        by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, mine)
        return [column.nonzero().flatten().tolist() for column in torch.stack(by_rank, dim=1)]


def _check(source: ExperienceSource | None, push: str, expected: Sequence[WorkerSums]) -> None:
    if source is not None:
        with source.engines() as engines:
            engines.check_push(push, expected)


def _finish(source: ExperienceSource | None, push: str, policy_version: int) -> None:
    if source is not None:
        with source.engines() as engines:
            engines.finish_push(push, policy_version)


@contextmanager
def meanwhile(
    source: ExperienceSource | None, action: Callable[[RolloutClient], None]
) -> Iterator[None]:
    """Have the engines do `action` beside the block, on rank 0, which holds `source`.

    What they raise goes before what the block raises: a rank sees of a dead engine a broken link.
    """
    if source is None:
        yield
        return

    def act() -> None:
        with source.engines() as engines:
            action(engines)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(act)
        try:
            yield
        finally:
            done.result()


def meeting_address(base_urls: Sequence[str], num_hosts: int, environ: Mapping[str, str]) -> str:
    """The address of rank 0's host at which ranks and workers meet: loopback where that will do.

    Else that of MASTER_ADDR, by which the ranks have met already, or, where they are on one host,
    the one from which an engine on another is reached.
    """
    if num_hosts > 1:
        return socket.gethostbyname(environ["MASTER_ADDR"])
    hosts = [urlsplit(url).hostname or "" for url in base_urls]
    remote = [host for host in hosts if host not in LOOPBACK]
    return local_address(Meeting(remote[0], port=1, key="")) if remote else "127.0.0.1"
