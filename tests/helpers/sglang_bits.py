"""An SGLang engine whose route /weights_checker tells the checksum of every parameter as it is.

SGLang's own would be that of products with scales, rounded to bfloat16. All of its processes import
this file, as it is their main module.
"""

from sglang.srt.utils import weight_checker

from megatron_grpo.engines.sglang.server import main

weight_checker._build_quantized_set = lambda model: {}

if __name__ == "__main__":
    main()
