"""Differences between Megatron-Core 0.16.1, the last release for Python 3.11, and 0.19.2.

No other module asks for the release. To drop 0.16.1, keep what `IS_OLD` False selects.
"""

from typing import Any

from megatron.core import __version__
from megatron.core.transformer.moe import moe_utils
from packaging.version import Version
from torch import Tensor

IS_OLD = Version(__version__) < Version("0.19")
"""For differences in behaviour, where no name or argument tells the releases apart."""

FREES_OUTPUTS_AFTER_OVERLAPPED_SENDS = not IS_OLD
"""Whether interleaved stages wait for a message before they free the output that it carries.

Megatron-LM pull request 4047. 0.16.1 frees it first, and sends whatever reuses its memory.
"""

COUNTS_TOKENS_OF_ALL_RANKS = not IS_OLD
"""Whether a router's loss is multiplied by the tokens of a microbatch on all of its ranks.

0.16.1 multiplies it by those of one tensor and context rank.
"""

HYBRIDEP_PADS = not IS_OLD
"""Whether HybridEP can pad the tokens of its ranks to the most that one of them has.

0.16.1 would need equally many.
"""

NAMES_WHAT_LEAVES = not IS_OLD
"""Whether layers say which module's saved tensors are to leave the GPU.

0.16.1 lets its manager guess it from the order of the calls.
"""


def no_initialization() -> dict[str, Any]:
    """Fields of a TransformerConfig that leave weights uninitialized: they are read from files."""
    if not IS_OLD:
        return {"perform_initialization": False}
    # In 0.16.1 initialization also sets the tensor-parallel marks of a weight, without which the
    # gradient norm counts only one shard.
    names = ("init_method", "output_layer_init_method", "embedding_init_method")
    return {"perform_initialization": True} | dict.fromkeys(names, lambda weight: None)


def mlp_submodules(layer: Any) -> Any:
    """The modules of a dense layer's MLP, in the description of the layer."""
    mlp = layer.submodules.mlp
    return mlp.submodules if IS_OLD else mlp.keywords["submodules"]


def router_losses(name: str) -> Tensor:
    """[layers] of this process: what routers recorded as loss `name` since it was last zeroed."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        return moe_utils.get_moe_metrics_tracker().metrics[name].values
    return moe_utils.get_moe_layer_wise_logging_tracker()[name]["values"]  # 0.16.1
