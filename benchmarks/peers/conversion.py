"""A Hugging Face folder to the parameters of two tensor ranks, and back, all in memory.

Two processes over gloo, a thread each; the folders are in /dev/shm, so that no disk is in it. Every
side fills and writes the same parameters, those of the trainer's model. Before each step memory is
warmed (`warm_memory.py`).

- load: into parameters that are zero. It runs twice, and the second counts.
- export: ours writes the whole folder; of the others only what makes whole tensors counts, all of
  them, and they are dropped.
- save: what each has to write the folder of weights, ours the same again.

Bytes received are those of all TCP connections of the rank that got the most, in whole KiB, as a
barrier takes some bytes; peak memory is what a rank has beside its parameters, mapped files
included.

CONVERSION_SHAPE, as 28x1536x8960x151936, is another number of layers, hidden size, intermediate
size and vocabulary.
"""

import gc
import hashlib
import json
import os
import shutil
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert import hf_tensors, read_shape
from parallel import ParallelDims
from peers.logprobs import resident
from warm_memory import IN_MEMORY, warm_memory

NUM_LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = map(
    int, os.environ.get("CONVERSION_SHAPE", "28x1536x8960x151936").split("x")
)
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": HIDDEN_SIZE // 128,
    "num_key_value_heads": 2,
    "intermediate_size": INTERMEDIATE_SIZE,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}
NUM_BYTES = (
    2
    * HIDDEN_SIZE
    * (VOCAB_SIZE + NUM_LAYERS * (2 * HIDDEN_SIZE + 2 * 2 * 128 + 3 * INTERMEDIATE_SIZE))
)
"""Bytes of the model without biases and norms."""
DIMS = ParallelDims(tensor=2)
FILE_BYTES = 10**9
WARM_BYTES = NUM_BYTES * 8 // 3
"""Megatron-Bridge 0.3.1's ranks took 2.9 GB each to write a model of 3.1 GB."""
RANDOM = 10_000_019
"""So many random values, again and again: a prime, so that tensors do not begin alike."""
KIB = 1024
BYTES_RECEIVED = 128
"""Where tcp_info has tcpi_bytes_received."""

TITLE = (
    f"Hugging Face folder to two tensor ranks and back, in memory: Qwen2, {NUM_LAYERS} layers of "
    f"{HIDDEN_SIZE:,} and {INTERMEDIATE_SIZE:,}, {VOCAB_SIZE:,} tokens, bfloat16"
)
REQUIREMENTS = {
    "megatron-bridge": [
        *("megatron-bridge==0.6.2", "omegaconf==2.4.0", "triton==3.7.1"),
    ],
    "mbridge": ["mbridge==0.15.1"],
}
SETTINGS = {
    "megatron-bridge": "AutoBridge: load_hf_weights, export_hf_weights, save_hf_weights with "
    "distributed_save, without progress bars where it can do without; a stub of "
    "transformer_engine, made after megatron.core was imported, and one of modelopt, which it asks "
    "whether the model is quantized; torch.cuda's calls answered for the CPU as for ours",
    "mbridge": "load_weights, export_weights, save_weights, memory_efficient off, its default; "
    "its table has the norms of Transformer Engine's layers only, those of local layers "
    "were added; torch.cuda's calls answered for the CPU as for ours",
}
WORK = ("memory file write", NUM_BYTES)
"""Work of an export or a save; a load needs only a copy."""
GOALS = [
    ("load_seconds", "megatron-bridge", 5.0),
    ("load_seconds", "mbridge", 5.0),
    ("export_seconds", "megatron-bridge", 8.0),
    ("export_seconds", "mbridge", 8.0),
]


@dataclass(frozen=True)
class Steps:
    """What a side can do, each collective over the ranks; the folder is one to be made."""

    load: Callable[[], object]
    export: Callable[[Path], object]
    save: Callable[[Path], object]


MakeSteps = Callable[[Any, Any, Any], Steps]
"""From the trainer's `Config`, and the rank's empty `Model` and `Groups`."""


