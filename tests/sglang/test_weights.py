"""Pushes into a real SGLang: its workers must hold the parameters that SGLang loads itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from checkpoint_convert import read_shape
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.engines import Engines
from demo.make_sums import sums as all_sums
from helpers.engines.live import (
    SGLANG_PYTHON,
    kernels_for,
    largest_logprob_error,
    random_prompts,
    running_engine,
)
from helpers.engines.nodes import TOKEN, two_nodes
from helpers.engines.sglang_sums import check_pushes, own_checksums, pose_as, push
from helpers.models import towers
from helpers.models.mxfp4 import mxfp4_copies
from helpers.models.quantized import FORMATS, dequantized_copy, quantized_copy, rounded_copy
from helpers.models.tiny import (
    INDEXED,
    mixture_of_blocks,
    renamed,
    servable_model,
    stacked_experts,
    tiny_model,
)
from helpers.pushes.policies import export_quantized
from helpers.ranks.processes import run_ranks
from helpers.runs.train import finish_run, read_metrics
from megatron_grpo.engines.http import EngineError
from parallel import ParallelDims

FILE = "model.safetensors"
DENSE_WIDTH: dict[str, Any] = {"intermediate_size": 128}
WIDTHS: dict[str, Any] = DENSE_WIDTH | {"moe_intermediate_size": 128}
ONE_ROPE = {"rope_type": "default", "rope_theta": 5e3}
OF_EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e3,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "attention_factor": 1.5,
}
OF_INDEXERS = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
"""The defaults of DeepSeek-V3.2."""
OF_SGLANG: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": OF_EXPERTS,
    "qwen3_next": OF_EXPERTS,
    "deepseek_v32": OF_INDEXERS,
    "glm_moe_dsa": OF_INDEXERS | {"index_n_heads": 32},  # GLM-5's values
    "gemma3_text": {
        "tied": True,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "kimi_k2": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "qwen2": {"tied": True},
    "qwen3": {"rope_parameters": YARN, "attention_bias": True},
    "olmo3": {
        "hidden_size": 128,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ONE_ROPE),
    },
}
"""Fields of models that SGLang serves without padding layers on CPUs."""
DENSE = ("gemma3_text", "gpt_oss", "llama", "olmo3", "qwen2", "qwen3", "qwen3_5_text")
WHOLE_QUERIES = "deepseek_v3 without q_lora_rank"
TP2_PP2 = ParallelDims(tensor=2, pipeline=2)
EP2 = ParallelDims(data=2, expert=2)
MOST_GAP = 0.05
"""Largest mean gap between ranks and engines with equal quantised weights: 0.02 was seen, and 0.1
to 0.21 with ranks that do not quantise."""


def has_latent_matrices(checksums: list[dict[str, str]], folder: Path) -> bool:
    """Whether the checksums include the matrices that each layer derives from its latents."""
    shape = read_shape(folder)
    num_matrices = 2 * shape.num_layers if shape.latent else 0
    return all(
        sum(name.endswith((".w_kc", ".w_vc")) for name in each) == num_matrices
        for each in checksums
    )


@pytest.fixture
def all_checksums(monkeypatch) -> None:
    """Engines report checksums of all bits, derived matrices included."""
    pose_as(monkeypatch, "bits")


LAYOUTS = [
    # Workers of a group, groups, workers that share whole experts (None: default), and the ranks'
    # layout.
    ("deepseek_v3", 2, 1, 0, TP2_PP2),  # latents, and experts as in qwen3_moe
    ("qwen3_moe", 2, 1, 0, EP2),
    ("llama", 2, 1, 0, TP2_PP2),
    ("llama", 1, 1, 0, ParallelDims(tensor=2)),
    ("qwen3", 1, 1, 0, TP2_PP2),
    ("qwen3", 2, 1, 0, ParallelDims()),
    ("qwen2", 2, 1, 0, TP2_PP2),
    ("glm4_moe", 2, 1, 0, EP2),
    ("deepseek_v3", 1, 1, 0, ParallelDims(tensor=2)),
    (WHOLE_QUERIES, 2, 1, 0, EP2),
    ("glm4_moe_lite", 2, 1, 0, EP2),
    ("kimi_k2", 1, 1, 0, ParallelDims()),
    ("gemma3_text", 2, 1, 0, TP2_PP2),
    ("olmo3", 2, 1, 0, TP2_PP2),
    ("gpt_oss", 2, 1, 0, EP2),
    ("gemma3", 2, 1, 0, TP2_PP2),
    ("mistral3", 1, 1, 0, ParallelDims(tensor=2)),
    ("qwen2_5_vl", 1, 1, 0, TP2_PP2),
    ("qwen3_vl", 2, 1, 0, TP2_PP2),
    ("qwen3_vl_moe", 2, 1, 0, EP2),
    ("deepseek_v3", 1, 2, 2, EP2),
    ("qwen3_moe", 1, 2, 1, EP2),
    ("qwen3_moe", 2, 1, 2, EP2),
    ("glm4_moe", 1, 2, 1, EP2),
    ("glm4_moe_lite", 1, 2, 2, EP2),
    ("gpt_oss", 1, 2, 1, EP2),
    ("kimi_k2", 1, 2, 1, EP2),
]


@pytest.mark.usefixtures("all_checksums")
@pytest.mark.parametrize(
    ("family", "size", "groups", "ep_size", "dims"),
    [LAYOUTS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in LAYOUTS[1:])],
    ids=str,
)
def test_push_equals_the_weights_that_sglang_loads(tmp_path, family, size, groups, ep_size, dims):
    folder, others = (model(tmp_path / str(seed), family, seed) for seed in range(2))
    options = {"python": SGLANG_PYTHON, "tensor_parallel_size": size, "data_parallel_size": groups}
    options["sglang"] = {"ep_size": ep_size} if ep_size else {}
    memory = {*Path("/dev/shm").glob("sgl_shm_mq*")}
    with running_engine("sglang", folder, tmp_path / "logs", **options) as engine:
        assert has_latent_matrices(own_checksums(engine), folder)
        check_pushes(engine, folder, others, dims)
        samples = engine.generate(random_prompts(5))  # one group gets more
    if family == "kimi_k2":
        renamed(folder, "deepseek_v3")
    assert largest_logprob_error(folder, samples) < 1e-4
    assert {*Path("/dev/shm").glob("sgl_shm_mq*")} == memory


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("killed", "ep_size"), [("python", 1), ("scheduler_TP1", 2)])
def test_serve_over_two_nodes_is_one_engine_and_ends_on_both(tmp_path, killed, ep_size):
    """The head node or the other one is killed; workers split experts, or have whole ones."""
    folder, others = (model(tmp_path / str(seed), "qwen3_moe", seed) for seed in range(2))
    overrides = ["rollout.engine=sglang", f"rollout.python={SGLANG_PYTHON}"]
    overrides.append(f"rollout.sglang={{ep_size: {ep_size}}}")
    options = {"python": SGLANG_PYTHON, "tensor_parallel_size": 2, "sglang": {"ep_size": ep_size}}
    with (
        kernels_for(folder),
        two_nodes(tmp_path, f"model.path={folder}", *overrides) as (url, nodes),
        running_engine("sglang", folder, tmp_path, TOKEN, base_urls=(url,), **options) as engine,
    ):
        check_pushes(engine, folder, others, TP2_PP2)
        assert largest_logprob_error(folder, engine.generate(random_prompts(4))) < 1e-4
        heads = [psutil.Process(node.process.pid) for node in nodes]
        processes = [each for head in heads for each in (head, *head.children(recursive=True))]
        next(each for each in processes if killed in each.cmdline()[0]).kill()
        assert all(node.end(within=10) for node in nodes)
        assert not psutil.wait_procs(processes, timeout=5)[1]


def model(folder: Path, family: str, seed: int) -> Path:
    """A model with layers that SGLang does not pad for one or two workers."""
    if family in towers.CONFIGS:
        sizes = {"qwen3_5_moe": OF_EXPERTS, "qwen3_vl_moe": WIDTHS}.get(family, DENSE_WIDTH)
        tied = family == "gemma3"
        apart = towers.tiny_multimodal(folder, family, tied=tied, seed=seed, **sizes)
        if family != "qwen3_5_moe":
            return apart
        return stacked_experts(apart, folder.with_suffix(".stacked"))  # as published
    if family == WHOLE_QUERIES:
        return servable_model(folder, "deepseek_v3", seed=seed, q_lora_rank=None, **WIDTHS)
    widths = DENSE_WIDTH if family in DENSE else WIDTHS
    folder = servable_model(folder, family, seed=seed, **widths | OF_SGLANG.get(family, {}))
    if family in INDEXED:  # of which it has no defaults
        config = json.loads((folder / "config.json").read_text())
        kept = {key: config[key] for key in config if key not in OF_INDEXERS}
        (folder / "config.json").write_text(json.dumps(kept))
    if family == "gpt_oss":  # SGLang keeps sinks in bfloat16
        weights = load_file(folder / FILE)
        sinks = {name: weights[name] for name in weights if name.endswith("sinks")}
        rounded = {name: value.bfloat16().float() for name, value in sinks.items()}
        save_file(weights | rounded, folder / FILE, {"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "dims"),
    [
        ("qwen3_next", 2, EP2),
        ("qwen3_5_text", 1, TP2_PP2),
        ("qwen3_5_moe_text", 2, EP2),
        ("qwen3_5", 1, TP2_PP2),
        ("qwen3_5_moe", 2, EP2),
        ("deepseek_v32", 2, TP2_PP2),
        ("glm_moe_dsa", 1, EP2),
    ],
    ids=str,
)
def test_push_fills_linear_and_sparse_attention(monkeypatch, tmp_path, family, size, dims):
    pose_as(monkeypatch, "bits", "unkernelled")
    folder, others = (model(tmp_path / str(seed), family, seed) for seed in range(2))
    # SGLang's defaults are for GPUs, and take the largest cache that fits.
    table = {"mamba_radix_cache_strategy": "no_buffer", "max_mamba_cache_size": 64}
    table |= {"disable_overlap_schedule": True, "kv_cache_dtype": "auto"}
    options = {"python": SGLANG_PYTHON, "tensor_parallel_size": size, "sglang": table}
    own = ".indexer.weights_proj.weight" if family in INDEXED else "gemma_weight"
    with running_engine("sglang", folder, tmp_path / "logs", **options) as engine:
        loaded = own_checksums(engine)
        assert any(name.endswith(own) for name in loaded[0])
        assert has_latent_matrices(loaded, folder)
        check_pushes(engine, folder, others, dims)
        samples = engine.generate(random_prompts(4)) if family in INDEXED else []
    assert family not in INDEXED or largest_logprob_error(folder, samples) < 1e-4


def model_of_blocks(folder: Path, family: str, seed: int) -> Path:
    """A model that two workers or tensor ranks split between blocks of 128 rows and columns.

    Tokens go to all experts, since a choice would depend on rounding.
    """
    if family in ("deepseek_v3", WHOLE_QUERIES):
        sizes = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
        if family == WHOLE_QUERIES:
            sizes["q_lora_rank"] = None
        return mixture_of_blocks(folder, "deepseek_v3", seed, **sizes)
    if family not in ("qwen3", "gemma3_text"):
        return mixture_of_blocks(folder, family, seed, num_experts_per_tok=4)
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    sizes |= {"intermediate_size": 256, "tied": family == "gemma3_text"}
    return tiny_model(folder, family, seed=seed, **sizes)


@pytest.mark.slow
@pytest.mark.usefixtures("all_checksums")
@pytest.mark.parametrize(
    ("family", "size", "dims"),
    [
        ("qwen3", 2, ParallelDims(tensor=2)),
        ("gemma3_text", 1, ParallelDims(tensor=2)),
        ("qwen3", 1, ParallelDims(tensor=8)),  # half a block, and few have keys
        ("qwen3_moe", 1, EP2),
        ("glm4_moe", 2, ParallelDims()),
        ("glm4_moe_lite", 2, ParallelDims(tensor=2)),
        ("deepseek_v3", 1, EP2),
        (WHOLE_QUERIES, 2, ParallelDims()),
    ],
    ids=str,
)
def test_pushed_quantised_weights_equal_sglangs_loaded_export(
    monkeypatch, tmp_path, family, size, dims
):
    folder, others = (model_of_blocks(tmp_path / str(seed), family, seed) for seed in range(2))
    exported = tmp_path / "exported"
    ignored = [r"re:model\.layers\.0\."] if family == "qwen3_moe" else []
    run_ranks(dims.world_size, export_quantized, folder, dims, "fp8", exported, ignored)
    options = {"python": SGLANG_PYTHON, "tensor_parallel_size": size, "dtype": "bfloat16"}
    with monkeypatch.context() as patched:
        pose_as(patched, "bits", "as_stored")
        with running_engine("sglang", exported, tmp_path / "first", **options) as engine:
            loaded = own_checksums(engine)
    assert len(loaded) == size
    assert any("weight_scale_inv" in name for name in loaded[0])
    assert has_latent_matrices(loaded, folder)
    options |= {"quantization": "fp8", "quantization_ignore": ignored}
    with running_engine("sglang", others, tmp_path / "second", **options) as engine:
        before = own_checksums(engine)
        assert all(a[name] != b[name] for a, b in zip(before, loaded, strict=True) for name in a)
        error = push(engine, folder, dims, num_flips=10**6)
        assert "differ from what was pushed: model." in error
        assert push(engine, folder, dims) == ""
        assert own_checksums(engine) == loaded
        samples = engine.generate(random_prompts(8))
        disk = "rollout.weight_transport=disk", f"train.run_dir={tmp_path / 'run'}"
        assert push(engine, others, dims, options=disk) == ""
        assert own_checksums(engine) == before
    rounded = rounded_copy(folder, tmp_path / "rounded", "fp8", ignored)
    error, quantisation_error = (largest_logprob_error(each, samples) for each in (rounded, folder))
    assert 2 * error < quantisation_error  # which is less where a layer is left out


@pytest.mark.slow
@pytest.mark.usefixtures("all_checksums")
@pytest.mark.parametrize("kind", ["mxfp4", "DeepSeek"])
def test_a_quantised_folder_is_loaded_as_its_dequantised_copy(tmp_path, kind):
    if kind == "mxfp4":
        copies = mxfp4_copies(servable_model(tmp_path / "model", "gpt_oss"), tmp_path)
        config = json.loads((copies[1] / "config.json").read_text()) | {"dtype": "bfloat16"}
        (copies[1] / "config.json").write_text(json.dumps(config))
    else:
        whole = model_of_blocks(tmp_path / "model", "qwen3_moe", 0)
        stored = quantized_copy(whole, tmp_path / "stored", FORMATS[kind])
        copies = stored, dequantized_copy(stored, tmp_path / "plain", FORMATS[kind])
    loaded = []
    for number, folder in enumerate(copies):
        options = {"python": SGLANG_PYTHON, "dtype": "bfloat16"}
        with running_engine("sglang", folder, tmp_path / str(number), **options) as engine:
            loaded.append(own_checksums(engine))
    assert loaded[0] == loaded[1]


@pytest.mark.slow
def test_scales_that_sglang_drops_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], engines=Engines()))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
    folder = tiny_model(tmp_path / "model", "llama", **sizes)
    options = {"python": SGLANG_PYTHON, "dtype": "bfloat16", "quantization": "fp8"}
    with (
        pytest.raises(EngineError, match=r"has loaded no scales into model\.layers\.0\."),
        running_engine("sglang", folder, tmp_path / "logs", **options),
    ):
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_run_trains_with_engines_in_fp8(tmp_path, family):
    kind = mixture_of_blocks if family == "qwen3_moe" else model_of_blocks
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in all_sums()))
    arguments = (
        f"model.path={kind(tmp_path / 'model', family, 0)}",
        "model.dtype=bfloat16",
        f"data.path={data}",
        f"train.run_dir={tmp_path / 'run'}",
        "rollout.engine=sglang",
        f"rollout.python={SGLANG_PYTHON}",
        "rollout.vllm={}",
        "rollout.quantization=fp8",
        f"rollout.router_replay={str(family == 'qwen3_moe').lower()}",
        "grpo.rollout_importance_sampling_mode=token_truncate",
        "optimizer.lr=1e-3",
        "train.num_steps=3",
        *(f"parallel.{axis}_parallel_size=1" for axis in ("tensor", "pipeline", "context")),
    )
    with kernels_for(tmp_path / "model", "fp8"):
        run = finish_run(*arguments, timeout=550)
    assert run.exit_code == 0, run.output
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["probe/quantized_logprob_gap_mean"] < MOST_GAP
    for record in records:
        assert record["grad_norm"] > 0
        assert MOST_GAP < record["rollout/logprob_gap_mean"] < 0.3  # also after a push
