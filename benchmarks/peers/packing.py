"""Which sequences form which microbatch: the pipeline's time under each planner, and the plan's.

Lengths are synthetic: lognormals, clipped. A plan's cost is the time of its slowest data rank,
overhead of microbatches included, over the time of all sequences divided by the ranks: 1 is a
schedule without bubble, overhead or imbalance. The schedule is 1F1B, simulated exactly, for all.
Nobody is charged for padding. Seconds are the best of five plans of 8,192 sequences for 32 data
ranks, the first of which fills caches; the goal for ours is 0.05 s.
"""

import heapq
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

from parallel import ParallelDims
from parallel.alignment import Alignment
from parallel.microbatches import CostModel, plan_microbatches
from parallel.pipeline_sim import makespan

ROUNDS = 3
TITLE = "Microbatches of packed sequences: simulated 1F1B of 4 stages, lognormal lengths"
AREAL = ["areal==1.0.4"]
REQUIREMENTS = {"verl": ["verl==0.9.1"], "areal": AREAL, "areal, kk": AREAL}
SETTINGS = {
    "verl": "balance_batch and use_dynamic_bsz, small microbatches at both ends (its defaults); "
    "packages verl and verl.utils without their __init__, with stubs of verl.protocol, "
    "verl.utils.tensordict_utils and verl.utils.device, of which the planner uses nothing",
    "areal": "packing_algorithm ffd, its default, 2 * pp microbatches or more as its Megatron "
    "engine asks for; packages areal and areal.utils without their __init__, with a stub of "
    "areal.utils.logging",
    "areal, kk": "the same with packing_algorithm kk, which its documentation recommends for 4 "
    "data ranks and more",
    "slime (rule)": "use_dynamic_batch_size and balance_data: first fit, the largest split until "
    "ranks have equally many, Karmarkar-Karp over ranks",
    "nemo_rl (rule)": "modified first-fit decreasing, which its documentation recommends; bins to "
    "ranks in turn",
}
GOALS = [
    ("cost_4k", "best", 1.0),
    ("cost_20k", "best", 1.08),
    ("cost_128k", "best", 1.0),
    ("seconds", "best", 1.0),
]

PIPELINE = 4
HIDDEN_SIZE = 8192  # of a 70B model
SEEDS = range(3)
NUM_TIMES = 5
Plan = list[list[list[int]]]


@dataclass(frozen=True)
class Lengths:
    """An optimizer batch, and the ranks that it is for."""

    median: float
    sigma: float
    longest: int
    """Also the tokens that a microbatch may have."""
    num: int
    data: int

    def sample(self, seed: int) -> list[int]:
        drawn = np.random.default_rng(seed).lognormal(math.log(self.median), self.sigma, self.num)
        return drawn.clip(16, self.longest).astype(int).tolist()


CASES = {
    "4k": Lengths(1000, 0.8, 4096, num=1024, data=8),
    "20k": Lengths(2500, 1.0, 20480, num=512, data=8),
    "128k": Lengths(8000, 1.2, 131072, num=512, data=4),
}
TIMED = Lengths(2500, 1.0, 20480, num=8192, data=32)
COST = CostModel.transformer(HIDDEN_SIZE)


def measured(plan: Callable[[list[int], int, int], tuple[Plan, float]], out: Path) -> dict:
    """`plan(lengths, max_tokens, data ranks)` also tells the seconds of its slowest rank."""
    figures, plans = {}, {}
    for name, case in CASES.items():
        costs, loads = [], []
        for seed in SEEDS:
            lengths = case.sample(seed)
            plans[f"{name}/{seed}"] = found = plan(lengths, case.longest, case.data)[0]
            costs.append(cost(found, lengths))
            loads.append(imbalance(found, lengths))
        figures[f"cost_{name}"] = float(np.mean(costs))
        figures[f"imbalance_{name}"] = float(np.mean(loads))
    lengths = TIMED.sample(0)
    timed = [plan(lengths, TIMED.longest, TIMED.data) for _ in range(NUM_TIMES)]
    plans["timed/0"], figures["seconds"] = min(timed, key=lambda found: found[1])
    out.joinpath("plans.json").write_text(json.dumps(plans))
    return figures


def cost(plan: Plan, lengths: list[int]) -> float:
    """1 / efficiency."""
    costs = sequence_costs(lengths)
    ranks = [[costs[members].sum() + COST.overhead for members in rank] for rank in plan]
    slowest = max(float(makespan(np.array([rank]), PIPELINE)[0]) for rank in ranks)
    return slowest / (3 * costs.sum() / len(plan))


def imbalance(plan: Plan, lengths: list[int]) -> float:
    """Work of the data rank that has most, over the mean."""
    costs = sequence_costs(lengths)
    loads = [costs[[i for members in rank for i in members]].sum() for rank in plan]
    return float(max(loads) / np.mean(loads))


