"""Pushes of weights into running engines by ranks of a trainer."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert import hf_export, read_shape
from checkpoint_convert.megatron import file_layout
from checkpoint_convert.quantized.shard import quantized_tensors
from checkpoint_convert.weights import whole_tensors
from helpers.engines.sampling import event_loop
from helpers.oracle.policies import start_policy, tiny_config
from helpers.ranks.processes import run_ranks
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.config.train import ModelConfig
from megatron_grpo.config.trained_shape import trained_shape
from megatron_grpo.engine_weights.checksums import pushed_sender, pushed_weights, sums_of_all_ranks
from megatron_grpo.engine_weights.protocol import WorkerSums
from megatron_grpo.engines.client import RolloutClient
from megatron_grpo.engines.http import EngineError
from megatron_grpo.engines.pool import EnginePool
from megatron_grpo.engines.server import EngineServers
from megatron_grpo.policy.export import export_model
from megatron_grpo.policy.model import Policy, weight_sender
from megatron_grpo.timing import PhaseTimer
from megatron_grpo.weight_sync import WeightSync
from parallel import Layout, ParallelDims, Sender, plan_sends
from parallel.checksum import added_up
from parallel.groups import Groups
from parallel.weight_transfer.local_channels import LocalChannel
from parallel.weight_transfer.network_channels import NetworkChannel
from parallel.weight_transfer.streams import OutStream, Packing

BUCKET_BYTES = 1 << 14
"""Bucket size of `sums_of_push`: several buckets for each worker."""


def client_of(base_urls: Sequence[str], token: str, **rollout: Any) -> RolloutClient:
    """Rank 0's client of the engines at `base_urls`."""
    overrides: dict[str, Any] = {"max_completion_length": 16, "startup_timeout": 3.0} | rollout
    config = RolloutConfig(base_urls=tuple(base_urls), **overrides)
    servers = EngineServers(ModelConfig(path=Path("unused")), config, Path("unused"), token)
    return RolloutClient(EnginePool(servers, config), config, event_loop())


def push_folder(
    folder: Path,
    rollout: RolloutConfig,
    base_urls: Sequence[str],
    token: str,
    version: int,
    num_flips: int = 0,
) -> None:
    """Push the weights in `folder` from a single rank that holds all of them."""
    overrides = rollout_overrides(rollout, base_urls)
    [(error, _)] = run_ranks(
        1, push_whole, folder, token, overrides, version, num_flips, rollout.quantization
    )
    if error:
        raise EngineError(error)


def rollout_overrides(rollout: RolloutConfig, base_urls: Sequence[str]) -> list[str]:
    """Overrides of the tiny config for the engines at `base_urls`."""
    expert_parallel = str(rollout.vllm.get("enable_expert_parallel", False)).lower()
    return [
        f"model.dtype={'float32' if rollout.quantization == 'none' else 'bfloat16'}",
        f"rollout.quantization={rollout.quantization}",
        f"rollout.quantization_ignore={json.dumps(rollout.quantization_ignore)}",
        f"rollout.engine={rollout.engine}",
        f"rollout.base_urls=[{', '.join(base_urls)}]",
        f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}",
        f"rollout.data_parallel_size={rollout.data_parallel_size}",
        f"rollout.enable_sleep_mode={str(rollout.enable_sleep_mode).lower()}",
        f"rollout.max_staleness={rollout.max_staleness}",
        f"grpo.old_logprobs={'rollout' if rollout.max_staleness else 'recompute'}",
        f"rollout.in_flight_updates={str(rollout.in_flight_updates).lower()}",
        f"rollout.recompute_kv_cache={str(rollout.recompute_kv_cache).lower()}",
        *([f"rollout.vllm.enable_expert_parallel={expert_parallel}"] if rollout.vllm else []),
        f"rollout.sglang={json.dumps(rollout.sglang)}",
    ]


def push_whole(
    rank: int,
    folder: Path,
    token: str,
    overrides: Sequence[str],
    version: int,
    num_flips: int = 0,
    quantization: str = "none",
) -> tuple[str, list[str]]:
    """Push the weights in `folder` from a single rank; returns the error and the timed phases.

    A bit is flipped in each of the first `num_flips` buffers.
    """
    flip_bits(num_flips)
    if quantization == "none":
        layout = file_layout(read_shape(folder))
        weights = {name: t.view(layout.shapes[name]) for name, t in whole_tensors(folder)}
    else:
        weights = dict(quantized_tensors(folder, quantization))
        layout = Layout.of_whole_tensors({name: tuple(t.shape) for name, t in weights.items()})
    sender = Sender(rank, layout, dict.fromkeys(weights, range(1)))
    return push(rank, folder, ParallelDims(), token, overrides, sender, weights, version)


