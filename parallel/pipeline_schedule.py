"""Simulates how long a pipeline takes for microbatches of unequal cost.

Stages run the operations of Megatron-Core, in its order (`forward_backward_pipelining_*` of
`megatron.core.pipeline_parallel.schedules`): warm-up forwards, then alternately one forward and one
backward, then the remaining backwards. An operation starts when its stage has finished the previous
one and the neighbour has sent its input. Sending takes no time, and senders do not wait for the
receiver.
"""

import ctypes

import numpy as np

from parallel.kernels import load_kernel

ABSENT = -np.inf
"""Cost of a missing microbatch, to pad rows of different lengths in one array."""
LANES = 16
"""Rows that pipeline_kernel.c processes at once."""


def makespan(costs: np.ndarray, pipeline: int, virtual_pipeline: int = 1) -> np.ndarray:
    """Time from the first forward to the last backward, for each row of `costs`.

    `costs` [rows, microbatches] are those of a forward on one stage, all its chunks together; a
    backward takes twice as long. Rows may end with `ABSENT`. With interleaving, where each group of
    `pipeline` microbatches goes through all chunks of a stage (section 2.2 of Narayanan et al.,
    arXiv 2104.04473), the number of microbatches must be a multiple of the pipeline size.
    """
    costs = np.ascontiguousarray(costs, dtype=np.float64)
    rows, count = costs.shape
    assert virtual_pipeline == 1 or count % pipeline == 0, (
        f"{count} microbatches are not a multiple of {pipeline} stages"
    )
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
