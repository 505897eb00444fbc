"""Needs of a job before a GPU is booked: by formulas, and by ranks built without memory.

To read it, go down this list; a file imports only from those above it:

- `card.py`, `workload.py`: a GPU; a job, and the sequences of one optimizer step of it.
- `precision.py`, `block.py`: linear layers in FP8; what any module of a layer is asked for.
- `attention.py`, `linear_attention.py`, `mlp.py`, `layer_kinds.py`: what each kind of module keeps,
  computes and sends; layers that are alike are counted once.
- `parameters.py`, `optimizers.py`, `state.py`: what a rank has, in the order of Megatron-Core's
  buffers; what each optimizer takes; the bytes that a rank always holds.
- `activations.py`, `engine_memory.py`, `memory.py`: bytes for a backward; that an engine takes; of
  a GPU in each phase.
- `advice.py`: what a plan may advise, as the config is accepted with it.
- `step_time.py`, `host.py`, `simulation.py`, `rollout_time.py`: the time of a step, with what ranks
  send; what a node holds; the time of a generation, and of a run whose engines generate ahead.
- `job_plan.py`, `suggest.py`, `quantized_engines.py`: all of that for a config; the layouts that
  fit; the engines of 8 bits that it could have.
- `command.py`, `reshard_table.py`, `instantiate.py`: what `plan`, `plan --reshard` and
  `plan --instantiate` print.
"""
