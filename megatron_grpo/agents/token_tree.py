"""The tokens of a session: a tree, since an agent may go on from any point of what it had.

Every path from the root is what the engine had as a prompt, or sampled. A branch begins where a
path leaves another one; its own tokens are those from there on. So each sampled token belongs to
exactly one branch, however many paths lead through it.
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
    """A point of the tree: after the first `length` tokens of the path to the end of a branch."""

    branch: int
    length: int


@dataclass
class Sampled:
    """One branch of the tree; `logprobs` and `loss_mask` are those of the path after `first`."""

    root: Place | None
    """Fork from another branch; None for the first."""
    first: int
    """Length of the path before its own tokens: of the first branch, the prompt."""
    path: "array[int]"
    """The whole path, with the tokens before its own ones."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    loss_mask: "array[int]" = field(default_factory=lambda: array("b"))
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Version of the weights and number of tokens, of each part of its own ones."""
    ends: list[int] = field(default_factory=list)
    """Lengths of the path at which its turns end."""
    text: str = ""
    routes: list[np.ndarray] = field(default_factory=list)
    """Parts that end to end are those of the path's tokens, but for the last."""


@dataclass
class TokenTree:
    """The branches of a session, in the order in which they began."""

    branches: list[Sampled] = field(default_factory=list)
    prompt_text: str = ""

    @property
    def num_sampled(self) -> int:
        return sum(sum(branch.loss_mask) for branch in self.branches)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Version of the weights and number of tokens, of each part of all branches' own tokens."""
        spans: list[tuple[int, int]] = []
        for branch in self.branches:
            for version, num_tokens in branch.spans:
                extend_spans(spans, version, num_tokens)
        return spans

    def tokens(self, place: Place) -> "array[int]":
        return self.branches[place.branch].path[: place.length]

    def shared(self, ids: Sequence[int]) -> Place | None:
        """The end of the longest path that `ids` begin with; None if the tree is empty."""
        wanted = np.asarray(ids, np.int32)
        places = []
        for number, branch in enumerate(self.branches):
            path = np.frombuffer(branch.path, np.int32)
            most = min(len(path), len(wanted))
            differ = np.flatnonzero(path[:most] != wanted[:most])
            places.append(Place(number, int(differ[0]) if len(differ) else most))
        return max(places, key=lambda place: place.length, default=None)

    def num_routed(self, place: Place) -> int:
        """How many tokens of the path to a place have known routes."""
        return min(place.length, sum(map(len, self.branches[place.branch].routes)))

    def add(
        self, place: Place | None, context: Sequence[int], context_text: str, choice: Choice
    ) -> Place:
        """Append what was sampled after the path to `place` and the tokens `context`; returns the
        place after it. The first turn has no place, and its context is the session's prompt."""
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
        # A context counts as of the turn before it, or of its own one.
        spans = choice.spans
        extend_spans(branch.spans, (branch.spans or spans)[-1][0], num_context)
        for version, num_tokens in spans:
            extend_spans(branch.spans, version, num_tokens)
        branch.ends.append(len(branch.path))
        branch.text += choice.text
        return Place(number, len(branch.path))

    def add_routes(self, place: Place, routes: np.ndarray) -> None:
        """Add the routes of tokens before `place` that were not known; it is a branch's end."""
        self.branches[place.branch].routes.append(routes)

    def sequences(self) -> tuple[Branch, ...]:
        """Every branch as a part of all branches' own tokens, end to end after the prompt."""
        starts = [*accumulate((len(each.logprobs) for each in self.branches), initial=0)]
        found = []
        for number, branch in enumerate(self.branches):
            start, end = starts[number], starts[number + 1]
            context = self._bounds(Place(number, branch.first), starts)
            if not context:  # nothing would predict its first token
                first = self.branches[0].first + start
                context, start = ((first, first + 1),), start + 1
            found.append(Branch(context, start, end))
        return tuple(found)

    def _bounds(self, place: Place, starts: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Ranges of the path to a place, in the prompt and all branches' own tokens end to end."""
        branch = self.branches[place.branch]
        if branch.root is None:
            return ((0, place.length),) if place.length else ()
        own = self.branches[0].first + starts[place.branch]
        num_own = place.length - branch.first
        before = self._bounds(Place(branch.root.branch, branch.first), starts)
        return (*before, (own, own + num_own)) if num_own else before

    def _branch_at(self, place: Place | None, context: Sequence[int]) -> int:
        """The number of the branch that ends at a place: a new one, if none does."""
        if place is None:
            assert not self.branches
            self.branches.append(Sampled(None, len(context), array("i", context)))
            return 0
        old = self.branches[place.branch]
        if place.length == len(old.path):
            return place.branch
        return self._leave(place)

    def _leave(self, place: Place) -> int:
        """Begin a branch at a place; where it lies before a branch, at that one's root."""
        while (branch := self.branches[place.branch]).root and place.length < branch.first:
            place = Place(branch.root.branch, place.length)
        known, path = self.num_routed(place), self.tokens(place)
        routes = [np.concatenate(branch.routes)[:known]] if known else []
        self.branches.append(Sampled(place, place.length, path, routes=routes))
        return len(self.branches) - 1
