"""How long a pipeline takes over microbatches of unequal cost.

Stages run what Megatron-Core 0.16.1 gives them to do, in its order (`forward_backward_pipelining_*`
of `megatron.core.pipeline_parallel.schedules`): some forwards to warm up, then one forward and one
backward in turn, then the backwards that are left. An operation starts when the stage has done the
one before and the neighbour has sent what it needs. Sending takes no time, and nobody waits until
what was sent is taken.
"""

import ctypes

import numpy as np

from parallel.kernels import load_kernel

ABSENT = -np.inf
"""Cost of a microbatch that there is not: for rows of different length in one array."""
LANES = 16
"""Rows that pipeline_kernel.c takes at once."""


def makespan(costs: np.ndarray, pipeline: int, virtual_pipeline: int = 1) -> np.ndarray:
    """Time from the first forward to the last backward, for each row of `costs`.

    `costs` [rows, microbatches] are those of a forward on one stage, all its chunks together; a
    backward takes twice as long. Rows may end in `ABSENT` ones. Under interleaving, where each
    group of `pipeline` microbatches goes through all chunks of a stage (section 2.2 of Narayanan et
    al., arXiv 2104.04473), each row has a multiple of the pipeline size.
    """
    costs = np.ascontiguousarray(costs, dtype=np.float64)
    rows, count = costs.shape
    assert virtual_pipeline == 1 or count % pipeline == 0, f"{count} of {pipeline} stages"
    lane_costs = np.empty((count, LANES))
    ends = np.empty((2 * pipeline * virtual_pipeline * count, LANES))
    clocks, turn = np.empty((pipeline, LANES)), np.empty(pipeline, dtype=np.uintp)
    times = np.empty(rows)
    scratch = (array.ctypes.data for array in (lane_costs, ends, clocks, turn, times))
    _KERNEL.time_rows(costs.ctypes.data, rows, count, pipeline, virtual_pipeline, *scratch)
    return times


def _load_kernel() -> ctypes.CDLL:
    kernel = load_kernel("pipeline_kernel")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kernel.time_rows.argtypes = [pointer, *[size] * 4, *[pointer] * 5]
    kernel.time_rows.restype = None
    return kernel


_KERNEL = _load_kernel()