def sequence_costs(lengths: list[int]) -> np.ndarray:
    tokens = np.array(lengths, dtype=float)
    return COST.linear * tokens + COST.quadratic * tokens**2


def compare(ours: Path, peer: Path) -> str:
    """Both plan every sequence once; how often the peer's microbatches exceed the limit."""
    cases = {f"{name}/{seed}": (case, seed) for name, case in CASES.items() for seed in SEEDS}
    cases["timed/0"] = (TIMED, 0)
    over = {}
    for side in (ours, peer):
        plans = json.loads(side.joinpath("plans.json").read_text())
        assert plans.keys() == cases.keys()
        over[side] = 0
        for name, (case, seed) in cases.items():
            lengths = case.sample(seed)
            microbatches = [members for rank in plans[name] for members in rank]
            assert sorted(i for members in microbatches for i in members) == [*range(case.num)]
            assert len({len(rank) for rank in plans[name]}) == 1, "ranks with different counts"
            over[side] += sum(sum(lengths[i] for i in m) > case.longest for m in microbatches)
    assert over[ours] == 0, f"{over[ours]} microbatches of ours exceed the limit"
    kept = f"{over[peer]} of its microbatches exceed" if over[peer] else "all microbatches keep"
    return f"every sequence once, equally many microbatches per rank, {kept} the token limit"


def ours(lengths: list[int], max_tokens: int, data: int) -> tuple[Plan, float]:
    dims = ParallelDims(data=data, pipeline=PIPELINE)
    start = time.perf_counter()
    plan = plan_microbatches(lengths, max_tokens, dims, Alignment(), COST)
    return plan, time.perf_counter() - start


def verl(lengths: list[int], max_tokens: int, data: int) -> tuple[Plan, float]:
    """The driver shares sequences out to ranks, equally many each; each rank packs its own."""
    import torch

    balancing = bare("verl.utils.seqlen_balancing")
    start = time.perf_counter()
    work = balancing.calculate_workload(torch.tensor(lengths)).tolist()
    shares = balancing.get_seqlen_balanced_partitions(work, data, equal_size=True)
    driver = time.perf_counter() - start

    def pack(share: list[int], least: int) -> list[list[int]]:
        # Nested, as its engine has them.
        ends = torch.tensor([0, *(lengths[i] for i in share)]).cumsum(0)
        ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(ends[-1])), ends)
        batch = {"input_ids": ids}
        _, found = balancing.rearrange_micro_batches(batch, max_tokens, min_num_micro_batch=least)
        return [[share[i] for i in members] for members in found]

    plan, seconds = in_step(pack, shares, 1)
    return plan, driver + seconds


def areal(
    lengths: list[int], max_tokens: int, data: int, algorithm: str = "ffd"
) -> tuple[Plan, float]:
    """The controller shares sequences out to ranks, equally many each; each rank packs its own."""
    packing = bare("areal.utils.seqpack")
    start = time.perf_counter()
    shares = packing.balanced_greedy_partition(lengths, data)
    controller = time.perf_counter() - start

    def pack(share: list[int], least: int) -> list[list[int]]:
        own = [lengths[i] for i in share]
        found = packing.get_allocate_fn(algorithm)(own, max_tokens, least, PIPELINE)
        return [[share[i] for i in members] for members in sorted(map(sorted, found))]

    plan, seconds = in_step(pack, shares, 2 * PIPELINE)
    return plan, controller + seconds


def in_step(
    pack: Callable[[list[int], int], list[list[int]]], shares: list[list[int]], least: int
) -> tuple[Plan, float]:
    """What ranks agree on that ask each other how many microbatches they need; the slowest's time.

    They plan at the same time: of each round the longest counts.
    """
    seconds = 0.0
    while True:
        plan, took = [], []
        for share in shares:
            start = time.perf_counter()
            plan.append(pack(share, least))
            took.append(time.perf_counter() - start)
        seconds += max(took)
        counts = {len(rank) for rank in plan}
        if len(counts) == 1:
            return plan, seconds
        least = max(counts)


def slime_rule(lengths: list[int], max_tokens: int, data: int) -> tuple[Plan, float]:
    """First fit in the order of the rollout, then whole microbatches to ranks by their cost.

    The fullest microbatches are halved until there are equally many for each rank.
    """
    start = time.perf_counter()
    bins: list[list[int]] = []
    tokens: list[int] = []
    for i, length in enumerate(lengths):
        fits = (j for j, held in enumerate(tokens) if held + length <= max_tokens)
        j = next(fits, len(bins))
        if j == len(bins):
            bins.append([])
            tokens.append(0)
        bins[j].append(i)
        tokens[j] += length
    while len(bins) % data:
        j = max((j for j in range(len(bins)) if len(bins[j]) > 1), key=lambda j: tokens[j])
        halves: list[list[int]] = [[], []]
        held = [0, 0]
        for i in sorted(bins[j], key=lambda i: -lengths[i]):
            half = int(held[1] < held[0])
            halves[half].append(i)
            held[half] += lengths[i]
        bins[j], tokens[j] = halves[0], held[0]
        bins.append(halves[1])
        tokens.append(held[1])
    costs = sequence_costs(lengths)
    ranks = karmarkar_karp([float(costs[members].sum()) for members in bins], data)
    plan = [[bins[j] for j in sorted(rank)] for rank in ranks]
    return plan, time.perf_counter() - start


