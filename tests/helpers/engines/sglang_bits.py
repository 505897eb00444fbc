"""An SGLang engine whose route /weights_checker tells the checksum of every parameter as it is, and
of what SGLang makes of the weights that project latents up.

SGLang's own would be that of products with scales, rounded to bfloat16. All of its processes import
this file, as it is their main module. With `AS_STORED` in the environment quantised weights are
loaded as by SGLang itself.
"""

import os
from collections.abc import Iterator

from sglang.srt.utils import weight_checker
from torch import Tensor

from megatron_grpo.engines.sglang import model_folder
from megatron_grpo.engines.sglang.server import main

AS_STORED = "SGLANG_BITS_AS_STORED"

OF_LATENTS = ("w_kc", "w_vc", "w_scale")
parameters_and_buffers = weight_checker.WeightChecker._model_state


def all_tensors(self: weight_checker.WeightChecker) -> Iterator[tuple[str, Tensor]]:
    """By name."""
    yield from parameters_and_buffers(self)
    for name, module in self._get_model().named_modules():
        for own in OF_LATENTS:
            if isinstance(value := getattr(module, own, None), Tensor):
                yield f"{name}.{own}", value


weight_checker.WeightChecker._model_state = all_tensors
weight_checker._build_quantized_set = lambda model: {}

if AS_STORED in os.environ:
    model_folder.is_plain = lambda model: True

if __name__ == "__main__":
    main()
