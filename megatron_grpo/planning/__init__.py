"""Needs of a job before a GPU is booked: by formulas, and by ranks built without memory.

To read it, go down this list; a file imports only from those above it:

- `card.py`, `workload.py`: a GPU; a job, and the sequences of one optimizer step of it.
- `layer_kinds.py`, `attention.py`, `parameters.py`, `fp8.py`: layers that are alike are counted
  once; what linear and sparse attention take; what a rank has, in the order of Megatron-Core's
  buffers; what products in FP8 change.
- `state.py`, `activations.py`, `engine_memory.py`, `memory.py`: bytes that a rank always holds, and
  for a backward; that an engine takes; of a GPU in each phase.
- `traffic.py`, `host.py`, `step_time.py`, `simulation.py`, `rollout_time.py`: what ranks send; what
  a node holds; the time of a step, of a generation, and of a run whose engines generate ahead.
- `job_plan.py`, `suggest.py`: all of that for a config; the layouts that fit.
- `advice.py`, `command.py`, `instantiate.py`: help where a plan does not fit; what `plan` and
  `plan --instantiate` print.
"""
