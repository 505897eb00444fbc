"""What a rank learns from rank 0 before the ranks form groups."""

import torch.distributed as dist

from helpers.runs import TINY_CONFIG
from megatron_grpo.config.file import load_config, with_num_steps
from megatron_grpo.rank import with_steps_of_rank_0


def test_all_ranks_take_as_many_steps_as_rank_0_has_found_the_epochs_to_be() -> None:
    store = dist.HashStore()
    cfg = load_config(TINY_CONFIG, ["train.num_steps=null", "train.num_epochs=3"])
    first = with_steps_of_rank_0(with_num_steps(cfg, 15), 0, store)
    assert with_steps_of_rank_0(cfg, 1, store) == first
    assert (first.num_steps, first.train.num_epochs) == (15, None)
