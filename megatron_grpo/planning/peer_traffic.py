"""What an engine worker would receive if vLLM itself moved the weights. Integers only.

vLLM is not imported: the rules are those of its release 0.32 for unquantized models on engines
without pipeline stages, the only kind that we start.
"""

from math import prod

from checkpoint_convert import ModelShape, hf_tensors
from parallel import Layout

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def nccl_elements(shape: ModelShape) -> dict[str, int]:
    """Elements of each tensor of the weight files that a worker receives with vLLM's `nccl`.

    One trainer rank broadcasts all tensors whole, with or without packed buffers.
    """
    return {name: prod(size) for name, size in hf_tensors(shape).items()}


def m2n_elements(shape: ModelShape, worker: Layout) -> dict[str, int]:
    """The same with vLLM's `nccl_m2n`, for what `worker` holds (an engine's workers are alike).

    A worker receives only its share of a tensor if it has a parameter of the same name that is
    filled by the loader of a linear layer. Any other tensor arrives whole and goes through vLLM's
    loading: the fused ones (QKV, gate and up, experts), and the embedding and the head, whose
    loader pads the vocabulary. That leaves the output projection of the attention, `down_proj` of a
    dense MLP, and the projections up from latents. It requires `dst_mesh_dims` to be (engines,
    their tensor size): by vLLM's default, every tensor that is split arrives whole.
    """
    return {
        name: prod(size if name in VOCABULARY else worker.shapes.get(name, size))
        for name, size in hf_tensors(shape).items()
    }
