"""What a worker of an engine receives when vLLM itself moves the weights. Integers only.

vLLM is not imported: the rules are those of its release 0.32, for models that are not quantized on
engines without pipeline stages, which are all that we start.
"""

from math import prod

from checkpoint_convert import ModelShape, hf_tensors
from parallel import Layout


def nccl_elements(shape: ModelShape) -> dict[str, int]:
    """Elements of each tensor of the weight files that a worker receives by vLLM's `nccl`.

    One trainer rank broadcasts all tensors whole, in or out of packed buffers.
    """
    return {name: prod(size) for name, size in hf_tensors(shape).items()}


def m2n_elements(shape: ModelShape, worker: Layout) -> dict[str, int]:
    """The same by vLLM's `nccl_m2n`, for what a worker holds (all of an engine receive alike).

    A worker receives its share of a tensor where it has a parameter of the same name, filled by the
    loader of a linear layer; any other tensor arrives whole and goes through vLLM's loading. So the
    fused ones do (QKV, gate and up, experts), and the embedding and the head, whose loader pads the
    vocabulary. What is left are layers that are split by columns: the output projection of the
    attention, and `down_proj` of a dense MLP. `dst_mesh_dims` must be (engines, their tensor size)
    for that: by vLLM's default every tensor that is split at all arrives whole.
    """
    received = {}
    for name, size in hf_tensors(shape).items():
        held = worker.shapes.get(name, size)
        is_split_by_columns = held[1:] != size[1:]
        received[name] = prod(held if is_split_by_columns else size)
    return received
