"""The tree of a session's tokens: whatever an agent does, each sampled token is trained on once."""

from array import array
from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.runs.rewards import sample_of
from megatron_grpo.agents.token_tree import Place, TokenTree
from megatron_grpo.batch.branches import cut_out
from megatron_grpo.data.prompts import Prompt
from megatron_grpo.data.samples import Sample
from megatron_grpo.engines.choice import Choice, Logprobs, Token, WeightVersion
from parallel.packing import TokenSequence


def choice(ids: list[int], first: float, version: int = 0) -> Choice:
    """A completion with log-probabilities first, first + 1, ..."""
    return Choice(
        token_ids=ids,
        logprobs=Logprobs([Token(first + i) for i in range(len(ids))]),
        finish_reason="stop",
        text="",
        weight_versions=[WeightVersion(str(version), 0, len(ids))],
    )


def grown(tree: TokenTree) -> Sample:
    first = tree.branches[0]
    return sample_of(
        "",
        {},
        prompt=Prompt(0, first.path[: first.first], "", {}),
        completion_ids=[t for each in tree.branches for t in each.path[each.first :]],
        logprobs=[p for each in tree.branches for p in each.logprobs],
        loss_mask=[m for each in tree.branches for m in each.loss_mask],
        branches=tree.sequences(),
    )


def whole_of(sample: Sample) -> TokenSequence:
    completion = torch.tensor([*sample.completion_ids])
    return TokenSequence(
        tokens=torch.cat([torch.tensor([*sample.prompt.token_ids]), completion]),
        num_prompt_tokens=len(sample.prompt.token_ids),
        advantage=1.0,
        loss_weight=0.5,
        rollout_logprobs=torch.tensor([*sample.logprobs]),
        response_mask=torch.tensor([*sample.loss_mask], dtype=torch.bool),
        log_row=0,
    )


tokens = st.lists(st.integers(0, 2), max_size=4)
deeds = st.lists(
    st.tuples(
        st.sampled_from(["append", "fork", "rewrite", "anywhere"]),
        st.integers(0, 1000),
        tokens,
        tokens.filter(bool),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(tokens.filter(bool), deeds)
def test_every_sampled_token_of_random_agents_is_trained_on_once(prompt, deeds):
    tree, expected, ends, count = TokenTree(), Counter(), [], 0.0
    for kind, number, context, sampled in [("append", 0, [], [1, 2]), *deeds]:
        if not ends:
            place, context, before = None, prompt, []
        elif kind == "append":  # to the last turn
            place = ends[-1]
        elif kind == "fork":  # from any turn
            place = ends[number % len(ends)]
        elif kind == "anywhere":  # inside a turn, or before it
            end = ends[number % len(ends)]
            place = Place(end.branch, 1 + number % end.length)
        else:
            context = context or [0]  # a prompt is never empty
            place = tree.shared(context)
            context = context[place.length :]
        if place:
            before = tree.tokens(place)
        ends.append(tree.add(place, context, "", choice(sampled, count)))
        for i in range(len(sampled)):
            expected[(*before, *context, *sampled[: i + 1]), count + i] += 1
        count += len(sampled)
    found = Counter()
    sample = grown(tree)
    whole = whole_of(sample)
    for branch in sample.branches:
        sequence = cut_out(whole, branch)
        first, ids = sequence.num_prompt_tokens, sequence.tokens.tolist()
        mask, logprobs = sequence.response_mask.tolist(), sequence.rollout_logprobs.tolist()
        for i, (is_sampled, logprob) in enumerate(zip(mask, logprobs, strict=True)):
            if is_sampled:
                found[tuple(ids[: first + i + 1]), logprob] += 1
    assert found == expected
    assert sum(n for each in tree.branches for _, n in each.spans) == len(sample.completion_ids)


def test_a_history_with_no_token_in_common_has_its_first_token_as_context():
    tree = TokenTree()
    tree.add(None, [1], "", choice([2], 1.0))
    tree.add(tree.shared([3, 4]), [3, 4], "", choice([5], 2.0))
    sequence = cut_out(whole_of(grown(tree)), grown(tree).branches[1])
    assert (sequence.tokens.tolist(), sequence.num_prompt_tokens) == ([3, 4, 5], 1)
    assert sequence.response_mask.tolist() == [False, True]


def test_experts_follow_the_tokens_of_each_branch():
    tree = TokenTree()
    first = tree.add(None, [1, 2], "", choice([3, 4], 1.0))
    tree.add_routes(first, np.array([[[1]], [[2]], [[3]]]))
    second = tree.add(Place(0, 3), [5], "", choice([6], 3.0))
    assert tree.num_routed(Place(0, 3)) == 3
    tree.add_routes(second, np.array([[[5]]]))
    assert array("i", np.concatenate(tree.branches[1].routes).ravel()) == array("i", [1, 2, 3, 5])


def test_a_branch_through_a_push_has_its_context_before_the_push():
    tree = TokenTree()
    tree.add(None, [1, 2], "", choice([3], -1.0))
    pushed = choice([6, 7], -1.0)
    pushed.weight_versions = [WeightVersion("0", 0, 1), WeightVersion("1", 1, 2)]
    tree.add(Place(0, 1), [4, 5], "", pushed)
    assert tree.spans == [(0, 4), (1, 1)]
