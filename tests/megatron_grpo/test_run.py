"""Values that ranks get from rank 0 before they form groups."""

import torch.distributed as dist

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config.file import load_config, with_num_steps
from megatron_grpo.run import with_rank_0_values


def test_with_rank_0_values_gives_all_ranks_its_steps():
    store = dist.HashStore()
    cfg = load_config(TINY_CONFIG, ["train.num_steps=null", "train.num_epochs=3"])
    first = with_rank_0_values(with_num_steps(cfg, 15), 0, store)
    assert with_rank_0_values(cfg, 1, store) == first
    assert (first.num_steps, first.train.num_epochs) == (15, None)


def test_with_rank_0_values_gives_all_ranks_its_date():
    store, cfg = dist.HashStore(), load_config(TINY_CONFIG)
    dated = load_config(TINY_CONFIG, ["data.date=2024-05-06T07:08:09+02:00"])
    assert with_rank_0_values(dated, 0, store) == dated
    assert with_rank_0_values(cfg, 1, store) == dated
