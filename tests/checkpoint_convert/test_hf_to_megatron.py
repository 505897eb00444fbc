"""Imports: Megatron-Core loads them bit for bit at any layout; chunks, dtypes and sidecar files."""

import json
from functools import partial

import pytest
import torch

from checkpoint_convert import read_shape
from checkpoint_convert.formats.torch_dist import read_chunks
from checkpoint_convert.hf_to_megatron import import_checkpoint, plan_import
from checkpoint_convert.megatron import megatron_layout
from helpers.models.conversions import assert_same, read_checkpoint, variant, weights_of
from helpers.models.tiny import CONFIGS, mesh_for, tiny_model
from helpers.ranks.processes import run_ranks
from parallel import ParallelDims, intersect

NO_QUERY_LATENT = "deepseek_v3 without a latent of queries"
# Imported at one layout, loaded at others; uneven pipelines, more TP ranks than key-value heads.
IMPORTED_AT = ParallelDims(tensor=4, pipeline=3)
LOADED_AT = [
    (ParallelDims(tensor=2), (*(name for name in CONFIGS if name != "gpt_oss"), NO_QUERY_LATENT)),
    (ParallelDims(pipeline=2, virtual_pipeline=2), ("llama", "qwen2", "deepseek_v3")),
    (
        ParallelDims(tensor=2, pipeline=2, expert=2, expert_tensor=1),
        ("qwen3_moe", "glm4_moe", "gpt_oss"),
    ),
]