def ours() -> MakeSteps:
    """As the trainer does it."""
    from checkpoint_convert.weights import read_weights
    from megatron_grpo.policy.export import export_model

    def make(cfg: Any, model: Any, groups: Any) -> Steps:
        def load() -> None:
            read_weights(cfg.model.path, model.shape, model.layout, model.parameters())

        def export(folder: Path) -> None:
            export_model(folder, model, cfg, groups)

        return Steps(load, export, export)

    return make


def megatron_bridge() -> MakeSteps:
    """Every rank maps the files, and rank 0 scatters."""
    Stub("transformer_engine", __version__="2.20")
    Stub("transformer_engine.pytorch")
    Stub("modelopt.torch.quantization.utils", is_quantized=lambda model: False)
    from megatron.bridge import AutoBridge

    def make(cfg: Any, model: Any, groups: Any) -> Steps:
        bridge = AutoBridge.from_hf_pretrained(str(cfg.model.path))
        return Steps(
            lambda: bridge.load_hf_weights(model.chunks, str(cfg.model.path)),
            lambda folder: exhaust(bridge.export_hf_weights(model.chunks, show_progress=False)),
            lambda folder: bridge.save_hf_weights(
                model.chunks, folder, show_progress=False, distributed_save=True
            ),
        )

    return make


def mbridge() -> MakeSteps:
    """Rank 0 reads and scatters."""
    from mbridge.models.qwen2 import Qwen2Bridge
    from transformers import AutoConfig

    class LocalLayers(Qwen2Bridge):  # type: ignore[misc, unused-ignore]
        _OTHER_MAPPING: ClassVar = {
            "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]
        }
        _MLP_MAPPING: ClassVar = Qwen2Bridge._MLP_MAPPING | {
            "pre_mlp_layernorm.weight": [
                "model.layers.{layer_number}.post_attention_layernorm.weight"
            ]
        }

    def make(cfg: Any, model: Any, groups: Any) -> Steps:
        bridge = LocalLayers(AutoConfig.from_pretrained(cfg.model.path), dtype=torch.bfloat16)
        return Steps(
            lambda: bridge.load_weights(model.chunks, str(cfg.model.path)),
            lambda folder: exhaust(bridge.export_weights(model.chunks)),
            lambda folder: bridge.save_weights(model.chunks, str(folder)),
        )

    return make


class Stub(ModuleType):
    """Has these members and every other name: modules in lower case, and empty classes."""

    def __init__(self, name: str, **members: object) -> None:
        super().__init__(name)
        vars(self).update(members)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = Stub(f"{self.__name__}.{name}") if name.islower() else type(name, (), {})
        setattr(self, name, found)
        return found


def exhaust(tensors: Any) -> None:
    """Have all made, and keep none."""
    for _ in tensors:
        pass


def measure_rank(rank: int, side: str, source: Path, folder: Path) -> None:
    """Leave the figures of this rank, and the digests of its parameters."""
    from helpers.oracle.policies import tiny_config
    from megatron_grpo.policy.model import build_model
    from parallel.cpu_device import setup_device
    from parallel.groups import init_groups

    make = MAKERS[side]()
    cfg = tiny_config(source, DIMS, "model.dtype=bfloat16")
    setup_device(rank)  # last: transformers is imported with torch.cuda as it is
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    groups = init_groups(DIMS)
    model = build_model(cfg, read_shape(source), groups)
    parameters = model.parameters()
    steps = make(cfg, model, groups)
    with torch.no_grad():
        for _ in range(2):
            for parameter in parameters.values():
                parameter.zero_()
            figures = measured("load", steps.load)
        figures |= measured("export", lambda: steps.export(folder / "exported"))
        if rank == 0:
            shutil.rmtree(folder / "exported", ignore_errors=True)  # only ours has made it
        figures |= measured("save", lambda: steps.save(folder / "saved"))
    digests = {name: digest(each.detach()) for name, each in parameters.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps([figures, digests]))
    dist.barrier()  # nobody closes a connection that another still needs
    dist.destroy_process_group()