def push_policy(
    rank: int,
    folder: Path,
    dims: ParallelDims,
    token: str,
    overrides: Sequence[str],
    version: int,
    num_flips: int = 0,
) -> tuple[str, list[str]]:
    """Push from one rank of a policy that is sharded by `dims`; only rank 0 flips bits."""
    flip_bits(num_flips if rank == 0 else 0)
    policy, groups = start_policy(rank, folder, dims, *overrides)
    cfg = tiny_config(folder, dims, *overrides)
    sender = pushed_sender(policy, weight_sender(policy, groups), cfg, groups)
    weights = pushed_weights(policy, cfg, groups)
    return push(rank, folder, dims, token, overrides, sender, weights, version)


def export_quantized(
    rank: int, folder: Path, dims: ParallelDims, scheme: str, out: Path, ignore: Sequence[str] = ()
) -> None:
    """Export a policy with the weights in `folder` as a quantised folder, from one of its ranks."""
    overrides = (
        "model.dtype=bfloat16",
        f"train.export_quantization={scheme}",
        f"rollout.quantization_ignore={json.dumps([*ignore])}",
    )
    policy, groups = start_policy(rank, folder, dims, *overrides)
    export_model(out, policy, tiny_config(folder, dims, *overrides), groups)


def push(
    rank: int,
    folder: Path,
    dims: ParallelDims,
    token: str,
    overrides: Sequence[str],
    sender: Sender,
    parameters: Mapping[str, Tensor],
    version: int,
) -> tuple[str, list[str]]:
    cfg = tiny_config(folder, dims, *overrides)
    timer = PhaseTimer(lambda name: None)
    keys = "enable_sleep_mode", "max_staleness", "in_flight_updates", "recompute_kv_cache"
    engines = None
    if rank == 0:
        chosen = cfg.rollout.model_dump(include={*keys})
        engines = client_of(cfg.rollout.base_urls, token, **chosen)
    with closing(
        WeightSync(cfg, trained_shape(cfg), sender, torch.device("cpu"), 1, engines)
    ) as sync:
        try:
            sync.push(lambda: parameters, version, timer)
        except ConnectionError as failure:
            return str(failure), list(timer.metrics())
    return "", list(timer.metrics())


def flip_bits(num_flips: int) -> None:
    """Flip the lowest bit of one byte in each of the next `num_flips` buffers that this process
    sends, or boxes that it writes."""
    left = iter(range(num_flips))

    def writing(file, place, box, values, write_box=hf_export.write_box) -> None:
        if next(left, None) is not None:
            values = values.clone()
            values.view(torch.uint8).view(-1)[0] ^= 1
        write_box(file, place, box, values)

    hf_export.write_box = writing
    for end in (LocalChannel, NetworkChannel):

        def remembering(self, next_buffer=end.next_buffer) -> Tensor:
            self.filled = next_buffer(self)
            return self.filled

        def flipping(self, num_bytes: int, send_bucket=end.send_bucket) -> None:
            if next(left, None) is not None:
                self.filled[num_bytes - 1] ^= 1
            send_bucket(self, num_bytes)

        end.next_buffer, end.send_bucket = remembering, flipping


class Nowhere:
    """A channel that discards its buffers."""

    def next_buffer(self) -> torch.Tensor:
        return torch.empty(BUCKET_BYTES, dtype=torch.uint8)

    def send_bucket(self, num_bytes: int) -> None:
        pass

    def flush(self) -> None:
        pass


def sums_of_push(
    policy: Policy, groups: Groups, workers: Sequence[Layout], dtype: torch.dtype
) -> Sequence[WorkerSums]:
    """Checksums that the ranks expect from the workers after a push of the policy."""
    sent = {}
    sends = plan_sends(weight_sender(policy, groups), workers, BUCKET_BYTES // dtype.itemsize)
    for worker, copies in sends.items():
        boxes = [copy.destination_box for copy in copies]
        packing = Packing(boxes, [dtype] * len(boxes), BUCKET_BYTES)
        stream = OutStream(Nowhere(), copies, workers[worker].shapes, packing, torch.device("cpu"))
        sent[worker] = added_up(stream.send_boxes(policy.parameters()))
    return sums_of_all_ranks(sent, workers)
