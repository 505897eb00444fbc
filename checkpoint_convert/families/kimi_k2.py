"""Kimi-K2 (given a tokenizer.json): DeepSeek-V3 under another name, as vLLM takes it, too.

Published with 384 experts in one group. transformers has no class of that name.
"""

from dataclasses import replace

from checkpoint_convert.families.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
