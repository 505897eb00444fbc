"""Golden values: recorded numbers that a refactor must keep.

Each is a float in hexadecimal; a tensor has its norm, followed by the SHA-256 of its bytes. After
an intended change of numbers, record them again, and say why in CHANGELOG.md:

    OMP_NUM_THREADS=1 PYTHONPATH=.:tests .venv/bin/python -m golden.record layouts runs push config
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_convert import hf_tensors, read_shape
from helpers.engines.live import TestEngine, running_engine, served_model
from helpers.models.tiny import tiny_model
from helpers.oracle.policies import LENGTHS, layout_name, numbers_of, pack_all, start_policy
from helpers.oracle.train_steps import BUDGETS, RECIPES, Case, Run, on_ranks
from helpers.pushes.policies import sums_of_push
from helpers.ranks.processes import run_ranks
from helpers.runs.jobs import NUM_RANKS, make_runs
from helpers.runs.sabotage import InPhase, die
from helpers.runs.train import results
from megatron_grpo.config.config import Config
from megatron_grpo.config.rollout import RolloutConfig
from megatron_grpo.engine_weights.layouts import worker_layouts
from megatron_grpo.engine_weights.protocol import WorkerSums
from parallel import Box, ParallelDims

Values = dict[str, Any]
"""Nested; they become JSON."""


def number(value: float) -> str:
    return float(value).hex()


def fingerprint(tensor: Tensor) -> str:
    """Norm, and SHA-256 of the bytes in row-major order."""
    content = tensor.contiguous()
    digest = sha256(content.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{number(content.double().norm())} {digest}"


# --- where they hold ----------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Properties that decide the rounding of sums: machines that agree give the same bits."""
    known = torch.cpu.get_capabilities()
    return {
        "torch": str(torch.__version__),
        "megatron-core": version("megatron-core"),
        "transformers": version("transformers"),
        "cpu": f"{known.get('cpu_name')}, {torch.backends.cpu.get_cpu_capability()}",
        "bfloat16": any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16")),
    }


def read(name: str) -> dict[str, Any]:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


def differences(name: str, values: Values, *, rel: float = 0.0, abs: float = 0.0) -> list[str]:
    """The recorded values that differ from `values`, which may be a part of them.

    Compares bits if they were recorded on a machine like this one or hold on any; otherwise floats
    and norms of tensors may differ by `rel` of their size or by `abs`.
    """
    recorded = read(name)
    is_exact = recorded["machine"] in (None, machine())
    ours = dict(_flat(values))
    theirs = dict(_flat({key: recorded["values"][key] for key in values}))

    def is_equal(at: str) -> bool:
        if is_exact or at not in ours or at not in theirs:
            return (at in ours, ours.get(at)) == (at in theirs, theirs.get(at))
        a, b = (float.fromhex(each[at].split()[0]) for each in (ours, theirs))
        return math.isclose(a, b, rel_tol=rel, abs_tol=abs)

    return [
        f"{at}: recorded {theirs.get(at)}, now {ours.get(at)}"
        for at in sorted({*ours, *theirs})
        if not is_equal(at)
    ]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested values, by their path of keys."""
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(parts, dict) and parts:
        for key, part in parts.items():
            yield from _flat(part, f"{path} > {key}" if path else key)
    else:
        yield path, value


# --- one optimizer step -------------------------------------------------------------------------

FEW: list[Run] = [
    ("grpo", BUDGETS[0]),
    ("gspo-token, forking tokens", BUDGETS[1]),  # a threshold over all ranks
    ("divergence in the rewards", BUDGETS[0]),  # advantages after all ranks have computed theirs
]
EVERY: list[Run] = [(name, BUDGETS[number % 2]) for number, name in enumerate(RECIPES)]
LAYOUTS: list[tuple[str, ParallelDims, list[Run]]] = [
    ("llama", ParallelDims(), EVERY),
    ("llama", ParallelDims(tensor=2, context=2), FEW),
    ("llama", ParallelDims(pipeline=2, virtual_pipeline=2), FEW),
    ("llama", ParallelDims(context=2, data=2), FEW),
    ("llama", ParallelDims(tensor=2, pipeline=2, virtual_pipeline=2), FEW),
    ("qwen3_moe", ParallelDims(data=2, expert=2), FEW),
    ("qwen3_moe", ParallelDims(tensor=2, expert_tensor=1), FEW),
]


def make_case(folder: Path, family: str) -> Case:
    return Case(tiny_model(folder, family, tied=True, num_hidden_layers=4), RECIPES)


def layout_values(case: Case, family: str, dims: ParallelDims, recipes: Sequence[Run]) -> Values:
    """Losses and gradients of the recipes, and log-probabilities of plain sequences."""
    shapes = hf_tensors(read_shape(case.folder))
    ranks = on_ranks(case, dims, case.experience(), recipes)
    values: Values = {}
    for run in recipes:
        boxes = [box for rank in ranks for box in rank[run][1]]
        values[f"{run[0]}, {run[1]} tokens"] = {
            "loss": number(ranks[0][run][0]),
            "gradients": _fingerprints(_assembled(boxes, shapes)),
        }
    plain = run_ranks(dims.world_size, _logprobs_on_rank, case.folder, dims)
    logprobs = {f"{index}": of for rank, _ in plain for index, of in sorted(rank.items())}
    values["gradient norm"] = number(plain[0][1])
    values["logprobs"] = _fingerprints(logprobs)
    return {f"{family} {layout_name(dims)}": values}


def _logprobs_on_rank(
    rank: int, folder: Path, dims: ParallelDims
) -> tuple[dict[int, Tensor], float]:
    """Log-probabilities of this rank's sequences, by number, and the norm of the gradient."""
    policy, groups = start_policy(rank, folder, dims)
    share = pack_all(LENGTHS, dims)[groups.coordinates.data :: dims.data]
    logprobs, _, norm = numbers_of(policy, groups, share)
    return logprobs, norm