def karmarkar_karp(values: list[float], parts: int) -> list[list[int]]:
    """Equally many to each part: differences of sorted tuples, the largest two merged at a time.

    Multi-way differencing: the largest of one goes with the smallest of the other.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    heap = []
    for start in range(0, len(order), parts):
        group = [(values[i], [i]) for i in reversed(order[start : start + parts])]
        heap.append((group[-1][0] - group[0][0], start, group))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, number, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [members for _, members in heap[0][2]]


def nemo_rl_rule(lengths: list[int], max_tokens: int, data: int) -> tuple[Plan, float]:
    """Modified first-fit decreasing (Johnson and Garey, 1985), bins dealt to ranks in turn.

    A bin for each sequence over a half of the limit; to each, first to last, the longest of a third
    to a half that fits; to those without, last to first, the shortest of a sixth to a third and the
    longest that fits beside it; to each what fits, longest first. What is left goes, longest first,
    to the emptiest new bin. Where ranks would have unequally many, bins give up a sequence each.
    """
    start = time.perf_counter()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins = [[i] for i in order if lengths[i] > max_tokens / 2]
    medium = [i for i in order if max_tokens / 3 < lengths[i] <= max_tokens / 2]
    small = [i for i in reversed(order) if max_tokens / 6 < lengths[i] <= max_tokens / 3]
    tiny = [i for i in order if lengths[i] <= max_tokens / 6]
    room = [max_tokens - lengths[members[0]] for members in bins]

    def put(i: int, j: int) -> None:
        bins[j].append(i)
        room[j] -= lengths[i]

    for j in range(len(bins)):
        found = next((i for i in medium if lengths[i] <= room[j]), None)
        if found is not None:
            medium.remove(found)
            put(found, j)
    for j in reversed(range(len(bins))):
        pair = len(bins[j]) == 1 and len(small) > 1
        if pair and lengths[small[0]] + lengths[small[1]] <= room[j]:
            put(small.pop(0), j)
            found = next(i for i in reversed(small) if lengths[i] <= room[j])
            small.remove(found)
            put(found, j)
    left = sorted([*medium, *small, *tiny], key=lambda i: -lengths[i])
    for j in range(len(bins)):
        while (found := next((i for i in left if lengths[i] <= room[j]), None)) is not None:
            left.remove(found)
            put(found, j)
    emptiest: list[tuple[int, int]] = []
    for i in left:
        if emptiest and emptiest[0][0] + lengths[i] <= max_tokens:
            held, j = heapq.heappop(emptiest)
        else:
            held, j = 0, len(bins)
            bins.append([])
        bins[j].append(i)
        heapq.heappush(emptiest, (held + lengths[i], j))
    givers = iter(sorted(range(len(bins)), key=lambda j: -len(bins[j])))
    giver = next(givers)
    while len(bins) % data:
        while len(bins[giver]) < 2:
            giver = next(givers)
        bins.append([bins[giver].pop()])
    return [bins[rank::data] for rank in range(data)], time.perf_counter() - start


def bare(name: str) -> ModuleType:
    """A module of a peer without what the `__init__` of its packages imports."""
    import importlib

    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            stub = ModuleType(package)
            stub.__path__ = [
                str(found) for entry in sys.path if (found := Path(entry, *parts[:depth])).is_dir()
            ]
            sys.modules[package] = stub
    stubs = {
        "verl.protocol": {"DataProto": object},
        "verl.utils.tensordict_utils": {"index_select_tensor_dict": lambda batch, chosen: chosen},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
        "areal.utils.logging": {"getLogger": logging.getLogger},
    }
    for stubbed, members in stubs.items():
        package, _, short = stubbed.rpartition(".")
        if package in sys.modules:
            sys.modules[stubbed] = module = ModuleType(stubbed)
            vars(module).update(members)
            setattr(sys.modules[package], short, module)
    return importlib.import_module(name)


SIDES: dict[str, Callable[[Path], dict[str, float]]] = {
    "ours": lambda out: measured(ours, out),
    "verl": lambda out: measured(verl, out),
    "areal": lambda out: measured(areal, out),
    "areal, kk": lambda out: measured(partial(areal, algorithm="kk"), out),
    "slime (rule)": lambda out: measured(slime_rule, out),
    "nemo_rl (rule)": lambda out: measured(nemo_rl_rule, out),
}