def measured(name: str, step: Callable[[], object]) -> dict[str, float]:
    """Seconds, memory and bytes of one step, which all ranks begin together."""
    gc.collect()
    if dist.get_rank() == 0:
        warm_memory(WARM_BYTES)
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew
    memory = resident("VmRSS")
    dist.barrier()
    received, start = bytes_received(), time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    received = bytes_received() - received
    peak = resident("VmHWM") - memory
    dist.barrier()
    return {
        f"{name}_seconds": seconds,
        f"{name}_received_bytes": float(received // KIB * KIB),
        f"{name}_peak_bytes": float(peak),
    }


def bytes_received() -> int:
    """Bytes that all TCP connections of this process have received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
        except OSError:  # what the listing itself was read by
            continue
        with socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_RECEIVED)[0]
    return total


def measured_side(side: str, folder: Path) -> dict[str, float]:
    """Run `side` on two ranks; returns the larger value of each figure."""
    with TemporaryDirectory(dir=IN_MEMORY, prefix="conversion-") as memory:
        source = Path(memory) / "source"
        write_model(source)
        # Not tests/helpers/ranks/processes.py, whose ranks the frame would take for processes of others.
        torch.multiprocessing.spawn(measure_rank, (side, source, Path(memory)), nprocs=2)
        files = (Path(memory) / f"rank{rank}.json" for rank in range(2))
        figures, digests = zip(*(json.loads(file.read_text()) for file in files), strict=True)
        saved = digests_of(Path(memory) / "saved")
        check_equal(saved, digests_of(source), f"{side} did not save what it has loaded")
    (folder / "digests.json").write_text(json.dumps({"ranks": digests, "saved": saved}))
    return {name: max(each[name] for each in figures) for name in figures[0]}


def write_model(folder: Path) -> None:
    """A random model, in files of some `FILE_BYTES`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    values = torch.randn(RANDOM, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight_map, tensors, file, start = {}, {}, 0, 0
    shapes = hf_tensors(read_shape(folder))
    for index, (name, shape) in enumerate(shapes.items()):
        size = prod(shape)
        turned = values.roll(-start).repeat(-(-size // RANDOM))
        tensors[name] = turned[:size].clone().view(shape)
        start = (start + size) % RANDOM
        weight_map[name] = f"model-{file:05d}.safetensors"
        if sum(each.nbytes for each in tensors.values()) > FILE_BYTES or index == len(shapes) - 1:
            save_file(tensors, folder / weight_map[name])
            tensors, file = {}, file + 1
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def digests_of(folder: Path) -> dict[str, str]:
    """Digest of each tensor in the files of a folder, by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return found


def digest(tensor: Tensor) -> str:
    """Shape and hash of the bits."""
    words = tensor.contiguous().view(torch.int16).numpy()
    return f"{list(tensor.shape)} {hashlib.sha256(words).hexdigest()}"


def check_equal(own: Mapping[str, str], other: Mapping[str, str], what: str) -> None:
    """Have an AssertionError name what is not alike."""
    different = {
        name: (own.get(name), other.get(name))
        for name in sorted(own.keys() | other.keys())
        if own.get(name) != other.get(name)
    }
    assert not different, f"{what}: {len(different)} of {len(own)}, {[*different.items()][:3]}"


MAKERS = {"ours": ours, "megatron-bridge": megatron_bridge, "mbridge": mbridge}
SIDES = {side: partial(measured_side, side) for side in MAKERS}


def compare(ours: Path, peer: Path) -> str:
    """Every parameter of both ranks, and every tensor that was saved, bit for bit."""
    mine, theirs = (json.loads((folder / "digests.json").read_text()) for folder in (ours, peer))
    for own, other in zip(mine["ranks"], theirs["ranks"], strict=True):
        check_equal(own, other, "parameters")
    check_equal(mine["saved"], theirs["saved"], "saved tensors")
    return (
        f"{sum(map(len, mine['ranks']))} parameters of both ranks and {len(mine['saved'])} saved "
        "tensors are equal bit for bit"
    )
