"""Shapes of published models, and random shapes with meshes that split them."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st

from checkpoint_convert import LatentShape, ModelShape, MoeShape, check_divisible, read_shape
from checkpoint_convert.shape import LinearShape
from helpers.models.published import write_config
from parallel import ParallelDims, divisors

DENSE = {
    "family": "llama",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "qk_norm": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "eos_token_ids": (1,),
}


def published_shape(name: str) -> ModelShape:
    """The shape of a published model without MTP layers, with the context and end token of tiny
    models."""
    with TemporaryDirectory() as folder:
        shape = read_shape(write_config(Path(folder) / "model", name))
    return replace(shape, eos_token_ids=(1,), max_position_embeddings=512, num_mtp_layers=0)


LLAMA_70B = published_shape("Llama-3.3-70B")
LLAMA_405B = published_shape("Llama-3.1-405B")
QWEN3_30B = published_shape("Qwen3-30B-A3B")
DEEPSEEK_V3 = published_shape("DeepSeek-V3")
MIXTRAL_8X7B = replace(
    LLAMA_70B,
    family="mixtral",
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    intermediate_size=14336,
    vocab_size=32000,
    moe=MoeShape(num_experts=8, experts_per_token=2, intermediate_size=14336, normalize_topk=True),
)


@st.composite
def shapes(draw):
    dense, hybrid = ["llama", "qwen3_5_text"], ["qwen3_5_text", "qwen3_next"]
    mixtures = ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next"]
    family = draw(st.sampled_from([*dense, *mixtures]))
    num_layers = draw(st.integers(1, 5))
    moe = MoeShape(
        num_experts=draw(st.sampled_from([2, 4, 6])),
        experts_per_token=1,
        intermediate_size=draw(st.integers(1, 2)) * 12,
        normalize_topk=True,
    )
    if family in ("glm4_moe", "deepseek_v3"):
        moe = replace(
            moe,
            score_function="sigmoid",
            weight_scale=2.5,
            shared_intermediate_size=draw(st.integers(0, 2)) * 12,
            dense_layers=tuple(
                draw(st.sets(st.integers(0, num_layers - 1), max_size=num_layers - 1))
            ),
        )
    if family == "qwen3_next":
        moe = replace(moe, shared_intermediate_size=12, has_shared_gate=True)
    linear, linear_layers = None, ()
    if family in hybrid:
        linear = draw(linears())
        linear_layers = tuple(n for n in range(num_layers) if draw(st.booleans()))
    kv_heads, head_dim, latent = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 3)), None
    num_heads = kv_heads * draw(st.integers(1, 4))
    if family == "deepseek_v3":
        kv_heads, latent = num_heads, draw(latents())
        head_dim = latent.rotary_dim + draw(st.integers(1, 4))
    return ModelShape(
        num_layers=num_layers,
        hidden_size=draw(st.integers(1, 9)),
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(st.integers(1, 3)) * 12,
        vocab_size=draw(st.integers(1, 20)),
        moe=None if family in dense else moe,
        latent=latent,
        linear=linear,
        linear_layers=linear_layers,
        has_output_gate=family in hybrid,
        **DENSE
        | {
            "family": family,
            "tie_word_embeddings": draw(st.booleans()),
            "attention_bias": latent is None and draw(st.booleans()),
            "has_output_bias": latent is None and draw(st.booleans()),
            "qk_norm": latent is None and draw(st.booleans()),
        },
    )


@st.composite
def latents(draw) -> LatentShape:
    return LatentShape(
        query_rank=draw(st.none() | st.integers(1, 5)),
        rank=draw(st.integers(1, 5)),
        rotary_dim=2 * draw(st.integers(1, 2)),
        value_dim=draw(st.integers(1, 5)),
    )


@st.composite
def linears(draw) -> LinearShape:
    num_heads = draw(st.sampled_from([1, 2, 4, 6]))
    return LinearShape(
        num_key_heads=num_heads,
        num_value_heads=num_heads * draw(st.integers(1, 3)),
        key_dim=draw(st.integers(1, 4)),
        value_dim=draw(st.integers(1, 4)),
        kernel_size=draw(st.integers(1, 4)),
    )


@st.composite
def models(draw) -> tuple[ModelShape, ParallelDims]:
    """A shape and a mesh that can split it."""
    shape = draw(shapes())
    tensor = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if splits(shape, n)]))
    contexts = [n for n in (1, 2) if splits(shape, tensor, n)]
    context, data = draw(st.sampled_from(contexts)), draw(st.sampled_from([1, 2]))
    pipeline = draw(st.integers(1, min(shape.num_layers, 3)))
    virtual = draw(st.integers(1, shape.num_layers // pipeline)) if pipeline > 1 else 1
    first = last = None
    if pipeline > 1:  # one end may take all layers beyond one per chunk
        ends = st.none() | st.integers(virtual, shape.num_layers - (pipeline - 1) * virtual)
        first, last = draw(st.permutations([draw(ends), None]))
    expert_tensor = expert = 1
    if shape.moe is not None:
        stage_size = tensor * context * data
        legal = [n for n in divisors(stage_size) if shape.moe.intermediate_size % n == 0]
        expert_tensor = draw(st.sampled_from(legal))
        rest = stage_size // expert_tensor
        legal = [n for n in divisors(rest) if shape.moe.num_experts % n == 0]
        expert = draw(st.sampled_from(legal))
    return shape, ParallelDims(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        expert=expert,
        expert_tensor=expert_tensor,
    )


def splits(shape: ModelShape, tensor: int, context: int = 1) -> bool:
    try:
        check_divisible(shape, ParallelDims(tensor=tensor, context=context))
    except ValueError:
        return False
    return True
