import itertools

import pytest
import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from parallel.dims import ParallelDims, divisors, pipeline_layers

MESHES = [
    ParallelDims(tensor=tp, context=cp, data=dp, pipeline=pp)
    for tp, cp, dp, pp in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 4))
]
# All ways to lay out experts over a pipeline stage of tensor=2, context=1 or 2, data=4.
EXPERT_MESHES = [
    ParallelDims(tensor=2, context=cp, data=4, pipeline=pp, expert_tensor=etp, expert=ep)
    for cp, pp in itertools.product((1, 2), (1, 3))
    for etp in divisors(2 * cp * 4)
    for ep in divisors(2 * cp * 4 // etp)
]


def rank_generator(dims, **sizes):
    given = {"ep": 1, "pp": dims.pipeline, "order": "tp-cp-ep-dp-pp"} | sizes
    return RankGenerator(**given)


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_coordinates_along_an_axis_are_a_group_of_megatron_in_order(dims):
    generator = rank_generator(dims, tp=dims.tensor, dp=dims.data, cp=dims.context)
    for token, axis in {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}.items():
        for ranks in generator.get_ranks(token):
            places = [vars(dims.coordinates(rank)) for rank in ranks]
            assert places == [{**places[0], axis: i} for i in range(len(ranks))]
            assert [dims.rank(dims.coordinates(rank)) for rank in ranks] == list(ranks)
    replicas = [dims.replica_ranks(data) for data in range(dims.data)]
    assert sorted(itertools.chain(*replicas)) == list(range(dims.world_size))
    for data, ranks in enumerate(replicas):
        assert {dims.coordinates(rank).data for rank in ranks} == {data}


@pytest.mark.parametrize(
    "dims", EXPERT_MESHES, ids=lambda d: f"{d} etp({d.expert_tensor}) ep({d.expert})"
)
def test_expert_place_along_an_axis_is_a_group_of_megatron_in_order(dims):
    copies = dims.stage_size // (dims.expert_tensor * dims.expert)
    generator = rank_generator(dims, tp=dims.expert_tensor, ep=dims.expert, dp=copies, cp=1)
    for token, axis in {"tp": "tensor", "ep": "expert", "dp": "data"}.items():
        groups = generator.get_ranks(token)
        assert sorted(itertools.chain(*groups)) == list(range(dims.world_size))
        for ranks in groups:
            places = [vars(dims.expert_place(dims.coordinates(rank))) for rank in ranks]
            assert places == [{**places[0], axis: i} for i in range(len(ranks))]


def test_expert_tensor_defaults_to_the_models_tensor_size():
    assert ParallelDims(tensor=4, data=2, expert=2).expert_tensor == 4


def test_check_world_size_names_every_factor_and_a_legal_value():
    dims = ParallelDims(tensor=2, pipeline=2, data=3)
    factors = r"tp\(2\) \* pp\(2\) \* cp\(1\) \* dp\(3\) = 12 != world"
    with pytest.raises(ValueError, match=factors + ".*data parallel size 2 would fill them"):
        dims.check_world_size(8)
    with pytest.raises(ValueError, match=r"multiple of tp\*pp\*cp = 4"):
        dims.check_world_size(6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"virtual_pipeline": 2}, "needs pipeline > 1"),
        ({"expert": -1}, "expert parallel size is -1: it must be at least 1"),
        (
            {"tensor": 2, "context": 2, "data": 3, "expert_tensor": 8},
            r"expert_tensor\(8\) must divide the 12 ranks of a pipeline stage, tp\(2\) \* cp\(2\) "
            r"\* dp\(3\): legal values are \[1, 2, 3, 4, 6, 12\]",
        ),
        ({"expert_tensor": 2}, "must divide the 1 rank of a pipeline stage"),
        (
            {"tensor": 2, "data": 4, "expert_tensor": 4, "expert": 4},
            r"expert\(4\) must divide .* / expert_tensor\(4\) = 2: legal values are \[1, 2\]",
        ),
    ],
)
def test_parallel_dims_refuse_impossible_sizes_with_a_legal_one(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelDims(**sizes)


@pytest.mark.parametrize("num_layers", [4, 5, 6, 7, 30, 80, 126])
@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_pipeline_layers_of_stages_differ_by_one(num_layers, pipeline, virtual):
    dims = ParallelDims(pipeline=pipeline, virtual_pipeline=virtual)
    stages = pipeline_layers(num_layers, dims)
    in_order = [stages[p][v] for v in range(virtual) for p in range(pipeline)]
    assert list(itertools.chain(*in_order)) == list(range(num_layers))
    sizes = [len(chunk) for chunk in in_order]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)  # the head's stage never has more layers than others


