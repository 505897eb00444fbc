"""The order of prompts: the prompts of each generation."""

import math
import random
from array import array
from collections.abc import Collection, Sequence
from hashlib import sha256
from itertools import accumulate

from megatron_grpo.config.config import Config
from megatron_grpo.config.data import WeightedPath
from megatron_grpo.data.prompts import Prompt

ONE_PATH = (WeightedPath(path="data", weight=1),)


class PromptStream:
    """Prompts by generation number: a pure function, so resuming needs no state.

    Several `paths` take turns by their weights, spread evenly: the stride scheduling of Waldspurger
    and Weihl (MIT/LCS/TM-528, 1995). A path that is used up starts over on its own.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        seed: int,
        shuffle: bool,
        paths: Sequence[WeightedPath] = ONE_PATH,
    ) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._paths, numbers = paths, range(len(paths))
        self._turns = _turns([path.weight for path in paths])
        self._turns_before = [
            list(accumulate((turn == path for turn in self._turns), initial=0)) for path in numbers
        ]
        self._prompts_of = [[each for each in prompts if each.path == path] for path in numbers]
        self._begins = [[(0, 0)] for _ in numbers]
        """(epoch, place) at which each generation begins, by path; computed as far as needed."""
        self._orders: list[tuple[int, list[int]]] = [(-1, []) for _ in numbers]
        """(epoch, order) of each path's latest epoch."""
        self._check_sizes()

    @classmethod
    def of(cls, cfg: Config, prompts: Sequence[Prompt]) -> "PromptStream":
        """The stream of a run; raises ValueError if a generation needs more prompts than exist."""
        batch_size = cfg.grpo.generation_batch_size // cfg.grpo.num_generations
        return cls(prompts, batch_size, cfg.train.seed, cfg.data.shuffle, cfg.data.paths)

    def _check_sizes(self) -> None:
        # The shares of the paths repeat after this many generations.
        period = len(self._turns) // math.gcd(len(self._turns), self.batch_size)
        for path, prompts in enumerate(self._prompts_of):
            most = max(len(self._places(path, generation)) for generation in range(period))
            if most > len(prompts):
                of_path = f" of {self._paths[path].path}" if len(self._paths) > 1 else ""
                raise ValueError(
                    f"one generation needs {most} different prompts{of_path} and the data has "
                    f"{len(prompts)}: lower grpo.generation_batch_size to at most "
                    f"{self.batch_size * len(prompts) // most} * grpo.num_generations"
                )

    @property
    def fingerprint(self) -> str:
        """Number and digest of the prompts; other prompts would make other generations."""
        digest = sha256()
        for prompt in self.prompts:
            # The number of ids makes the bytes unambiguous: [1], [2, 3] differs from [1, 2], [3].
            numbers = (prompt.index, len(prompt.token_ids), *prompt.token_ids)
            digest.update(array("q", numbers).tobytes())
            digest.update(prompt.images.key if prompt.images else b"")
        if len(self._paths) > 1:
            sizes = [len(prompts) for prompts in self._prompts_of]
            digest.update(array("q", [*sizes, *self._turns]).tobytes())
        return f"{len(self.prompts)} prompts of SHA-256 {digest.hexdigest()[:16]}"

    def batch(self, generation_index: int) -> list[Prompt]:
        """The `batch_size` different prompts of generation `generation_index` (0, 1, ...).

        With `shuffle`, every epoch of a path has its own order and drops the rows that do not fill
        a whole batch. Otherwise rows are taken in order and wrap around.
        """
        first = generation_index * self.batch_size
        drawn = [iter(self._draw(path, generation_index)) for path in range(len(self._paths))]
        return [
            next(drawn[self._turns[turn % len(self._turns)]])
            for turn in range(first, first + self.batch_size)
        ]

    def _draw(self, path: int, generation: int) -> list[Prompt]:
        """Prompts of one path in a generation."""
        prompts, places = self._prompts_of[path], self._places(path, generation)
        if not self.shuffle:
            return [prompts[place % len(prompts)] for place in places]
        begins, size = self._begins[path], len(prompts)
        while len(begins) <= generation:
            (epoch, place), last = begins[-1], len(begins) - 1
            place += len(self._places(path, last))
            # A generation across two epochs could have a prompt twice, so it starts the new epoch.
            fits = place + len(self._places(path, last + 1)) <= size
            begins.append((epoch, place) if fits else (epoch + 1, 0))
        epoch, begin = begins[generation]
        if self._orders[path][0] != epoch:
            self._orders[path] = epoch, _epoch_order(len(prompts), self.seed, epoch, path)
        order = self._orders[path][1]
        return [prompts[i] for i in order[begin : begin + len(places)]]

    def _places(self, path: int, generation: int) -> range:
        """Numbers of a generation's prompts of one path, counting all draws of the path from 0."""
        # The first n turns of a round take before[n] prompts of this path, a round before[-1].
        before = self._turns_before[path]
        rounds, turn = divmod(generation * self.batch_size, len(self._turns))
        end_rounds, end = divmod((generation + 1) * self.batch_size, len(self._turns))
        return range(rounds * before[-1] + before[turn], end_rounds * before[-1] + before[end])

    def others(
        self, tried: Collection[int], count: int, generation: int, number: int
    ) -> list[Prompt]:
        """Choose up to `count` random prompts that are not in `tried`, by the paths' weights, for
        round `number` of a generation."""
        # Seeded by generation and round: a resumed run must try the same prompts.
        order = random.Random(f"resampled {self.seed} {generation} {number}")
        num_turns = len(self._turns)
        # A random first turn: with one prompt per call, turn 0 would always choose the first path.
        first = order.randrange(num_turns) if num_turns > 1 else 0
        turns = [self._turns[(first + i) % num_turns] for i in range(count)]
        chosen: list[Prompt] = []
        for path, prompts in enumerate(self._prompts_of):
            untried = [prompt for prompt in prompts if prompt.index not in tried]
            chosen += order.sample(untried, min(turns.count(path), len(untried)))
        return chosen

    def epochs(self, num_generations: float) -> float:
        """Passes over the prompts after `num_generations`; the mean over several paths."""
        per_epoch = len(self.prompts) / self.batch_size
        drops_rows = self.shuffle and len(self._paths) == 1
        return num_generations / (math.floor(per_epoch) if drops_rows else per_epoch)

    def num_generations(self, num_epochs: int) -> int:
        """Generations that complete `num_epochs` passes over the prompts of one path."""
        if self.shuffle:
            return num_epochs * (len(self.prompts) // self.batch_size)
        return -(-num_epochs * len(self.prompts) // self.batch_size)


def _turns(weights: Sequence[int]) -> list[int]:
    """Order of the paths in one round: weights (2, 1) give 0, 1, 0.

    Turn j = 0, 1, ... of a path is due at (j + 1/2) / weight; ties go to the earlier path.
    """
    whole = [weight // math.gcd(*weights) for weight in weights]
    due = [((j + 0.5) / weight, path) for path, weight in enumerate(whole) for j in range(weight)]
    return [path for _, path in sorted(due)]


def _epoch_order(num_prompts: int, seed: int, epoch: int, path: int) -> list[int]:
    order = list(range(num_prompts))
    of_path = f", path {path}" if path else ""
    # A string is hashed with SHA-512, so the seed is the same in every Python version and process.
    random.Random(f"prompts of epoch {epoch}, seed {seed}{of_path}").shuffle(order)
    return order
