"""Kimi-K2 (given a tokenizer.json): DeepSeek-V3 under another name, as vLLM takes it, too.

Published with 384 experts in one group. transformers has no class of that name.
"""

from dataclasses import replace

from checkpoint_convert.families.deepseek_v3 import DEEPSEEK_V3

_SGLANG = replace(DEEPSEEK_V3.engines.sglang, loaded_as=DEEPSEEK_V3.model_type)
KIMI_K2 = replace(
    DEEPSEEK_V3, model_type="kimi_k2", engines=replace(DEEPSEEK_V3.engines, sglang=_SGLANG)
)
