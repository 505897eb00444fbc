"""Model families. Each is described once; conversions in every direction follow from that."""

from checkpoint_convert.families.deepseek_v3 import DEEPSEEK_V3
from checkpoint_convert.families.deepseek_v32 import DEEPSEEK_V32
from checkpoint_convert.families.gemma3_text import GEMMA3_TEXT
from checkpoint_convert.families.glm4_moe import GLM4_MOE
from checkpoint_convert.families.glm4_moe_lite import GLM4_MOE_LITE
from checkpoint_convert.families.glm_moe_dsa import GLM_MOE_DSA
from checkpoint_convert.families.gpt_oss import GPT_OSS
from checkpoint_convert.families.kimi_k2 import KIMI_K2
from checkpoint_convert.families.llama import LLAMA
from checkpoint_convert.families.minimax_m2 import MINIMAX_M2
from checkpoint_convert.families.ministral3 import MINISTRAL3
from checkpoint_convert.families.mistral import MISTRAL
from checkpoint_convert.families.mixtral import MIXTRAL
from checkpoint_convert.families.nemotron_h import NEMOTRON_H
from checkpoint_convert.families.olmo2 import OLMO2
from checkpoint_convert.families.olmo3 import OLMO3
from checkpoint_convert.families.phi3 import PHI3
from checkpoint_convert.families.qwen2 import QWEN2
from checkpoint_convert.families.qwen3 import QWEN3
from checkpoint_convert.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from checkpoint_convert.families.qwen3_moe import QWEN3_MOE
from checkpoint_convert.families.qwen3_next import QWEN3_NEXT
from checkpoint_convert.families.seed_oss import SEED_OSS

FAMILIES = {
    family.model_type: family
    for family in (
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GEMMA3_TEXT,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GLM_MOE_DSA,
        GPT_OSS,
        KIMI_K2,
        LLAMA,
        MINIMAX_M2,
        MINISTRAL3,
        MISTRAL,
        MIXTRAL,
        NEMOTRON_H,
        OLMO2,
        OLMO3,
        PHI3,
        QWEN2,
        QWEN3,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_MOE,
        QWEN3_NEXT,
        SEED_OSS,
    )
}
