"""`benchmarks/push_table.py`: the traffic of a push, computed without weights."""

from math import prod

import pytest

from checkpoint_convert import hf_tensors, read_shape
from helpers.models.published import write_config
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config.file import load_config
from push_table import push_table

RUN = {
    "model.dtype": "bfloat16",
    "parallel.tensor_parallel_size": 4,
    "parallel.pipeline_parallel_size": 4,
    "parallel.context_parallel_size": 1,
    "parallel.data_parallel_size": 4,
    "rollout.tensor_parallel_size": 8,
    "rollout.num_engines": 3,
}


@pytest.fixture
def push(tmp_path):
    """A function: the table of a push of 70B with changes to `RUN`."""
    folder = write_config(tmp_path, "Llama-3.3-70B")

    def run(**differing):
        values = {"model.path": folder, **RUN, **differing}
        return push_table(load_config(TINY_CONFIG, [f"{k}={v}" for k, v in values.items()]))

    return run


def test_push_table_of_70b_has_the_bytes_of_every_rank(push):
    text = push()
    rows = [line.split() for line in text.splitlines()]
    # Stages have 20 layers, the first also the embedding, the last the head.
    sent = {row[0]: row[2] for row in rows if row and row[0] in ("0-15", "16-31", "48-63")}
    assert sent == {"0-15": "2.27", "16-31": "2.14", "48-63": "2.27"}
    # 17.64 GB is an eighth of 70.55 B parameters in two bytes each, and the norms.
    assert [row[-6:] for row in rows if "17.64" in row] == [
        ["8", "8", "17.64", "GB", "17.64", "GB"],
        ["8", "8", "17.64", "GB", "17.64", "GB"],
        ["8", "0", "17.64", "GB", "0", "B"],
    ]
    for total in ("141.13 GB", "423.38 GB", "13,088 boxes", "1.030 times"):
        assert total in text
    # Workers of the first engine have 16 channels with 2 buffers, each a multiple of 64 KiB.
    assert "two buffers of 15.99 MB: at most 511.71 MB in one process" in text


def test_one_engine_forwards_nothing_and_has_all_buffers_for_arrivals(push):
    text = push(**{"rollout.num_engines": 1})
    (row,) = [line for line in text.splitlines() if line.startswith("0-7 ")]
    assert " ".join(row.split()) == "0-7 0 trainer 8 0 17.64 GB 0 B"
    assert "two buffers of 31.98 MB: at most 511.71 MB in one process" in text


def test_routers_that_an_engine_keeps_in_float32_arrive_in_it(push, tmp_path):
    small = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "vocab_size": 256}
    folder = write_config(tmp_path / "glm", "GLM-4.5-Air", **small)
    elements = sum(map(prod, hf_tensors(read_shape(folder)).values())) + 128 * (4096 + 1)
    one = {"rollout.tensor_parallel_size": 1, "rollout.num_engines": 1}
    text = push(**one, **{"model.path": folder, "parallel.pipeline_parallel_size": 1})
    (row,) = [line for line in text.splitlines() if line.startswith("0  ")]
    assert row.split()[5:7] == [f"{2 * elements / 1e6:,.2f}", "MB"]


def test_only_adapters_are_pushed_to_engines_with_the_base(push):
    text = push(**{"lora.r": 32})
    # 80 layers, in units of 32 elements. A worker has an eighth of A where columns are split (o and
    # down), and of B elsewhere; the rest is whole.
    columns, rows = 8192 + 28672, 8192 + 2 * 1024 + 2 * 28672
    elements = 80 * 32 * (5 * 8192 + columns // 8 + rows // 8 + 2 * 8192)
    received = f"{2 * elements / 1e6:,.2f} MB"
    assert received == "360.45 MB"
    rows_of_workers = [" ".join(row.split()[-6:]) for row in text.splitlines() if received in row]
    assert rows_of_workers == [f"8 8 {received} {received}"] * 2 + [f"8 0 {received} 0 B"]
    assert f"sum {8 * 2 * elements / 1e9:,.2f} GB; the busiest rank sends 1.000 times" in text
    assert push(**{"lora.r": 32, "lora.sync": "merged"}) == push(), "merged, as all weights"


@pytest.mark.parametrize(
    ("differing", "message"),
    [
        ({"rollout.tensor_parallel_size": 3}, r"legal values are \[1, 2, 4, 8, "),
        # 16 channels of two buffers of 64 KiB.
        ({"rollout.update_weights_bucket_megabytes": 2}, "2097152"),
    ],
)
def test_an_impossible_push_is_refused_with_legal_values(push, differing, message):
    with pytest.raises(ValueError, match=message):
        push(**differing)
