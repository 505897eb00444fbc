"""Tokens of a session: a tree, since an agent may go on from any point of its history.

Every path from the root is a prompt with its completion. A branch owns the tokens from where it
leaves another path, so each sampled token belongs to exactly one branch:

    prompt | turn 1 | tool result | turn 2      branch 0: first = len(prompt)
                    + other text  | turn 3      branch 1: first = len(prompt) + len(turn 1)
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron_grpo.data.samples import Branch, extend_spans
from megatron_grpo.engines.choice import Choice


class Place(NamedTuple):
    """Point of the tree: behind the first `length` tokens of the path to the end of `branch`."""

    branch: int
    length: int


@dataclass
class Sampled:
    """Branch of the tree; `logprobs` and `loss_mask` cover its own tokens, `path[first:]`."""

    root: Place | None
    """Fork from another branch; None for the first branch."""
    first: int
    """Number of tokens before its own; in the first branch, the length of the prompt."""
    path: "array[int]"
    """All tokens from the root of the tree to the end of the branch."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    loss_mask: "array[int]" = field(default_factory=lambda: array("b"))
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version of the weights, number of tokens) of each part of its own tokens."""
    ends: list[int] = field(default_factory=list)
    """Lengths of `path` at the ends of its turns."""
    text: str = ""
    routes: list[np.ndarray] = field(default_factory=list)
    """Routes of all tokens of `path` but the last, in parts."""


@dataclass
class TokenTree:
    """Branches of a session, in the order in which they began."""

    branches: list[Sampled] = field(default_factory=list)
    prompt_text: str = ""

    @property
    def num_sampled(self) -> int:
        return sum(sum(branch.loss_mask) for branch in self.branches)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(version of the weights, number of tokens) of each part of all branches' own tokens."""
        spans: list[tuple[int, int]] = []
        for branch in self.branches:
            for version, num_tokens in branch.spans:
                extend_spans(spans, version, num_tokens)
        return spans

    def tokens(self, place: Place) -> "array[int]":
        return self.branches[place.branch].path[: place.length]

    def shared(self, ids: Sequence[int]) -> Place | None:
        """End of the longest path that `ids` begin with; None if the tree is empty."""
        wanted = np.asarray(ids, np.int32)
        places = []
        for number, branch in enumerate(self.branches):
            path = np.frombuffer(branch.path, np.int32)
            most = min(len(path), len(wanted))
            differ = np.flatnonzero(path[:most] != wanted[:most])
            places.append(Place(number, int(differ[0]) if len(differ) else most))
        return max(places, key=lambda place: place.length, default=None)

    def num_routed(self, place: Place) -> int:
        """Number of tokens on the path to a place with known routes."""
        return min(place.length, sum(map(len, self.branches[place.branch].routes)))

    def add(
        self, place: Place | None, context: Sequence[int], context_text: str, choice: Choice
    ) -> Place:
        """Append `context` and a completion behind `place`; returns the new end. The first turn has
        no place, and its context is the session's prompt."""
        number = self._branch_at(place, context)
        branch, num_context = self.branches[number], 0
        if place is None:
            self.prompt_text = context_text
        else:
            num_context = len(context)
            branch.path.extend(context)
            branch.text += context_text
        branch.path.extend(choice.token_ids)
        branch.logprobs.extend([0.0] * num_context + choice.token_logprobs)
        branch.loss_mask.extend([0] * num_context + [1] * len(choice.token_ids))
        # A context has the version of the turn before it; a new branch has none, so its own turn's.
        spans = choice.spans
        version, _ = branch.spans[-1] if branch.spans else spans[0]
        extend_spans(branch.spans, version, num_context)
        for version, num_tokens in spans:
            extend_spans(branch.spans, version, num_tokens)
        branch.ends.append(len(branch.path))
        branch.text += choice.text
        return Place(number, len(branch.path))

    def add_routes(self, place: Place, routes: np.ndarray) -> None:
        """Add routes of the tokens from `num_routed` on; `place` is the end of a branch."""
        self.branches[place.branch].routes.append(routes)

    def sequences(self) -> tuple[Branch, ...]:
        """Branches as parts of a completion: all branches' own tokens, end to end."""
        starts = [*accumulate((len(each.logprobs) for each in self.branches), initial=0)]
        found = []
        for number, branch in enumerate(self.branches):
            start, end = starts[number], starts[number + 1]
            context = self._bounds(Place(number, branch.first), starts)
            # A branch that shares no token: nothing predicts its first token, which is the context.
            if not context:
                first = self.branches[0].first + start
                context, start = ((first, first + 1),), start + 1
            found.append(Branch(context, start, end))
        return tuple(found)

    def _bounds(self, place: Place, starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(start, end) parts of the path to a place, in the prompt and all branches' own tokens."""
        branch = self.branches[place.branch]
        if branch.root is None:
            return ((0, place.length),) if place.length else ()
        own = self.branches[0].first + starts[place.branch]
        num_own = place.length - branch.first
        before = self._bounds(Place(branch.root.branch, branch.first), starts)
        return (*before, (own, own + num_own)) if num_own else before

    def _branch_at(self, place: Place | None, context: Sequence[int]) -> int:
        """Number of the branch that ends at `place`, or of a new branch from there."""
        if place is None:
            assert not self.branches
            self.branches.append(Sampled(None, len(context), array("i", context)))
            return 0
        old = self.branches[place.branch]
        if place.length == len(old.path):
            return place.branch
        return self._leave(place)

    def _leave(self, place: Place) -> int:
        """Begin a branch at a place; returns its number."""
        # A place before the own tokens of its branch belongs to the branch that owns these tokens.
        while (branch := self.branches[place.branch]).root and place.length < branch.first:
            place = Place(branch.root.branch, place.length)
        known, path = self.num_routed(place), self.tokens(place)
        routes = [np.concatenate(branch.routes)[:known]] if known else []
        self.branches.append(Sampled(place, place.length, path, routes=routes))
        return len(self.branches) - 1