@pytest.mark.parametrize(
    ("num_layers", "sizes", "stages"),
    [
        (94, {"first": 10, "last": 10}, [10, 13, 13, 12, 12, 12, 12, 10]),
        (61, {"first": 4}, [4, 9, 8, 8, 8, 8, 8, 8]),
    ],
)
def test_pipeline_layers_follow_the_set_ends(num_layers, sizes, stages):
    given = {f"num_layers_in_{end}_pipeline_stage": layers for end, layers in sizes.items()}
    chunks = pipeline_layers(num_layers, ParallelDims(pipeline=8, **given))
    assert [[len(layers) for layers in stage] for stage in chunks] == [[n] for n in stages]
    assert [layer for [layers] in chunks for layer in layers] == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_layers", "pipeline", "virtual", "first", "last"),
    [
        (94, 8, 1, None, 10),
        (94, 8, 1, 11, 11),
        (94, 8, 2, None, 10),
        (61, 4, 1, 16, 13),
        (28, 4, 2, 4, None),
        (5, 2, 1, 2, 3),
    ],
)
def test_pipeline_layers_of_set_ends_equal_megatrons(num_layers, pipeline, virtual, first, last):
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_dtype=torch.float32,
        **ends,
    )

    def megatron_layers(rank: int, stage: int | None) -> range:
        start = get_transformer_layer_offset(config, stage, rank)
        return range(start, start + get_num_layers_to_build(config, stage, rank))

    virtual_stages = range(virtual) if virtual > 1 else [None]
    dims = ParallelDims(pipeline=pipeline, virtual_pipeline=virtual, **ends)
    assert pipeline_layers(num_layers, dims) == [
        [megatron_layers(rank, stage) for stage in virtual_stages] for rank in range(pipeline)
    ]


def test_pipeline_layers_of_a_set_stage_are_shared_by_its_chunks():
    dims = ParallelDims(pipeline=2, virtual_pipeline=2, num_layers_in_last_pipeline_stage=3)
    assert pipeline_layers(5, dims) == [[range(1), range(3, 4)], [range(1, 3), range(4, 5)]]


@pytest.mark.parametrize(
    ("sizes", "virtual", "message"),
    [
        ({"last": 1}, 2, r"virtual_pipeline\(2\) chunks with num_layers_in_last.*_stage=2"),
        (
            {"first": 2, "last": 1},
            1,
            r"4 layers .* pipeline\(2\) .* num_layers_in_first_pipeline_stage\(2\) and "
            r"num_layers_in_last_pipeline_stage\(1\): every chunk needs a layer, and every layer a "
            r"chunk; .* num_layers_in_first_pipeline_stage=2 with "
            r"num_layers_in_last_pipeline_stage=2",
        ),
    ],
)
def test_pipeline_layers_refuse_ends_with_a_legal_split(sizes, virtual, message):
    given = {f"num_layers_in_{end}_pipeline_stage": layers for end, layers in sizes.items()}
    with pytest.raises(ValueError, match=message):
        pipeline_layers(4, ParallelDims(pipeline=2, virtual_pipeline=virtual, **given))


def test_pipeline_layers_refuse_more_stages_than_layers():
    with pytest.raises(ValueError, match=r"3 layers cannot fill .* = 4 stages: use at most 3"):
        pipeline_layers(3, ParallelDims(pipeline=2, virtual_pipeline=2))
