import itertools

import pytest

from parallel.dims import Coordinates, ParallelDims, pipeline_layers

MESHES = [
    ParallelDims(tensor=tp, context=cp, data=dp, pipeline=pp)
    for tp, cp, dp, pp in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 4))
]


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_ranks_and_coordinates_are_inverse(dims: ParallelDims) -> None:
    assert [dims.rank(dims.coordinates(rank)) for rank in range(dims.world_size)] == list(
        range(dims.world_size)
    )


def test_tensor_axis_is_the_fastest_and_pipeline_the_slowest() -> None:
    dims = ParallelDims(tensor=2, context=2, data=2, pipeline=2)
    assert dims.coordinates(1) == Coordinates(tensor=1, context=0, data=0, pipeline=0)
    assert dims.coordinates(2) == Coordinates(tensor=0, context=1, data=0, pipeline=0)
    assert dims.coordinates(4) == Coordinates(tensor=0, context=0, data=1, pipeline=0)
    assert dims.coordinates(8) == Coordinates(tensor=0, context=0, data=0, pipeline=1)


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_model_replicas_split_the_world(dims: ParallelDims) -> None:
    replicas = [dims.replica_ranks(data) for data in range(dims.data)]
    assert sorted(itertools.chain(*replicas)) == list(range(dims.world_size))
    for data, ranks in enumerate(replicas):
        assert {dims.coordinates(rank).data for rank in ranks} == {data}


def test_a_mesh_that_does_not_fill_the_world_names_every_factor_and_a_legal_value() -> None:
    dims = ParallelDims(tensor=2, pipeline=2, data=3)
    with pytest.raises(ValueError, match=r"tp\(2\) \* pp\(2\) \* cp\(1\) \* dp\(3\) = 12 != world"):
        dims.check_world_size(8)
    with pytest.raises(ValueError, match="data parallel size 2 would fill them"):
        dims.check_world_size(8)
    with pytest.raises(ValueError, match=r"multiple of tp\*pp\*cp = 4"):
        dims.check_world_size(6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 0}, "tensor parallel size is 0"),
        ({"virtual_pipeline": 2}, "needs pipeline > 1"),
        ({"data": 4, "expert": 3}, r"legal values are \[1, 2, 4\]"),
    ],
)
def test_impossible_sizes_are_refused_with_a_legal_value(
    sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(**sizes)


@pytest.mark.parametrize("num_layers", [4, 5, 6, 7, 30, 80, 126])
@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_every_layer_has_one_stage_and_stages_differ_by_one_layer(
    num_layers: int, pipeline: int, virtual: int
) -> None:
    dims = ParallelDims(pipeline=pipeline, virtual_pipeline=virtual)
    stages = pipeline_layers(num_layers, dims)
    in_order = [stages[p][v] for v in range(virtual) for p in range(pipeline)]
    assert list(itertools.chain(*in_order)) == list(range(num_layers))
    sizes = [len(chunk) for chunk in in_order]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)  # the stage of the head is never the taller one


def test_more_stages_than_layers_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"3 layers cannot fill .* = 4 stages: use at most 3"):
        pipeline_layers(3, ParallelDims(pipeline=2, virtual_pipeline=2))
