"""Values of `train.export_quantization` and `rollout.quantization`."""

from typing import Literal

Quantization = Literal["none", "fp8", "fp8_channel", "int8"]
