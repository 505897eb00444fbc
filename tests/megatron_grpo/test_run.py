"""Values that ranks get from rank 0 before they form groups."""

import torch.distributed as dist

from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config.file import load_config, with_num_steps
from megatron_grpo.run import as_rank_0_has_it


def test_as_rank_0_has_it_gives_all_ranks_its_steps():
    store = dist.HashStore()
    cfg = load_config(TINY_CONFIG, ["train.num_steps=null", "train.num_epochs=3"])
    first = as_rank_0_has_it(with_num_steps(cfg, 15), 0, store)
    assert as_rank_0_has_it(cfg, 1, store) == first
    assert (first.num_steps, first.train.num_epochs) == (15, None)


def test_as_rank_0_has_it_gives_all_ranks_its_date():
    store, cfg = dist.HashStore(), load_config(TINY_CONFIG)
    dated = load_config(TINY_CONFIG, ["data.date=2024-05-06T07:08:09+02:00"])
    assert as_rank_0_has_it(dated, 0, store) == dated
    assert as_rank_0_has_it(cfg, 1, store) == dated
