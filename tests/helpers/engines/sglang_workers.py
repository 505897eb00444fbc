"""SGLang workers without an engine: the parameters that SGLang's own loader gives each.

    ENGINE_POSES=unkernelled python -m helpers.engines.sglang_workers CASES.json OUT.json

`CASES` lists for each engine its server's arguments and number of workers; `OUT` gets the shape and
checksum of every parameter of each worker. Workers are made one after the other, each in a fork of
a process that has imported SGLang, and do not communicate.
"""

import json
import os
import sys
from pathlib import Path

import sglang.srt.models.registry  # noqa: F401  # imports all models
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.server_args import prepare_server_args
from torch.nn import Module
from torch.testing._internal.distributed.fake_pg import FakeStore

import helpers.engines.sglang_server  # noqa: F401  # lets models with sparse attention be made
from engines_on_cpu.sglang_attention import attend_by_torch
from megatron_grpo.engine_weights.protocol import pushable_parameters
from parallel.checksum import whole_checksum

new_group = dist.new_group


def loaded_model(flags: list[str], rank: int, num_workers: int) -> Module:
    """Shape and checksum of every parameter that worker `rank` of an engine loads."""
    arguments = prepare_server_args(flags)
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    dist.init_process_group("fake", rank=rank, world_size=num_workers, store=FakeStore())
    dist.new_group = lambda ranks=None, *args, **kwargs: new_group(ranks, backend="fake")
    init_distributed_environment(num_workers, rank, local_rank=rank, backend="fake")
    initialize_model_parallel()
    initialize_dp_attention(arguments)
    config = ModelConfig.from_server_args(arguments)
    init_dp_gathered_buffer(config)
    loader = get_model_loader(LoadConfig(), config)
    model: Module = loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    return model


def main() -> None:
    cases, out = map(Path, sys.argv[1:])
    attend_by_torch()
    workers = []
    for flags, num_workers in json.loads(cases.read_text(encoding="utf-8")):
        for rank in range(num_workers):
            part = out.with_suffix(f".{len(workers)}")
            if not (child := os.fork()):
                held = pushable_parameters(loaded_model(flags, rank, num_workers))
                sums = {
                    name: (each.shape, int(whole_checksum(each))) for name, each in held.items()
                }
                part.write_text(json.dumps(sums), encoding="utf-8")
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0, f"worker {rank} of {num_workers} ended: {flags}"
            workers.append(json.loads(part.read_text(encoding="utf-8")))
    out.write_text(json.dumps(workers), encoding="utf-8")


if __name__ == "__main__":
    main()
