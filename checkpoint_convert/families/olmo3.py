"""OLMo-3: OLMo-2 with a window of attention in three of four layers, whose RoPE is not scaled."""

from dataclasses import replace

from checkpoint_convert.families.description import Windows
from checkpoint_convert.families.engines import Engines, Sglang
from checkpoint_convert.families.olmo2 import OLMO2

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    defaults={**OLMO2.defaults, "sliding_window": 4096},
    required={"attention_bias": False},
    windows=Windows(every=4, are_by_layer_types=True, rope_theta=(5e5, 5e5)),
    engines=Engines(sglang=Sglang(has_windows=True, has_one_rope=True)),
)