def _assembled(
    boxes: Sequence[tuple[str, Box, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Whole tensors from the boxes of all ranks; NaN where none is."""
    whole = {name: torch.full(shapes[name], torch.nan) for name in sorted({b[0] for b in boxes})}
    for name, box, values in boxes:
        whole[name][box.slices] = values
    return whole


def _fingerprints(tensors: Mapping[str, Tensor]) -> Values:
    return {name: fingerprint(tensor) for name, tensor in sorted(tensors.items())}


# --- whole runs ---------------------------------------------------------------------------------

SYNCHRONOUS = [
    "eval.data.max_prompt_length=64",
    "eval.max_prompts=4",
    "eval.interval=2",
]
ASYNCHRONOUS = [
    "rollout.async_generate=true",
    "grpo.rollout_importance_sampling_mode=token_truncate",
    "grpo.dynamic_sample=true",
    "train.num_steps=6",
    "train.save_interval=2",
    "parallel.tensor_parallel_size=1",
    "parallel.pipeline_parallel_size=1",
    "parallel.context_parallel_size=2",
    "parallel.data_parallel_size=2",
]


def synchronous_run(engine: TestEngine, folder: Path) -> Values:
    """Two generations of two steps; for the second the run is resumed from a checkpoint."""
    runs, run_dir = make_runs(engine.folder, engine, folder), folder / "synchronous"
    for num_steps in (2, 4):
        ended = runs.finish(run_dir, *SYNCHRONOUS, f"train.num_steps={num_steps}")
        assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    return {"synchronous": _outcome(run_dir)}


def asynchronous_run(engine: TestEngine, folder: Path) -> Values:
    """Three generations of two steps; killed in the second, resumed from the end of the first."""
    runs, run_dir = make_runs(engine.folder, engine, folder), folder / "asynchronous"
    with runs.start(run_dir, *ASYNCHRONOUS, sabotage=InPhase(die, 1, "train", 4)) as job:
        assert 0 not in job.end(60).exit_codes
    ended = runs.finish(run_dir, *ASYNCHRONOUS)
    assert ended.exit_codes == [0] * NUM_RANKS, ended.output
    return {"asynchronous": _outcome(run_dir)}


def _outcome(run_dir: Path) -> Values:
    return {
        "metrics": {
            f"step {record['step']}": {
                name: number(value) for name, value in record.items() if value is not None
            }
            for record in results(run_dir)
        },
        "weights": _fingerprints(load_file(run_dir / "hf" / "model.safetensors")),
    }


# --- exact on every machine ---------------------------------------------------------------------


def push_values(folder: Path) -> Values:
    """Checksums that four ranks send to each of an engine's two workers, by parameter."""
    model = tiny_model(folder, "qwen3", tied=True, num_hidden_layers=4)
    _fill_exactly(model / "model.safetensors")
    dims = ParallelDims(tensor=2, pipeline=2)
    sums = run_ranks(dims.world_size, _sums_on_rank, model, dims)[0]
    return {f"{dims} into tp(2)": {f"worker {rank}": of for rank, of in enumerate(sums)}}


def _fill_exactly(weights: Path) -> None:
    """Replace random values, which differ from machine to machine, by multiples of 2^-16."""
    tensors = load_file(weights)
    for number, tensor in enumerate(tensors.values()):
        scrambled = (torch.arange(tensor.numel()) + number) * 40503 % 65536 - 32768
        tensor.copy_((scrambled / 65536).view(tensor.shape))
    save_file(tensors, weights, metadata={"format": "pt"})


def _sums_on_rank(rank: int, folder: Path, dims: ParallelDims) -> Sequence[WorkerSums]:
    policy, groups = start_policy(rank, folder, dims, "model.dtype=float32")
    rollout = RolloutConfig(max_completion_length=16, tensor_parallel_size=2)
    return sums_of_push(policy, groups, worker_layouts(policy.shape, rollout), torch.float32)


def config_values() -> Values:
    """Type, default and limits of every key of the config; without prose and names of classes."""
    schema = Config.model_json_schema()

    def plain(part: Any) -> Any:
        if isinstance(part, list):
            return [plain(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]] | part
        return {
            key: plain(value)
            for key, value in part.items()
            if key not in ("$defs", "$ref")
            and not (key in ("title", "description") and isinstance(value, str))
        }

    return {"config": plain(schema)}


# --- recording ----------------------------------------------------------------------------------


def _layouts(folder: Path) -> Values:
    values: Values = {}
    cases = {family: make_case(folder / family, family) for family, _, _ in LAYOUTS}
    for family, dims, recipes in LAYOUTS:
        values |= layout_values(cases[family], family, dims, recipes)
    return values


def _runs(folder: Path) -> Values:
    model = served_model(folder / "model", "qwen3", tied=True, intermediate_size=96)
    with running_engine("reference", model, folder / "logs") as engine:
        return synchronous_run(engine, folder) | asynchronous_run(engine, folder)


ROUNDED = {"layouts": _layouts, "runs": _runs}
EXACT = {"push": push_values, "config": lambda folder: config_values()}


def main(*names: str) -> None:
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            values = (ROUNDED | EXACT)[name](Path(folder))
        recorded = {"machine": machine() if name in ROUNDED else None, "values": values}
        file = Path(__file__).with_name(f"{name}.json")
        file.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
