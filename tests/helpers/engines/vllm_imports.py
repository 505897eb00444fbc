"""Imports of ranks with a vLLM worker, done once in the process from which they are forked."""

import tests.helpers.ranks.imports  # noqa: F401
from helpers.engines.vllm_workers import become_worker

become_worker(1)  # vLLM reads some environment variables at import
for module in (
    *("distributed.parallel_state", "engine.arg_utils", "lora.worker_manager"),
    *(f"model_executor.models.{name}" for name in ("deepseek_v2", "qwen3", "qwen3_moe")),
    "v1.worker.cpu_worker",
):
    __import__(f"vllm.{module}")