@pytest.fixture(scope="module")
def models(seven_layer_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("no_query_latent")
    no_latent = tiny_model(folder, "deepseek_v3", q_lora_rank=None)
    return {**seven_layer_models, NO_QUERY_LATENT: no_latent}


@pytest.fixture(scope="module")
def imported(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported")
    for family, model in models.items():
        import_checkpoint(model, folder / family, mesh_for(family, IMPORTED_AT))
    return folder


@pytest.fixture(scope="module")
def qwen3(models):
    return models["qwen3"]


def load_imports(rank, models, imported, dims):
    """Load each model's import with Megatron-Core; returns (number of parameters, those that
    differ from the parameters that the trainer reads from the Hugging Face folder)."""
    from megatron.core import dist_checkpointing

    from helpers.oracle.policies import tiny_config
    from megatron_grpo.policy.model import unwrapped
    from megatron_grpo.policy.reference import build_reference
    from parallel.cpu_device import setup_device
    from parallel.groups import init_groups

    setup_device(rank)
    groups = init_groups(dims)
    found = {}
    for family, model in models.items():
        reference = build_reference(tiny_config(model, dims), read_shape(model), groups)
        before = {name: value.clone() for name, value in reference.parameters().items()}
        chunks = {f"model{i}": unwrapped(chunk) for i, chunk in enumerate(reference.chunks)}
        for parameter in reference.parameters().values():
            parameter.fill_(torch.nan)
        state = {name: chunk.sharded_state_dict() for name, chunk in chunks.items()}
        loaded = dist_checkpointing.load(state, str(imported / family))
        for name, chunk in chunks.items():
            chunk.load_state_dict(loaded[name])
        after = reference.parameters()
        found[family] = len(before), [n for n in before if not torch.equal(before[n], after[n])]
    return found


@pytest.mark.parametrize(("dims", "families"), LOADED_AT, ids=lambda value: f"{value}")
def test_import_is_loaded_by_megatron_bitwise(models, imported, dims, families):
    chosen = {family: models[family] for family in families}
    for rank in run_ranks(dims.world_size, load_imports, chosen, imported, dims):
        assert rank.keys() == chosen.keys()
        for family, (count, differing) in rank.items():
            assert count >= 2 * 6, family
            assert differing == [], family


def test_import_has_chunks_that_ranks_read_whole(qwen3, tmp_path):
    """No rank reads a chunk and uses only a part of it."""
    dims, shape = ParallelDims(tensor=2, pipeline=2), read_shape(qwen3)
    import_checkpoint(qwen3, tmp_path / "out", dims)
    stored = read_chunks(tmp_path / "out")
    dtypes = dict.fromkeys(weights_of(qwen3), "F32")
    chunks = plan_import(shape, dims, dtypes).layout
    assert stored.layout.shapes == chunks.shapes
    for rank in range(dims.world_size):
        layout = megatron_layout(shape, dims, dims.coordinates(rank), transformer_engine=True)
        taken = dict.fromkeys(chunks.shapes, 0)
        for copy in intersect(chunks, layout):
            taken[copy.source] += copy.source_box.num_elements
        sizes = {name: torch.Size(size).numel() for name, size in chunks.shapes.items()}
        partly = [name for name, count in taken.items() if 0 < count < sizes[name]]
        assert partly == []


def test_import_limits_the_size_of_chunks_and_files(qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoint_convert.hf_to_megatron.MAX_CHUNK_BYTES", 5000)
    monkeypatch.setattr("checkpoint_convert.hf_to_megatron.FILE_BYTES", 100_000)
    import_checkpoint(qwen3, tmp_path / "out", ParallelDims(), num_workers=2)
    stored = read_chunks(tmp_path / "out")
    assert max(4 * torch.Size(size).numel() for size in stored.layout.shapes.values()) <= 5000
    files = list((tmp_path / "out").glob("__[0-9]*.distcp"))
    assert len(files) > 5
    import_checkpoint(qwen3, tmp_path / "whole", ParallelDims())
    assert_same(read_checkpoint(tmp_path / "out"), read_checkpoint(tmp_path / "whole"))


def test_import_has_chunks_of_only_padding(qwen3, tmp_path, monkeypatch):
    # The last of 4 ranks has 63 rows; the last 2 are padding.
    monkeypatch.setattr("checkpoint_convert.hf_to_megatron.MAX_CHUNK_BYTES", 61 * 64 * 4)
    import_checkpoint(qwen3, tmp_path / "out", ParallelDims(tensor=4))
    table = read_checkpoint(tmp_path / "out")["embedding.word_embeddings.weight"]
    assert torch.equal(table[:250], weights_of(qwen3)["model.embed_tokens.weight"])
    assert not table[250:].any()


def test_import_is_the_same_by_any_number_of_workers(qwen3, tmp_path):
    reported = []
    for num_workers in (1, 3):
        import_checkpoint(
            *(qwen3, tmp_path / str(num_workers), IMPORTED_AT),
            num_workers=num_workers,
            progress=lambda *both: reported.append(both),
        )
        num_bytes = sum(x.nbytes for x in read_checkpoint(tmp_path / str(num_workers)).values())
        assert {total for _, total in reported} == {num_bytes}
        assert reported == sorted(reported) and reported.pop()[0] == num_bytes
        reported.clear()
    one, three = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*.*")}
        for folder in (tmp_path / "1", tmp_path / "3")
    )
    assert one == three


# Dtypes.


def to_bf16(weights, but=()):
    for name, value in weights.items():
        if not name.endswith(but):
            weights[name] = value.bfloat16()


def test_import_keeps_the_dtype_of_each_tensor(qwen3, tmp_path):
    norms = ("norm.weight", "layernorm.weight")
    model = variant(qwen3, tmp_path / "model", partial(to_bf16, but=norms))
    import_checkpoint(model, tmp_path / "out", ParallelDims(tensor=2))
    found = read_checkpoint(tmp_path / "out")
    assert found["decoder.final_layernorm.weight"].dtype == torch.float32
    assert found["decoder.layers.self_attention.q_layernorm.weight"].dtype == torch.float32
    assert found["decoder.layers.self_attention.linear_qkv.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "out" / "hf_config" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_import_refuses_to_fuse_two_dtypes(qwen3, tmp_path):
    model = variant(
        qwen3, tmp_path / "model", partial(to_bf16, but=("layers.1.mlp.up_proj.weight",))
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is F32.*--dty"):
        import_checkpoint(model, tmp_path / "out", ParallelDims())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    import_checkpoint(model, tmp_path / "out", ParallelDims(), dtype="BF16")
