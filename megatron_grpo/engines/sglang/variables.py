"""The environment of an SGLang engine: variables that all have, and variables that none may have.

Sources: SGLang 0.5.23, mostly `srt/environ.py`.
"""

import re
from collections.abc import Mapping

from megatron_grpo.engines.arguments import reason

QUANTIZATION_VARIABLE = "MEGATRON_GRPO_QUANTIZATION"
"""Scheme by which the workers quantise the weights that they load."""
RENDEZVOUS_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""Rendezvous of one host's workers: a file, since torch's store would listen on all networks."""

REPORTED_TOKENS = 16
"""Tokens of a request that SGLang's scheduler reports at once: they show the trainer that an engine
makes progress. Streams collect them into larger chunks."""
VARIABLES = {
    # /health would generate a token, which a paused engine does not.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "SGLANG_FORCE_STREAM_INTERVAL": str(REPORTED_TOKENS),
    # After a worker's death, SGLang's server would stay for 5 to 65 s without an answer.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    # On GPUs SGLang would fuse two matrices of some indexers into one parameter.
    "SGLANG_DISABLE_DSA_INDEXER_FUSION": "1",
}
"""Variables that our server sets for every engine."""

_PORT = "its port would ask for no token"
_ELSEWHERE = "workers would hold other shards than pushes bring"
_REORDERED = "SGLang would reorder weights, and pushed ones would not fit"
_SELF_TESTS = "it is for tests of SGLang, and makes results wrong or late"
REFUSED = {
    "SGLANG_GRPC_PORT": _PORT,
    "SGLANG_RUST_SERVER": _PORT,
    "DUMPER_SERVER_PORT": _PORT,
    "SGLANG_LOAD_SNAPSHOT_USE_ZMQ": _PORT,
    RENDEZVOUS_VARIABLE: "the run chooses where workers meet",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probabilities would be those at temperature 1",
    "SGLANG_SANITIZE_NAN_LOGITS": "weights that are not finite would go unnoticed",
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "set rollout.max_completion_length",
    "SGLANG_REQ_(WAITING|RUNNING)_TIMEOUT": "completions may take any time; see "
    "rollout.stall_timeout",
    "SGLANG_MM_PRECOMPUTE_HASH": "the trainer hashes images, and requests with images would fail",
    "SGLANG_ENABLE_EMBED_REPLICATION": _ELSEWHERE,
    "SGLANG_SHARED_EXPERT_TP1": _ELSEWHERE,
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "prompts of more tokens than indexers choose "
    "would be read with dense attention",
    "SGLANG_CPU_QUANTIZATION": "set rollout.quantization",
    "SGLANG_FP8_IGNORED_LAYERS": "set rollout.quantization_ignore",
    "SGLANG_FORCE_FP8_MARLIN": _REORDERED,
    "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": _REORDERED,
    "SGLANG_(TEST|SIMULATE|KV_CANARY_PERTURB)_.*": _SELF_TESTS,
}
"""Regular expressions for variables that users must not set, and why."""


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise ValueError for a variable of `REFUSED`; SGL_ is the former prefix of SGLANG_."""
    for name in environ:
        if why := reason(re.sub("^SGL_", "SGLANG_", name), REFUSED):
            raise ValueError(
                f"{name}={environ[name]} in the environment does not go with engines of SGLang: "
                f"{why}. Unset it"
            )
