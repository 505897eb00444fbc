"""Which drafters of `rollout.vllm.speculative_config` engines can have."""

from checkpoint_convert import ModelShape
from checkpoint_convert.formats.hf_folder import mtp_tensors
from checkpoint_convert.hf_config import read_scheme
from megatron_grpo.config.config import Config

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods to draft that have no weights."""


def check_drafts(cfg: Config, shape: ModelShape) -> None:
    """Raise ValueError if engines would draft with weights that they do not have."""
    table = cfg.rollout.vllm.get("speculative_config") or {}
    if not isinstance(table, dict):
        raise ValueError(
            f"rollout.vllm.speculative_config is {table!r}: give a table, such as "
            "{method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 2}"
        )
    if not table:
        return
    if shape.indexer:
        raise ValueError(
            "rollout.vllm.speculative_config is not supported for a model with sparse attention: "
            "leave it out"
        )
    if table.get("method") is None:  # vLLM would find one by the model
        raise ValueError(
            f"rollout.vllm.speculative_config {table} has no method: give its method, such as mtp"
        )
    method, model = str(table["method"]), table.get("model")
    are_there = method in WITHOUT_WEIGHTS or (method.endswith("mtp") and shape.trains_mtp)
    if not are_there and cfg.rollout.vllm.get("load_format") == "dummy":
        raise ValueError(
            "rollout.vllm.load_format dummy: the weights that engines draft with are not pushed; "
            "leave out speculative_config, or load_format"
        )
    if not method.endswith("mtp"):
        return
    if read_scheme(cfg.model.path) is not None:
        raise ValueError(
            f"rollout.vllm.speculative_config drafts with {method}, and model.path has quantised "
            "weights, which vLLM dequantises without the layer for it: leave it out, or train from "
            "a copy that is not quantised"
        )
    is_own = model in (None, str(cfg.model.path))
    if shape.trains_mtp:
        others = {
            f"rollout.vllm.speculative_config of the model {model}": not is_own,
            "rollout.weight_transport disk": cfg.rollout.weight_transport == "disk",
            **{
                f"rollout.vllm.speculative_config.{name}": name in table
                for name in ("quantization", "draft_tensor_parallel_size")
            },
        }
        if told := [key for key, is_on in others.items() if is_on]:
            raise ValueError(
                f"{told[0]} does not go with model.mtp_num_layers 1, which pushes the layer that "
                "engines draft with: leave out one of the two"
            )
    elif is_own and not mtp_tensors(cfg.model.path, shape):
        raise ValueError(
            f"rollout.vllm.speculative_config drafts with {method}, and model.path has no layer "
            "for multi-token prediction: give as its `model` a folder that has it, or leave it out"
        )
