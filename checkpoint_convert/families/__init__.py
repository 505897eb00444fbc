"""Model families, each described once; every direction of conversion follows from it."""

from checkpoint_convert.families.llama import LLAMA
from checkpoint_convert.families.qwen2 import QWEN2
from checkpoint_convert.families.qwen3 import QWEN3

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3)}
