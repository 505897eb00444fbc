"""How long a pipeline takes over microbatches of unequal cost.

Stages run what Megatron-Core 0.16.1 gives them to do, in its order (`forward_backward_pipelining_*`
of `megatron.core.pipeline_parallel.schedules`): some forwards to warm up, then one forward and one
backward in turn, then the backwards that are left. An operation starts when the stage has done the
one before and the neighbour has sent what it needs. Sending takes no time, and nobody waits until
what was sent is taken.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

ABSENT = -np.inf
"""Cost of a microbatch that there is not: for rows of different length in one array."""


class Operation(NamedTuple):
    """What a stage does with one microbatch in one of its model chunks."""

    is_backward: bool
    chunk: int
    microbatch: int


def makespan(costs: np.ndarray, pipeline: int, virtual_pipeline: int = 1) -> np.ndarray:
    """Time from the first forward to the last backward, for each row of `costs`.

    `costs` [rows, microbatches] are those of a forward on one stage, all its chunks together; a
    backward takes twice as long. Rows may end in `ABSENT` ones. Under interleaving each has a
    multiple of the pipeline size.
    """
    if virtual_pipeline == 1:
        return _one_chunk(costs, pipeline)
    return _interleaved(costs, pipeline, virtual_pipeline)


def stage_operations(
    stage: int, microbatches: int, pipeline: int, virtual_pipeline: int
) -> list[Operation]:
    """What a stage does, in order.

    With several chunks, each group of `pipeline` microbatches goes through all of them (section 2.2
    of Narayanan et al., arXiv 2104.04473).
    """
    groups = [range(microbatches)]
    if virtual_pipeline > 1:
        assert microbatches % pipeline == 0, f"{microbatches} microbatches, {pipeline} stages"
        groups = [range(i, i + pipeline) for i in range(0, microbatches, pipeline)]
    turns = [(chunk, i) for group in groups for chunk in range(virtual_pipeline) for i in group]
    forwards = [Operation(False, chunk, i) for chunk, i in turns]
    backwards = [Operation(True, virtual_pipeline - 1 - chunk, i) for chunk, i in turns]
    ahead = pipeline - 1 - stage
    if virtual_pipeline > 1:
        ahead = 2 * ahead + (virtual_pipeline - 1) * pipeline
    ahead = min(ahead, len(forwards))
    in_turn = zip(forwards[ahead:], backwards, strict=False)
    steady = [operation for pair in in_turn for operation in pair]
    return forwards[:ahead] + steady + backwards[len(forwards) - ahead :]


def _one_chunk(costs: np.ndarray, pipeline: int) -> np.ndarray:
    """1F1B without interleaving, all stages of all rows at once.

    Were all operations as long, stage s would do the forward of microbatch i in slot s + 2 i and
    its backward in slot 2 p - 1 - s + 2 i. In that order an operation waits for what its stage and
    one neighbour did last, so that one time for each stage is all there is to keep.
    """
    rows, microbatches = costs.shape
    slots = np.arange(2 * (microbatches + pipeline - 1))[:, None]
    stages = np.arange(pipeline)
    is_forward = (slots - stages) % 2 == 0
    microbatch = np.where(is_forward, slots - stages, slots - 2 * pipeline + 1 + stages) // 2
    exists = (microbatch >= 0) & (microbatch < microbatches)
    # One column more, for slots in which a stage does nothing.
    work = np.hstack([costs, np.full((rows, 1), ABSENT)]).T
    work = work[np.where(exists, microbatch, microbatches)]
    work *= np.where(is_forward, 1, 2)[:, :, None]
    clock = np.zeros((pipeline + 2, rows))  # before the first stage and after the last nobody waits
    here = clock[1:-1]
    neighbours = [np.where(turn, stages, stages + 2) for turn in is_forward[:2]]
    for slot, cost in enumerate(work):
        np.maximum(here, np.maximum(here, clock[neighbours[slot % 2]]) + cost, out=here)
    return here.max(axis=0)


def _interleaved(costs: np.ndarray, pipeline: int, virtual_pipeline: int) -> np.ndarray:
    rows, microbatches = costs.shape
    waves, total = _waves(microbatches, pipeline, virtual_pipeline)
    # By a row for each operation, and one for what nothing waits for.
    end = np.zeros((total + 1, rows))
    share = costs.T / virtual_pipeline
    for wave in waves:
        ready = end[wave.before]
        cost = share[wave.microbatch] * wave.factor
        end[wave.operation] = np.maximum(ready, np.maximum(ready, end[wave.source]) + cost)
    return end.max(axis=0)


class _Wave(NamedTuple):
    """Operations that wait for none of each other, as rows of an array of times."""

    operation: np.ndarray
    before: np.ndarray
    """What the stage does before it."""
    source: np.ndarray
    """What sends it its input."""
    microbatch: np.ndarray
    factor: np.ndarray


@lru_cache(maxsize=64)
def _waves(microbatches: int, pipeline: int, virtual_pipeline: int) -> tuple[list[_Wave], int]:
    """All operations of all stages, in waves, and how many there are."""
    last = pipeline * virtual_pipeline - 1
    total = 2 * microbatches * (last + 1)

    def row(is_backward: bool, part: int, microbatch: int) -> int:
        """`part`: of the model, in the order in which a forward goes through them."""
        sends = 0 <= part <= last
        return (is_backward * (last + 1) + part) * microbatches + microbatch if sends else total

    queues = []
    for stage in range(pipeline):
        before, queue = total, []
        for is_backward, chunk, i in stage_operations(
            stage, microbatches, pipeline, virtual_pipeline
        ):
            part = chunk * pipeline + stage
            source = row(is_backward, part + (1 if is_backward else -1), i)
            queue.append((row(is_backward, part, i), before, source, i, 1 + is_backward))
            before = queue[-1][0]
        queues.append(queue[::-1])

    done, waves = {total}, []
    while any(queues):
        # Of every stage the next one, where its input was sent in an earlier wave.
        ready = [queue[-1] for queue in queues if queue and queue[-1][2] in done]
        assert ready, "a schedule in which every stage waits"
        for queue in queues:
            if queue and queue[-1][2] in done:
                queue.pop()
        done.update(operation for operation, *_ in ready)
        operation, before, source, i, factor = np.array(ready).T
        waves.append(_Wave(operation, before, source, i, factor[:, None]))
    return waves, total
