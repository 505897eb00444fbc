"""Requests for the rest of a completion that was cut, and how its parts are joined."""

import random
from itertools import pairwise

import numpy as np
import pytest

from megatron_grpo.data.samples import seed_after
from megatron_grpo.engines.choice import CUT, Choice, Logprobs, Token, WeightVersion, npy_of
from megatron_grpo.engines.engine import ROUTES_START
from megatron_grpo.engines.request import joined, num_until_stop, rest_of

STOPS = ("##", "é#", "#\n\n")


def decoded(token_ids):
    """Text of tokens that each hold two bytes."""
    return bytes(byte for each in token_ids for byte in divmod(each, 256) if byte).decode(
        errors="replace"
    )


def sampled(token_ids, is_cut):
    """An engine's answer that samples these tokens: it ends at a stop string."""
    for count in range(1, len(token_ids) + 1):
        ends = [text.find(s) + len(s) for s in STOPS if s in (text := decoded(token_ids[:count]))]
        if ends:
            return choice_of(token_ids[:count], "stop", text[: min(ends)])
    return choice_of(token_ids, CUT if is_cut else "length", decoded(token_ids))


def choice_of(token_ids, finish_reason, text):
    logprobs = Logprobs([Token(-1.0) for _ in token_ids])
    spans = [WeightVersion("0", 0, len(token_ids))]
    routes = npy_of(np.array(token_ids).astype(np.int16).reshape(-1, 1, 1))
    return Choice(token_ids, logprobs, finish_reason, text, spans, routes)


def test_a_stop_string_ends_a_completion_wherever_it_is_cut():
    for seed in range(300):
        chance = random.Random(seed)
        text = "".join(chance.choice("ab#é\n") for _ in range(20)).encode()
        token_ids = [256 * a + b for a, b in zip(text[::2], text[1::2], strict=False)]
        cuts = sorted(chance.sample(range(1, len(token_ids)), chance.randint(1, 4)))
        found = sampled(token_ids[: cuts[0]], is_cut=True)
        for start, end in pairwise([*cuts, len(token_ids)]):
            if found.finish_reason == CUT:
                rest = sampled(token_ids[start:end], is_cut=end < len(token_ids))
                found = joined(found, rest, decoded, STOPS)
        assert found == sampled(token_ids, is_cut=False), seed


@pytest.mark.parametrize("with_routes", [True, False])
def test_the_rest_is_requested_with_the_sampled_tokens_in_its_prompt(with_routes):
    params = {"max_tokens": 10, "seed": 5, "temperature": 0.5}
    routes = {ROUTES_START: 0} if with_routes else {}
    request = {"token_ids": [1, 2, 3], "sampling_params": params | routes, "priority": 7}
    expected = params | {"max_tokens": 8, "seed": seed_after(5, 2)}
    # Routes of the positions 0 to 3 are known; 9, at 4, has not been read by the engine.
    own = {ROUTES_START: 4} if with_routes else {}
    assert rest_of(request, choice_of([8, 9], CUT, "")) == {
        "token_ids": [1, 2, 3, 8, 9],
        "sampling_params": expected | own,
        "priority": 7,
    }
    assert request["sampling_params"] == params | routes  # the request may be sent again


def letters(token_ids):
    """Tokens are letters; \x80 to \xff are halves of characters."""
    return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("begun", "rest", "stop", "num_tokens"),
    [
        (b"a#", b"#b", ["##"], 3),
        (b"#", b"#b", ["##"], 2),  # all of the text
        (b"ab", b"c##", ["##"], 0),  # within the rest: the engine finds it itself
        (b"a##", b"b", ["##"], 0),  # within the first part
        (b"a\xc3", b"\xa9b", ["\N{LATIN SMALL LETTER E WITH ACUTE}"], 3),  # a character in halves
        (b"a#", b"b", [], 0),
    ],
)
def test_a_stop_string_that_spans_the_cut_is_found(begun, rest, stop, num_tokens):
    assert num_until_stop([*begun], [*rest], letters, stop) == num_tokens


def test_the_search_for_a_stop_string_reaches_no_further_than_it_can():
    decoded_lengths = []

    def letters_counted(token_ids):
        decoded_lengths.append(len(token_ids))
        return letters(token_ids)

    assert num_until_stop([*b"abc"], [*b"d" * 1000], letters_counted, ["###", "#"]) == 0
    assert decoded_lengths == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("finish_reason", "stop", "text"),
    [
        ("stop", [], "abcd"),  # the end token is not text
        ("stop", ["e"], "abcde"),
        ("length", [], "abcde"),
        ("stop", ["b", "c"], "ab"),  # the first string that ends, in the last token's text
        (CUT, [], ""),
    ],
)
def test_the_joined_text_ends_like_an_uncut_one(finish_reason, stop, text):
    begun, rest = choice_of([*b"abc"], CUT, "abc"), choice_of([*b"de"], finish_reason, "de")
    assert joined(begun, rest, letters, stop).text == text
