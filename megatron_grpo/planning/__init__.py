"""Plans a job before a GPU is booked: by formulas, and by ranks built without memory.

Reading order; a file imports only from files above it:

- `rows.py`, `card.py`, `workload.py`: lines of output; a GPU; a job, and the sequences of one
  optimizer step.
- `precision.py`, `block.py`: linear layers in FP8; the interface of a layer's modules.
- `attention.py`, `linear_attention.py`, `mlp.py`, `layer_kinds.py`: bytes, operations and traffic
  of each kind of module; equal layers are counted once.
- `parameters.py`, `optimizers.py`, `state.py`: a rank's parameters in the order of Megatron-Core's
  buffers; bytes of each optimizer; weights, gradients and optimizer state of a rank.
- `activations.py`, `engine_memory.py`, `memory.py`: activations; an engine; a GPU in each phase.
- `step_time.py`, `host.py`, `simulation.py`, `rollout_time.py`: time and traffic of a step; host
  memory; a run whose engines generate ahead; time of a generation.
- `job_plan.py`, `division.py`, `suggest.py`: the plan of a config; the GPUs of ranks and engines,
  and layouts of ranks; those that fit.
- `advice.py`, `command.py`, `instantiate.py`: advice where a plan does not fit; the output of
  `plan` and `plan --instantiate`.
"""
