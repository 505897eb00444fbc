"""The sequences of samples with branches: their tokens and values, and which of them share some."""

from collections.abc import Sequence

import pytest
import torch

from megatron_grpo.batch.branches import (
    MOST_PARTS,
    cut_out,
    numbered_sequences,
    prompt_groups,
)
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Branch, Sample
from parallel.packing import TokenSequence
from parallel.shared_prefix import Branched, PromptGroup

PROMPT, COMPLETION = (1, 2), (3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
BRANCHES = (
    Branch(((0, 2),), 0, 4),  # 3 to 6 after the prompt
    Branch(((0, 4),), 4, 6),  # 7 and 8 after 3 and 4, which branch 0 sampled
    Branch(((0, 4), (6, 7)), 6, 7),  # 9 after 7, of branch 1
    Branch(((0, 3),), 7, 8),  # 10 after 3, of branch 0
    Branch(((0, 1),), 8, 9),  # 11 after the first token of the prompt; 12 is of no branch
)


def sample(branches: Sequence[Branch], completion: Sequence[int] = COMPLETION) -> Sample:
    return Sample(
        prompt=Prompt(0, PROMPT, "", {}),
        sample_index=0,
        completion_ids=completion,
        logprobs=[-each for each in completion],
        finish_reason="stop",
        text="",
        policy_version=0,
        branches=tuple(branches),
    )


def whole_of(each: Sample, **values: object) -> TokenSequence:
    own = {
        "tokens": torch.tensor([*PROMPT, *each.completion_ids]),
        "num_prompt_tokens": len(PROMPT),
        "advantage": 1.0,
        "loss_weight": 0.5,
        "rollout_logprobs": torch.tensor([*each.logprobs]),
    }
    return TokenSequence(**own | values)


PLAIN, BRANCHED = sample(()), sample(BRANCHES)


def sequences() -> dict[int, TokenSequence]:
    """Sequences of a sample without branches and of one with five."""
    return numbered_sequences([PLAIN, BRANCHED], [whole_of(PLAIN), whole_of(BRANCHED)])


def test_a_branch_knows_the_sequence_that_sampled_the_token_before_it():
    found = {n: (each.tokens.tolist(), each.root) for n, each in sequences().items()}
    assert found == {
        0: ([*PROMPT, *COMPLETION], None),
        1: ([1, 2, 3, 4, 5, 6], None),
        3: ([1, 2, 3, 4, 7, 8], 1),
        5: ([1, 2, 3, 4, 7, 9], 3),
        7: ([1, 2, 3, 10], 1),
        9: ([1, 11], None),
    }


@pytest.mark.parametrize(("num_parts", "root"), [(MOST_PARTS, 0), (MOST_PARTS + 1, None)])
def test_a_branch_of_too_many_parts_shares_none(num_parts, root):
    parts = tuple((2 * part, 2 * part + 1) for part in range(num_parts))
    each = sample([Branch(((0, 2),), 0, 30), Branch(parts, 30, 31)], range(31))
    assert numbered_sequences([each], [whole_of(each)])[1].root == root


def test_branches_are_in_the_group_of_their_origin():
    """Sequences 0, 1, 3, 5, 7 and 9 have the positions 0 to 5."""
    branched = {2: Branched(1, 4, 2), 3: Branched(2, 5, 1), 4: Branched(1, 3, 1)}
    assert prompt_groups(sequences()) == [
        PromptGroup(num_prompt_tokens=2, responses={0: 10, 1: 4}, branches={1: branched}),
        PromptGroup(num_prompt_tokens=1, responses={5: 1}),
    ]


def test_a_branch_has_its_own_values_and_the_routes_of_tokens_that_it_read():
    mask, advantages = torch.arange(10) % 2 == 0, torch.arange(10) / 10
    routes = torch.arange(11).reshape(11, 1, 1)  # none for token 12: the engine has not read it
    whole = whole_of(BRANCHED, advantage=advantages, response_mask=mask, routes=routes, log_row=100)
    found = cut_out(whole, BRANCHES[2])
    assert (found.tokens.tolist(), found.num_prompt_tokens) == ([1, 2, 3, 4, 7, 9], 5)
    assert found.rollout_logprobs.tolist() == [-9]
    assert torch.equal(found.advantage, advantages[6:7])
    assert torch.equal(found.response_mask, mask[6:7])
    assert found.routes.flatten().tolist() == [0, 1, 2, 3, 6]
    assert found.log_row == 106
