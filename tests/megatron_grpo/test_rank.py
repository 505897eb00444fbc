"""Values that ranks get from rank 0, which alone has read the data."""

from helpers.ranks.processes import run_ranks
from helpers.runs.train import TINY_CONFIG
from megatron_grpo.config.file import load_config, with_num_steps
from megatron_grpo.rank import with_rank_0_values

EPOCHS = ["train.num_steps=null", "train.num_epochs=3"]
DATE = "2024-05-06T07:08:09+02:00"


def receive(rank: int):
    """Rank 0 knows the steps and the date."""
    if rank == 0:
        cfg = load_config(TINY_CONFIG, [*EPOCHS, f"data.date={DATE}"])
        return with_rank_0_values(with_num_steps(cfg, 15))
    return with_rank_0_values(load_config(TINY_CONFIG, EPOCHS))


def test_with_rank_0_values_gives_all_ranks_its_steps_and_date():
    first, second = run_ranks(2, receive)
    assert first == second
    assert (second.num_steps, second.train.num_epochs) == (15, None)
    assert second.data.date == first.data.date is not None
